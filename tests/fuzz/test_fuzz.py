"""Random lists: the plan and the reference agree in values and in all gradients.

A few of them, always the same ones; `python -m tests.fuzz` runs 300 others, with `--lists 10000` any number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from te_fuser import compare
from te_fuser.codegen import compiler
from te_fuser.verify import Row
from te_fuser.verify.models import Subject
from tests.fuzz.lists import FuzzCase, fuzz_cases

REPEATABLE = settings(
    database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)


LISTS: dict[str, tuple[int, dict[str, Any]]] = {
    "by PyTorch's operations": (100, {}),
    "by generated kernels": (100, {"kernels": "auto"}),
    "with numbers of 8 bits": (40, {"quantizes": True}),
    "in regions": (40, {"regions": True}),
    "in regions by generated kernels": (30, {"kernels": "auto", "regions": True}),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_as_their_references(name: str) -> None:
    number, options = LISTS[name]
    if "kernels" in options and compiler.find_compiler() is None:
        pytest.skip("no C++ compiler")

    @settings(REPEATABLE, max_examples=number)
    @given(fuzz_cases(**options))
    def check(case: FuzzCase) -> None:
        assert not case.check(), case.script()

    check()


def test_a_case_is_the_same_whatever_ran_before() -> None:
    case = FuzzCase("te_fuser.Sequential(ops.Linear(4, 3), ops.Linear(3, 5, bias=False))", seed=7)
    first = case.build().state_dict()
    torch.rand(5)
    drawn = torch.get_rng_state()
    for name, p in case.build().state_dict().items():
        assert torch.equal(p, first[name]), name
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_what_cancels_across_ops_is_no_number_where_its_terms_are_none(kernels: str) -> None:
    """x + (-x) and its gradient, where x is infinite."""
    case = FuzzCase(
        "te_fuser.Sequential(te_fuser.Residual(ops.Scale(value=-1.0)), ops.GELU(), memory=memory, kernels=kernels)",
        shape=(2, 8),
        dtype="float16",
        training=False,
        kernels=kernels,
        numbers="extreme",
    )
    assert not case.check(), case.script()


def test_a_bias_under_autocast_is_rounded_as_plain_pytorch_rounds_it() -> None:
    """All rows are nearly equal here, so that they round alike and errors add up."""
    case = FuzzCase(
        "te_fuser.Sequential(ops.LayerNorm(10, 0.3, bias=False), Softmax(), ops.SwiGLU(gate_first=False), "
        "ops.Linear(5, 2), Squeezed(2), kernels=kernels)",
        shape=(4, 4, 1, 10),
        upstream="same rows",
        autocast=True,
    )
    for seed in (13, 43):
        assert not dataclasses.replace(case, seed=seed).check(), seed


@pytest.mark.parametrize("wrong", [False, True])
def test_a_list_that_fails_is_judged_by_more_neighbours(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    asked: list[int] = []

    def check(self: Subject, *arguments: object) -> list[Row]:
        asked.append(compare._NEIGHBOURS)
        return [Row("fuzz", "output", error=2.0, allowed=1.0 if wrong or len(asked) == 1 else 2.0)]

    monkeypatch.setattr(Subject, "check", check)
    assert bool(FuzzCase("te_fuser.Sequential(ops.GELU())").check()) == wrong
    assert asked == [compare._NEIGHBOURS, 10 * compare._NEIGHBOURS]
