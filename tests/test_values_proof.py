"""Opaque ops of a user's that give several values: in dtypes of their own, with gradients and without."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.formula.evaluate import rounds
from te_fuser.formula.expr import Axes
from te_fuser.fuser.plan import segmenting
from te_fuser.fusions import Cost, fusion, only
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.operations import UnfusedOperation
from tests.needs import needs_compiler

WIDTH = 24
NARROW = torch.float8_e4m3fn


class _Narrow(torch.autograd.Function):
    """x / scale in 8 bits, whose gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.double() / scale.double()).to(NARROW).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, None, None


def narrowed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in 8 bits, and the scale of each row."""
    scale = _wide(x.detach()).abs().amax(-1, keepdim=True).clamp_min(1e-6) / 448
    return (x.double() / scale.double()).to(NARROW), scale


@op_table.gradient_dtype.row(lambda op, dtype: torch.promote_types(dtype, torch.float32))
class Quantize(UnfusedOperation):
    """x / scale in 8 bits, the scale of each row, and 2 x; the gradient of the first is that of x."""

    values = ("scale", "twice")
    non_differentiable = ("scale",)
    takes_gradients_in = (torch.float32, torch.float64)
    reads = ()
    seen: tuple[torch.dtype | None, ...] = ()

    def infer(self, x: Spec) -> Mapping[str, Spec]:
        scale = Spec((*x.shape[:-1], 1), torch.promote_types(x.dtype, torch.float32), x.device)
        return {"output": replace(x, dtype=NARROW), "scale": scale, "twice": x}

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        data, scale = narrowed(x)
        return {"output": data, "scale": scale, "twice": 2 * x}

    def op_backward(self, call: OpCall, dy: torch.Tensor | None) -> torch.Tensor:
        twice = call.get("d_twice")
        type(self).seen = tuple(None if g is None else g.dtype for g in (dy, twice))
        parts = [g for g in (dy, None if twice is None else 2 * twice) if g is not None]
        return functools.reduce(torch.add, parts)

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        _, scale = narrowed(x)
        exact = x.dtype == torch.float64 and not rounds()
        data = _Narrow.apply(x, scale, torch.float64 if exact else NARROW)
        return {"output": data, "scale": scale, "twice": 2 * x}


@op_table.gradient_dtype.row(lambda op, dtype: torch.promote_types(op.weight.dtype, torch.float32))
class NarrowProduct(UnfusedOperation):
    """y = (data scale) W^T; gives the gradient of data scale, in float32."""

    input_dtypes = (NARROW,)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"scale": NamedInput("scale", None, gradient=False)}

    def infer(self, x: Spec) -> Spec:
        return replace(x, dtype=self.weight.dtype)

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        weight = Gradient(("weight",), ("input", "scale"), "weight_gradient")
        return Gradient(("input",), ("weight",), "input_gradient"), weight

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return (_wide(x) * _wide(call["scale"])).to(self.weight.dtype) @ call["weight"].mT

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"input": (_wide(dy) @ _wide(call["weight"]))}

    def weight_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        x = _wide(call["input"]) * _wide(call["scale"])
        return {"weight": (_wide(dy).flatten(0, -2).mT @ x.flatten(0, -2)).to(dy.dtype)}

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return (_OfWhole.apply(x, call["scale"])).to(call["weight"].dtype) @ call["weight"].mT


class _OfWhole(torch.autograd.Function):
    """data scale, whose gradient goes to data as it is."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return _wide(data) * _wide(scale)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, None


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.float64 else t.float()


class RowScale(ops.RowOp):
    """y = x * (1 + scale), with one number for each row."""

    inputs = {"scale": NamedInput("scale", Axes.ROWS, gradient=False)}

    def compute(self, x: Any, scale: Any) -> Any:
        return x * (1.0 + scale)


def model(kernels: str = "reference", dtype: torch.dtype = torch.float32, **options: Any) -> Sequential:
    """Row ops before and behind, a product that reads the narrow value and its scale, and an op that reads another."""
    torch.manual_seed(0)
    parts = (ops.LayerNorm(WIDTH), Quantize(), NarrowProduct(), ops.Bias(WIDTH), RowScale(), ops.Add("twice"))
    made = Sequential(*parts, ops.GELU(), ops.Linear(WIDTH, WIDTH), kernels=kernels, **options)
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.2, 0.3)
    return made.to(dtype)


