"""The examples of training engines on two ranks: their losses are those of one process with the whole batch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.ranks import on_ranks

EXAMPLES = str(Path(__file__).parents[2] / "examples")
TOLERANCE = {False: 2e-5, True: 2e-2}  # float32 adds up in another order; bfloat16 rounds batches apart
# Example -> the package that it needs, the arguments it takes.
RUNS = {
    "accelerate": ("accelerate", []),
    "accelerate bf16": ("accelerate", ["--bf16"]),
    "lightning": ("pytorch_lightning", []),
    "lightning bf16": ("pytorch_lightning", ["--bf16"]),
    "lightning tp": ("pytorch_lightning", ["--tp", "2"]),
    "deepspeed": ("deepspeed", []),
    "titan": ("torch", []),
    "titan tp": ("torch", ["--tp", "2"]),
}


@functools.cache
def alone(bf16: bool) -> list[float]:
    return importlib.import_module("engine_steps").alone(Path(EXAMPLES), bf16)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(needs), reason=f"needs {needs}"))
        for name, (needs, _) in RUNS.items()
    ],
)
@on_ranks
def test_losses_are_one_processs(run: str, tmp_path: Path) -> None:
    sys.path.insert(0, EXAMPLES)
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "0"}
    if "deepspeed" in run:  # which else compiles an extension of its own, for half a minute
        ops = importlib.import_module("deepspeed").ops
        ops.__compatible_ops__ = dict.fromkeys(ops.__compatible_ops__, False)
    steps = importlib.import_module("engine_steps")
    arguments = RUNS[run][1]
    text, out = Path(EXAMPLES), tmp_path / "losses.json"
    example = importlib.import_module(f"train_{run.split()[0]}")
    assert example.main(["--text", str(text), "--out", str(out), *arguments]) == 0
    if "accelerate" in sys.modules:  # it keeps what the first one in a process asked for
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    if dist.get_rank() == 0:
        bf16 = "--bf16" in arguments
        losses, want = json.loads(out.read_text()), alone(bf16)
        assert len(losses) == steps.STEPS and want[-1] < want[0] - 0.5
        assert losses == pytest.approx(want, abs=TOLERANCE[bf16])
