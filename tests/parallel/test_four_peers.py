"""Exchanges by copies between four ranks."""

from __future__ import annotations

import pytest

from tests.parallel import test_peers as two
from tests.parallel.ranks import on_ranks

RANKS = 4


@pytest.mark.parametrize("body", ["test_gather", "test_blocks_for_each_rank", "test_scatter"])
@on_ranks
def test_an_exchange(body: str) -> None:
    vars(getattr(two, body))["body"]()


@on_ranks
def test_many_exchanges() -> None:
    vars(two.test_many_exchanges_of_any_size_in_any_order)["body"](60)
    vars(two.test_more_exchanges_under_way_than_buffers)["body"]()


@on_ranks
def test_products() -> None:
    for gives in (False, True):
        vars(two.test_a_product_of_gathered_rows)["body"](gives)
    vars(two.test_a_product_that_is_scattered)["body"]()
