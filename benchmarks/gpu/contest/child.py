"""Python commands in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.common import ROOT

CHILD_LIMIT = 280  # seconds of a child process: a part ends within five minutes


def output_of(command: Sequence[str], **more: str) -> str:
    """Output of a Python command.

    Args:
        more: of its environment.

    Raises:
        RuntimeError: when it fails or does not end.
    """
    try:
        # OpenMP's threads spin while they wait, unless told otherwise: beside other processes that takes long.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ, **more}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHILD_LIMIT
        )
    except subprocess.TimeoutExpired as expired:
        said = (expired.stdout or b"")[-2000:].decode(errors="replace")
        raise RuntimeError(f"{' '.join(command)} did not end within {CHILD_LIMIT} s:\n{said}") from expired
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
