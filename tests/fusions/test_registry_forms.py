"""Fusions that take gradients of another dtype, forms, or gradients by name; declarations that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan import segmenting
from te_fuser.fusions import Cost, Details, Fusion, Optional, Repeat, fusion, only
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, OpCall
from te_fuser.ops.operations import UnfusedOperation
from tests.forms import HalfProduct, TwoForms
from tests.fusions.products import reasons
from tests.fusions.registered import FREE, X, declared
from tests.needs import needs_compiler
from tests.refused import refused
from tests.twins import sequential, tensor

WIDTH = 16
CHEAP = Cost(seconds=1e-12)


def run(model: Any, x: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of the leaves."""
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.double().square().sum(), leaves)]


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------ gradients in another dtype


def slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of SiLU."""
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


def silu_backward(seen: list[Any], **details: Any) -> Fusion:
    """The backward of SiLU, which notes the dtypes of what it gets."""

    @fusion(
        backward=[ops.SiLU],
        reads=["input"],
        cost=lambda m: CHEAP,
        when=lambda m: seen.append(m.dy and m.dy.dtype) or True,
        details=Details(registered=False, **details),
    )
    def own(m: Any, dy: torch.Tensor) -> torch.Tensor:
        seen.append(("ran", dy.dtype))
        return (dy.float() * slope(m["input"].float())).to(m["input"].dtype)

    return own


@pytest.mark.parametrize("taken", [(), (torch.float32,), (torch.float32, torch.float16)])
def test_a_gradient_in_another_dtype_is_taken_where_the_fusion_says_so(taken: tuple[torch.dtype, ...]) -> None:
    model = Sequential(ops.MatMul(WIDTH, WIDTH), ops.SiLU(), HalfProduct(WIDTH)).bfloat16()
    x = torch.randn(7, WIDTH).bfloat16().requires_grad_()
    leaves, seen = [x, *model.parameters()], list[Any]()
    with only(silu_backward(seen, takes_gradients_in=taken)):
        got, plan = run(model, x, leaves), model.plan(x)
    if torch.float16 in taken:
        assert torch.float16 in seen and ("ran", torch.float16) in seen
    else:
        assert reasons(plan, "own") == {"the gradient of silu.output arrives in float16, not in its own dtype"}
    double = [t.detach().double().requires_grad_() for t in leaves]
    y = torch.nn.functional.silu(double[0] @ double[1].mT) @ double[2].mT
    assert_near(got, [y.detach(), *torch.autograd.grad(y.square().sum(), double)], 0.1)


# ----------------------------------------------------------------------------------------------------- forms


def two_forms(behind: ops.FusableOperation, **options: Any) -> Sequential:
    model = Sequential(ops.LayerNorm(WIDTH), TwoForms(), behind, ops.Bias(WIDTH), **options)
    model[2].bfloat16(), model[3].bfloat16()
    return model


class _Products:
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert x.dtype == weight.dtype == torch.float32
        return (x @ weight.mT).bfloat16()

    @staticmethod
    def dx(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert weight.dtype == torch.float32
        return (dy.float() @ weight).bfloat16()

    @staticmethod
    def dw(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return (dy.float().flatten(0, -2).mT @ x.flatten(0, -2)).bfloat16()


def wide_backward(**options: Any) -> Fusion:
    nodes = (Gradient(("input",), ("0.weight.float32",), "dx"), Gradient(("0.weight",), ("input.float32",), "dw"))
    details = Details(gradients=nodes, registered=False)
    return fusion(backward=[ops.MatMul], cost=lambda m: (CHEAP, CHEAP), details=details, name="wide", **options)(
        _Products
    )


def wide_forward() -> Fusion:
    details = Details(takes=("input.float32", "0.weight.float32"), registered=False)
    return fusion(forward=[ops.MatMul], cost=lambda m: CHEAP, details=details, name="wide")(_Products.forward)


@needs_compiler
@pytest.mark.parametrize("cut", [False, True])
def test_a_backward_that_reads_the_wide_form(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value in the form that forward stores for it, a parameter in one that a step makes."""
    model = two_forms(ops.MatMul(WIDTH, WIDTH), memory="fast")
    x = torch.randn(7, 3, WIDTH, requires_grad=True)
    leaves = [x, *model.parameters()]
    want = run(model, x, leaves)
    if cut:
        monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
        monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    with only(wide_backward(), fusions.registry.STRETCH):
        plan = model.plan(x)
        assert len(plan.segments) == 1 + cut
        kept = {k.name: k.bytes for k in plan.kept}
        assert kept["two_forms.output in float32"] == x.numel() * 4 and "two_forms.output" not in kept
        assert [s.name for s in plan.backward].count("wide") == 2
        assert "cast_parameter" in [s.name for s in plan.backward]
        assert_near(run(model, x, leaves), want, 0.05)


