"""What a call returns: where an output is an input, or another output, it is that tensor for autograd as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from te_fuser import FusableOperation, Sequential, ops
from te_fuser.fuser.run.segment import SegmentFunction

NOTHING: dict[str, Callable[[], FusableOperation | Sequential]] = {
    "Identity": ops.Identity,
    "Identity in a list": lambda: Sequential(ops.Identity()),
    "several": lambda: Sequential(ops.Identity(), Sequential(ops.Dropout(0.5)), ops.Identity()).eval(),
    "Dropout in eval mode": lambda: Sequential(ops.Dropout(0.5)).eval(),
    "Dropout of nothing": lambda: Sequential(ops.Dropout(0.0)),
    "reference kernels": lambda: Sequential(ops.Identity(), kernels="reference"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_list_that_does_nothing_gives_its_input(name: str) -> None:
    model, x = NOTHING[name](), torch.randn(3, 4, requires_grad=True)
    assert model(x) is x
    with pytest.raises(RuntimeError, match="leaf Variable"):
        model(x).mul_(3.0)
    inner = x * 1.0
    model(inner).mul_(3.0)
    assert inner._version == 1
    inner.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    with torch.no_grad():
        assert model(x) is x


def test_named_outputs_are_the_tensors_that_they_are() -> None:
    model = Sequential(ops.Output("given"), ops.Scale(4), ops.Output("y"), ops.Identity(), ops.Output("z"))
    leaf = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    result, x, y, z = model.double()(leaf, outputs=("given", "y", "z"))
    assert x is leaf and y is result and z is result
    grads = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    torch.autograd.backward([x, result, z], grads)
    assert torch.equal(leaf.grad, grads[0] + (grads[1] + grads[2]) * model[1].weight)
    torch.testing.assert_close(model[1].weight.grad, ((grads[1] + grads[2]) * leaf.detach()).sum(0))


def test_a_named_output_that_is_written_to_is_seen() -> None:
    """By the sibling that it is, and by what backward has kept of it."""
    model = Sequential(ops.Scale(4), ops.Output("h"), ops.Identity())
    y, h = model(torch.randn(3, 4, requires_grad=True), outputs=("h",))
    before = y.detach().clone()
    h.mul_(2.0)
    assert torch.equal(y, 2.0 * before)
    kept = Sequential(ops.Output("given"), ops.Scale(4))
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    y, named = kept(x, outputs=("given",))
    named.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_runs_for_a_list_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentFunction, "forward", lambda *_: pytest.fail("a segment runs"))
    x = torch.randn(0, 4, requires_grad=True)
    assert Sequential(ops.Dropout(0.1)).eval()(x) is x


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
