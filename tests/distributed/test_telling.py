"""What ranks tell one another, as far as one process shows it; the rest is in tests/parallel."""

from __future__ import annotations

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from te_fuser.distributed import telling
from te_fuser.distributed.group import Group


def test_counts_are_those_of_the_group_not_of_its_name() -> None:
    """Of ranks that are connected anew one may have started more before: all begin from zero."""
    found = []
    for starts in (3, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            group = Group.of("a test", dist.group.WORLD)
            for _ in range(starts):
                telling.start(group)
            found.append((group.name, telling.stands(group)))
        finally:
            dist.destroy_process_group()
    (one, before), (other, now) = found
    assert one == other and before == (1, 3) and now == (1, 1)
