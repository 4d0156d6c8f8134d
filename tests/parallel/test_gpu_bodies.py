"""Some bodies of the tests of several GPUs on CPUs, so that they run where there are GPUs."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("name", ["gated MLP", "layer, grouped queries"])
@on_ranks
def test_presets(name: str) -> None:
    vars(presets.test_presets)["body"](name, True)


@on_ranks
def test_training(tmp_path: Path) -> None:
    vars(training.test_parallelize)["body"](True, 0.2, True)
    vars(training.test_memory_stays_as_it_is_over_many_steps)["body"]("FSDP2")
    vars(training.test_checkpoints)["body"](tmp_path)
    vars(training.test_replays_equal_calls)["body"](True)  # which returns at once


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_in_flight(sequence_parallel: bool) -> None:
    vars(in_flight.test_results_are_as_one_by_one)["body"]("lean", sequence_parallel)


@on_ranks
def test_peer_products() -> None:
    vars(peer_products.test_they_equal_those_of_nccl)["body"](torch.float32)
    vars(peer_products.test_ten_thousand_in_a_row)["body"]()
    vars(peer_products.test_as_the_whole_list)["body"]("lean")
    vars(peer_products.test_without_copies)["body"]()
    vars(peer_products.test_by_no_multicast)["body"]()


@on_ranks
def test_regions() -> None:
    vars(regions.test_errors_are_those_of_the_whole_model)["body"]("delayed", "LayerNormMLP", True)


@on_ranks
def test_two_dimensions() -> None:
    vars(two.test_fully_shard)["body"]()
    vars(two.test_ddp)["body"]()
    vars(two.test_sequences_that_ranks_cut)["body"](0.2)
    vars(two.test_activations_that_ranks_keep_together_and_second_derivatives)["body"]()


@on_ranks
def test_consistency() -> None:
    vars(consistency.test_a_difference_and_an_error_come_to_all)["body"]()
