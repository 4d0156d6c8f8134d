"""Some bodies of the tests of several GPUs on CPUs, so that they run where there are GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.ranks import test_consistency as consistency
from tests.gpu.ranks import test_in_flight as in_flight
from tests.gpu.ranks import test_peer_products as peer_products
from tests.gpu.ranks import test_presets as presets
from tests.gpu.ranks import test_regions as regions
from tests.gpu.ranks import test_training as training
from tests.gpu.ranks import test_two_dimensions as two
from tests.parallel.ranks import on_ranks

BODIES: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
    "a gated MLP": [(presets.test_presets, ("gated MLP", True))],
    "grouped queries": [(presets.test_presets, ("layer, grouped queries", True))],
    "training": [
        (training.test_parallelize, (True, 0.2, True)),
        (training.test_memory_stays_as_it_is_over_many_steps, ("FSDP2",)),
        (training.test_replays_equal_calls, (True,)),  # which returns at once
    ],
    "in flight": [(in_flight.test_results_are_as_one_by_one, ("lean", cut)) for cut in (False, True)],
    "peer products": [
        (peer_products.test_they_equal_those_of_nccl, (torch.float32,)),
        (peer_products.test_ten_thousand_in_a_row, ()),
        (peer_products.test_as_the_whole_list, ("lean",)),
        (peer_products.test_without_copies, ()),
        (peer_products.test_by_no_multicast, ()),
    ],
    "regions": [(regions.test_errors_are_those_of_the_whole_model, ("delayed", "LayerNormMLP", True))],
    "two dimensions": [
        (two.test_fully_shard, ()),
        (two.test_ddp, ()),
        (two.test_sequences_that_ranks_cut, (0.2,)),
        (two.test_activations_that_ranks_keep_together_and_second_derivatives, ()),
    ],
    "consistency": [(consistency.test_a_difference_and_an_error_come_to_all, ())],
}


@pytest.mark.parametrize("name", BODIES)
@on_ranks
def test_bodies(name: str) -> None:
    for test, given in BODIES[name]:
        vars(test)["body"](*given)


@on_ranks
def test_checkpoints(tmp_path: Path) -> None:
    vars(training.test_checkpoints)["body"](tmp_path)