@needs_compiler
def test_a_forward_takes_a_form_that_somebody_else_reads() -> None:
    model = two_forms(ops.MatMul(WIDTH, WIDTH))
    x = torch.randn(7, WIDTH)
    with only(wide_forward(), fusions.registry.STRETCH), torch.no_grad():
        why = "it reads input.float32, which nobody else reads, so that it is not stored"
        assert reasons(model.plan(x), "wide") == {why}
        assert [s.name for s in model.plan(x, outputs=("wide",)).forward][1:3] == ["cast_parameter", "wide"]
        y, wide = model(x, outputs=("wide",))
    right = wide.double() @ model[2].weight.double().mT + model[3].bias.double()
    torch.testing.assert_close(y.double(), right, rtol=0.02, atol=0.02)


def test_a_form_that_there_is_not() -> None:
    model = Sequential(ops.SiLU(), ops.MatMul(WIDTH, WIDTH)).bfloat16()
    x = torch.randn(7, WIDTH).bfloat16().requires_grad_()
    for entry in (wide_backward(), wide_forward()):
        with only(entry):
            assert reasons(model.plan(x), "wide") == {"it reads input.float32, and silu.output is in other forms alone"}
            run(model, x, [x])
    entry = fusion(
        backward=[ops.SiLU], reads=["dy.float32"], name="odd", details=Details(registered=False), cost=lambda m: CHEAP
    )(lambda m, dy: dy)
    with only(entry), pytest.raises(ValueError, match="'dy.float32' names nothing in its match"):
        Sequential(ops.SiLU()).plan(torch.randn(7, WIDTH, requires_grad=True))


def test_the_form_that_a_value_has_anyway() -> None:
    model = Sequential(ops.SiLU(), ops.MatMul(WIDTH, WIDTH))
    x = torch.randn(7, WIDTH, requires_grad=True)
    nodes = (Gradient(("input",), ("0.weight.float32",), "dx"), Gradient(("0.weight",), ("input.float32",), "dw"))
    details = Details(gradients=nodes, registered=False, choose=lambda m, method: PLAIN[method])
    leaves = [x, *model.parameters()]
    want = run(model, x, leaves)
    with only(fusion(backward=[ops.MatMul], cost=lambda m: CHEAP, details=details, name="plain")(_Products)):
        assert [s.name for s in model.plan(x).backward].count("plain") == 2
        assert_near(run(model, x, leaves), want, 1e-5)


PLAIN = {"dx": lambda dy, w: dy @ w, "dw": lambda dy, x: dy.mT @ x}


# ------------------------------------------------------------------------------- gradients of named values


class Pair(UnfusedOperation):
    """y = 2 x, and 3 x as a value of its own."""

    values = ("other",)
    reads = ()

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        return {"output": 2 * x, "other": 3 * x}

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return 2 * dy + 3 * call["d_other"]


def pair_backward(*reads: str) -> Fusion:
    @fusion(backward=[ops.SiLU, Pair], reads=["input", *reads], cost=lambda m: CHEAP, details=Details(registered=False))
    def pair(m: Any, dy: torch.Tensor) -> torch.Tensor:
        return (2 * dy + 3 * m["1.d_other"]) * slope(m["input"])

    return pair


@pytest.fixture
def pair_model() -> Iterator[tuple[Sequential, torch.Tensor]]:
    model = Sequential(ops.Bias(WIDTH), ops.SiLU(), Pair(), ops.MatMul(WIDTH, WIDTH), ops.Add("other")).double()
    yield model, torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True)


def test_a_backward_takes_the_gradient_of_a_named_value(pair_model: tuple[Sequential, torch.Tensor]) -> None:
    model, x = pair_model
    leaves = [x, *model.parameters()]
    want = run(model.reference, x, leaves)
    with only(pair_backward()):
        assert reasons(model.plan(x), "pair") == {"pair.other is also read outside the pattern"}
    with only(pair_backward("1.d_other")):
        assert "pair" in [s.name for s in model.plan(x).backward]
        assert_near(run(model, x, leaves), want, 1e-9)

    @op_table.exports.row(True)
    class Given(Pair):
        def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
            return 2 * dy

    entry = fusion(backward=[ops.SiLU, Given], reads=["1.d_other"], name="pair", details=Details(registered=False))(
        lambda m, dy: dy
    )
    model = Sequential(ops.SiLU(), Given(), kernels="reference")
    x = torch.randn(7, WIDTH, requires_grad=True)
    with only(entry):
        assert reasons(model.plan(x), "pair") == {"it reads 1.d_other, and no gradient of given.other comes"}
        run(model, x, [x])


