"""Sizes of a call as planning sees them: whole numbers that note what is asked of them.

A plan holds for every shape of which the same questions have the same answers. Prices see each size rounded up to one
grid, so what they say depends on the shape alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def on_grid(size: int) -> int:
    """The power of two that is not below a size; 0 for none."""
    return 1 << (size - 1).bit_length() if size > 1 else size


class Questions:
    """Questions asked of sizes s0, s1, .. of a call while it was planned, and the answers."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self._sizes: list[int] = []
        self._constants: dict[tuple[type, Hashable], str] = {}

    def sizes(self, shape: Iterable[int]) -> tuple[Any, ...]:
        """The next sizes of the call: what is asked of them is noted here."""
        first, found = len(self._sizes), tuple(shape)
        self._sizes += found
        return tuple(Size(size, on_grid(size), f"s{k}", self) for k, size in enumerate(found, first))

    def tie(self) -> None:
        """Note that the sizes are what they are, for what takes none but plain numbers."""
        self.answers |= {f"s{k} == {size}": True for k, size in enumerate(self._sizes)}

    def ask(self, function: Callable[..., Any], arguments: Iterable[Any], answer: Hashable) -> None:
        """Note what a function said of sizes and of what else it takes."""
        given = [a.text if isinstance(a, Size) else self._constant(a) for a in arguments]
        self.answers[f"{self._constant(function)}({', '.join(given)}) == {self._constant(answer)}"] = True

    def _constant(self, value: Hashable) -> str:
        return self._constants.setdefault((type(value), value), f"c{len(self._constants)}")

    def look(self) -> Callable[..., bool]:
        """f(s0, s1, ...) -> whether all questions have the same answers for these sizes."""
        known = {name: value for (_, value), name in self._constants.items()}
        told = [text if answer else f"not ({text})" for text, answer in self.answers.items()]
        sizes = ", ".join(f"s{k}" for k in range(len(self._sizes)))
        look = eval(f"lambda {sizes}: {' and '.join(told) or 'True'}", known)  # noqa: S307 - written here alone

        def fits(*sizes: int) -> bool:
            try:
                return bool(look(*sizes))
            except ZeroDivisionError:
                return False

        return fits


class Size:
    """A size of a call, or what was computed from some: a whole number whose comparisons are noted.

    What reads it natively (`int()`, `range()`, a tensor's size, a dictionary's key, text) ties the plan to this very
    number.

    Attributes:
        rounded: what it would be if the sizes of the call were those of the grid.
        text: it as an expression of these.
    """

    __slots__ = ("_questions", "rounded", "text", "value")

    def __init__(self, value: int, rounded: int, text: str, questions: Questions) -> None:
        self.value, self.rounded, self.text, self._questions = value, rounded, text, questions

    def note(self, function: Callable[..., Any], arguments: Iterable[Any], answer: Hashable) -> None:
        """Note what a function said of this size and of what else it takes."""
        self._questions.ask(function, arguments, answer)

    def __index__(self) -> int:
        self._questions.answers[f"{self.text} == {self.value}"] = True
        return self.value

    __int__ = __trunc__ = __index__

    def __float__(self) -> float:
        return float(int(self))

    def __truediv__(self, other: Any) -> float:
        return int(self) / other  # type: ignore[no-any-return]

    def __rtruediv__(self, other: Any) -> float:
        return other / int(self)  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return repr(int(self))

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        int(self)
        return found

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _compares(symbol: str, compare: Callable[[Any, Any], bool]) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, (Size, int, float)):
            return NotImplemented
        answer = compare(self.value, exact(other))
        if abs(exact(other)) < float("inf"):  # no size changes the answer beyond
            self._questions.answers[f"{self.text} {symbol} {_text(other)}"] = answer
        return answer

    return method


def _computes(symbol: str, compute: Callable[[Any, Any], Any], turned: bool) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, (Size, int)):
            return NotImplemented if not isinstance(other, float) else _turn(compute, turned)(int(self), other)
        at = _turn(compute, turned)
        first, second = (other, self) if turned else (self, other)
        try:
            rounded = at(self.rounded, rounded_up(other))
        except ZeroDivisionError:
            rounded = 0
        text = f"({_text(first)} {symbol} {_text(second)})"
        return Size(at(self.value, exact(other)), rounded, text, self._questions)

    return method


def _turn(compute: Callable[[Any, Any], Any], turned: bool) -> Callable[[Any, Any], Any]:
    return (lambda a, b: compute(b, a)) if turned else compute


def _text(size: Any) -> str:
    return size.text if isinstance(size, Size) else repr(size)


_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPUTED = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**", "and": "&", "rshift": ">>"}
for _name, _symbol in _COMPARED.items():
    setattr(Size, f"__{_name}__", _compares(_symbol, getattr(operator, _name)))
for _name, _symbol in _COMPUTED.items():
    _compute = getattr(operator, f"{_name}_" if _name == "and" else _name)
    setattr(Size, f"__{_name}__", _computes(_symbol, _compute, turned=False))
    setattr(Size, f"__r{_name}__", _computes(_symbol, _compute, turned=True))


def exact(size: Any) -> Any:
    """A size as a plain number, whatever it is asked for."""
    return size.value if isinstance(size, Size) else size


def rounded_up(size: Any) -> Any:
    """A size as a plain number of the grid; a number that is no size of a call stays."""
    return size.rounded if isinstance(size, Size) else size


def asked(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Answer of a function that reads sizes natively."""
    answer = function(*map(exact, arguments))
    size = next((a for a in arguments if isinstance(a, Size)), None)
    if size is not None:
        size.note(function, arguments, answer)  # type: ignore[arg-type]
    return answer
