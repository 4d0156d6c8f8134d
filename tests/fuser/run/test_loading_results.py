"""Results of a call, views that autograd knows of among them, and plans that come to one function of PyTorch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from te_fuser import FusableOperation, Sequential, fusions, ops
from te_fuser.fuser.run.segment import SegmentFunction
from te_fuser.fusions.cublaslt import linear_bias
from te_fuser.ops.base import OpCall

NOTHING: dict[str, Callable[[], FusableOperation | Sequential]] = {
    "Identity": ops.Identity,
    "Identity in a list": lambda: Sequential(ops.Identity()),
    "several": lambda: Sequential(ops.Identity(), Sequential(ops.Dropout(0.5)), ops.Identity()).eval(),
    "Dropout in eval mode": lambda: Sequential(ops.Dropout(0.5)).eval(),
    "Dropout of nothing": lambda: Sequential(ops.Dropout(0.0)),
    "reference kernels": lambda: Sequential(ops.Identity(), kernels="reference"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_list_that_does_nothing_gives_a_view_of_its_input(name: str) -> None:
    model, x = NOTHING[name](), torch.randn(3, 4, requires_grad=True)
    assert model(x) is not x and torch.equal(model(x), x) and model(x).data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        model(x).mul_(3.0)
    inner = x * 1.0
    model(inner).mul_(3.0)
    assert inner._version == 1
    inner.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert model(x) is not x and torch.equal(model(x), x)


class Handed(ops.UnfusedOperation):
    """y = x, the very tensor; dx = 2 dy."""

    reads: ClassVar[tuple[str, ...]] = ()

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return x

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return 2.0 * dy

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x - x.detach()


GIVEN: dict[str, Callable[[], list[torch.nn.Module]]] = {
    "before all": lambda: [ops.Output("o"), ops.RMSNorm(64)],
    "alone": lambda: [ops.Output("o")],
    "twice": lambda: [ops.Output("o"), ops.Identity(), ops.Output("p")],
    "behind a dropout that does nothing": lambda: [ops.Dropout(0.5), ops.Output("o"), ops.RMSNorm(64)],
    "in a list": lambda: [Sequential(ops.Output("o")), Sequential(Sequential(ops.RMSNorm(64)))],
    "taken": lambda: [ops.Fork("f"), ops.RMSNorm(64), ops.Output("o"), ops.Take("f")],
    "taken and given": lambda: [ops.Fork("f"), ops.RMSNorm(64), ops.Take("f"), ops.Output("o"), ops.Identity()],
    "reshaped": lambda: [ops.Output("o"), ops.Reshape(-1, 64), ops.RMSNorm(64), ops.Reshape(6, 16, 64)],
    "handed on by an op's own code": lambda: [ops.Output("o"), Handed()],
    "of one op and the next": lambda: [ops.RMSNorm(64), ops.Output("o"), Handed(), ops.Output("p")],
    "at the end": lambda: [ops.RMSNorm(64), ops.Output("o"), ops.Output("p")],
}
BETWEEN_STEPS = {"reshaped", "of one op and the next"}  # gradients that an op's own code takes are tensors, rounded


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_is_no_input_and_its_gradient_is_rounded_once(name: str, kernels: str) -> None:
    """All outputs are tensors of their own, and what comes to them is added up before it is rounded."""
    torch.manual_seed(0)
    parts = GIVEN[name]()
    names = tuple(n for n in "op" if any(getattr(m, "name", "") == n for p in parts for m in p.modules()))
    model = Sequential(*parts, kernels=kernels).to(torch.bfloat16).eval()
    x = torch.rand(6, 16, 64).bfloat16().requires_grad_()
    outs = model(x, outputs=names)
    dys = torch.rand(len(outs), 6, 16, 64).bfloat16()
    assert len({id(t) for t in (x, *outs)}) == len(outs) + 1
    (dx,) = torch.autograd.grad(outs, x, list(dys))
    wide, exact = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    wanted = wide.reference(exact, outputs=names)
    (want,) = torch.autograd.grad(wanted, exact, [dy.double() for dy in dys])
    for y, w in zip(outs, wanted, strict=True):
        torch.testing.assert_close(y.double(), w, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(dx.double(), want, rtol=2**-7, atol=2**-5)
    if name not in BETWEEN_STEPS:
        assert (dx == want.bfloat16()).double().mean() > 0.99  # twice: 0.7
    with torch.no_grad():
        assert len({id(t) for t in (x, *model(x, outputs=names))}) == len(outs) + 1


def test_each_named_output_has_the_gradient_that_comes_to_it() -> None:
    model = Sequential(ops.Output("given"), ops.Scale(4), ops.Output("y"), ops.Identity(), ops.Output("z")).double()
    leaf = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    outs = result, x, y, z = model(leaf, outputs=("given", "y", "z"))
    assert torch.equal(x, leaf) and torch.equal(y, result) and torch.equal(z, result)
    heard: dict[int, torch.Tensor] = {}
    for k, t in enumerate(outs):
        t.register_hook(functools.partial(heard.setdefault, k))
    grads = [torch.randn(3, 4, dtype=torch.float64) for _ in outs]
    torch.autograd.backward(outs, grads)
    assert all(torch.equal(heard[k], g) for k, g in enumerate(grads))
    behind = grads[0] + grads[2] + grads[3]
    torch.testing.assert_close(leaf.grad, grads[1] + behind * model[1].weight)
    torch.testing.assert_close(model[1].weight.grad, (behind * leaf.detach()).sum(0))


def test_what_shares_memory_is_not_written_to_unseen() -> None:
    """Neither an input of the call, nor an output by its sibling, nor what backward has kept of either."""
    model = Sequential(ops.Scale(4), ops.Output("h"), ops.Identity())
    y, h = model(torch.randn(3, 4, requires_grad=True), outputs=("h",))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.mul_(2.0)
        h.mul_(2.0)
    kept = Sequential(ops.Output("given"), ops.Scale(4))
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    _, named = kept(x, outputs=("given",))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        named.mul_(2.0)
    taken = Sequential(ops.Fork("first"), ops.Scale(4), ops.Take("first"))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        taken(x).mul_(2.0)


def test_nothing_runs_for_a_list_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentFunction, "forward", lambda *_: pytest.fail("a segment runs"))
    x = torch.randn(0, 4, requires_grad=True)
    assert Sequential(ops.Dropout(0.1)).eval()(x).shape == x.shape


WRITTEN_TO: dict[str, Callable[[], list[FusableOperation]]] = {
    "product": lambda: [ops.Linear(4, 6)],
    "product alone": lambda: [ops.MatMul(4, 6)],
    "reshape": lambda: [ops.LayerNorm(4), ops.Flatten(0, 1), ops.Identity()],
    "named": lambda: [ops.Linear(4, 6), ops.Output("given"), ops.GELU(), ops.Unflatten(-1, (2, 3))],
}


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", WRITTEN_TO)
def test_a_result_may_be_written_to(name: str, kernels: str) -> None:
    """Also where what was computed is a view of other memory, as torch.nn.functional.linear's result is."""
    model = Sequential(*WRITTEN_TO[name](), torch.nn.SiLU(inplace=True), kernels=kernels).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    alone, want = model[:-1], torch.nn.functional.silu(model[:-1].reference(x))
    assert torch.equal(model(x), torch.nn.functional.silu(alone(x)))
    y = torch.nn.functional.silu(alone(x).mul_(3.0).div_(3.0))
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy))


