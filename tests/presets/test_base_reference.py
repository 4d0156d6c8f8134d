"""What a call gives in plain PyTorch, and how it is planned: for every call that forward takes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.looking import plans_that_run
from tests.needs import needs_follower
from tests.presets.layers import HEADS, LENGTHS, PAD, B, F, K, S, layer
from tests.twins import randomize, tensor

OWN = {"device": "cpu", "params_dtype": torch.float64}


def attention(**keywords: Any) -> Any:
    return randomize(te_fuser.MultiheadAttention(F, HEADS, attention_dropout=0.0, **{**OWN, **keywords}))


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
    "attention, beside": (
        lambda: attention(input_layernorm=True, return_layernorm_output=True, return_bias=True),
        {"window_size": (1, 0), "rotary_pos_emb": ANGLES},
    ),
    "attention, cross": (
        lambda: attention(attention_type="cross", attn_mask_type="no_mask"),
        {"encoder_output": MEMORY, "attention_mask": (None, (torch.arange(K) > 3).expand(B, 1, 1, K))},
    ),
    "layer": (layer, {}),
    "layer, mask": (layer, {"attention_mask": PAD, "self_attn_mask_type": "padding_causal"}),
    "layer, lengths": (layer, {"cu_seqlens_q": LENGTHS, "self_attn_mask_type": "padding"}),
    "layer, bias": (layer, {"core_attention_bias": BIAS, "core_attention_bias_type": "post_scale_bias"}),
    "layer, angles": (layer, {"rotary_pos_emb": (ANGLES, ANGLES), "window_size": (2, 0)}),
    "decoder": (
        lambda: layer(layer_type="decoder"),
        {"encoder_output": MEMORY, "enc_dec_attn_mask": torch.rand(B, 1, S, K) > 0.7},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_takes_what_calls_take(name: str) -> None:
    make, call = CALLS[name]
    made, x = make(), tensor(S, B, F)
    given = [t for item in call.values() for t in (item if isinstance(item, tuple) else (item,))]
    leaves = [x, *made.parameters(), *(t for t in given if isinstance(t, torch.Tensor) and t.requires_grad)]
    ours, wanted = made(x, **call), made.reference(x, **call)
    ours, wanted = (t if isinstance(t, tuple) else (t,) for t in (ours, wanted))
    assert len(ours) == len(wanted)
    torch.testing.assert_close(ours, wanted)
    total, want = (sum((y * y).sum() for y in ys) for ys in (ours, wanted))
    for one, other in zip(*(torch.autograd.grad(t, leaves, allow_unused=True) for t in (total, want)), strict=True):
        torch.testing.assert_close(one, other)
    assert type(wanted[0].grad_fn).__name__ != "SegmentFunctionBackward"


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


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_looks_take_positions_and_names_of_calls(
    name: str, by_keyword: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    make, call = POSITIONS[name]
    made, args, named = make(), call, dict[str, Any]()
    if by_keyword:
        _, *names = inspect.signature(made.forward.__func__).parameters
        args, named = (), dict(zip(names, call, strict=False))
    want, ran = made(*call), plans_that_run(monkeypatch)
    torch.testing.assert_close(made.reference(*args, **named), want)
    made(*args, **named)
    steps = [step.name for step in ran[0].steps]
    assert [step.name for step in made.plan(*args, **named).steps] == steps
    assert [[step.name for step in plan.steps] for plan in made.plans(*args, **named)] == [steps]
    assert made.plan(*args, device="h200", **named).device.name == "h200"
    shown = made.explain(*args, device="cpu", source=True, **named)
    assert [[step.name for step in plan.steps] for plan in shown.plans] == [steps]
    made.tune(*args, rounds=1, seconds=0.001, **named)
    torch.testing.assert_close(made(*args, **named), want)


def test_by_position_alone() -> None:
    made, x = layer(), tensor(S, B, F)
    mask = torch.rand(1, 1, S, S) > 0.5
    with pytest.warns(UserWarning, match="reads no mask"):
        torch.testing.assert_close(made.reference(x, mask), made(x))
    core = dot_product(attn_mask_type="no_mask")
    want = torch.nn.functional.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in HEADED))
    torch.testing.assert_close(core.reference(*HEADED), want.permute(2, 0, 1, 3).flatten(2))


def test_twice_differentiated() -> None:
    """What the fused calls refuse: a gradient of a gradient, of a call with a mask."""
    made, x = layer(self_attn_mask_type="padding"), tensor(S, B, F)
    (dx,) = torch.autograd.grad(made.reference(x, PAD).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    assert ddx.abs().sum() > 0


def test_bad_calls_are_told_as_by_forward() -> None:
    made, x = layer(), tensor(S, B, F)
    with pytest.raises(TypeError, match="did you mean 'window_size'"):
        made.reference(x, windowsize=(1, 0))
    with pytest.raises(ValueError, match="encoder_output is for cross attention"):
        made.reference(x, None, x)
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        layer(tp_size=2).reference(x)


def test_named_outputs() -> None:
    made, x = mlp(), tensor(S, B, F)
    made.insert(2, ops.Output("product"))
    for ours, want in zip(made.reference(x, outputs=("product",)), made(x, outputs=("product",)), strict=True):
        torch.testing.assert_close(ours, want)


def test_a_subclass_with_a_forward_of_its_own() -> None:
    class Doubled(te_fuser.LayerNormMLP):
        def forward(self, inp: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * super().forward(inp)

    made, x = randomize(Doubled(F, 20, **OWN)), tensor(S, B, F)
    torch.testing.assert_close(2 * made.reference(x), made(x))


class Exported(torch.nn.Module):
    """A layer in plain PyTorch, with a mask."""

    def __init__(self, part: Any, **call: Any) -> None:
        super().__init__()
        self.part, self.call = part, call

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.part.reference(x, mask, **self.call)


def test_export() -> None:
    made, x = layer(), tensor(S, B, F, grad=False)
    how = {"self_attn_mask_type": "padding_causal", "window_size": (3, 0)}
    program = torch.export.export(Exported(made, **how), (x, PAD))
    other = PAD.roll(1, -1)
    torch.testing.assert_close(program.module()(x, other), made(x, other, **how))


@pytest.mark.parametrize("name", CALLS)
def test_looks_take_what_calls_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, call = CALLS[name]
    made, x, ran = make(), tensor(S, B, F), plans_that_run(monkeypatch)
    (shown,) = made.plans(x, **call)
    made(x, **call)
    assert [step.name for step in shown.steps] == [step.name for step in ran[0].steps]
    assert str(made.explain(x, **call)).startswith("Plan: ")


def test_measuring_takes_what_calls_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    made, x = layer(params_dtype=torch.float32), tensor(S, B, F, dtype=torch.float32)
    how = {"attention_mask": PAD, "self_attn_mask_type": "padding"}
    want = made(x, **how)
    assert str(made.explain(x, measure=True, **how)).startswith("Plan: ")
    made.tune(x, rounds=1, seconds=0.001, **how)
    torch.testing.assert_close(made(x, **how), want)
    assert made.plan(x, device="h200", **how).device.name == "h200"


SEQUENCES = torch.tensor([0, 4, 15, S * B])
COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lengths": ({}, {"cu_seqlens_q": LENGTHS, "self_attn_mask_type": "padding"}),
    "offsets": ({"attn_input_format": "thd"}, {"cu_seqlens_q": SEQUENCES, "max_seqlen_q": 11}),
    "padded, angles": (
        {"attn_input_format": "thd"},
        {
            "cu_seqlens_q": torch.tensor([0, 3, 10, 15]),
            "cu_seqlens_q_padded": SEQUENCES,
            "rotary_pos_emb": torch.ones(11, 1, 1, 6),
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "strict"),
    [
        ("lengths", False),
        ("offsets", False),
        ("padded, angles", False),
        pytest.param("padded, angles", True, marks=needs_follower),
    ],
)
def test_export_of_what_a_cpu_looks_at(name: str, strict: bool) -> None:
    """Lengths and offsets are values of the exported program: nobody looks at them while it is traced."""
    how, call = COUNTED[name]
    made = layer(params_dtype=torch.float32, **how)
    x = torch.randn(*((S * B, F) if how else (S, B, F)))

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = made

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            return self.made.reference(x, **{**call, "cu_seqlens_q": lengths})

    want = made(x, **call)
    program = torch.export.export(Exported(), (x, call["cu_seqlens_q"]), strict=strict).module()
    torch.testing.assert_close(program(x, call["cu_seqlens_q"]), want, rtol=1e-4, atol=1e-5)
    other = call["cu_seqlens_q"].clone()
    other[1] -= 2
    torch.testing.assert_close(program(x, other), made(x, **{**call, "cu_seqlens_q": other}), rtol=1e-4, atol=1e-5)


@needs_follower
def test_strict_export_of_a_layer_that_has_not_run() -> None:
    made, x = layer(params_dtype=torch.float32), torch.randn(S, B, F)

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = made

        def forward(self, x: torch.Tensor) -> Any:
            return self.made.reference(x)

    program = torch.export.export(Exported(), (x,), strict=True).module()
    torch.testing.assert_close(program(x), made(x), rtol=1e-4, atol=1e-5)
