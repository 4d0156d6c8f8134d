"""Expressions: what a row formula is made of.

An expression is an immutable node; building the same expression twice gives the same object, so common
subexpressions are shared by construction. `depth` is the number of row reductions below it, and so the
synchronization stage that a kernel computes it in.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterable
from fractions import Fraction
from numbers import Real
from typing import Any

from te_fuser.formula.traversal import Deep, deep, render


class Axes(enum.IntFlag):
    """Axes of an extra input: FULL, ROWS, SAMPLE_FEATURES, BATCH, FEATURE or NONE, see `ops.NamedInput`."""

    NONE = 0
    OUTER = 1
    BATCH = 2
    FEATURE = 4
    ROWS = 3
    SAMPLE_FEATURES = 6
    FULL = 7

    # The enum's own look the member up by a call of its class, which is a tenth of the time of planning.
    def __and__(self, other: int) -> Axes:
        return _AND[self][other]

    def __or__(self, other: int) -> Axes:
        return _OR[self][other]


_AND = tuple([tuple([Axes(a & b) for b in range(8)]) for a in range(8)])
_OR = tuple([tuple([Axes(a | b) for b in range(8)]) for a in range(8)])

_WITH_FEATURES = tuple([axes for axes in map(Axes, range(8)) if Axes.FEATURE in axes])
_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()


class Expr:
    """One node: an operation, its arguments, its attributes, the axes it extends over and its feature width.

    Attributes:
        unit, widest: what divides all feature widths here and below, concatenations apart, and the largest of all.
        marked: whether it or something below means nothing to a kernel, or something else; `unmarked`: without that.
    """

    __slots__ = (
        "__weakref__", "args", "attrs", "axes", "depth", "digest", "has_features", "marked", "op", "reduces",
        "unit", "unmarked", "widest", "width",
    )  # fmt: skip

    op: str
    args: tuple[Expr, ...]
    attrs: tuple[Any, ...]
    axes: Axes
    width: int
    depth: int
    has_features: bool
    reduces: bool
    digest: str
    unit: int
    widest: int
    marked: bool
    unmarked: Expr | None

    def __add__(self, other: Any) -> Expr:
        return written(add, self, lift(other))

    def __radd__(self, other: Any) -> Expr:
        return written(add, lift(other), self)

    def __sub__(self, other: Any) -> Expr:
        return written(sub, self, lift(other))

    def __rsub__(self, other: Any) -> Expr:
        return written(sub, lift(other), self)

    def __mul__(self, other: Any) -> Expr:
        return written(mul, self, lift(other))

    def __rmul__(self, other: Any) -> Expr:
        return written(mul, lift(other), self)

    def __truediv__(self, other: Any) -> Expr:
        return written(div, self, lift(other))

    def __rtruediv__(self, other: Any) -> Expr:
        return written(div, lift(other), self)

    def __neg__(self) -> Expr:
        return mul(const(-1), self)

    def __abs__(self) -> Expr:
        return unary("abs", self)

    def __pow__(self, exponent: Any) -> Expr:
        return written(functools.partial(power, exponent=exponent), self)

    def __rpow__(self, base: Any) -> Expr:
        raise TypeError(f"a formula raises to powers that are numbers, not to {self}; write exp(log(a) * x)")

    def __lt__(self, other: Any) -> Expr:
        return pointwise("lt", self, lift(other))

    def __le__(self, other: Any) -> Expr:
        return pointwise("le", self, lift(other))

    def __gt__(self, other: Any) -> Expr:
        return pointwise("gt", self, lift(other))

    def __ge__(self, other: Any) -> Expr:
        return pointwise("ge", self, lift(other))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Expr):
            return self is other
        raise TypeError("a formula has no ==; write (x >= a) * (x <= a), or use where with < and >")

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("a formula cannot branch on the value of an expression; use where(condition, a, b)")

    def __repr__(self) -> str:
        return render(self)

    @property
    def is_part(self) -> bool:
        """True where this leaf, or named output, has only a part of its tensor's features."""
        return self.has_features and self.width != self.attrs[-1]


MARKS = ("value", "broadcast", "detach", "quantize_gradient")
_NOT_IN_KERNELS = (*MARKS, "quantize")


