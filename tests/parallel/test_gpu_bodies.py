"""Some bodies of the tests of several GPUs on CPUs, so that they run where there are GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import test_presets as presets
from tests.gpu.ranks import test_training as training
from tests.parallel.ranks import on_ranks


@pytest.mark.parametrize("name", ["gated MLP", "layer, grouped queries"])
@on_ranks
def test_presets(name: str) -> None:
    vars(presets.test_presets)["body"](name, True)


@on_ranks
def test_training(tmp_path: Path) -> None:
    vars(training.test_parallelize)["body"](True, 0.2, True)
    for how in ("tensor", "DDP", "FSDP2"):
        vars(training.test_memory_stays_as_it_is_over_many_steps)["body"](how)
    vars(training.test_checkpoints)["body"](tmp_path)
    vars(training.test_replays_equal_calls)["body"](True)  # which returns at once
