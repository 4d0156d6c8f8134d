"""Calls that presets take: their reference, looks, plans and exports, and sizes that are planned ahead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser import pipeline
from tests.looking import plans_that_run
from tests.needs import needs_follower
from tests.presets.layers import HEADS, LENGTHS, OWN, PAD, B, F, K, S, attention, layer
from tests.twins import assert_same, randomize, tensor


def dot_product(**keywords: Any) -> Any:
    return te_fuser.DotProductAttention(HEADS, 6, device="cpu", **keywords).double()


def linear(kind: Any = te_fuser.Linear, **keywords: Any) -> Any:
    return randomize(kind(F, 12, **{**OWN, **keywords}))


def mlp(**keywords: Any) -> Any:
    return randomize(te_fuser.LayerNormMLP(F, 20, **{**OWN, **keywords}))


MEMORY, ANGLES, BIAS = tensor(K, B, F, seed=5), tensor(S, 1, 1, 6, grad=False), tensor(1, HEADS, S, S, seed=4)
WEIGHT, HEADED = tensor(12, F, seed=6), [tensor(S, B, HEADS, 6, seed=n) for n in range(3)]
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (linear, {}),
    "linear, weight": (linear, {"weight": WEIGHT, "bias": tensor(12, seed=7)}),
    "linear, no weight": (lambda: linear(skip_weight_param_allocation=True, bias=False), {"weight": WEIGHT}),
    "linear, bias": (lambda: linear(return_bias=True), {}),
    "norm linear": (lambda: linear(te_fuser.LayerNormLinear, return_layernorm_output=True, return_bias=True), {}),
    "mlp": (lambda: mlp(return_bias=True, return_layernorm_output=True), {"is_first_microbatch": False}),
    "mlp, again": (lambda: mlp(checkpoint=True), {}),
    "norm": (lambda: randomize(te_fuser.LayerNorm(F, **OWN)), {}),
    "attention": (attention, {}),
    "attention, mask": (attention, {"attention_mask": PAD, "attn_mask_type": "padding"}),
    "attention, beside": (lambda: attention(input_layernorm=True, return_layernorm_output=True, return_bias=True),
     {"window_size": (1, 0), "rotary_pos_emb": ANGLES}),
    "attention, cross": (lambda: attention(attention_type="cross", attn_mask_type="no_mask"),
     {"encoder_output": MEMORY, "attention_mask": (None, (torch.arange(K) > 3).expand(B, 1, 1, K))}),
    "layer": (layer, {}),
    "layer, mask": (layer, {"attention_mask": PAD, "self_attn_mask_type": "padding_causal"}),
    "layer, lengths": (layer, {"cu_seqlens_q": LENGTHS, "self_attn_mask_type": "padding"}),
    "layer, bias": (layer, {"core_attention_bias": BIAS, "core_attention_bias_type": "pre_scale_bias"}),
    "layer, angles": (layer, {"rotary_pos_emb": (ANGLES, ANGLES), "window_size": (2, 0)}),
    "layer, slopes": (layer, {"core_attention_bias_type": "alibi", "alibi_slopes": tensor(B, HEADS, grad=False)}),
    "decoder": (lambda: layer(layer_type="decoder"),
     {"encoder_output": MEMORY, "enc_dec_attn_mask": torch.rand(B, 1, S, K) > 0.7}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_it_takes_what_calls_take(name: str) -> None:
    make, call = CALLS[name]
    made, x = make(), tensor(S, B, F)
    given = [t for item in call.values() for t in (item if isinstance(item, tuple) else (item,))]
    own = [] if "weight" in call else made.parameters()
    leaves = [x, *own, *(t for t in given if isinstance(t, torch.Tensor) and t.requires_grad)]
    wanted = made.reference(x, **call)
    first = wanted[0] if isinstance(wanted, tuple) else wanted
    assert type(first.grad_fn).__name__ != "SegmentFunctionBackward"
    assert_same(made(x, **call), wanted, leaves)


MASKS = (torch.rand(B, 1, 1, S) > 0.8, torch.rand(B, 1, 1, S) > 0.8)
POSITIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # every argument that goes by position
    "Linear": (linear, (tensor(S, B, F), WEIGHT, tensor(12, seed=7), True, False, False)),
    "LayerNormLinear": (lambda: linear(te_fuser.LayerNormLinear), (tensor(S, B, F), WEIGHT, None, False)),
    "LayerNormMLP": (mlp, (tensor(S, B, F), True)),
    "LayerNorm": (lambda: randomize(te_fuser.LayerNorm(F, **OWN)), (tensor(S, B, F),)),
    "RMSNorm": (lambda: randomize(te_fuser.RMSNorm(F, **OWN)), (tensor(S, B, F),)),
    "DotProductAttention": (lambda: dot_product(attn_mask_type="arbitrary"), (*HEADED, torch.rand(S, S) > 0.8)),
    "DotProductAttention, cross": (
        lambda: dot_product(attn_mask_type="padding", attention_type="cross"),
        (*HEADED, MASKS),
    ),
    "MultiheadAttention": (
        lambda: attention(attention_type="cross", attn_mask_type="arbitrary"),
        (tensor(S, B, F), torch.rand(S, K) > 0.8, MEMORY),
    ),
    "TransformerLayer": (
        lambda: layer(layer_type="decoder", self_attn_mask_type="arbitrary"),
        (tensor(S, B, F), torch.rand(S, S) > 0.8, MEMORY, torch.rand(S, K) > 0.8, False, False, None, None),
    ),
}


def calls() -> Iterator[Any]:
    """A preset's maker, arguments of a call by position and by name, and all of them by name."""
    for name, (make, named) in CALLS.items():
        yield pytest.param(make, (tensor(S, B, F),), named, {}, id=name)
    for name, (make, args) in POSITIONS.items():
        _, *names = inspect.signature(type(make()).forward).parameters
        yield pytest.param(make, args, {}, dict(zip(names, args, strict=False)), id=f"{name}, by position and by name")