def exact(ours: Sequential, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(output, scale, twice) of the model in float64, and the leaves: x and all parameters."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *ours.parameters())]
    x, g, b, w, bias, w2, bias2 = leaves
    y = torch.nn.functional.layer_norm(x, (WIDTH,), g, b, ours[0].eps)
    data, scale = narrowed(y)
    product = (y + (data.double() * scale - y).detach()) @ w.mT + bias
    hidden = torch.nn.functional.gelu(product * (1 + scale.double()) + 2 * y, approximate="tanh")
    return [hidden @ w2.mT + bias2, scale.double(), 2 * y], leaves


def gradients(ours: Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of x and of all parameters, for the sum of the squares of the output."""
    return list(torch.autograd.grad(ours(x).square().sum(), [x, *ours.parameters()]))


def arriving(made: Any) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=rng, dtype=torch.float64).to(y.dtype) for y in made]


SIZES = [(7, 3), (1,), (0,), (33,)]


def assert_as_exact(ours: Sequential, x: torch.Tensor, asked: tuple[str, ...], within: float, scaled: bool) -> None:
    """As in float64: the output, named values that the user gets too, and the gradients of all.

    Args:
        within: how far values may be apart; of gradients ten times that, and `scaled` by the largest number.
    """
    made = ours(x, outputs=asked) if asked else (ours(x),)
    (main, scale, twice), leaves = exact(ours, x)
    want = [main, *({"scale": scale, "twice": twice}[name] for name in asked)]
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=within, atol=within)
        assert a.requires_grad == b.requires_grad
    dys = [dy.to(x.device) for dy in arriving([y.cpu() for y in made])]
    pairs = [(y, w, dy) for y, w, dy in zip(made, want, dys, strict=True) if y.requires_grad]
    got = torch.autograd.grad([y for y, _, _ in pairs], [x, *ours.parameters()], [dy for _, _, dy in pairs])
    right = torch.autograd.grad([w for _, w, _ in pairs], leaves, [dy.double() for _, _, dy in pairs])
    for a, b in zip(got, right, strict=True):
        size = b.abs().max().item() if scaled and b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=10 * within, atol=1e-4 * size)


@needs_compiler
@pytest.mark.parametrize("kernels", ["generated", "reference"])
@pytest.mark.parametrize("leading", SIZES)
@pytest.mark.parametrize("asked", [(), ("twice",), ("scale", "twice")])
def test_values_and_gradients(kernels: str, leading: tuple[int, ...], asked: tuple[str, ...]) -> None:
    assert_as_exact(model(kernels), torch.randn(*leading, WIDTH, requires_grad=True), asked, 1e-5, scaled=False)
    assert Quantize.seen == (torch.float32, torch.float32)


@needs_compiler
def test_neighbours_are_fused_and_a_plan_says_what_it_does() -> None:
    ours = model("generated", torch.bfloat16)
    x = torch.randn(7, WIDTH).bfloat16().requires_grad_()
    plan = ours.plan(x)
    assert [s.name for s in plan.forward][:4] == [
        "layer_norm_fwd",
        "quantize",
        "narrow_product",
        "bias_row_scale_add_gelu_fwd",
    ]
    step = next(s for s in plan.forward if s.name == "quantize")
    made = {name: (ref.label(plan.graph), str(ref.spec(plan.graph).dtype)) for name, ref in step.outputs}
    assert made == {
        "output": ("quantize.output", "torch.float8_e4m3fn"),
        "scale": ("quantize.scale", "torch.float32"),
        "twice": ("quantize.twice", "torch.bfloat16"),
    }
    back = next(s for s in plan.backward if s.name == "quantize.input_gradient")
    dtypes = {name: ref.spec(plan.graph).dtype for name, ref in back.inputs}
    assert dtypes == {"dy": torch.float32, "d_twice": torch.bfloat16}
    kept = {k.name for k in plan.kept}
    assert {"quantize.output", "quantize.scale"} <= kept and "quantize.twice" in str(ours.explain(x, details=True))
    (dx,) = torch.autograd.grad(ours(x).float().sum(), x)
    assert Quantize.seen == (torch.float32, torch.bfloat16) and dx.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_step_is_verified(dtype: torch.dtype) -> None:
    ours = model(dtype=dtype, verify=True)
    x = torch.randn(7, WIDTH).to(dtype).requires_grad_()
    sum(y.double().sum() for y in ours(x, outputs=("twice",))).backward()
    assert x.grad is not None and all(p.grad is not None for p in ours.parameters())


@needs_compiler
def test_the_whole_model_is_verified() -> None:
    te_fuser.verify(model("generated"), torch.randn(7, 3, WIDTH))


def test_everyday_uses() -> None:
    """A second backward, no gradients, a checkpoint, copies."""
    ours, x = model(), torch.randn(7, WIDTH, requires_grad=True)
    y = ours(x)
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], dx)
    with torch.no_grad():
        assert torch.equal(ours(x), y)
    again = functools.partial(checkpoint, ours, use_reentrant=False)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), again):
        assert torch.equal(torch.autograd.grad(other(x).sum(), x)[0], dx)


def test_values_cross_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, x = model(), torch.randn(7, WIDTH, requires_grad=True)
    want = gradients(ours, x)
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    cut = copy.deepcopy(ours)
    plan = cut.plan(x)
    assert len(plan.segments) > 2 and any(len(s.values_out) > 1 for s in plan.segments)
    torch.testing.assert_close(gradients(cut, x), want)


@pytest.mark.parametrize("behind", [ops.GELU(), ops.MatMul(WIDTH, WIDTH)])
def test_row_ops_and_products_take_no_narrow_values(behind: ops.FusableOperation) -> None:
    ours = Sequential(ops.GELU(), op_table.exports.row(True)(type("Exporting", (Quantize,), {}))(), behind)
    with pytest.raises(TypeError, match=r"op 2 .*: takes float32, bfloat16, float16, float64, got float8_e4m3fn"):
        ours(torch.randn(5, WIDTH))


# ----------------------------------------------------------------------------------------------------- fusions


def test_a_forward_fusion_gives_values_by_name() -> None:
    @fusion(
        forward=[Quantize, NarrowProduct], emits=["0.output", "0.scale", "0.twice"], cost=lambda m: Cost(seconds=1e-12)
    )
    def quantized_product(m: Any, x: torch.Tensor) -> torch.Tensor:
        data, scale = narrowed(x)
        for name, t in (("output", data), ("scale", scale), ("twice", 2 * x)):
            m.emit(f"0.{name}", t)
        return (data.float() * scale) @ m[1].weight.mT

    ours, x = model(), torch.randn(7, WIDTH, requires_grad=True)
    assert "quantized_product" in [s.name for s in ours.plan(x).forward]
    found = gradients(ours, x)
    with only():
        torch.testing.assert_close(found, gradients(ours, x))
    main, leaves = exact(ours, x)
    want = torch.autograd.grad(main[0].square().sum(), leaves)
    torch.testing.assert_close([g.double() for g in found], list(want), rtol=1e-4, atol=1e-4)
