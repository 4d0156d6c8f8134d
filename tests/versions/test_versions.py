"""Which versions and which tests `./dev versions` takes, and its table in docs/works-with.md."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pip._vendor.packaging.version import Version

from tests.versions import packages, selected, table
from tests.versions.environments import ENVIRONMENTS

PAGE = table.PAGE.read_text()


def test_names_of_libraries() -> None:
    assert packages.named("import transformers.models as m\nfrom peft import x") == {"transformers", "peft"}
    assert packages.named("def f():\n    pytest.importorskip('accelerate')") == {"accelerate"}
    assert packages.named("from kernels import Mode") == {"kernels"}
    assert packages.named("def f():\n    options['kernels'] = 'kernels'") == set()
    assert packages.named("'transformers is a word here'\nfrom torch import nn\nimport mypeft") == set()


def test_tests_that_touch_libraries_are_taken() -> None:
    """By themselves, by a helper, by a name in a string, by a block of a document; and no others."""
    taken = selected.of_libraries()
    assert {
        "tests/convert/test_block.py",
        "tests/parallel/test_convert.py",
        "tests/parallel/test_engines.py",
        "tests/quantization/test_state.py",
        "tests/test_docs.py::test_blocks_run[docs/how-to/engines.md]",
    } <= {*taken}
    assert not [t for t in taken if t.startswith(("tests/ops", "tests/gpu", "tests/versions")) or t.endswith("docs.py")]


def test_tests_of_torch() -> None:
    assert {"tests/ops", "tests/formula", "tests/test_works_with.py"} <= {*selected.of_torch()}


def test_requirements() -> None:
    """The oldest by pyproject.toml, the newest by pip; libraries beside the torch that is there."""
    asked = ENVIRONMENTS["torch-oldest"].requirements()
    assert asked == [f"torch=={packages.oldest('torch')}"]
    assert ENVIRONMENTS["torch-newest"].requirements() == ["--upgrade", "torch"]
    *oldest, torch = ENVIRONMENTS["libraries-oldest"].requirements()
    assert oldest == [f"{name}=={packages.oldest(name)}" for name in packages.KINDS["libraries"]]
    assert re.fullmatch(r"torch==\d+\.\d+.*", torch)


def test_a_package_has_one_oldest_version() -> None:
    with pytest.raises(AssertionError, match="pyproject.toml names numpy"):
        packages.oldest("numpy")


def test_the_page_has_the_table() -> None:
    """Its form, what is locked, and the oldest; of the newest only that it is no older than what is locked."""
    cells = table.read(PAGE)
    assert [*cells] == [*packages.MODULES]
    for package, versions in cells.items():
        numbers = {age: Version(version) for age, version in versions.items()}
        assert versions["locked"] == table.lock()[package]
        assert f"{versions['oldest']}.".startswith(f"{packages.oldest(package)}.")
        assert numbers["oldest"] <= numbers["locked"] <= numbers["newest"], "./dev versions, ./dev versions --write"


def record(code: int, **versions: str) -> dict[str, Any]:
    return {"versions": versions, "code": code}


def test_the_table_is_written_by_what_passed() -> None:
    newer = table.written(PAGE, {"torch-newest": record(0, torch="99.1.0+cpu")})
    assert table.read(newer) == {**table.read(PAGE), "torch": {**table.read(PAGE)["torch"], "newest": "99.1.0"}}
    assert newer.replace("99.1.0", table.read(PAGE)["torch"]["newest"]) == PAGE
    assert table.written(PAGE, {"torch-newest": record(1, torch="99.1.0"), "torch-oldest": {"code": 1}}) == PAGE
