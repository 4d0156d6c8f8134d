"""Parts shared by the texts of every target: indented lines, names that are roles, decimals of float32 numbers."""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections.abc import Iterator
from typing import ClassVar

COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}

_LANGUAGE = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const constexpr
const_cast continue co_await co_return co_yield decltype default delete do double dynamic_cast else enum
explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
nullptr operator or or_eq private protected public register reinterpret_cast requires return short signed sizeof
static static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename
union unsigned using virtual void volatile wchar_t while xor xor_eq te
"""  # C++'s words, and the namespace of the functions that the text calls


class Lines:
    """Indented text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def __call__(self, line: str = "") -> None:
        self.lines.append("  " * self._depth + line if line else "")

    @contextlib.contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """`head { ... }`, with `end` for the closing brace."""
        self(f"{head} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self(end)


class RoleNames:
    """Identifiers made from roles, each given out once; a target adds the words of its own text."""

    own_words: ClassVar[str] = ""

    def __init__(self) -> None:
        self._taken = {*_LANGUAGE.split(), *self.own_words.split()}

    def fresh(self, role: str) -> str:
        """The role as an identifier, with a number behind it when that is taken."""
        base = identifier(role)
        number, name = 1, base
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    def numbered(self, role: str) -> str:
        """The role, an identifier already, with the first number that is free."""
        number = 1
        while f"{role}_{number}" in self._taken:
            number += 1
        self._taken.add(f"{role}_{number}")
        return f"{role}_{number}"

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Names given out inside are free again afterwards."""
        before = set(self._taken)
        yield
        self._taken = before


def identifier(role: str) -> str:
    """A role as an identifier without two underscores in a row, or a digit in front."""
    name = re.sub(r"[^0-9a-zA-Z_]+", "_", role).strip("_") or "value"
    name = re.sub(r"__+", "_", name)
    return f"v_{name}" if name[0].isdigit() else name


def part_name(name: str, index: int, parts: int) -> str:
    """The name of a tensor, with the number of the part where it has several."""
    return name if parts == 1 else f"{name}_{index}"


def to_float32(value: float) -> float:
    """The nearest float32; infinity for what is beyond its range."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def shortest(single: float) -> str:
    """The shortest decimal that gives this finite float32."""
    candidates = (f"{single:.{digits}g}" for digits in range(1, 10))
    return next(c for c in candidates if to_float32(float(c)) == single)
