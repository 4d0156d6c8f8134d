"""Equal stretches share their kernels, unequal ones do not, and a shared kernel stands where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.codegen.description import NotOneKernel
from te_fuser.fuser.plan import kernel_cache
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.plan.stretch import Stretch


@pytest.fixture(autouse=True)
def derived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The derivations that a test makes, by direction; nothing is shared with other tests."""
    kernel_cache.forget()
    made: list[str] = []
    for name in ("forward", "backward"):
        plain = getattr(Stretch, name)

        def counted(self: Stretch, *args: Any, name: str = name, plain: Any = plain) -> Any:
            made.append(name)
            return plain(self, *args)

        monkeypatch.setattr(Stretch, name, counted)
    return made


def branch(features: int = 8, p: float = 0.1, eps: float = 1e-5) -> te_fuser.Residual:
    return te_fuser.Residual(
        ops.LayerNorm(features, eps), ops.Linear(features, 16), ops.GELU(), ops.Linear(16, features), ops.Dropout(p)
    )


def plan(*branches: te_fuser.Residual, dtype: torch.dtype = torch.float32) -> Plan:
    model = te_fuser.Sequential(*branches).to(dtype)
    return model.plan(torch.empty(4, 3, 8, dtype=dtype, requires_grad=True), device="h200")


def test_layers_of_one_model_are_derived_once(derived: list[str]) -> None:
    plan(branch(), branch(), branch())
    three = len(derived)
    derived.clear()
    plan(*(branch() for _ in range(6)))
    assert three > 0 and not derived


def test_models_share_too(derived: list[str]) -> None:
    first = plan(branch())
    derived.clear()
    second = plan(branch())
    assert not derived
    assert first.forward[0].task.description is second.forward[0].task.description  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changed", [{"p": 0.2}, {"eps": 1e-3}, {"p": 0.0}, {"dtype": torch.bfloat16}, {"frozen": True}], ids=str
)
def test_another_formula_dtype_or_gradient_is_another_kernel(derived: list[str], changed: dict[str, Any]) -> None:
    plan(branch())
    derived.clear()
    other = branch(**{k: v for k, v in changed.items() if k in ("p", "eps")})
    other[0].requires_grad_("frozen" not in changed)
    plan(other, dtype=changed.get("dtype", torch.float32))
    assert derived


def test_results_and_refusals_are_those_of_the_stretch() -> None:
    graph = plan(branch(), branch()).graph
    for start, stop in ((0, 2), (7, 11)):
        shared, exact = kernel_cache.DerivedStretch(graph, start, stop), Stretch(graph, start, stop)
        for _ in range(2):
            assert shared.backward(start, stop, frozenset(), frozenset()) == exact.backward(start, stop, frozenset())


def test_what_a_range_does_not_make_is_no_part_of_what_its_kernels_depend_on(derived: list[str]) -> None:
    graph = plan(branch()).graph
    shared, none = kernel_cache.DerivedStretch(graph, 0, 2), frozenset[int]()
    made = {graph.roots[v] for n in graph.nodes[:2] for v in (n.output, *n.named_out)}
    others = frozenset(range(len(graph.values))) - made
    kernel_cache.forget()
    derived.clear()
    kernel = shared.backward(0, 2, none, none)
    assert kernel is shared.backward(0, 2, others, none) is shared.backward(0, 2, none, none, (), frozenset([5]))
    assert derived == ["backward"]
    with pytest.raises(NotOneKernel, match="it would read input, which the forward fusion does not give"):
        shared.backward(0, 2, none, frozenset([graph.nodes[0].input]))


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_KEPT", 5)
    plan(branch(), branch())
    assert len(kernel_cache._derived) <= 5
