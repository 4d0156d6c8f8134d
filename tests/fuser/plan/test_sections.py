"""Equal layers are planned once and laid out again: the plan is that of the whole list, and little is asked twice."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.graph import builder
from te_fuser.fuser.plan import covers, kernel_cache
from te_fuser.fuser.plan.backward_candidates import BackwardCandidates
from te_fuser.fuser.plan.forward_candidates import ForwardCandidates
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.op_tasks import FusionTask, OpTask
from te_fuser.fusions import registry
from tests.plans.models import (
    BF16,
    FP32,
    Case,
    attention_branch,
    autocast,
    gpt,
    llama,
    mlp_branch,
    packages,
    user_fusions,
)
from tests.plans.text import DEVICES, plan_lines, plans_of

X = torch.empty(64, 1, 768, device="meta", requires_grad=True)


def _mixed() -> list[torch.nn.Module]:
    """Layers that are alike in pairs, and some that differ in an attribute, a size or what needs a gradient."""
    parts = [*gpt(2, 256, 4, BF16), *gpt(2, 256, 4, BF16, dropout=0.2), mlp_branch(256, BF16, 0.1, ops.SwiGLU)]
    parts += [mlp_branch(256, BF16, 0.1) for _ in range(3)]
    parts[1].requires_grad_(False)
    parts[9].requires_grad_(False)
    return [*parts, ops.LayerNorm(256, eps=1e-3, dtype=BF16), ops.LayerNorm(256, dtype=BF16)]


def _read_again() -> list[torch.nn.Module]:
    """A named input and a bound value that several layers read, parameters that two of them share, named outputs."""
    norm = ops.LayerNorm(64)
    layer = [ops.Linear(64, 64), ops.GELU(), ops.Add("other"), norm]
    again = [ops.Linear(64, 64), ops.GELU(), ops.Add("other"), norm]
    return [ops.Fork("first"), *layer, ops.Output("norm"), *again, *(ops.Linear(64, 64), ops.ReLU()), ops.Add("first")]


CASES = {
    "gpt": Case(lambda: gpt(3, 1024, 16, BF16), (512, 4, 1024), BF16),
    "gpt of few tokens": Case(lambda: gpt(3, 768, 12, FP32, dropout=0.0), (64, 1, 768)),
    "gpt of a length between two of the grid": Case(lambda: gpt(3, 768, 12, BF16), (613, 3, 768), BF16),
    "gpt with packages": Case(lambda: gpt(3, 1024, 16, BF16), (512, 4, 1024), BF16, within=packages),
    "gpt in inference": Case(lambda: gpt(3, 1024, 16, BF16), (512, 4, 1024), BF16, within=lambda kind: torch.no_grad()),
    "gpt without the gradient of x": Case(lambda: gpt(3, 1024, 16, BF16), (512, 4, 1024), BF16, grad=False),
    "autocast": Case(lambda: gpt(3, 1024, 16, FP32), (512, 4, 1024), within=lambda kind: autocast(BF16, kind)),
    "users": Case(lambda: gpt(3, 1024, 16, BF16), (512, 4, 1024), BF16, within=user_fusions),
    "llama": Case(lambda: [part for _ in range(3) for part in llama(1024, 16, BF16)], (4, 512, 1024), BF16),
    "mixed": Case(_mixed, (128, 4, 256), BF16),
    "read again": Case(_read_again, (48, 4, 64), inputs={"other": (48, 4, 64)}, outputs=("norm",)),
    "dense mask": Case(
        lambda: [attention_branch(256, 4, BF16, 0.0, mask="given") for _ in range(3)],
        (128, 2, 256),
        BF16,
        inputs={"attention_mask": (2, 1, 128, 128)},
    ),
}
MEMORY = ("fast", "balanced", "lean", 3 * 2**20)


def _plans(case: Case, memory: Any) -> list[Plan]:
    return [plan for device in DEVICES[:2] for plan in plans_of(case, device, memory)]


def _lines(plans: list[Plan]) -> list[str]:
    return [line for plan in plans for line in plan_lines(plan)]


def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No section is like another one."""
    numbers = itertools.count()
    monkeypatch.setattr(builder, "likeness", lambda op: next(numbers))


