"""The benchmarks' commands in processes that need not import PyTorch."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import ROOT
from tests.parallel.ranks import forking


def forked(command: Sequence[str], **environment: str) -> str:
    """As `output_of`, in a process that has PyTorch at once."""
    with tempfile.NamedTemporaryFile("r") as out:
        process = forking().Process(target=_run, args=(command, environment, out.name))
        process.start()
        process.join()
        assert process.exitcode == 0, out.read()
        return out.read()


def _run(command: Sequence[str], environment: dict[str, str], out: str) -> None:
    os.environ.update(environment)
    os.chdir(ROOT)
    with open(out, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    sys.argv = [*command[command[0] == "-m" :]]
    sys.path.insert(0, str(ROOT / Path(sys.argv[0]).parent))
    if command[0] == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