def make(op: str, args: tuple[Expr, ...], attrs: tuple[Any, ...], axes: Axes, width: int) -> Expr:
    """Return the one node with these fields."""
    told = repr(attrs) if attrs else "()"  # by their text, as 0.0 and -0.0 are equal
    found = _interned.get(key := (op, args, told, axes, width))
    if found is not None:
        return found
    text = f"{op}|{told}|{int(axes)}|{width}|{','.join([a.digest for a in args])}"
    node = Expr()
    node.op, node.args, node.attrs, node.axes, node.width = op, args, attrs, axes, width
    node.digest = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
    node.has_features = axes in _WITH_FEATURES
    node.depth, node.widest = 0, width if node.has_features else 0
    node.unit = 0 if op == "concat" else node.widest
    node.marked, node.unmarked = op in _NOT_IN_KERNELS, None
    wide = False
    for a in args:
        node.depth, node.widest = max(node.depth, a.depth), max(node.widest, a.widest)
        node.unit = math.gcd(node.unit, a.unit)
        node.marked, wide = node.marked or a.marked, wide or a.has_features
    node.reduces = wide and not node.has_features  # row reductions alone lose the features
    node.depth += node.reduces
    _interned[key] = node
    return node


# ---------------------------------------------------------------------------------------------- leaves


def const(value: float | int | Fraction) -> Expr:
    """A number; whole and rational numbers are exact.

    An exact zero is nothing, and nothing times x is nothing; 0.0 is a number that a formula writes, and 0.0 * NaN NaN.
    """
    if isinstance(value, float) and value.is_integer() and 0 < abs(value) < 2**53:
        value = int(value)
    if isinstance(value, int):
        value = Fraction(value)
    return make("const", (), (value,), Axes.NONE, 1)


ZERO = const(0)
ONE = const(1)


