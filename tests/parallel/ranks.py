"""Tests whose body runs in several processes at once, which gloo connects, or NCCL on GPUs."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLD = 2
DEADLINE = 120.0  # seconds: for one body, and for the processes to start
GRACE = 3.0  # seconds that a rank has left when another failed, for it may wait for that one
# Modules that ranks use: with the first DTensor PyTorch imports its compiler, which takes longer than most bodies.
IMPORTED = ["te_fuser", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest"]
ENDED = "ended"  # what is said of a process that did not answer and is no more
LOG = 8000  # the characters at the end of a log that a failure shows

Body = Callable[..., None]


def mesh_of() -> DeviceMesh:
    """All ranks in a row, as a test's body has them."""
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))


def forking() -> ForkServerContext:
    """Starts processes that have torch and the package at once: a server imports them for the ranks of all files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def in_a_fork(work: Callable[..., None], *given: Any) -> None:
    """Run a function of a module in a process of its own, which must end well."""
    process = forking().Process(target=work, args=given)
    process.start()
    process.join()
    assert process.exitcode == 0, f"{work.__name__} ended {_end(process.exitcode)}"


def on_ranks(body: Body) -> Callable[..., None]:
    """A test whose body each rank runs, with what the test is parametrized with; it fails where one of them does.

    The body is looked up by its name, so it stands at the head of a module, and nothing of the test's process is in it.
    """

    def test(ranks: Ranks, **given: Any) -> None:
        ranks.run(body, given)

    takes = inspect.signature(body)
    first = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(test)["__signature__"] = takes.replace(parameters=[first, *takes.parameters.values()])
    vars(test)["body"] = body
    vars(test)["place_as"] = body  # by which pytest says in which file a test stands
    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


class RanksFailedError(AssertionError):
    """Failure of a test on several ranks, with the output of each of them."""


class Ranks:
    """The processes, which run one body after the other: started when they are asked for, anew after a failure."""

    def __init__(
        self, folder: Path, cpu: str, deadline: float = DEADLINE, world: int = WORLD, gpu: bool = False
    ) -> None:
        self._folder, self._cpu, self._deadline, self._world, self._gpu = folder, cpu, deadline, world, gpu
        self._starts = 0
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []

    def run(self, body: Body, given: Mapping[str, Any]) -> None:
        """Run a body on all ranks.

        Raises:
            RanksFailedError: where it raises on one, hangs, or ends the process.
        """
        if not self._processes:
            self._start()
        for log in self._logs():
            os.truncate(log, 0)
        for end in self._ends:
            end.send((body.__module__, body.__name__, dict(given)))
        self._finished(body.__name__)

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        self._starts += 1
        (self._folder / f"{self._starts}").mkdir()
        context = forking()
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self._world, str(self._log(rank)), self._cpu, self._deadline, self._gpu, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)
        self._finished("the start", DEADLINE)

    def _finished(self, what: str, deadline: float | None = None) -> None:
        """Wait until all ranks have answered."""
        said = dict.fromkeys(range(self._world), "did not answer in time")
        until = time.monotonic() + (deadline or self._deadline)
        waiting = dict(zip(self._ends, range(self._world), strict=True))
        while waiting and (ready := wait(list(waiting), max(until - time.monotonic(), 0))):
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                said[rank] = _answer(end)
                if said[rank] != "passed":
                    until = min(until, time.monotonic() + GRACE)
        if set(said.values()) == {"passed"}:
            return
        processes = self._processes
        self.stop()
        for rank, how in said.items():
            said[rank] = f"{ENDED} {_end(processes[rank].exitcode)}" if how == ENDED else how
        ends = [f"---- rank {rank} {how}, and wrote:\n{self._written(rank)}" for rank, how in said.items()]
        raise RanksFailedError(f"{what} failed on {self._world} ranks\n" + "\n".join(ends))

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self._starts}" / f"rank{rank}.log"

    def _logs(self) -> list[Path]:
        return [self._log(rank) for rank in range(self._world)]

    def _written(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[-LOG:] if self._log(rank).exists() else "nothing"


def _answer(end: Connection) -> str:
    try:
        return str(end.recv())
    except (EOFError, OSError):
        return ENDED


def _end(code: int | None) -> str:
    """By what a process ended."""
    return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"


def _serve(rank: int, world: int, log: str, cpu: str, deadline: float, gpu: bool, orders: Connection) -> None:
    """Work of a rank: run the bodies that it is told to, until nobody is there to tell."""
    from tests.settings import settle

    with open(log, "a", buffering=1) as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    faulthandler.enable()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(EOFError):
        patch.setattr(dist.ProcessGroupGloo, "__init__", _with_one_thread)
        if gpu:
            _take_gpu(rank, world)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=f"file://{Path(log).parent}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=deadline),
        )
        settle(patch, cpu, Path(log).parent)
        gc.freeze()  # collections look at what bodies make
        orders.send("passed")
        while True:
            module, name, given = orders.recv()
            orders.send(_outcome(module, name, given, deadline))


_make_gloo = dist.ProcessGroupGloo.__init__


def _with_one_thread(
    self: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: bool
) -> None:
    """A group of gloo that has one thread, and runs its works in their order.

    PyTorch 2.13 gives it two, which write the name of the work that ended last into one string without a lock. A name
    of more than 15 letters has memory of its own (ALLGATHER_COALESCED, as functional collectives gather), which both
    free when two works end at once: the process dies later, in a malloc of theirs.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._threads = [dist.ProcessGroupGloo.create_default_device()], 1
    options._timeout = timeout
    for name, value in others.items():  # from PyTorch 2.14 on
        setattr(options, name, value)
    _make_gloo(self, store, rank, size, options)


def _take_gpu(rank: int, world: int) -> None:
    """Take this rank's GPU; ranks share GPUs where there are fewer.

    NCCL refuses two ranks of one host on one GPU. So each is told that it is a host of its own, and they are connected
    by sockets: what they compute is what GPUs of their own would, the times say nothing. Symmetric memory they have.
    """
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    count = torch.cuda.device_count()
    if world > count:
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % count)


def _outcome(module: str, name: str, given: Mapping[str, Any], deadline: float) -> str:
    faulthandler.dump_traceback_later(0.9 * deadline)
    torch.default_generator.manual_seed(0)
    try:
        vars(getattr(importlib.import_module(module), name))["body"](**given)
    except BaseException:
        traceback.print_exc()
        return "raised"
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
    return "passed"