@pytest.mark.parametrize(("name", "memory"), [(name, MEMORY[k % 4]) for k, name in enumerate(CASES)])
def test_the_plan_is_that_of_the_whole_list(name: str, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its steps run the ops of their place."""
    shared = _plans(CASES[name], memory)
    for step in (step for plan in shared for step in plan.steps if isinstance(step.task, (OpTask, FusionTask))):
        nodes = step.task.nodes if isinstance(step.task, FusionTask) else (step.task.node,)
        assert [n.index for n in nodes] == [*range(step.start, step.stop)]
    _apart(monkeypatch)
    assert _lines(shared) == _lines(_plans(CASES[name], memory))


# ------------------------------------------------------------------------------------------------ what is asked


def _asked(layers: int, monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Counts of what planning asks: candidates and ways of a section, what an op gives, computed formulas."""
    found: collections.Counter[str] = collections.Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count(*arguments: Any, **named: Any) -> Any:
            found[name] += 1
            return function(*arguments, **named)

        return count

    watched = [(where, "edges") for where in (BackwardCandidates, ForwardCandidates)]
    watched += [(covers, "way_through"), (ops.MatMul, "infer"), (ops.Bias, "infer"), (registry.Fusion, "refusal")]
    watched += [(where, "compute") for where in (ops.LayerNorm, ops.Bias, ops.GELU, ops.Add)]
    with monkeypatch.context() as patch:
        for where, name in watched:
            patch.setattr(where, name, counted(f"{where.__name__}.{name}", getattr(where, name)))
        _plan(layers)
    return found


def _plan(layers: int) -> Plan:
    return _model(layers).plan(X, device="h200")


def _model(layers: int) -> te_fuser.Sequential:
    with torch.device("meta"):
        return te_fuser.Sequential(*gpt(layers, 768, 12, FP32))


def test_twelve_layers_ask_at_most_twice_as_much_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, twelve = _asked(1, monkeypatch), _asked(12, monkeypatch)
    assert len(one) == 10
    assert not {what: (one[what], twelve[what]) for what in one if twelve[what] > 2 * one[what]}
    _apart(monkeypatch)
    assert all(count > 5 * one[what] for what, count in _asked(12, monkeypatch).items())  # the counts see it


@pytest.mark.parametrize("looks", [False, True])
def test_a_fusion_chooses_once_for_all_that_are_alike_unless_it_sees_a_parameter(looks: bool) -> None:
    chosen: list[fusions.Match] = []

    def choose(m: fusions.Match, method: str) -> Any:
        chosen.append(m)
        return torch.nn.functional.linear if m[0].dtype_of("weight") == (m[0].weight.dtype if looks else m.dtype) else 0

    details = fusions.Details(choose=choose, takes=("input", "0.weight"), registered=False)
    mine = fusions.fusion(forward=[ops.MatMul], cost=lambda m: fusions.Cost(seconds=1e-9), details=details)
    model = te_fuser.Sequential(*(part for _ in range(12) for part in (ops.MatMul(64, 64), ops.Tanh())))
    with fusions.only(mine(torch.nn.functional.linear)):
        plan = model.plan(torch.empty(64, 64, requires_grad=True))
    tasks = [step.task for step in plan.forward if isinstance(step.task, FusionTask)]
    assert len(tasks) == 12 and len({task.nodes[0].index for task in tasks}) == 12
    assert len(chosen) >= 12 if looks else len(chosen) < 6


def _calls(layers: int, device: str) -> int:
    """Number of functions that planning calls, Python's and native ones, where no kernel was derived before."""
    model, count = _model(layers), 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    model.plan(X, device=device)
    kernel_cache.forget()
    sys.setprofile(counted)
    try:
        model.plan(X, device=device)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("device", "most"), [("cpu", 80_000), ("h200", 115_000)])
def test_twelve_layers_call_at_most_twice_as_many_functions_as_one(device: str, most: int) -> None:
    """And one layer little more than 71,000 and 102,000: planning is that fast on every machine."""
    one = _calls(1, device)
    assert one < most and _calls(12, device) <= 2.0 * one
