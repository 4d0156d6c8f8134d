"""Records: what a frozen dataclass is, but for what watches over it while it runs."""

from __future__ import annotations

from dataclasses import replace

from te_fuser.record import record


@record()
class Point:
    x: int
    y: int = 2


@record(eq=False)
class Place:
    x: int


def test_records_with_equal_fields_are_equal_and_have_one_hash() -> None:
    assert Point(1) == Point(1, 2) == replace(Point(5), x=1) != Point(1, 3)
    assert {Point(1): "found"}[Point(1, 2)] == "found"


def test_without_eq_each_record_is_equal_to_itself_alone() -> None:
    place = Place(1)
    assert place == place and place != Place(1) and len({place, Place(1), place}) == 2
