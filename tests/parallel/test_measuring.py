"""Lists that ranks share, tuned, verified and timed: all ranks do the same, as the first one decides."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_fuser
from te_fuser import fusions, ops
from te_fuser.codegen import cache_files
from te_fuser.distributed.consistency import RankMismatchError, gather_values
from te_fuser.distributed.group import Group
from te_fuser.fuser.plan.tuned import ON
from te_fuser.fuser.tune import tune as tuning
from te_fuser.fusions import fusion
from te_fuser.fusions.match import Cost
from te_fuser.kernels.cublaslt import tuning as algorithms
from te_fuser.kernels.cublaslt.products import form_of_8, product_of
from tests import fake_cublaslt, fake_cuda
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.twins import randomize, tensor

F = 8
HOW: tuple[Any, ...] = "plain", torch.float8_e5m2, torch.float8_e4m3fn, torch.float32, False  # a product of 8 bits


def model(sequence_parallel: bool = False) -> te_fuser.Sequential:
    """A product by columns, what a fusion of the tests is for, and a product by rows."""
    rank = dist.get_rank()
    up, middle, down = ops.Linear(F, 2 * F, bias=False), ops.Bias(2 * F), ops.MatMul(2 * F, F)
    made = randomize(te_fuser.Sequential(ops.LayerNorm(F), up, middle, ops.GELU(), down)).float()
    for op, mode, name, dim in ((up, "column", "weight", 0), (middle, "column", "bias", 0), (down, "row", "weight", 1)):
        op.group, op.parallel_mode, op.sequence_parallel = dist.group.WORLD, mode, sequence_parallel
        own = op._parameters[name].detach().chunk(WORLD, dim)[rank].clone()
        setattr(op, name, torch.nn.Parameter(own))
    return made


@contextmanager
def slow_gelu(folder: Path, wrong_on: int | None = None, fails_on: int | None = None) -> Iterator[None]:
    """A fusion whose price is so high that no plan takes it; on one rank it may be wrong, or not to be had."""
    rank = dist.get_rank()

    @fusion(forward=[ops.Bias, ops.GELU], name="slow_gelu", cost=lambda m: Cost(seconds=1.0), emits=["0.output"])
    def slow_gelu(m: fusions.FusionCall, x: torch.Tensor) -> torch.Tensor:
        biased = x + m[0].bias
        m.emit("0.output", biased)
        return torch.nn.functional.gelu(biased, approximate="tanh") * (1.1 if rank == wrong_on else 1.0)

    def load(plan: Any, *given: Any, **how: Any) -> Any:
        if rank == fails_on and "slow_gelu" in [s.name for s in plan.forward]:
            raise OSError("no compiler here")
        return loaded(plan, *given, **how)

    loaded = tuning.load
    with mock.patch.object(tuning, "load", load), mock.patch.object(te_fuser.config, "cache_dir", folder):
        try:
            yield
        finally:
            fusions.unregister("slow_gelu")


@contextmanager
def own_clock() -> Iterator[None]:
    """By the first rank's clock the second of two plans is faster, by the other's slower."""

    def contest(first: Any, second: Any, effort: tuning.Effort) -> float:
        first()
        second()
        return 0.8 + dist.get_rank()

    with mock.patch.object(tuning, "_contest_on", lambda *given: contest):
        yield


def x_of() -> torch.Tensor:
    return tensor(4, 2, F).detach().float().requires_grad_()


def same_on_all(value: object) -> None:
    found: list[object] = [None] * WORLD
    dist.all_gather_object(found, value)
    assert found == [value] * WORLD


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_the_first_rank_decides(sequence_parallel: bool, tmp_path: Path) -> None:
    rank, m, x = dist.get_rank(), model(sequence_parallel), x_of()
    y = m(x)
    written = mock.Mock(side_effect=cache_files.write_whole)
    with slow_gelu(tmp_path), own_clock(), mock.patch.object(cache_files, "write_whole", written):
        before = written.call_count
        report = m.tune(x)
        same_on_all(str(report))
        assert ("slow_gelu 8>8", ON, 0.8, True) in [(t.place, t.choice, t.ratio, t.taken) for t in report.trials]
        assert written.call_count - before == 1 + (rank == 0), "where it can be written is tried; one writes"
        shown = [s.name for s in m.plan(x).forward]
        assert "slow_gelu" in shown
        same_on_all(shown)
        torch.testing.assert_close(m(x), y)
    assert len(json.loads(next((tmp_path / "tuned").glob("*.json")).read_text())["entries"]) == 1


@on_ranks
def test_what_is_wrong_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    m, x = model(), x_of()
    with slow_gelu(tmp_path, wrong_on=1), own_clock():
        report = m.tune(x)
        same_on_all(str(report))
        (trial,) = [t for t in report.trials if t.place.startswith("slow_gelu")]
    assert not trial.taken and "differs from the default" in trial.reason


@on_ranks
def test_what_one_rank_raises_all_do(tmp_path: Path) -> None:
    m, x = model(), x_of()
    kind = OSError if dist.get_rank() else RankMismatchError
    with slow_gelu(tmp_path, fails_on=1), own_clock(), pytest.raises(kind, match="no compiler here"):
        m.tune(x)
    with (
        slow_gelu(tmp_path),
        own_clock(),
        pytest.raises(RankMismatchError, match=r"rank 0 has tune: Effort\(rounds=3.*rank 1 has .*rounds=4"),
    ):
        m.tune(x, rounds=3 + dist.get_rank())
    assert m(x).shape == (4, 2, F)


@on_ranks
def test_by_the_real_clock(tmp_path: Path) -> None:
    m, x = model(True), x_of()
    with slow_gelu(tmp_path):
        same_on_all(str(m.tune(x, rounds=1, seconds=0.001)))
        same_on_all([s.name for s in m.plan(x).steps])


class WrongOnOneRank(ops.UnfusedOperation):
    """y = x^2, and a gradient that forgets the 2 on rank 1."""

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * call["input"] * (1.0 if dist.get_rank() == 1 else 2.0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_verify(sequence_parallel: bool) -> None:
    """On an input of the caller's, and on those that it makes."""
    given = {"x": x_of()} if sequence_parallel else {"dtypes": [torch.float64]}
    report = te_fuser.verify(model(sequence_parallel), **given)
    assert report.passed and len(report.rows) > 20


