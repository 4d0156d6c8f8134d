"""What holds for every test: one thread, and nothing that depends on the tests before it, the machine or its user."""

import platform
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch

from te_fuser import fusions
from te_fuser.codegen.compiler import TARGET_FLAGS
from te_fuser.config import config
from te_fuser.fuser.plan import tuned
from te_fuser.fuser.plan.device import DEVICES, cpu_device
from te_fuser.fuser.run import fuser
from te_fuser.fusions import registry
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack_matmul
from tests.fake_cuda import Emulation, FakeDriver, compile_driver, in_place

# Test processes share the cores, and two pools on one core wait for each other.
torch.set_num_threads(1)

# The CPUs that tests plan for, whatever they run on.
CPUS = {"avx512": cpu_device(2, "AVX512", {"bfloat16": 2.5}), "avx2": cpu_device(2, "AVX2", {})}
AVX2_FLAGS = ("-march=haswell",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu",
        choices=list(CPUS),
        default="avx512",
        help="the CPU that tests plan for; with avx2 kernels are compiled for one that has no more, too",
    )


@pytest.fixture(scope="session", autouse=True)
def _the_same_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prices, and so plans, are those of a CPU that the command names, not of the one that it runs on."""
    name = request.config.getoption("--cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", CPUS[name])
        if name == "avx2":
            patch.setitem(TARGET_FLAGS, platform.machine(), AVX2_FLAGS)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_nodes() -> Iterator[None]:
    """Small models run as PyTorch's functions; in tests they stand for large ones, but where `recorded()` is."""
    nothing: ContextVar[frozenset[str]] = ContextVar("te_fuser_disabled", default=frozenset({fusions.RECORDED}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_disabled", nothing)
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Which tests ran before in this process is a matter of time; what a test draws must not be."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_fusions() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    before = set(fusions.names())
    yield
    for name in set(fusions.names()) - before:
        fusions.unregister(name)
    assert set(fusions.names()) == before


@pytest.fixture(scope="session", autouse=True)
def _nothing_tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `tune` found on this machine does not change the plans that tests expect; a test's own folder counts."""
    empty = tuned.TunedChoices(tmp_path_factory.mktemp("tuned") / "none.json")

    def store_for(device_name: str) -> tuned.TunedChoices:
        return empty if config.cache_dir is None else tuned.store_for(device_name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuser, "store_for", store_for)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_optional_packages() -> Iterator[None]:
    """Plans are those of a machine without them, unless a test puts one in place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn_frontend.PACKAGE, "version", lambda: None)
        patch.setattr(flash_attn_4.PACKAGE, "version", lambda: None)
        patch.setattr(quack_matmul.PACKAGE, "version", lambda: None)
        yield


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA driver for machines without a GPU, compiled."""
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: Path) -> Iterator[FakeDriver]:
    """That driver in place of the real one."""
    with in_place(library) as fake:
        yield fake


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    """Generated kernels that the driver runs on the CPU."""
    return Emulation(tmp_path_factory.mktemp("emulated"))