NAN, INF = float("nan"), float("inf")


class Both:
    """A body that gives what it is given."""

    forward, backward = staticmethod(lambda m, x: x), staticmethod(lambda m, dy: dy)


@pytest.mark.parametrize(
    "number", [{"seconds": NAN}, {"read": INF}, {"launches": -1}, {"efficiency": 0}, {"flops": "1"}]
)
def test_cost_of_a_number_that_is_none_is_refused_before_anything_runs(number):
    """Of a fusion in one direction, and of one in both; costs of both where one is wanted, too."""
    cost, ((name, value),) = Cost(**number), number.items()
    one, both = {"forward": [ops.GELU, ops.SiLU]}, {"joint": [ops.GELU, ops.SiLU], "reads": ["input"]}
    words = f"^fusion 'mine': its `cost` gives a Cost of {name}={value!r}"
    for pattern, given, why in (
        (one, cost, words),
        (both, (cost, Cost()), words),
        (one, (Cost(), Cost()), "fusion 'mine': its `cost` gives tuple, not a Cost"),
    ):
        body = Both if pattern is both else Both.forward
        mine = declared(**pattern, cost=lambda m, c=given: c, name="mine", registered=False)(body)
        model = sequential(ops.GELU(), ops.SiLU())
        with fusions.only(mine):
            refused(TypeError, [why], lambda model=model: model(X))


def test_how_many_ops_is_not_known_of_repeated_parts_and_fused_operations():
    for part in (fusions.Repeat(ops.GELU), ops.FusedOperation, fusions.OneOf(ops.GELU, ops.FusedOperation)):
        te_fuser.fusion(forward=[ops.MatMul, part], emits=["5.output"], name="mine", details=Details(registered=False))(
            lambda m, x: x
        )


def test_what_runs_may_be_chosen_for_each_match_and_direction():
    """The declared body runs where `choose` gives None."""
    asked = []

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def forward(self, m, x):
            return self.factor * F.silu(x)

        def backward(self, m, dy):
            return torch.ops.aten.silu_backward(self.factor * dy, m["input"])

    def choose(m, method):
        asked.append((m.x.features, method))
        return getattr(Scaled(m.x.features), method) if m.x.features > 4 or method == "forward" else None

    class Both:
        forward, backward = None, staticmethod(lambda m, dy: 0 * dy)

    Both.forward = staticmethod(lambda m, x: pytest.fail("its forward was chosen"))
    mine = declared(joint=[ops.SiLU], name="mine", reads=["input"], choose=choose, registered=False, **FREE)(Both)
    for features, slope in ((8, 8), (4, 0)):
        model, x = te_fuser.Sequential(ops.SiLU()), tensor(3, features)
        with fusions.only(mine):
            y = model(x)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        leaf = x.detach().requires_grad_()
        want = F.silu(leaf)
        torch.testing.assert_close(y, features * want)
        torch.testing.assert_close(dx, slope * torch.autograd.grad(want.sum(), leaf)[0])
    assert set(asked) == {(n, method) for n in (8, 4) for method in ("forward", "backward")}


def test_the_name_is_the_functions_unless_given_and_unknown_ones_are_refused():
    @te_fuser.fusion(forward=[ops.MatMul, Optional(ops.Bias), Repeat(ops.GELU)], details=Details(registered=False))
    def my_fusion(m, x):
        """Does it."""

    assert my_fusion.name == "my_fusion" and my_fusion.doc == "Does it."
    assert repr(my_fusion) == "<fusion 'my_fusion' forward: MatMul, [Bias], GELU x 1+>"
    assert "my_fusion" not in fusions.names()
    with pytest.raises(TypeError, match="register takes a fusion, got the class Fusion"):
        fusions.register(fusions.Fusion)
    fusions.register(my_fusion)
    assert fusions.get("my_fusion") is my_fusion and fusions.names()[-1] == "my_fusion"
    assert fusions.unregister("my_fusion") is my_fusion
    for call in (
        fusions.get,
        fusions.unregister,
        lambda n: fusions.disabled(n).__enter__(),
        lambda n: fusions.only(n).__enter__(),
    ):
        with pytest.raises(KeyError, match="no fusion 'none' .registered: .*matmul_bias"):
            call("none")
