"""Steps that add up gradients over ranks: what they are of, by their groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from te_fuser import ops
from te_fuser.fuser.graph.refs import STARTED, Ref
from te_fuser.fuser.plan.cover_steps import _over_ranks


def test_groups_of_one_title_are_under_way_apart() -> None:
    """Groups of two meshes, whose parameters one op has first: each waits for its own."""
    problem: Any = SimpleNamespace(nodes=[SimpleNamespace(index=0, parameters={"weight": 0, "bias": 1})])
    prices: Any = SimpleNamespace(problem=problem, step=lambda name, covers, *made: made[:2])
    found: list[Ref] = []
    for k, name in enumerate(("a", "b")):
        (_, way), (waits, _) = _over_ranks(prices, ops.Group(name, 2, "tp"), [k])
        (started,) = [ref for _, ref in way if ref.kind is STARTED]
        assert started in [ref for _, ref in waits]
        found.append(started)
    assert len(set(found)) == 2
