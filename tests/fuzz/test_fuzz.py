"""Random lists: the plan and the reference agree in values and in all gradients.

`python -m tests.fuzz --lists 10000` runs any number of them.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from te_fuser.codegen import compiler
from tests.fuzz.lists import FuzzCase, fuzz_cases

REPEATABLE = settings(
    database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)


@settings(REPEATABLE, max_examples=300)
@given(fuzz_cases())
def test_lists_run_by_pytorch_operations(case: FuzzCase) -> None:
    assert not case.check(), case.script()


@pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler")
@settings(REPEATABLE, max_examples=60)
@given(fuzz_cases(kernels="auto"))
def test_lists_run_by_generated_kernels(case: FuzzCase) -> None:
    assert not case.check(), case.script()