@pytest.mark.parametrize(("make", "args", "named", "by_name"), calls())
def test_look_takes_what_a_call_takes_and_shows_what_runs(
    make: Any, args: Any, named: Any, by_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    made, ran = make(), plans_that_run(monkeypatch)
    want = made(*args, **named)
    torch.testing.assert_close(made.reference(*args, **named), want)
    steps = [step.name for step in ran[0].steps]
    assert [step.name for step in made.plan(*args, **named).steps] == steps
    assert [[step.name for step in plan.steps] for plan in made.plans(*args, **named)] == [steps]
    assert made.plan(*args, device="h200", **named).device.name == "h200"
    for how in ({"device": "cpu", "source": True, "passes": True}, *([{"measure": True}] if by_name else [])):
        shown = made.explain(*args, **how, **named, details=True)
        assert [[step.name for step in plan.steps] for plan in shown.plans] == [steps]
        assert str(shown).startswith("Plan: ")
    if by_name:  # each kind of call once
        assert [step.name for step in made.plan(**by_name).steps] == steps
        made.tune(*args, rounds=1, seconds=0.001)
        torch.testing.assert_close((made(**by_name), made.reference(**by_name)), (want, want))
    torch.testing.assert_close(made(*args, **named), want)


def test_twice_differentiated() -> None:
    """The reference gives what fused calls refuse: a gradient of a gradient, of a call with a mask."""
    made, x = layer(self_attn_mask_type="padding"), tensor(S, B, F)
    (dx,) = torch.autograd.grad(made.reference(x, PAD).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    assert ddx.abs().sum() > 0


def test_named_outputs_and_a_subclass_with_a_forward_of_its_own() -> None:
    class Doubled(te_fuser.LayerNormMLP):
        def forward(self, inp: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * super().forward(inp)

    made, x = randomize(Doubled(F, 20, **OWN)), tensor(S, B, F)
    torch.testing.assert_close(2 * made.reference(x), made(x))
    made, x = mlp(), tensor(S, B, F)
    made.insert(2, ops.Output("product"))
    for ours, want in zip(made.reference(x, outputs=("product",)), made(x, outputs=("product",)), strict=True):
        torch.testing.assert_close(ours, want)


class Exported(torch.nn.Module):
    """A preset in plain PyTorch, called with a tensor of that name."""

    def __init__(self, made: Any, name: str | None = None, **call: Any) -> None:
        super().__init__()
        self.made, self.name, self.call = made, name, call

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> Any:
        return self.made.reference(x, **self.call, **({self.name: given[0]} if self.name else {}))


SEQUENCES = torch.tensor([0, 4, 15, S * B])
PADDED, TWO = torch.tensor([0, 3, 10, 15]), torch.tensor([0, 2, 0, 0])
# A tensor, another one, and what else the call says.
TAKEN: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {
    "lengths": (LENGTHS, LENGTHS - TWO, {"self_attn_mask_type": "padding"}),
    "offsets": (SEQUENCES, SEQUENCES - TWO, {"max_seqlen_q": 11}),
    "padded, angles": (PADDED, PADDED - TWO,
     {"cu_seqlens_q_padded": SEQUENCES, "rotary_pos_emb": torch.ones(11, 1, 1, 6)}),
    "mask": (PAD, PAD.roll(1, -1), {"self_attn_mask_type": "padding_causal", "window_size": (3, 0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_export_of_lengths_or_a_mask_takes_them_as_values(name: str) -> None:
    """Nobody looks at them while it is traced."""
    (one, other, call), sequences = TAKEN[name], name in ("offsets", "padded, angles")
    made = layer(params_dtype=torch.float32, **({"attn_input_format": "thd"} if sequences else {}))
    x, taken = (
        torch.randn(*((S * B, F) if sequences else (S, B, F))),
        "attention_mask" if one is PAD else "cu_seqlens_q",
    )
    program = torch.export.export(Exported(made, taken, **call), (x, one)).module()
    for given in (one, other):
        want = made(x, **call, **{taken: given})
        torch.testing.assert_close(program(x, given), want, rtol=1e-4, atol=1e-5)


@needs_follower
def test_strict_export_of_a_call_that_was_not_made_yet() -> None:
    made, x = attention(params_dtype=torch.float32), torch.randn(S, B, F)
    call = {"attn_mask_type": "no_mask", "window_size": (1, 1)}
    program = torch.export.export(Exported(made, **call), (x,), strict=True).module()
    for given in (x, 2 * x):
        torch.testing.assert_close(program(given), made(given, **call), rtol=1e-4, atol=1e-5)


SIZES: dict[str, Any] = {"seq_length": S, "micro_batch_size": B}
X, SAME, CROSS = tensor(S, B, F), tensor(S, B, F, seed=5), {"attention_type": "cross", "attn_mask_type": "padding"}
ENDS, MASK = torch.arange(B + 1, dtype=torch.int32) * S, PAD.expand(B, 1, S, S)
DECODER: dict[str, Any] = {"layer_type": "decoder"}
CROSSED = {**DECODER, "self_attn_mask_type": "padding", "enc_dec_attn_mask_type": "padding"}
# A preset, its arguments, and a call of it.
AHEAD: list[tuple[Any, dict[str, Any], torch.Tensor, dict[str, Any]]] = [
    (mlp, {}, X, {}),
    (mlp, {"checkpoint": True}, X, {}),
    (mlp, {"return_bias": True, "return_layernorm_output": True}, X, {}),
    (attention, {}, X, {}),
    (attention, {"input_layernorm": True, "return_layernorm_output": True}, X, {}),
    (attention, {"attn_mask_type": "padding"}, X, {"attention_mask": PAD}),
    (attention, CROSS, X, {"encoder_output": SAME, "attention_mask": (PAD, PAD)}),
    (layer, {}, X, {}),
    (layer, {"attn_input_format": "bshd"}, tensor(B, S, F), {}),
    (layer, {"self_attn_mask_type": "padding_causal"}, X, {"attention_mask": PAD}),
    (layer, {"self_attn_mask_type": "arbitrary"}, X, {"attention_mask": MASK}),
    (layer, {"attn_input_format": "thd"}, tensor(S * B, F), {"cu_seqlens_q": ENDS}),
    (layer, DECODER, X, {"encoder_output": SAME}),
    (layer, CROSSED, X, {"attention_mask": PAD, "encoder_output": SAME, "enc_dec_attn_mask": (PAD, PAD)}),
]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records of plans made, and of plans loaded, for which kernels are compiled."""
    found: list[str] = []
    for name in ("make_plan", "load"):
        real = getattr(pipeline, name)
        monkeypatch.setattr(pipeline, name, lambda *args, name=name, real=real: found.append(name) or real(*args))
    return found


@pytest.mark.parametrize(("make", "keywords", "x", "call"), AHEAD)
def test_sizes_that_are_planned_ahead(make: Any, keywords: Any, x: Any, call: Any, planned: list[str]) -> None:
    """The first call of them neither plans nor compiles, and its backward neither."""
    made = make(**keywords, **SIZES)
    assert planned == ["make_plan", "load"]
    planned.clear()
    y = made(x, **call)
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert planned == []


def test_one_of_the_two_or_a_group_that_comes_later_plans_nothing(planned: list[str]) -> None:
    for make in (mlp, attention, layer):
        make(seq_length=S), make(micro_batch_size=B)
        assert make(**SIZES, tp_size=2, set_parallel_mode=True).tp_size == 2
    mlp(**SIZES, device="meta"), attention(**SIZES, device="meta")
    assert planned == []


def test_hooks_for_all_modules() -> None:
    """Hooks for all modules make every op a part by itself: there is no plan to be made ahead."""
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        made = layer(**SIZES)
    finally:
        hook.remove()
    torch.testing.assert_close(made(X), layer()(X))
