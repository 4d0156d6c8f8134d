"""Promises that every preset keeps, by one table: values, copies, files, modes, lists, hooks, main_grad."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import te_fuser
from te_fuser import ops
from tests.presets import plain
from tests.presets.layers import HEADS, OWN, PRESETS, bare_list, forward_hook, leaves_of, sample
from tests.presets.plain import ACTIVATIONS, Call, activated, linear, normalized
from tests.refused import raises
from tests.twins import assert_same, randomize, tensor

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")


def linear_of(part: Any, x: torch.Tensor) -> torch.Tensor:
    return linear(x, plain.joined(part, "weight"), plain.joined(part, "bias"))


def norm_of(part: Any, x: torch.Tensor) -> torch.Tensor:
    weight = part.weight + part.zero_centered_gamma
    bias = None if part.bias is None else part.bias.flatten()
    y = normalized(x.flatten(-weight.dim()), weight.flatten(), bias, part.eps)
    return y.reshape(x.shape)


def norm_linear_of(part: Any, x: torch.Tensor) -> torch.Tensor:
    h = normalized(x, part.layer_norm_weight + part.zero_centered_gamma, part.layer_norm_bias, part.eps)
    return linear_of(part, h)


def mlp_of(part: Any, x: torch.Tensor) -> torch.Tensor:
    h = normalized(x, part.layer_norm_weight + part.zero_centered_gamma, part.layer_norm_bias, part.eps)
    between = activated(part.activation, linear(h, part.fc1_weight, part.fc1_bias), **(part.activation_params or {}))
    return linear(between, part.fc2_weight, part.fc2_bias)


def of_samples(meaning: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A meaning of [B, S, F] with a causal mask, of [S, B, F]."""

    def run(part: Any, x: torch.Tensor) -> torch.Tensor:
        y = meaning(part, x.transpose(0, 1), Call(plain.causal(x.shape[0])))
        return (y[0] if isinstance(y, tuple) else y).transpose(0, 1)

    return run


