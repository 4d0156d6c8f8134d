"""A model that is dropped is freed at once, with its plans: nothing waits for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from te_fuser import Residual, Sequential, ops
from te_fuser.ops import FusableOperation, FusedOperation


class Pair(FusedOperation):
    """Two ops by one name."""

    def __init__(self) -> None:
        super().__init__(up=ops.Linear(8, 8), act=ops.GELU())


class Owner(FusableOperation):
    """An op that one of its own parts reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.part = ops.Bound(ops.Scale(8, device="meta"), self, weight="scale")

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.part(x)


MODELS: dict[str, Callable[[], Any]] = {
    "list": lambda: Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.GELU()),
    "reference": lambda: Sequential(ops.Linear(8, 8), ops.Dropout(0.1), kernels="reference"),
    "nested": lambda: Sequential(Residual(ops.LayerNorm(8), ops.Linear(8, 8)), Sequential(ops.ReLU(), memory="lean")),
    "with plain modules": lambda: Sequential(torch.nn.Linear(8, 8), ops.Linear(8, 8), torch.nn.Tanh(), ops.GELU()),
    "attention": lambda: Sequential(
        ops.Linear(8, 24), ops.DotProductAttention(2, 4, mask="none", layout="sequence_first")
    ),
    "verified": lambda: Sequential(ops.Linear(8, 8), ops.GELU(), verify=True),
    "fused operation": lambda: Sequential(Pair(), ops.Bias(8)),
    "row op alone": lambda: ops.LayerNorm(8),
    "opaque op alone": lambda: ops.MatMul(8, 8),
    "Linear alone": lambda: ops.Linear(8, 8),
    "fused operation alone": Pair,
    "bound to its owner, alone": Owner,
}


@pytest.fixture(scope="module", autouse=True)
def _what_others_left_stays() -> Iterator[None]:
    """Collections in here look at nothing else, which takes a second where there is much."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def used(make: Callable[[], Any]) -> list[weakref.ref[Any]]:
    """Make a model, train, look at and drop it; what was in it."""
    model, x = make(), torch.randn(3, 2, 8, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    if isinstance(model, Sequential) and len(model._prepared()) == 1:
        str(model.explain(x, details=True))
    return [weakref.ref(each) for each in (*model.modules(), *model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_a_dropped_model_is_freed_at_once(name: str, no_collector: None) -> None:
    left = [there for each in used(MODELS[name]) if (there := each()) is not None]
    assert not left, [type(each).__name__ for each in left]


class Inside(ops.UnfusedOperation):
    """An op with a module of torch.nn in it, which is no formula's business."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8))

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).detach()  # type: ignore[no-any-return]

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(dy)


@pytest.mark.parametrize("name", [n for n in MODELS if "alone" not in n and n != "fused operation alone"] + ["inside"])
@pytest.mark.parametrize("measure", [False, True])
def test_who_keeps_a_plan_that_is_shown_keeps_no_model(name: str, measure: bool, no_collector: None) -> None:
    model, x = MODELS.get(name, lambda: Sequential(Inside(), ops.GELU()))(), torch.randn(3, 2, 8, requires_grad=True)
    plans, shown = model.plans(x), model.explain(x, measure=measure, details=True)
    gc.collect()  # PyTorch's stand-ins leave cycles through the frames of who made them
    left = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    del model
    assert [type(found).__name__ for each in left if (found := each()) is not None] == []
    assert str(shown) and plans[0].graph.nodes[0].label


def test_an_op_alone_is_itself_to_the_end() -> None:
    """Plans hold another object, which sees every change and shows what the op's forward leaves behind."""
    op, x = ops.LayerNorm(8), torch.randn(3, 8)
    before = op(x)
    op.eps = 10.0
    assert not torch.allclose(op(x), before) and torch.allclose(
        op(x), torch.nn.functional.layer_norm(x, (8,), eps=10.0)
    )
    op.weight = torch.nn.Parameter(torch.full((8,), 2.0))
    torch.testing.assert_close(op(x), 2 * torch.nn.functional.layer_norm(x, (8,), eps=10.0))
    dropout = ops.Dropout(0.5)
    assert (dropout(x) == 0).any() and torch.equal(dropout.eval()(x), x) and (dropout.train()(x) == 0).any()