@on_ranks
def test_what_verify_finds_on_one_rank_fails_on_all() -> None:
    x = x_of()
    shared = te_fuser.Sequential(ops.AllReduceGradient(dist.group.WORLD), ops.Bias(F))
    assert te_fuser.verify(te_fuser.Sequential(shared, ops.GELU()), x).passed
    report = te_fuser.verify(te_fuser.Sequential(shared, WrongOnOneRank()), x, raise_on_failure=False)
    assert not report.passed
    told = [row for row in report.rows if row.note.startswith("on rank 1: float32 [4, 2, 8]: gradient of 0.1.bias")]
    assert told, report


@on_ranks
def test_verify_of_dtensors() -> None:
    mesh = mesh_of()
    gated = te_fuser.Residual(ops.RMSNorm(F), ops.Linear(F, 4 * F), ops.SwiGLU(), ops.Linear(2 * F, F))
    m = te_fuser.parallelize(te_fuser.Sequential(gated, ops.Dropout(0.1)), mesh, sequence_parallel=True)
    assert te_fuser.verify(m, x_of()).passed
    assert m[0][1].weight.shape == (4 * F, F), "the model is left as it is"


@on_ranks
def test_times_of_steps() -> None:
    """Each shows its own, of as many runs as the others; what one cannot run none does."""
    m, x = model(), x_of()
    assert "all_reduce" in str(m.explain(x, measure=True, details=True))
    with pytest.raises(RankMismatchError, match=r"rank 0 has explain\(measure=True\) of x \[4, 2, 8\]; rank 1 .* 9\]"):
        m.explain(tensor(4, 2, F + dist.get_rank()).float(), measure=True, details=True)
    assert m(x).shape == (4, 2, F)


@on_ranks
def test_lists_whose_parameters_are_dtensors(tmp_path: Path) -> None:
    """Trials are compared by each rank's own part."""
    made = te_fuser.Sequential(ops.LayerNorm(F), ops.Linear(F, 2 * F), ops.GELU(), ops.Linear(2 * F, F))
    m, x = te_fuser.parallelize(randomize(made).float(), init_device_mesh("cpu", (WORLD,)), True), x_of()
    with slow_gelu(tmp_path), own_clock():
        report = m.tune(x)
    same_on_all(str(report))
    (trial,) = (t for t in report.trials if t.place.startswith("slow_gelu"))
    assert trial.taken and trial.ratio == 0.8
    assert "measured" in str(m.explain(x, measure=True, details=True))


@on_ranks
def test_algorithms_of_products_of_8_bits_are_those_of_the_first_rank(tmp_path: Path) -> None:
    """Whatever is faster by another one's clock; where they have one folder, one writes."""
    rank = dist.get_rank()
    groups = (Group.of("a product", dist.group.WORLD),)
    sizes, dtypes = ((5, 32), (6, 32), (5, 6)), HOW[1:4]
    a, b, out = (  # aligned alike on all ranks, as a GPU's memory is
        algorithms._matrix(*size, size[1], False, 256, dtype, torch.device("cpu"))
        for size, dtype in zip(sizes, dtypes, strict=True)
    )
    given = a, b, torch.ones(()), torch.ones(()), out
    patched = (
        mock.patch.object(te_fuser.config, "cache_dir", tmp_path),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "get_device_name", lambda index: "NVIDIA H200"),
        mock.patch.object(algorithms, "_seconds_of", lambda place: [1.0, 2.0, 0.9] if rank == 0 else [1.0, 0.9, 2.0]),
    )

    def call() -> None:
        product_of(form_of_8(*HOW))(given)

    def contest(first: Any, second: Any) -> float:
        first()
        second()
        return float(gather_values(groups, "how two compare", 0.9 + rank)[0])

    with contextlib.ExitStack() as stack:
        for patch in patched:
            stack.enter_context(patch)
        stack.enter_context(fake_cuda.in_place(fake_cuda.compile_driver()))
        library = stack.enter_context(fake_cublaslt.in_place(fake_cublaslt.compile_library()))
        product_of.cache_clear()
        written = stack.enter_context(mock.patch.object(cache_files, "write_whole", wraps=cache_files.write_whole))
        trials = algorithms.tune_products(call, contest, 0.005, deciding=tuning._deciding(groups))
        same_on_all([(t.place, t.choice, t.ratio, t.taken) for t in trials])
        assert [(t.choice, t.taken) for t in trials] == [("#3", True), ("all", True)]
        assert written.call_count == (rank == 0)
        gather_values(groups, "what was chosen is on disk", None)
        for _ in ("in this process", "in a new one"):
            before = library.by_algorithm[3]
            call()
            assert library.by_algorithm[3] == before + 1
            product_of.cache_clear()