@dataclass(frozen=True)
class Case:
    """A preset, by whom it is made, for how many features, and its meaning in plain PyTorch."""

    kind: Any
    sizes: tuple[Any, ...]
    meaning: Callable[[Any, torch.Tensor], torch.Tensor]
    names: tuple[str, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    features: tuple[int, ...] = (7,)

    def make(self, **more: Any) -> Any:
        return randomize(self.kind(*self.sizes, **{**OWN, **self.keywords, **more}))

    def x(self, *leading: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return tensor(*(leading or (3, 5)), *self.features, dtype=dtype)


NORM = ("layer_norm_weight", "layer_norm_bias")
FC = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
PARTS = tuple(f"{n}_{kind}" for kind in ("weight", "bias") for n in ("query", "key", "value"))
UNEVEN = {"parameters_split": {"query": 6, "key": 2, "value": 4}}
RMS: dict[str, Any] = {"normalization": "RMSNorm", "zero_centered_gamma": True}
HEADED: dict[str, Any] = {"attention_dropout": 0.0, "fuse_qkv_params": True}
FIRST: dict[str, Any] = {"bias": False, "fc1_bias": True}
LAYER = {**HEADED, "hidden_dropout": 0.0}
CASES: dict[str, Case] = {
    "Linear": Case(te_fuser.Linear, (7, 12), linear_of, ("weight", "bias")),
    "Linear, no bias": Case(te_fuser.Linear, (7, 12, False), linear_of, ("weight",)),
    "Linear, split": Case(te_fuser.Linear, (7, 12), linear_of, PARTS, {"parameters_split": ("query_", "key", "value")}),
    "Linear, uneven": Case(te_fuser.Linear, (7, 12), linear_of, PARTS, UNEVEN),
    "Linear, row": Case(te_fuser.Linear, (7, 12), linear_of, ("weight", "bias"), {"parallel_mode": "row"}),
    "LayerNormLinear": Case(te_fuser.LayerNormLinear, (7, 12, 0.1), norm_linear_of, (*NORM, "weight", "bias")),
    "LayerNormLinear, split": Case(te_fuser.LayerNormLinear, (7, 12), norm_linear_of, (*NORM, *PARTS), UNEVEN),
    "LayerNormLinear, RMSNorm": Case(
        te_fuser.LayerNormLinear, (7, 12), norm_linear_of, (NORM[0], "weight"), {**RMS, "bias": False}
    ),
    "LayerNormMLP": Case(te_fuser.LayerNormMLP, (7, 11), mlp_of, (*NORM, *FC), {"set_parallel_mode": True}),
    "LayerNormMLP, no bias": Case(te_fuser.LayerNormMLP, (7, 11, 0.1, False), mlp_of, (*NORM, FC[0], FC[2])),
    "LayerNormMLP, bias first": Case(te_fuser.LayerNormMLP, (7, 11), mlp_of, (*NORM, *FC[:3]), FIRST),
    "LayerNormMLP, bias last": Case(
        te_fuser.LayerNormMLP, (7, 11), mlp_of, (*NORM, FC[0], *FC[2:]), {"fc1_bias": False}
    ),
    "LayerNormMLP, again": Case(te_fuser.LayerNormMLP, (7, 11), mlp_of, (*NORM, *FC), {"checkpoint": True}),
    **{
        f"LayerNormMLP, {name}, {kind}": Case(
            te_fuser.LayerNormMLP, (7, 11), mlp_of, (*norm, *FC), {"activation": name, **more}
        )
        for name in ACTIVATIONS
        for kind, norm, more in (("LayerNorm", NORM, {}), ("RMSNorm", NORM[:1], RMS))
    },
    "LayerNormMLP, params": Case(
        te_fuser.LayerNormMLP,
        (7, 11),
        mlp_of,
        (*NORM, *FC),
        {"activation": "clamped_swiglu", "activation_params": {"limit": 0.5, "alpha": 1.1, "glu_linear_offset": 0.25}},
    ),
    "LayerNorm": Case(te_fuser.LayerNorm, (7, 0.1), norm_of, ("weight", "bias"), {"sequence_parallel": True}),
    "RMSNorm": Case(te_fuser.RMSNorm, (7, 0.1), norm_of, ("weight",)),
    "LayerNorm, zero": Case(
        te_fuser.LayerNorm, (), norm_of, ("weight", "bias"), {"hidden_size": 7, "zero_centered_gamma": True}
    ),
    "RMSNorm, zero": Case(te_fuser.RMSNorm, ((7,),), norm_of, ("weight",), {"zero_centered_gamma": True}),
    "LayerNorm, of two": Case(te_fuser.LayerNorm, ((3, 4),), norm_of, ("weight", "bias"), {}, (3, 4)),
    "RMSNorm, of two": Case(te_fuser.RMSNorm, (), norm_of, ("weight",), {"normalized_shape": (3, 4)}, (3, 4)),
    "MultiheadAttention": Case(
        te_fuser.MultiheadAttention,
        (24, HEADS),
        of_samples(plain.attention),
        ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias"),
        HEADED,
        (24,),
    ),
    "TransformerLayer": Case(
        te_fuser.TransformerLayer,
        (24, 20, HEADS),
        of_samples(plain.layer),
        (
            *(f"self_attention.layernorm_qkv.{n}" for n in (*NORM, "weight", "bias")),
            *("self_attention.proj.weight", "self_attention.proj.bias"),
            *(f"layernorm_mlp.{n}" for n in (*NORM, *FC)),
        ),
        LAYER,
        (24,),
    ),
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)
NORMED = ("LayerNormLinear", "LayerNormMLP", "MultiheadAttention")
few = pytest.mark.parametrize("name", [name for name in CASES if name.count(",") < 2])
KINDS = [name for name in CASES if "," not in name]
kinds = pytest.mark.parametrize("name", KINDS)


@each
def test_preset_gives_float64_values_and_gradients_of_its_meaning(name: str) -> None:
    case = CASES[name]
    made = case.make()
    assert tuple(made.state_dict()) == case.names
    for leading in ((3, 5), (1, 1), (0, 2)):
        x = case.x(*leading)
        assert_same(made(x), case.meaning(made, x), leaves_of(made, x))
    wide = torch.cat([case.x(), case.x()], -1)[..., ::2]
    assert_same(made(wide), case.meaning(made, wide), leaves_of(made, wide))


KEPT = ("Linear, split", "Linear, row", "LayerNormLinear, split", "LayerNormMLP, again")


@pytest.mark.parametrize("name", [*KINDS, *KEPT])
def test_preset_copied_or_loaded_is_trained_by_itself(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made, x = case.make(), case.x()
    before = made(x).detach()
    torch.save(made.state_dict(), tmp_path / "state.pt")
    torch.save(made, tmp_path / "whole.pt")
    safetensors.torch.save_model(made, str(tmp_path / "whole.safetensors"))
    loaded, read, empty, assigned = (case.make(device=device) for device in ("cpu", "cpu", "meta", "meta"))
    for twin in (loaded, empty.to_empty(device="cpu")):
        twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    safetensors.torch.load_model(read, str(tmp_path / "whole.safetensors"))
    assigned.load_state_dict(copy.deepcopy(made.state_dict()), assign=True)
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), whole, loaded, read, empty, assigned):
        assert torch.equal(twin(x), before)
        assert not any("lie apart" in note for note in twin.plan(x).notes) or twin is assigned
        for p, own in zip(twin.parameters(), made.parameters(), strict=True):
            assert [getattr(p, mark, None) for mark in MARKS] == [getattr(own, mark, None) for mark in MARKS]
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(0.5)
        torch.testing.assert_close(twin(x), case.meaning(twin, x))
        narrow = twin.float()(x.float())
        torch.testing.assert_close(narrow, case.meaning(twin, x.float()), rtol=1e-4, atol=1e-4)
    assert torch.equal(made(x), before)


BLOCKED = {"num_gqa_groups": 2, "bias": False}
OTHERS: dict[str, Case] = {
    name: Case(te_fuser.TransformerLayer, (24, 20, HEADS), of_samples(plain.layer), (), {**LAYER, **keywords}, (24,))
    for name, keywords in {
        "apart": {"fuse_qkv_params": False, "bias": False},
        "no mask": {**BLOCKED, "self_attn_mask_type": "no_mask"},
        "bshd": {**BLOCKED, "attn_input_format": "bshd", "normalization": "RMSNorm", "activation": "swiglu"},
    }.items()
}


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_preset_as_torch_nn_and_back_gives_the_same(name: str) -> None:
    case = (CASES | OTHERS)[name]
    made, x = case.make(), case.x()
    theirs, want = made.to_torch(), made(x)
    assert not any(isinstance(m, (te_fuser.FusableOperation, te_fuser.Sequential)) for m in theirs.modules())
    torch.testing.assert_close(theirs(x), want)
    back = te_fuser.from_torch(theirs, x.detach())
    torch.testing.assert_close(back(x), want)
    assert len(te_fuser.Sequential(back, ops.GELU()).plans(x)) == 1
    for p in theirs.parameters():
        p.data.zero_()
    assert torch.equal(made(x), want)


@few
def test_preset_in_lists_is_one_plan_and_hooks_run(name: str) -> None:
    case = CASES[name]
    made, other, x = case.make(), case.make(), case.x()
    model = te_fuser.Sequential(ops.SiLU(), te_fuser.Residual(ops.Identity()), made, ops.GELU())
    y = 2 * torch.nn.functional.silu(x)
    want = activated("gelu", case.meaning(made, y))
    assert len(model.plans(x)) == (2 if case.keywords.get("checkpoint") else 1)
    assert_same(model(x), want, leaves_of(model, x))
    if want.shape == x.shape and case.features != (24,):  # large numbers overflow in plain attention
        stack = te_fuser.Sequential(made, other)
        assert len(stack.plans(x)) == (0 if case.keywords.get("checkpoint") else 1)
        assert_same(stack(x), case.meaning(other, case.meaning(made, x)), leaves_of(stack, x), tolerance=1e-8)
    seen = forward_hook(made)
    assert_same(model(x), want, leaves_of(model, x))
    assert seen == [1]


BESIDE = ("return_bias", "return_layernorm_output")
ASKED = [("Linear", BESIDE[:1]), *((name, asked) for name in NORMED for asked in (BESIDE[:1], BESIDE[1:], BESIDE))]


@pytest.mark.parametrize(("name", "asked"), ASKED)
def test_preset_returns_what_it_is_asked_for_beside(name: str, asked: tuple[str, ...]) -> None:
    case = CASES[name]
    norm = {} if name != "MultiheadAttention" else {"input_layernorm": True}
    made, x = case.make(**dict.fromkeys(asked, True), **norm), case.x()
    held = {path.rpartition(".")[2]: p for path, p in made.named_parameters() if "layer_norm" in path}
    want = [case.meaning(made, x)]
    y, *beside = made(x)
    if "return_bias" in asked:
        bias = beside.pop(0)
        assert bias is [p for path, p in made.named_parameters() if path.endswith("bias")][-1]
        y = y + bias
        assert case.make(bias=False, return_bias=True)(x)[1] is None
        with torch.autocast("cpu", torch.bfloat16):
            narrow = case.make(return_bias=True, params_dtype=torch.float32)(x.detach().float())
        assert [t.dtype for t in narrow] == [torch.bfloat16] * 2
    if "return_layernorm_output" in asked:
        want.append(normalized(x, *held.values(), getattr(made, "eps", 1e-5)))
    assert_same((y, *beside), tuple(want), leaves_of(made, x))
    for model in (te_fuser.Sequential(made), te_fuser.Sequential(ops.Identity(), te_fuser.Sequential(made))):
        raises(TypeError, f"{name} returns several values, by {' and '.join(asked)}", model, x)
    raises((TypeError, NotImplementedError), asked[0], made.to_torch)
    forward_hook(made)
    raises(TypeError, asked[0], lambda: te_fuser.Sequential(made, ops.GELU())(x))
    if name in ("LayerNormLinear", "LayerNormMLP"):
        assert isinstance(case.make(return_layernorm_output_gathered=True)(x), torch.Tensor)


@kinds
def test_preset_under_each_mode_gives_its_values(name: str) -> None:
    case = CASES[name]
    made, x = case.make(), case.x()
    want = case.meaning(made, x).detach()
    made, x = made.float(), x.detach().float().requires_grad_()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            y = made(x)
        assert y.dtype == (torch.float32 if name in ("LayerNorm", "RMSNorm", "TransformerLayer") else dtype)
        torch.testing.assert_close(y.double(), want, rtol=0.1, atol=0.1)
    for scope in (torch.no_grad(), torch.inference_mode()):
        with scope:
            y = made(x)
        assert not y.requires_grad
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


BARE: dict[str, Callable[[torch.dtype], list[Any]]] = {
    "Linear": lambda d: [ops.MatMul(7, 12, dtype=d), ops.Bias(12, dtype=d)],
    "LayerNormLinear": lambda d: [ops.LayerNorm(7, 0.1, dtype=d), ops.Linear(7, 12, dtype=d)],
    "LayerNormMLP": lambda d: [
        ops.LayerNorm(7, dtype=d), ops.Linear(7, 11, dtype=d), ops.GELU(), ops.Linear(11, 7, dtype=d),
    ],
    "LayerNorm": lambda d: [ops.LayerNorm(7, 0.1, dtype=d)],
    "RMSNorm": lambda d: [ops.RMSNorm(7, 0.1, dtype=d)],
    "TransformerLayer": lambda d: [
        te_fuser.Residual(
            ops.LayerNorm(24, dtype=d), ops.Linear(24, 72, dtype=d),
            ops.DotProductAttention(HEADS, 6, mask="causal", layout="sequence_first"),
            ops.Linear(24, 24, dtype=d), ops.Dropout(0.0),
        ),
        te_fuser.Residual(
            ops.LayerNorm(24, dtype=d), ops.Linear(24, 20, dtype=d), ops.GELU(), ops.Linear(20, 24, dtype=d),
            ops.Dropout(0.0),
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BARE)
def test_preset_is_its_list_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    made, x = case.make(params_dtype=dtype), case.x(dtype=dtype)
    bare = bare_list(made, *BARE[name](dtype))
    assert_same(made(x), bare(x), leaves_of(made, x), tolerance=0)
    rows = torch.empty(64, 2, *case.features, dtype=dtype, requires_grad=True)
    stacks = [te_fuser.Sequential(*([m, m] if made(x).shape == x.shape else [m])) for m in (made, bare)]
    for device in ("h200", None):
        ours, theirs = ([step.name for step in stack.plan(rows, device=device).steps] for stack in stacks)
        assert ours == theirs


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm"])
def test_preset_is_verified(name: str) -> None:
    made = CASES[name].make(params_dtype=torch.float32)
    assert te_fuser.verify(made, CASES[name].x(4, dtype=torch.float32).detach()).passed


FUSED = ["Linear", "Linear, uneven", "LayerNormLinear", "LayerNormLinear, split", "LayerNormMLP", "LayerNormMLP, again"]


@pytest.mark.parametrize("name", [*FUSED, "MultiheadAttention", "TransformerLayer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_preset_adds_gradients_of_weights_to_main_grad(name: str, dtype: torch.dtype) -> None:
    """By micro batches: of any, of the first, which writes over what is there, and of others."""
    case = CASES[name]
    made, twin = (case.make(fuse_wgrad_accumulation=fused, params_dtype=dtype) for fused in (True, False))
    x, tolerance = case.x(dtype=dtype), 1e-10 if dtype == torch.float64 else 0.02
    wide = torch.promote_types(dtype, torch.float32)
    twin(x).sum().backward()
    weights = {n: p for n, p in made.named_parameters() if p.dim() == 2}
    for p in weights.values():
        p.main_grad = torch.full_like(p, 5.0, dtype=wide)
    for first, times, base in ((None, 1, 5), (True, 1, 0), (False, 2, 0)):
        made.zero_grad()
        made(x, is_first_microbatch=first).sum().backward()
        for path, p in made.named_parameters():
            want = twin.get_parameter(path).grad.to(wide)
            got, want = (p.main_grad, base + times * want) if path in weights else (p.grad.to(wide), want)
            assert (p.grad is None) == (path in weights)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * (1 + want.abs().max().item()))
    for p in made.parameters():  # a loop that copies gradients finds none of these weights
        p.requires_grad_(p.dim() < 2)
    made(x, is_first_microbatch=True).sum().backward()
    got, want = next(iter(weights.values())).main_grad, 2 * next(p.grad for p in twin.parameters() if p.dim() == 2)
    torch.testing.assert_close(got, want.to(wide), rtol=tolerance, atol=tolerance * (1 + want.abs().max().item()))


WHOLE, ALONE, ROWS, COLUMNS = (False, -1, 1, False), (False, -1, 1, None), (True, 0, 1, None), (True, 1, 1, None)
MARKED: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("Linear", {}, (ALONE, WHOLE)),
    ("Linear", {"parallel_mode": "Column"}, (ROWS, ROWS)),
    ("Linear", {"parallel_mode": "ROW"}, (COLUMNS, WHOLE)),
    ("LayerNormLinear", {"parallel_mode": "column"}, (WHOLE, WHOLE, ROWS, ROWS)),
    ("LayerNormMLP", {}, (WHOLE, WHOLE, ROWS, ROWS, COLUMNS, WHOLE)),
    ("LayerNorm", {}, (WHOLE, WHOLE)),
    ("RMSNorm", {}, (WHOLE,)),
    ("MultiheadAttention", {"softmax_type": "learnable"}, (ALONE, WHOLE, ALONE, ALONE, WHOLE)),
    ("MultiheadAttention", {"set_parallel_mode": True, "softmax_type": "learnable"},
     (ROWS, ROWS, ROWS, COLUMNS, WHOLE)),
    ("MultiheadAttention", {"set_parallel_mode": True, "fuse_qkv_params": False}, (*[ROWS] * 6, COLUMNS, WHOLE)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keywords", "marks"), MARKED)
def test_preset_marks_its_parameters_for_ranks(name: str, keywords: dict[str, Any], marks: tuple[Any, ...]) -> None:
    made = CASES[name].make(sequence_parallel=True, **keywords)
    assert [tuple(getattr(p, mark, None) for mark in MARKS) for p in made.parameters()] == list(marks)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_under_a_name_of_its_own_keeps_a_module_out_of_its_list(name: str) -> None:
    """As where a preset is a plain module: an adapter that is assigned to it is called by who assigned it alone."""
    made, x = PRESETS[name](**OWN), tuple(t.double() for t in sample(name))
    y = made(*x)
    made.adapter = torch.nn.Linear(6, 6, dtype=torch.float64)
    made.relist()
    assert "adapter.weight" in made.state_dict()
    assert torch.equal(made(*x), y) and torch.equal(copy.deepcopy(made)(*x), y)
    if len(x) == 1:
        assert torch.equal(te_fuser.Sequential(made)(*x), y)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_that_nobody_holds_is_freed(name: str) -> None:
    import weakref

    made = PRESETS[name](device="cpu")
    made(*sample(name))
    held = weakref.ref(made)
    del made
    assert held() is None
