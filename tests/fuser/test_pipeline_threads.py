"""A call takes what its plan depends on once: another thread may call train() and eval() meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.builder import GraphBuilder
from te_fuser.ops import UnfusedOperation
from te_fuser.ops.base import OpCall


def meanwhile(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], Any]) -> None:
    """Let another thread `act`, once, just before the function runs."""
    function, acts = getattr(owner, name), [act]

    def later(*args: Any, **kwargs: Any) -> Any:
        if acts:
            thread = threading.Thread(target=acts.pop())
            thread.start()
            thread.join()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, later)


PLACES = {"graph": (GraphBuilder, "build"), "plan": (pipeline, "make_plan"), "kernels": (pipeline, "load")}
PLACES["run"] = (pipeline, "execute")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["dropout", "attention"])
def test_a_mode_that_changes_during_a_call(
    kind: str, place: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is of the mode in which it began, and so is each later one."""
    drop = (
        [ops.Dropout(1.0)]
        if kind == "dropout"
        else [ops.DotProductAttention(2, 4, dropout=1.0, mask="none", layout="sequence_first")]
    )
    model, x = Sequential(ops.Linear(8, 24), *drop).train(training), torch.randn(3, 2, 8)
    meanwhile(monkeypatch, *PLACES[place], lambda: model.train(not training))
    y = model(x)
    y.sum().backward()
    assert bool((y == 0).all()) is training
    for mode in (training, not training):
        assert bool((model.train(mode)(x) == 0).all()) is mode


def test_a_mode_that_changes_between_forward_and_backward() -> None:
    """An opaque op's backward is of forward's mode, too."""

    class Doubled(UnfusedOperation):
        reads = ()

        def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
            return 2 * x if self.training else x.clone()

        def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
            return 2 * dy if self.training else dy

    model, x = Sequential(Doubled(), ops.Bias(4)), torch.randn(3, 4, requires_grad=True)
    y = model(x)
    model.eval()
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
