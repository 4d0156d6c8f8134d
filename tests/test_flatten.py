"""Flattening nested lists: who takes whose ops, by which options they are planned, and what crosses in between."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.flatten import flatten
from te_fuser.fused_regions import Border, FusedRegion
from tests.looking import hooked
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(5, 8)


def kinds(plan: Any) -> list[str]:
    return [node.op.kind.__name__ for node in plan.graph.nodes]


def notes(plan: Any) -> list[str]:
    return [note for note in plan.notes if note.startswith("planned by itself")]


# --------------------------------------------------------------------------------------------------- options


def lean(*parts: Any, **options: Any) -> te_fuser.Sequential:
    return te_fuser.Sequential(*parts, memory="lean", **options)


def test_a_list_without_options_has_those_around_it() -> None:
    model = sequential(ops.Linear(8, 8), te_fuser.Sequential(ops.GELU(), ops.LayerNorm(8)), memory="lean")
    plan = model.plan(X)
    assert plan.memory == "lean" and len(plan.graph.nodes) == 4 and notes(plan) == []
    given = sequential(ops.Linear(8, 8), te_fuser.Sequential(ops.GELU(), memory="balanced", kernels="reference"))
    assert kinds(given.plan(X)) == ["MatMul", "Bias", "GELU"]  # what is given twice is one plan
    assert (model[1].memory, te_fuser.Sequential().memory) == ("balanced", "balanced")


def test_a_list_with_another_option_is_planned_by_itself() -> None:
    model = sequential(ops.Linear(8, 8), lean(ops.GELU(), ops.LayerNorm(8)), ops.Bias(8), ops.SiLU())
    plans = model.plans(X)
    assert [kinds(p) for p in plans] == [["MatMul", "Bias"], ["GELU", "LayerNorm"], ["Bias", "SiLU"]]
    assert [p.memory for p in plans] == ["balanced", "lean", "balanced"]
    note = "planned by itself: memory='lean' was given here, 'balanced' around it"
    assert [notes(p) for p in plans] == [[], [note], []]
    assert str(model.explain(X, details=True)).count(f"Note: {note}") == 1
    assert str(model.explain(X, measure=True, details=True)).count(f"Note: {note}") == 1
    with pytest.raises(ValueError, match=r"lists with other options split this list into 3 plans; use plans\(x\)"):
        model.plan(X)
    assert_as_meant(model, X)


def test_every_option_counts() -> None:
    given = {"memory": 1 << 20, "kernels": "auto", "fallback": "error", "verify": True}
    for name, value in given.items():
        model = sequential(ops.Bias(8), te_fuser.Sequential(ops.GELU(), **{name: value}))
        found = notes(model.plans(X)[1])
        assert len(found) == 1 and found[0].startswith(f"planned by itself: {name}={value!r} was given here, ")
        assert_as_meant(model, X)
    model = sequential(ops.Bias(8), lean(ops.GELU(), verify=True))
    both = "memory='lean' was given here, 'balanced' around it, verify=True was given here, False around it"
    assert notes(model.plans(X)[1]) == [f"planned by itself: {both}"]


def test_a_list_that_verifies_does_so_in_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = importlib.import_module("te_fuser.verify")  # te_fuser.verify is its function
    seen: list[int] = []
    run = verify.run_verified
    monkeypatch.setattr(verify, "run_verified", lambda f, *call: seen.append(len(f._lists.given)) or run(f, *call))
    model = sequential(ops.Bias(8), te_fuser.Sequential(ops.GELU(), ops.Bias(8), verify=True), ops.SiLU())
    want = model.reference(X)
    torch.testing.assert_close(model(X), want)
    assert seen == [2]
    model.verify = True
    torch.testing.assert_close(model(X), want)
    assert seen == [2, 4]
    model[1].verify = False
    model(X)
    assert seen == [2, 4, 1, 1]


def test_lists_in_such_a_list() -> None:
    """Each given value counts against that of the list around it."""
    inner = te_fuser.Sequential(ops.ReLU(), memory="balanced")
    model = sequential(ops.Bias(8), lean(ops.GELU(), te_fuser.Sequential(ops.SiLU()), inner, ops.Bias(8)))
    plans = model.plans(X)
    assert [(kinds(p), p.memory) for p in plans] == [
        (["Bias"], "balanced"),
        (["GELU", "SiLU"], "lean"),
        (["ReLU"], "balanced"),
        (["Bias"], "lean"),
    ]
    assert notes(plans[2]) == ["planned by itself: memory='balanced' was given here, 'lean' around it"]
    assert_as_meant(model, X)
    two = sequential(lean(ops.GELU()), lean(ops.SiLU()))
    assert [kinds(p) for p in two.plans(X)] == [["GELU"], ["SiLU"]]


def test_names_cross_it() -> None:
    inner = lean(ops.Add("outer"), ops.Output("o"), ops.Fork("own"), ops.Linear(8, 8), ops.Add("own"), ops.Add("call"))
    model = sequential(ops.Fork("outer"), ops.Linear(8, 8), inner, ops.GELU())
    assert_as_meant(model, X, ("o",), call=tensor(5, 8, seed=2))
    with pytest.raises(TypeError, match=r"unknown input 'nobody': .*\(named inputs: call\)"):
        model(X, call=X, nobody=X)
    assert_as_meant(sequential(ops.Fork("a"), ops.Bias(8), lean(ops.Add("a")), ops.Add("a")), X)


def test_names_that_a_list_shares() -> None:
    inner = te_fuser.Sequential(ops.Linear(8, 8), ops.Fork("inside"), ops.GELU())
    model = sequential(inner, ops.Add("inside"))
    with pytest.raises(ValueError, match="reads 'inside', which no Fork before it binds"):
        model(X)
    inner.shares_names = True
    model = sequential(inner, ops.Add("inside"))
    assert_as_meant(model, X)


def test_a_residual_with_another_option() -> None:
    model = sequential(ops.Bias(8), te_fuser.Residual(ops.Linear(8, 8), ops.GELU(), memory="lean"), ops.SiLU())
    assert [kinds(p)[0] for p in model.plans(X)] == ["Bias", "Fork", "SiLU"]
    assert_as_meant(model, X)


def test_options_change_and_are_withdrawn() -> None:
    model = sequential(ops.Bias(8), te_fuser.Sequential(ops.GELU()))
    model(X)
    model[1].memory = "fast"
    assert [p.memory for p in model.plans(X)] == ["balanced", "fast"]
    model.memory = "fast"
    assert model.plan(X).memory == "fast"
    model[1].memory = model.memory = None
    assert model.plan(X).memory == model.memory == "balanced"
    model.memory = "tiny"
    with pytest.raises(ValueError, match="got 'tiny'"):
        model(X)


def test_a_list_that_runs_by_itself_has_the_options_around_it_too() -> None:
    class Doubled(te_fuser.Sequential):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return 2.0 * super().forward(x)

    hooked, own, given = te_fuser.Sequential(ops.GELU()), Doubled(ops.Bias(8)), lean(ops.SiLU())
    for part in (hooked, given):
        part.register_forward_hook(lambda *_: None)
    model = sequential(ops.Bias(8), hooked, own, given, memory="fast")
    assert_as_meant(model, X)
    assert [m.plan(X).memory for m in (hooked, own, given)] == ["fast", "fast", "lean"]
    model.memory = "lean"
    model(X)
    assert hooked.plan(X).memory == "lean"
    assert copy.deepcopy(hooked).plan(X).memory == "balanced"  # in no list


MADE: dict[str, Callable[[te_fuser.Sequential], te_fuser.Sequential]] = {
    "slice": lambda m: m[:2],
    "sum": lambda m: m + sequential(ops.GELU(), memory="fast"),
    "times": lambda m: m * 2,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("name", MADE)
def test_new_lists_have_what_was_given(name: str) -> None:
    """And not what was not: a slice of a list without options takes those of the list that it is put into."""
    given, plain = (te_fuser.Sequential(ops.Bias(8), ops.GELU(), ops.SiLU(), **o) for o in ({"memory": "lean"}, {}))
    made = MADE[name](given)
    assert made.memory == "lean"
    made.memory = "fast"
    assert given.memory == "lean"
    assert len(sequential(MADE[name](plain), ops.Bias(8), kernels="reference", memory=7).plans(X)) == 1 or name == "sum"


# --------------------------------------------------------------------------------------------------- forwards


class Preset(te_fuser.Sequential):
    """Two names of its own for what its ops read and give."""

    flattens = True

    def __init__(self) -> None:
        super().__init__(ops.Linear(8, 8), ops.Add("skip"), ops.Output("inner"), ops.GELU())
        self.calls = 0

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, with_inner: bool = False, **call: Any
    ) -> Any:  # type: ignore[override]
        self.calls += 1
        skip = x if residual is None else residual
        outputs: Sequence[str] = call.pop("outputs", ()) or (("inner",) if with_inner else ())
        return super().forward(x, outputs=outputs, **{"skip": skip, **call})


def test_a_forward_that_promises_to_flatten_is_not_run() -> None:
    preset = Preset()
    model = sequential(ops.Bias(8), preset, ops.SiLU())
    skip = tensor(5, 8, seed=4)
    assert kinds(model.plan(X, skip=skip)) == ["Bias", "MatMul", "Bias", "Add", "Output", "GELU", "SiLU"]
    y, inner = assert_as_meant(model, X, ("inner",), skip=skip)
    assert preset.calls == 0
    h = X + model[0].bias
    alone, own = preset(h, skip, with_inner=True)
    assert preset.calls == 1
    torch.testing.assert_close((ops.SiLU()(alone), own), (y, inner))


class NotSaid(Preset):
    """A forward below the one that promises: of this one nobody said anything."""

    def forward(self, x: torch.Tensor, **call: Any) -> Any:  # type: ignore[override]
        return 2.0 * super().forward(x, **call)


class Mixin:
    def forward(self, x: torch.Tensor, **call: Any) -> Any:
        return 2.0 * super().forward(x, **call)  # type: ignore[misc]


class Mixed(Mixin, Preset):
    pass


class Taken(Preset):
    flattens = False


def put_on() -> te_fuser.Sequential:
    m = Preset()
    m.forward = lambda x, **call: 2.0 * Preset.forward(m, x, **call)  # type: ignore[method-assign]
    return m


@pytest.mark.parametrize("make", [lambda: hooked(Preset()), NotSaid, Mixed, Taken, put_on])
def test_other_forwards_are_run(make: Callable[[], te_fuser.Sequential]) -> None:
    preset = make()
    model = sequential(ops.Bias(8), preset, ops.SiLU())
    skip = tensor(5, 8, seed=4)
    want = ops.SiLU()(preset(X + model[0].bias, skip=skip))
    calls = preset.calls
    torch.testing.assert_close(model(X, skip=skip), want)
    assert preset.calls == calls + 1
    assert len(model.plans(X, skip=skip)) == 2


def test_a_class_with_another_forward_is_seen() -> None:
    class Doubled(te_fuser.Residual):
        def forward(self, x: torch.Tensor, **call: Any) -> Any:  # type: ignore[override]
            return 2.0 * super().forward(x, **call)

    inner = te_fuser.Residual(ops.SiLU())
    model = sequential(ops.Bias(8), sequential(inner))
    want = model(X)
    inner.__class__ = Doubled
    torch.testing.assert_close(model(X), 2.0 * want)
    inner.__class__ = te_fuser.Residual
    assert torch.equal(model(X), want)


def test_what_decides_is_seen_on_an_instance_after_a_call() -> None:
    """Of a list itself, and of one inside."""
    inner = sequential(ops.SiLU())
    model = sequential(ops.Bias(8), inner)
    plain, x = model(X), X + model[0].bias
    inner.adds_input = True
    torch.testing.assert_close(model(X), x + plain)
    model.adds_input = True
    torch.testing.assert_close(model(X), X + x + plain)
    del inner.adds_input
    torch.testing.assert_close(model(X), X + plain)
    model.adds_input, inner.runs_alone = False, True
    torch.testing.assert_close(model(X), plain)
    assert [type(part) for part in model._prepared()] == [FusedRegion, Border]


def test_a_wrapped_class_keeps_the_promise() -> None:
    """As fully_shard makes one."""
    preset = Preset()
    preset.__class__ = type("Wrapped", (Preset,), {})
    assert [type(part) for part in flatten(sequential(ops.Bias(8), preset))] == [FusedRegion]
    hooked(preset)
    assert [type(part) for part in flatten(sequential(ops.Bias(8), preset))] == [FusedRegion, Border]
