"""Comparisons between ranks, as far as one process shows them; the rest is in tests/parallel."""

from __future__ import annotations

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

from te_fuser.distributed import consistency
from te_fuser.distributed.group import Group


def test_counts_are_those_of_the_group_not_of_its_name() -> None:
    """Of ranks that are connected anew one may have compared more before: all begin from zero."""
    found = []
    for comparisons in (3, 1):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        try:
            group = Group.of("a test", dist.group.WORLD)
            numbers = [consistency._post(group, {}) for _ in range(comparisons)]
            found.append((group.name, numbers))
        finally:
            dist.destroy_process_group()
    (one, before), (other, now) = found
    assert one == other and before == [1, 2, 3] and now == [1]
