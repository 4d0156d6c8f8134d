"""Settings of every test: one thread, and nothing that depends on the tests before it, the machine or its user."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_fuser import fusions
from te_fuser.verify import examples
from tests.fake_cuda import Emulation, FakeDriver, compile_driver, in_place
from tests.settings import CPUS, settle


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu",
        choices=list(CPUS),
        default="avx512",
        help="the CPU that tests plan for; with avx2 kernels are compiled for one that has no more, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the machine's GPUs from tests, unless the mark `gpu` chooses those that need one."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collections of garbage, which take a second with all that is there before the first test, leave it out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, request.config.getoption("--cpu"), tmp_path_factory.mktemp("tuned"))
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Random numbers of a test do not depend on the tests that ran before in its process."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_fusions() -> Iterator[None]:
    """Fusions that a test registers are gone after it."""
    before = set(fusions.names())
    yield
    for name in set(fusions.names()) - before:
        fusions.unregister(name)
    assert set(fusions.names()) == before


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that verify draws up have at most 1,031 rows: for tests that do not ask what it finds at more."""
    monkeypatch.setattr(examples, "_MANY_ROWS", 0)


@pytest.fixture(scope="session")
def library() -> Path:
    """The CUDA driver for machines without a GPU, compiled."""
    return compile_driver()


@pytest.fixture
def driver(library: Path) -> Iterator[FakeDriver]:
    """The fake driver in place of the real one."""
    with in_place(library) as fake:
        yield fake


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    """Generated kernels that the driver runs on the CPU."""
    return Emulation(tmp_path_factory.mktemp("emulated"))