def lift(value: Any) -> Expr:
    """An expression as it is, a number as a constant."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (int, float, Fraction)):
        return const(value or 0.0)
    if isinstance(value, Real):  # numpy's
        return const(float(value) or 0.0)
    tensor = "; name the tensor as an argument, compute(self, x, weight), and it is there" * hasattr(value, "dtype")
    raise TypeError(f"a formula combines expressions and numbers, not {type(value).__name__}{tensor}")


def leaf(name: str, axes: Axes, width: int = 1) -> Expr:
    """A tensor that is read: its name, the offset of this part, its full width."""
    return make("input", (), (name, 0, width), axes, width if axes & Axes.FEATURE else 1)


def keep_leaf(name: str, threshold: int, axes: Axes, width: int) -> Expr:
    """1 where 16 random bits of the stream `name` are >= threshold, else 0."""
    return make("keep", (), (name, threshold, 0, width), axes, width if axes & Axes.FEATURE else 1)


def value(name: str, inner: Expr) -> Expr:
    """A named op output: simplification stops here, because this is what can be stored and read again."""
    if inner.op in ("input", "const"):
        return inner
    return make("value", (inner,), (name, 0, inner.width), inner.axes, inner.width)


def is_const(e: Expr, number: float | None = None) -> bool:
    """True where `e` is a constant (equal to `number`, when one is given)."""
    return e.op == "const" and (number is None or e.attrs[0] == number)


_SMALLEST, _LARGEST = 2.0**-64, 2.0**64
_ONCE = Fraction(1)


def may_move(number: float | Fraction) -> bool:
    """True where a factor may be joined with others, as if a float32 had any exponent.

    One that is 0.0, infinite or of an extreme size stays where it is: x * 1e20 * 1e20 is 0 where x is, x * 1e40 is NaN.
    """
    return _SMALLEST <= abs(float(number)) <= _LARGEST


def is_scaled(e: Expr) -> bool:
    """True for a multiple or quotient by a number that may not move."""
    number = e.args[0 if e.op == "mul" else 1] if e.op in ("mul", "div") else ONE
    return number.op == "const" and not may_move(number.attrs[0])


# ------------------------------------------------------------------------------------------- pointwise


def _join(args: tuple[Expr, ...]) -> tuple[Axes, int]:
    axes, width = Axes.NONE, 0
    for a in args:
        axes = _OR[axes][a.axes]
        if a.has_features and a.width != width:
            if width:
                few, many = sorted({a.width for a in args if a.has_features})[:2]
                raise ValueError(f"a formula mixes the feature widths {few} and {many}")
            width = a.width
    return axes, width or 1


def pointwise(op: str, *args: Expr, attrs: tuple[Any, ...] = ()) -> Expr:
    """A pointwise node; concats among its arguments float up to the stores."""
    axes, width = _join(args)
    counts = [len(a.args) for a in args if a.op == "concat"]
    if counts and (pieces := math.lcm(*counts)) > 1:
        columns = [tile(a, pieces) for a in args]
        return concat([rebuild(op, tuple(c[k] for c in columns), attrs) for k in range(pieces)], width)
    return make(op, args, attrs, axes, width)


def _sorted(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return (a, b) if (a.op != "const", a.digest) <= (b.op != "const", b.digest) else (b, a)


def coefficient(e: Expr) -> tuple[Any, Expr]:
    """`e` as number * rest."""
    if e.op == "const":
        return e.attrs[0], ONE
    if e.op == "mul" and e.args[0].op == "const" and not is_scaled(e):
        return e.args[0].attrs[0], e.args[1]
    return _ONCE, e


def add(a: Expr, b: Expr) -> Expr:
    if is_const(a, 0):
        return b
    if is_const(b, 0):
        return a
    ca, ra = coefficient(a)
    cb, rb = coefficient(b)
    if ra is rb:
        return mul(const(ca + cb or 0), ra)
    if ca is cb is _ONCE:
        return pointwise("add", *_sorted(a, b))
    if cb < 0 and rb is not ONE:
        return sub(a, mul(const(-cb), rb))
    if ca < 0 and ra is not ONE:
        return sub(b, mul(const(-ca), ra))
    return pointwise("add", *_sorted(a, b))


def sub(a: Expr, b: Expr) -> Expr:
    if is_const(b, 0):
        return a
    if is_const(a, 0):
        return mul(const(-1), b)
    ca, ra = coefficient(a)
    cb, rb = coefficient(b)
    if ra is rb:
        return mul(const(ca - cb or 0), ra)
    if cb < 0:
        return add(a, mul(const(-cb), rb))
    return pointwise("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    if a is ZERO or b is ZERO:
        return ZERO
    ca, ra = coefficient(a)
    cb, rb = coefficient(b)
    if ca is cb is _ONCE:
        return pointwise("mul", *_sorted(a, b))
    alone = ca is _ONCE or cb is _ONCE
    c = (cb if ca is _ONCE else ca) if alone else ca * cb
    if not all(map(may_move, (c,) if alone else (ca, cb, c))) and not ra is rb is ONE:
        return pointwise("mul", *_sorted(a, b))
    rest = rb if ra is ONE else ra if rb is ONE else pointwise("mul", *_sorted(ra, rb))
    if rest is ONE:
        return const(c)
    return rest if c == 1 else pointwise("mul", const(c), rest)


def div(a: Expr, b: Expr) -> Expr:
    if b.op == "const":
        return mul(const(1 / b.attrs[0]), a) if may_move(b.attrs[0]) else pointwise("div", a, b)
    if a is ZERO:
        return ZERO
    ca, ra = coefficient(a)
    if ca != 1 and ra is not ONE:
        return mul(const(ca), div(ra, b))
    return pointwise("div", a, b)


def unary(op: str, a: Expr, attrs: tuple[Any, ...] = ()) -> Expr:
    return pointwise(op, a, attrs=attrs)


def binary(op: str, a: Expr, b: Expr) -> Expr:
    return a if a is b else pointwise(op, a, b)


# Powers that other nodes are, as they are in torch.pow; of -1/2 the gradient at -0 and -infinity is rsqrt's.
_POWERS: dict[Any, Callable[[Expr], Expr]] = {
    0: lambda a: ONE,
    1: lambda a: a,
    2: lambda a: mul(a, a),
    3: lambda a: mul(mul(a, a), a),
    -1: lambda a: div(ONE, a),
    0.5: lambda a: unary("sqrt", a),
    -0.5: lambda a: unary("rsqrt", a),
}


def power(a: Expr, exponent: Any) -> Expr:
    """a to the power of a finite number, as torch.pow: NaN for a finite a < 0, unless the number is whole."""
    if not isinstance(exponent, Real) or not math.isfinite(exponent):
        raise TypeError(
            f"a formula raises to powers that are finite numbers, not to {exponent!r}; write exp(y * log(x))"
        )
    known = _POWERS.get(exponent)
    return unary("pow", a, (float(exponent),)) if known is None else known(a)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    if a is b:
        return a
    if condition.op == "const":
        return a if condition.attrs[0] else b
    return pointwise("where", condition, a, b)


def broadcast(e: Expr, axes: Axes, width: int = 1) -> Expr:
    """`e` for every place along `axes` (`width` features); kernels do not see it."""
    if e.axes & axes == axes:
        return e
    return make("broadcast", (e,), (), e.axes | axes, e.width if e.has_features else width)


def written(build: Callable[..., Expr], *args: Expr) -> Expr:
    """Expression of a formula: simplified, but over the features of all its arguments, as it is on tensors.

    x - x is 0 for each feature, so that a row sum of x - x + m counts m once for each; and NaN where x is not finite.
    """
    found = build(*args)
    if found is ZERO:
        found = mul(const(0.0), args[0])
    if found.has_features:
        return found
    axes, width = _join(args)
    return broadcast(found, Axes.FEATURE, width) if axes & Axes.FEATURE else found


# ----------------------------------------------------------------------------------- parts of the row


def concat(parts: Iterable[Expr], width: int | None = None) -> Expr:
    """The parts side by side along the features; all have one width.

    `width`, that of the whole, is needed only where no part has features (adjoints that are broadcast).
    """
    given = list(parts)
    if len(given) == 1 or all(is_const(p) and p is given[0] for p in given):
        return given[0]
    items = [q for p in given for q in (p.args if p.op == "concat" else (p,))]
    widths = {p.width for p in items if p.has_features}
    whole = {p.width for p in given if p.has_features}
    if len(widths) > 1 and len(whole) == 1:
        unit = math.gcd(*widths)
        items = [q for p in given for q in tile(p, next(iter(whole)) // unit)]
        widths = {unit}
    if not widths and width is not None:
        widths = {width // len(items)}
    if len(widths) != 1:
        raise ValueError(f"concat needs parts of one feature width, got {sorted(widths) or 'none with features'}")
    axes = Axes.FEATURE
    for p in items:
        axes |= p.axes
    return make("concat", tuple(items), (), axes, widths.pop() * len(items))


def tile(e: Expr, pieces: int) -> tuple[Expr, ...]:
    """`e` cut along the features into `pieces` equal parts."""
    return tuple(part(e, k, pieces) for k in range(pieces))


def part(e: Expr, index: int, pieces: int) -> Expr:
    """Part `index` of `pieces` of `e`, pushed down to the leaves, where it is an offset."""
    return deep(_part(e, index, pieces, {}))


def _part(e: Expr, index: int, pieces: int, done: dict[tuple[int, int, int], Expr]) -> Deep[Expr]:
    if pieces == 1 or not e.has_features:
        return e
    key = (id(e), index, pieces)
    if key not in done:
        done[key] = yield _cut(e, index, pieces, done)
    return done[key]


def _parts(of: Iterable[tuple[Expr, int]], pieces: int, done: dict[tuple[int, int, int], Expr]) -> Deep[list[Expr]]:
    found = []
    for e, index in of:
        found.append((yield _part(e, index, pieces, done)))
    return found


def _cut(e: Expr, index: int, pieces: int, done: dict[tuple[int, int, int], Expr]) -> Deep[Expr]:
    if e.width % pieces:
        raise ValueError(f"cannot split {e.width} features into {pieces} equal parts")
    width = e.width // pieces
    if e.op in ("input", "keep", "value"):
        *head, offset, full = e.attrs
        attrs = (*head, offset + index * width, full)
        inner = yield _parts([(a, index) for a in e.args], pieces, done)
        return make(e.op, tuple(inner), attrs, e.axes, width)
    if e.op == "broadcast":
        return broadcast((yield _part(e.args[0], index, pieces, done)), e.axes, width)
    if e.op == "concat":
        count = len(e.args)
        if count % pieces == 0:
            each = count // pieces
            return concat(e.args[index * each : (index + 1) * each], width)
        if pieces % count == 0:
            each = pieces // count
            return (yield _part(e.args[index // each], index % each, each, done))
        finer = math.lcm(count, pieces)
        each = finer // pieces
        return concat((yield _parts([(e, k) for k in range(index * each, (index + 1) * each)], finer, done)), width)
    args = yield _parts([(a, index) for a in e.args], pieces, done)
    return rebuild(e.op, tuple(args), e.attrs)


_BUILDERS: dict[str, Callable[..., Expr]] = {"add": add, "sub": sub, "mul": mul, "div": div, "where": where}


def rebuild(op: str, args: tuple[Expr, ...], attrs: tuple[Any, ...]) -> Expr:
    """The pointwise node `op` over new arguments, simplified as if written so."""
    if op in _BUILDERS:
        return _BUILDERS[op](*args)
    if op == "value":
        return value(attrs[0], args[0])
    return pointwise(op, *args, attrs=attrs)
