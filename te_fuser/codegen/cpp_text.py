"""Parts of C++ text: names, literals, and parts of expressions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from te_fuser.codegen.text import RoleNames, shortest, to_float32
from te_fuser.dtypes import TABLE

ELEMENTS = {name: row.cpp for name, row in TABLE.items() if row.cpp}
ATOM, PRODUCT, SUM, COMPARISON = 3, 2, 1, 0  # how tightly an operation binds


class CppNames(RoleNames):
    """Unique names in one function, made in the order of asking."""

    own_words = """
    at launch row row_begin row_end worker workers sample block_end scratch partial sample_partial share
    """


@dataclass(frozen=True)
class Fragment:
    """Part of a C++ expression, how tightly it binds, and whether it is a vec (or a mask) rather than one number."""

    text: str
    binds: int
    vector: bool
    truth: bool = False  # a comparison: a mask or a bool
    named: bool = False

    def within(self, binds: int) -> str:
        """The text inside an operation that binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"


def literal(value: float) -> str:
    """A float literal: the shortest that gives this float32."""
    single = to_float32(value)
    if math.isnan(single):
        return "te::not_a_number"
    if math.isinf(single):
        return "te::infinity" if single > 0 else "-te::infinity"
    return f"{float(shortest(single))!r}f"


def plus(pointer: str, *offsets: int | str) -> str:
    """`pointer` moved by the offsets that are not 0."""
    return " + ".join([pointer, *(str(o) for o in offsets if o not in (0, "0"))])


def part_name(name: str, index: int, parts: int) -> str:
    """The name of a tensor, with the number of the part where it has several."""
    return name if parts == 1 else f"{name}_{index}"
