"""The kernel that norms and turns heads, run on the CPU by an emulated driver, and compiled for the GPUs there are."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda import FakeDriver
from tests.kernels.emulated import emulating
from tests.kernels.turned_cases import CASES, EMPTY, SIZES, Case, complaints
from tests.needs import needs_compiler

pytestmark = needs_compiler
BY_NAME = {case.name: case for case in CASES}
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


emulated = emulating(lambda: (p for case in CASES for p in case.passes()))


@EACH
def test_values_and_gradients(case: Case, emulated: FakeDriver) -> None:
    for seed, (samples, positions) in enumerate(SIZES):
        call = case.inputs(samples, positions, seed)
        assert not complaints(case, call, case.run(call)), (samples, positions)


@EACH
def test_nothing(case: Case, emulated: FakeDriver) -> None:
    for samples, positions in EMPTY:
        call = case.inputs(samples, positions)
        made = case.run(call)
        assert made.pop("y").shape == made.pop("dx").shape == call["x"].shape
        assert all((t == 0).all() for t in made.values())


@pytest.mark.parametrize("name", ["some of an odd head", "tokens with starts"])
def test_rows_without_angles_are_nan(name: str, emulated: FakeDriver) -> None:
    case = BY_NAME[name]
    call = case.inputs(3, 5)
    if case.tokens:
        call["offsets"] = torch.tensor([0, 4, 9, 15], dtype=case.tokens)
    within, length = call["starts"].clone(), call["tables"][0].shape[0]
    known = case.run({**call, "starts": within})
    for wrong in (-5, length):
        found = case.run({**call, "starts": within.index_fill(0, torch.tensor([1]), wrong)})
        for value in ("y", "dx"):
            outside = slice(4, 9) if case.tokens else (slice(None), 1)
            assert found[value][outside].isnan().any(-1).all()
            same = found[value].isnan().any(-1, keepdim=True) | (found[value] == known[value])
            same[outside] = True
            assert same.all() and not known[value].isnan().any()
