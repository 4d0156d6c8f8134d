"""Arguments of presets: every one, by name and position, of other releases, devices and dtypes."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser.presets import keyword_arguments, keyword_types
from te_fuser.presets.base import Preset
from tests.keyword_types import WRITTEN, keywords, makers, text
from tests.presets.layers import PRESETS, sample
from tests.refused import raises


def test_the_file_is_what_the_signatures_say() -> None:
    assert text().splitlines() == WRITTEN.read_text().splitlines(), "see tests/keyword_types.py"


@pytest.mark.parametrize("preset", makers())
def test_a_constructor_takes_its_keywords_with_their_types(preset: type[Preset]) -> None:
    own, known = f"{preset.__name__}Keys", {**vars(keyword_arguments), **vars(keyword_types)}
    assert inspect.signature(preset.__init__).parameters["keywords"].annotation == f"Unpack[{own}]"
    hints = typing.get_type_hints(getattr(keyword_types, own))
    assert hints == {name: eval(of, known) for name, of in keywords(preset).items()}
    assert {"device", "params_dtype", "memory", "verify"} < hints.keys()


WITH_WEIGHTS = [name for name in PRESETS if name not in ("LayerNorm", "RMSNorm", "DotProductAttention")]
each = pytest.mark.parametrize("name", PRESETS)


@each
def test_params_dtype_device_and_options_of_lists(name: str) -> None:
    make = PRESETS[name]
    held = list(make(device="cpu", params_dtype=torch.bfloat16).parameters())
    assert {p.dtype for p in held} == {torch.bfloat16} and {p.device.type for p in held} == {"cpu"}
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in make(device="cpu").parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in make().parameters()} == {here}
    with torch.device("meta"):
        assert all(p.is_meta for p in make().parameters())
        assert not any(p.is_meta for p in make(device="cpu").parameters())
    for bad in (torch.int32, "float32", 5):
        raises(TypeError, "params_dtype is a floating-point dtype", make, params_dtype=bad)
    preset = PRESETS[name](memory="lean", kernels="reference", device="cpu")
    assert preset.memory == "lean" and preset.kernels == "reference"


def test_the_default_device_is_the_gpu_where_there_is_one_and_none_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_fuser.presets.keyword_arguments import default_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device(None).type == "cuda"
    with torch.device("cpu"):
        assert default_device(None).type == "cpu"
    torch.set_default_device("meta")
    try:
        assert default_device(None).type == "meta"
        assert default_device("cpu").type == "cpu"
    finally:
        torch.set_default_device(None)
    assert default_device(None).type == "cuda"


@each
def test_unknown_keywords_name_the_nearest(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) takes no argument 'param_dtype'; did you mean 'params_dtype'\?"):
        PRESETS[name](param_dtype=torch.float32)
    raises(TypeError, r"takes no argument 'zzzz'; it takes .*device, .*tp_size", lambda: PRESETS[name](zzzz=1))


NOTHING = {
    "name": "mlp",
    "ub_name": "fc1",
    "ub_bulk_wgrad": False,
    "ub_overlap_rs_dgrad": None,
    "ub_of_a_release_to_come": False,
    "symmetric_ar_type": None,
    "save_original_input": True,
}
MISSING = {"symmetric_ar_type": "multimem_all_reduce"}
OF_OTHERS = {"cp_group": None, "cp_comm_type": "p2p"}  # which the preset of attention takes
MISSING_IN_OTHERS = {"cp_stream": "a stream", "cp_global_ranks": [0, 1]}


@each
def test_arguments_that_do_nothing(name: str) -> None:
    attends = name == "DotProductAttention"
    for argument, value in {**NOTHING, **({} if attends else OF_OTHERS)}.items():
        with pytest.warns(DeprecationWarning, match=f"{name}: {argument} does nothing here") as seen:
            PRESETS[name](**{argument: value})
        assert len(seen) == 1
    for argument, value in {**MISSING, **({} if attends else MISSING_IN_OTHERS)}.items():
        with pytest.raises(NotImplementedError, match=f"{name}: {argument}=.* asks for what te_fuser does not have"):
            PRESETS[name](**{argument: value})


CUT = {"sequence_parallel": True, "tp_size": 2}
LAYER = {"ub_tp_comm_overlap": False, "ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_dgrad": True}


@each
def test_user_buffers_are_asked_for_where_ranks_cut_the_sequence(name: str) -> None:
    on = {"ub_tp_comm_overlap": True} if name == "TransformerLayer" else {}
    for argument in ("ub_overlap_ag", "ub_split_rs"):
        for cut in ({}, {"sequence_parallel": True}, {"tp_size": 2}):
            with pytest.warns(DeprecationWarning, match=f"{name}: {argument} does nothing here") as seen:
                made = PRESETS[name](**{argument: True}, **on, **cut, device="cpu")
            assert len(seen) == 1 + len(on)
            assert "tp_size" in cut or made(*sample(name)).isfinite().all()
        words = "=True asks for user buffers, which te_fuser does not have; leave"
        with pytest.raises(NotImplementedError, match=f"{name}: {argument}{words} {argument} out"):
            PRESETS[name](**{argument: True}, **CUT, **on)


def test_user_buffers_of_a_layer_that_says_no_overlap() -> None:
    for cut in ({}, CUT):
        with pytest.warns(DeprecationWarning) as seen:
            te_fuser.TransformerLayer(4, 8, 2, **LAYER, **cut, set_parallel_mode=bool(cut), device="cpu")
        assert [str(w.message).split()[1] for w in seen] == list(LAYER)
    with pytest.warns(DeprecationWarning, match="ub_overlap_ag does nothing"):
        te_fuser.TransformerLayer(4, 8, 2, ub_overlap_ag=True, **CUT, set_parallel_mode=True, device="cpu")
    with pytest.raises(NotImplementedError, match="ub_tp_comm_overlap=True asks for user buffers"):
        te_fuser.TransformerLayer(4, 8, 2, **{**LAYER, "ub_tp_comm_overlap": True}, **CUT, device="cpu")


def test_warnings_stand_at_the_callers_line_and_have_a_reason() -> None:
    with pytest.warns(DeprecationWarning) as seen:
        te_fuser.Linear(4, 6, ub_name="qkv")
        te_fuser.LayerNorm(4, name="norm")
    assert {w.filename for w in seen} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in PRESETS.values():
            make(device="cpu", tp_group=None, tp_size=1, sequence_parallel=False)


def test_signature_of_a_subclass_is_its_own() -> None:
    """Signatures of presets stand in public.txt: help() shows them, and code that asks for `device` finds it."""

    class Small(te_fuser.Linear):
        def __init__(self, features: int) -> None:
            super().__init__(features, features, device="cpu")

    assert list(inspect.signature(Small).parameters) == ["features"]
    assert Small(3)(torch.ones(2, 3)).shape == (2, 3)
    assert inspect.signature(Small(3)) == inspect.signature(torch.nn.Linear(2, 3))  # of its calls

    class Square(te_fuser.Linear):
        def __init__(self, features: int, **keywords: Any) -> None:
            super().__init__(features, features, **keywords)

    assert {"features", "bias", "device", "verify"} < inspect.signature(Square).parameters.keys()
    raises(TypeError, r"Square\(\) takes no argument 'bais'; did you mean 'bias'", Square, 3, bais=False)
    made = torch.nn.utils.skip_init(te_fuser.Linear, 4, 6, device="cpu")
    assert made.weight.shape == (6, 4) and not made.weight.is_meta


WORDS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (lambda **k: te_fuser.LayerNormMLP(8, 6, **k), {"activation": "SWIGLU"}, {"normalization": "rmsnorm"}),
    (lambda **k: te_fuser.Linear(8, 6, **k), {"parallel_mode": "COLUMN"}, {}),
    (lambda **k: te_fuser.MultiheadAttention(8, 2, **k), {"qk_norm_type": "l2normalization"}, {"qkv_format": "BSHD"}),
    (lambda **k: te_fuser.MultiheadAttention(8, 2, **k), {"qk_norm_type": "RMSNORM"}, {"attn_mask_type": "No_Mask"}),
    (lambda **k: te_fuser.MultiheadAttention(8, 2, **k), {"softmax_type": "Learnable"}, {"attention_type": "SELF"}),
    (lambda **k: te_fuser.TransformerLayer(8, 6, 2, **k), {"attn_input_format": "BSHD"}, {"layer_type": "Encoder"}),
    (lambda **k: te_fuser.TransformerLayer(8, 6, 2, **k), {"drop_path_rate": 0.1, "attn_input_format": "SBHD"}, {}),
]


@pytest.mark.parametrize(("make", "some", "others"), WORDS)
def test_words_in_any_case(make: Any, some: dict[str, Any], others: dict[str, Any]) -> None:
    right = {"rmsnorm": "RMSNorm", "l2normalization": "L2Normalization", "RMSNORM": "RMSNorm"}
    usual = {n: right.get(w, w.lower()) if isinstance(w, str) else w for n, w in {**some, **others}.items()}
    made, want = (make(device="cpu", **keywords) for keywords in ({**some, **others}, usual))
    want.load_state_dict(made.state_dict())
    x = torch.randn(3, 2, 8)
    assert torch.equal(made.eval()(x), want.eval()(x))
    assert "inter_attention" in dict(
        te_fuser.TransformerLayer(8, 6, 2, layer_type="DECODER", device="cpu").named_children()
    )


@each
def test_what_fills_parameters(name: str) -> None:
    """Weights by init_method, the last of a block by output_layer_init_method, norms by 1 or 0, biases by 0."""

    def twos(t: torch.Tensor) -> None:
        assert t.dim() == 2
        t.fill_(2.0)

    for centered in (False, True):
        norms = {"zero_centered_gamma": centered} if name not in ("Linear", "DotProductAttention") else {}
        fills = {"init_method": twos, "output_layer_init_method": torch.nn.init.ones_}
        fills = fills if name in WITH_WEIGHTS else {}
        made, empty = (PRESETS[name](**fills, device=device, **norms) for device in ("cpu", "meta"))
        empty.to_empty(device="cpu")
        for part in empty.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        for path, p in (*made.named_parameters(), *empty.named_parameters()):
            if "layer_norm" in path or name.endswith("Norm"):
                want = float(path.endswith("weight") and not centered)
            elif path.endswith(("bias", "offset")):
                want = 0.0
            else:
                want = 1.0 if path.endswith(("proj.weight", "fc2_weight")) else 2.0
            assert (p == want).all(), path
        with torch.no_grad():
            for p in made.parameters():
                p.fill_(3.0)
        made.reset_parameters(defer_init=True)
        assert all((p == 3.0).all() for p in made.parameters())


@pytest.mark.parametrize(
    "made",
    [
        lambda: te_fuser.Linear(256, 64, device="cpu").weight,
        lambda: te_fuser.LayerNormMLP(64, 256, device="cpu").fc2_weight,
        lambda: te_fuser.TransformerLayer(256, 64, 4, device="cpu").self_attention.proj.weight,
    ],
)
def test_weights_without_a_method_are_drawn_with_a_deviation_of_0_023(made: Any) -> None:
    assert abs(made().std() - 0.023) < 1e-3 and abs(made().mean()) < 1e-3


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_weights_are_drawn_from_a_trackers_state(name: str) -> None:
    def drawn(seed: int, **named: str) -> list[torch.Tensor]:
        tracker = te_fuser.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", seed)
        tracker.add("other", seed + 7)
        made = PRESETS[name](get_rng_state_tracker=lambda: tracker, **named)
        return [p for p in made.parameters() if p.dim() == 2]

    state = torch.get_rng_state()
    first = drawn(5)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, same, other, named in zip(first, drawn(5), drawn(6), drawn(5, rng_tracker_name="other"), strict=True):
        assert torch.equal(ours, same) and not torch.equal(ours, other) and not torch.equal(ours, named)


@each
def test_groups_of_ranks(name: str, tmp_path: Path) -> None:
    """One rank works, given at once or later, to all parts; a group of another size is refused, in words."""
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group, given = dist.new_group([0]), sample(name)
        made = PRESETS[name](tp_group=group, device="cpu")
        want = made(*given)
        assert made.tp_group is group and want.isfinite().all()
        outer = te_fuser.Sequential(made) if len(given) == 1 else made
        assert torch.equal(outer(*given), want)
        assert torch.equal(torch.nn.parallel.DistributedDataParallel(made)(*given), want)
        assert copy.deepcopy(made).tp_group is group and torch.equal(pickle.loads(pickle.dumps(made))(*given), want)
        parts = [m for m in made.modules() if hasattr(m, "set_tensor_parallel_group")]
        made.set_tensor_parallel_group(None)
        assert all(m.tp_group is None for m in parts) and torch.equal(made(*given), want)
        made.set_tensor_parallel_group(group)
        assert all(m.tp_group is group for m in parts) and torch.equal(outer(*given), want)
        raises(TypeError, "tp_group is a group of torch.distributed's, got 5", made.set_tensor_parallel_group, 5)
        later = PRESETS[name](tp_size=2, device="cpu")
        raises(RuntimeError, "tp_size=2 takes a group: call set_tensor_parallel_group", later, *given)
        later.set_tensor_parallel_group(group)
        raises(RuntimeError, "made for tp_size=2, its tp_group has 1 ranks", later, *given)
        with pytest.raises(ValueError, match="tp_size=2, but tp_group has 1 ranks: leave tp_size out"):
            PRESETS[name](tp_group=group, tp_size=2, device="cpu")
    finally:
        dist.destroy_process_group()


# Values of the first arguments that go by position, none the default.
GIVEN: dict[str, list[Any]] = {
    "Linear": [8, 6, False],
    "LayerNormLinear": [8, 6, 1e-3, False],
    "LayerNormMLP": [8, 6, 1e-3, False],
    "LayerNorm": [8, 1e-3],
    "RMSNorm": [8, 1e-3],
    "DotProductAttention": [4, 2, 2, 0.5, "bshd", "no_mask"],
    "MultiheadAttention": [8, 4, 4, 0.5, 1e-3, torch.nn.init.ones_, torch.nn.init.zeros_, 3, "no_mask"],
    "TransformerLayer": [8, 6, 4, 2, 1e-3, 0.3, 0.4, torch.nn.init.ones_, torch.nn.init.zeros_, 3, 4, "no_mask"],
}


def by_position(function: Any) -> list[str]:
    found = inspect.signature(function).parameters
    return [n for n, p in found.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


@each
def test_what_goes_by_position_is_what_its_name_says_and_more_is_told_so(name: str) -> None:
    kind, positions = getattr(te_fuser, name), by_position(getattr(te_fuser, name))
    made, want = kind(*GIVEN[name], device="cpu"), kind(**dict(zip(positions, GIVEN[name], strict=True)), device="cpu")
    if "init_method" not in positions:
        want.load_state_dict(made.state_dict())
    assert str(made) == str(want)
    ours, theirs = made.state_dict(), want.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(t, theirs[key]) for key, t in ours.items())
    numbers = [getattr(m, "layer_number", None) for m in made.modules()]
    assert numbers == [getattr(m, "layer_number", None) for m in want.modules()]
    last = by_position(getattr(te_fuser, name))[-1]
    words = rf"^{name}\(\) takes .*{last} by position, got \(1, 0\) behind them: give it by"
    raises(TypeError, words, lambda: getattr(te_fuser, name)(*GIVEN[name], (1, 0)))

    class Own(getattr(te_fuser, name)):  # type: ignore[misc]
        def __init__(self, *sizes: int) -> None:
            super().__init__(*GIVEN[name], device="cpu")

    assert Own(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14).training


# Of those whose forward is not in public.txt.
CALLS: dict[str, list[str]] = {
    **dict.fromkeys(("Linear", "LayerNormLinear"), ["inp", "weight", "bias", "is_first_microbatch"]),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), ["inp"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_positions_of_calls(name: str) -> None:
    found = by_position(getattr(te_fuser, name).forward)
    assert found[1 : 1 + len(CALLS[name])] == CALLS[name]
