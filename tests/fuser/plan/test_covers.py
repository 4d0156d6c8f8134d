"""Covers: what is computed again, sums over ranks; equal layers are planned once, as the whole list is."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Sequential, fusion, fusions, ops
from te_fuser.fuser.graph import builder
from te_fuser.fuser.plan import covers, kernel_cache
from te_fuser.fuser.plan.backward_candidates import BackwardCandidates
from te_fuser.fuser.plan.forward_candidates import ForwardCandidates
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.op_tasks import FusionTask, OpTask
from te_fuser.fusions import Cost, registry, unregister
from te_fuser.ops.base import NamedInput
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
from tests.twins import assert_as_meant


class Times(ops.RowOp):
    """y = x * other, whose backward reads both."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"other": NamedInput(self.name)}

    def compute(self, x: Any, other: Any) -> Any:
        return x * other


WIDTH, NORM = 64, 512 * 64 * 4  # bytes of the norm's output
NORMED = [lambda: ops.LayerNorm(WIDTH), lambda: ops.Fork("n"), lambda: ops.Linear(WIDTH, WIDTH)]
TAKEN = [*NORMED, lambda: ops.Fork("a"), lambda: ops.Take("n")]
# Behind the first product: what reads the norm's output, under its own name or another, and how often that is kept.
READ: dict[str, list[Callable[[], torch.nn.Module]]] = {
    "by a product": [*TAKEN, lambda: ops.Linear(WIDTH, WIDTH), lambda: ops.Add("a")],
    "by a product, in another shape": [
        *TAKEN,
        lambda: ops.Reshape(-1, 32),
        lambda: ops.Linear(32, 32),
        lambda: ops.Reshape(-1, WIDTH),
        lambda: ops.Add("a"),
    ],
    "by a kernel": [*TAKEN, lambda: ops.RMSNorm(WIDTH), lambda: ops.Add("a")],
    "by a kernel, as itself": [*NORMED, lambda: Times("n")],
}


def kept_by(model: Sequential, x: torch.Tensor) -> int:
    """The bytes of the large tensors that a call keeps beside parameters and x."""
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    own = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    assert y.grad_fn is not None
    return sum(size for place, size in found.items() if place not in own and size >= NORM)


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean", 0])
@pytest.mark.parametrize("name", READ)
def test_what_is_read_under_another_name_is_kept_once_and_not_computed_again(name: str, memory: str | int) -> None:
    model, x = Sequential(*[part() for part in READ[name]], memory=memory), torch.randn(512, WIDTH, requires_grad=True)
    plan = model.plan(x)
    assert plan.kept_bytes() == kept_by(model, x)
    assert "layer_norm.output" in [k.name for k in plan.kept] and not [c for c in plan.choices if c.recomputed]
    assert not plan.choices or name == "by a kernel, as itself"
    assert_as_meant(model, x, tolerance=1e-4)


def test_what_only_products_read_is_computed_again() -> None:
    """`Add` reads nothing in backward, so that the memory of what is taken goes."""
    model = Sequential(*[part() for part in TAKEN], ops.Add("a"), memory="lean")
    x = torch.randn(512, WIDTH, requires_grad=True)
    plan = model.plan(x)
    assert [c.value for c in plan.choices if c.recomputed] == ["layer_norm.output"]
    assert plan.kept_bytes() == kept_by(model, x) == 0
    assert_as_meant(model, x, tolerance=1e-4)


@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_to_take_a_value_costs_nothing(memory: str) -> None:
    model = Sequential(*[part() for part in READ["by a product"]], memory=memory)
    x = torch.empty(8192, WIDTH, requires_grad=True)
    plan = model.plan(x, device="h200")
    taken = [s for s in plan.steps if s.name.startswith("take")]
    assert [s.name for s in taken] == ["take", "take.value_gradient"]
    assert all(s.seconds == s.cost.read == s.cost.written == s.cost.launches == 0 for s in taken)


def test_a_fusion_that_gives_too_little_says_what_it_would_cost() -> None:
    """Backward would compute the statistics of its norms again, or does so where that is cheaper."""
    chain = [ops.LayerNorm(512), ops.GELU(), ops.LayerNorm(512), ops.GELU(), ops.LayerNorm(512)]

    def planned(seconds: float) -> Any:
        fusion(forward=[type(op) for op in chain], name="normed", cost=lambda m: Cost(seconds=seconds))(lambda m, x: x)
        try:
            return Sequential(*chain, memory="fast").plan(x, device="cpu")
        finally:
            unregister("normed")

    x = torch.empty(4096, 512, requires_grad=True)
    without = Sequential(*chain, memory="fast").plan(x, device="cpu")
    (row,) = without.forward
    cheap = planned(0.9 * row.seconds)
    assert [step.name for step in cheap.forward] == ["normed"] and not cheap.refusals
    why = "backward reads per-row statistics or op results that it does not give; "
    longer = cheap.seconds() + 0.09 * row.seconds - without.seconds()
    dear = f"a plan whose backward does without that is predicted {longer * 1e6:.1f} us longer"
    dearest = f"in forward alone: predicted {0.01 * row.seconds * 1e6:.1f} us more than {row.name}"
    for share, cost in ((0.99, dear), (1.01, dearest)):
        plan = planned(share * row.seconds)
        assert [step.name for step in plan.forward] == [row.name]
        assert [r.reason for r in plan.refusals] == [why + cost]


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
