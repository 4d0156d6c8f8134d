"""The tests of several GPUs on CPUs, so that they run where there are GPUs; what only these have returns at once."""

from tests.gpu.ranks.test_presets import test_presets
from tests.gpu.ranks.test_training import (
    test_checkpoints,
    test_memory_stays_as_it_is_over_many_steps,
    test_parallelize,
    test_replays_equal_calls,
)

__all__ = [
    "test_checkpoints",
    "test_memory_stays_as_it_is_over_many_steps",
    "test_parallelize",
    "test_presets",
    "test_replays_equal_calls",
]