def test_what_backward_reads_is_not_written_to_unseen() -> None:
    model = Sequential(ops.Linear(4, 6), ops.Output("kept"), ops.Flatten(0, 1), ops.Linear(6, 2))
    y, kept = model(torch.randn(2, 3, 4, requires_grad=True), outputs=("kept",))
    with pytest.raises(RuntimeError, match="modified inplace|modified by an inplace operation"):
        kept.add_(1.0)
        y.sum().backward()


# -------------------------------------------------------------------------------- plans that come to one function


WIDTH = 16
X = torch.randn(3, WIDTH)


def function_of(model: Sequential, x: torch.Tensor, **inputs: Any) -> Callable[..., torch.Tensor] | None:
    """Function by which calls like these run; the second call is known by the first."""
    first = model(x, **inputs)
    (part,) = model._prepared()
    known = part.fuser._last  # type: ignore[union-attr]
    torch.testing.assert_close(model(x, **inputs), first)
    assert known is not None and known is part.fuser._last  # type: ignore[union-attr]
    return known.function


def linear(columns: int = WIDTH) -> Sequential:
    return Sequential(ops.Linear(WIDTH, columns))


@torch.no_grad()
def test_a_linear_without_gradients_is_pytorchs() -> None:
    model = linear()
    assert function_of(model, X) is F.linear
    assert torch.equal(model(X), F.linear(X, model[0].weight, model[0].bias))
    for shape in ((WIDTH,), (0, WIDTH), (2, 5, WIDTH)):
        x = torch.randn(shape)
        assert torch.equal(model(x), F.linear(x, model[0].weight, model[0].bias))


@torch.no_grad()
def test_a_choice_that_sizes_or_dtypes_leave_is_made_at_each_call() -> None:
    large = linear(2**17)
    assert function_of(large, X) is linear_bias  # maybe oneDNN's is faster
    torch.testing.assert_close(large(X), F.linear(X, large[0].weight, large[0].bias))
    assert function_of(linear().bfloat16(), X.bfloat16()) is linear_bias  # maybe in float32


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sequential(ops.Linear(WIDTH, WIDTH), ops.Output("y"), ops.GELU()),
        lambda: Sequential(ops.LayerNorm(WIDTH)),  # a kernel
        lambda: Sequential(ops.Identity(), ops.Flatten(0)),  # another name of its input
    ],
)
def test_what_is_more_than_a_function_of_tensors_is_run_by_its_steps(make: Callable[[], Sequential]) -> None:
    model = make()
    with torch.no_grad(), fusions.disabled("torch_functions"):
        assert function_of(model, X) is None


def test_gradients_that_come_are_seen() -> None:
    model, x = linear(), X.clone()
    with torch.no_grad():
        model(x), model(x)
    y = model(x)
    y.sum().backward()
    want = torch.autograd.grad(F.linear(x, model[0].weight, model[0].bias).sum(), [*model.parameters()])
    for p, g in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_a_list_that_changed_is_seen_by_the_calls_that_are_known() -> None:
    """Known calls notice a new hook, a new op and a removed one."""
    model, seen = linear(), list[torch.Tensor]()
    with torch.no_grad():
        model(X), model(X)
        hook = model[0].register_forward_hook(lambda _, __, y: seen.append(y))
        model(X)
        assert len(seen) == 1
        hook.remove()
        model.append(ops.Scale(WIDTH))
        model[1].weight.fill_(3.0)
        torch.testing.assert_close(model(X), 3.0 * F.linear(X, model[0].weight, model[0].bias))
        model(X)
        del model[0]
        torch.testing.assert_close(model(X), 3.0 * X)
        assert len(seen) == 1
