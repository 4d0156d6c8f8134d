"""HeadNorm and RotaryByAngles on CUDA as one kernel over heads, in either order, each alone too.

Backward turns dy back and makes the gradients of the norm's parameters, and of the Bias of the projection before, in
the same pass. Of a norm it reads the input again; a rotation alone keeps nothing but its angles, and stores 8 bits for
a product of 8 bits before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from te_fuser.dtypes import GENERATED, text_of
from te_fuser.fusions import rotary_embedding
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.pattern import OneOf, Optional, Repeat
from te_fuser.kernels import turned_heads as kernel
from te_fuser.kernels.turned_heads import WEIGHTS, Groups, Norming, PassInputs, Turned, TurnedPass, Turning
from te_fuser.ops.attention.head_norm import HeadNorm
from te_fuser.ops.attention.heads import LAYOUTS
from te_fuser.ops.bias import Bias
from te_fuser.ops.context import Context
from te_fuser.ops.rotary_by_angles import RotaryByAngles

_NORMED = Optional(RotaryByAngles), HeadNorm, Optional(RotaryByAngles)
_GIVEN = ("angles", "key_angles", "cos", "sin", "starts", "offsets")


@dataclass(frozen=True)
class _Covered:
    """What a match says of its ops: all that bodies need beside a call's tensors.

    Attributes:
        rotation, norm: the places of both in the match, if they are there.
        tables: names of the rotation's inputs that are given: angles of queries, of keys; or cosines and sines.
        starts, offsets: whether they are given.
        norm_names: the norm's parameters.
        bias, bias_at: the dtype of the bias before them and its place, if there is one.
        stored: the dtype of 8 bits in which the gradient of the input is wanted, if it is.
        context: how ranks cut the sequence.
    """

    heads: Groups
    dtype: torch.dtype
    layout: str
    rotation: int | None
    norm: int | None
    tables: tuple[str, ...]
    turning: Turning | None
    norming: Norming | None
    norm_names: tuple[str, ...]
    eps: float
    bias: torch.dtype | None
    bias_at: int | None = None
    stored: torch.dtype | None = None
    context: Context = Context()

    def forward_pass(self) -> TurnedPass:
        """What forward launches."""
        return TurnedPass(self.heads, self.dtype, self.turning, self.norming)

    def backward_pass(self, needed: Iterable[str]) -> TurnedPass:
        """What backward launches where these gradients are needed."""
        wanted = set(needed)
        names = tuple(n for n in WEIGHTS if n in self.norm_names and f"{self.norm}.{n}" in wanted)
        columns = self.bias if f"{self.bias_at}.bias" in wanted else None
        return TurnedPass(self.heads, self.dtype, self.turning, self.norming, True, columns, names, self.stored)

    def given(self, m: FusionCall, p: TurnedPass, x: torch.Tensor) -> PassInputs:
        """The tensors that a pass over x, or its gradient, reads of a call."""
        turning, at = self.turning, self.rotation
        starts = m[f"{at}.starts"] if turning is not None and turning.starts else None
        offsets = m[f"{at}.offsets"] if turning is not None and turning.offsets else None
        weights = {name: m[f"{self.norm}.{name}"] for name in p.weights}
        tables = [m[f"{at}.{name}"] for name in self.tables]
        if self.context.group.size > 1:
            positions = x.shape[LAYOUTS[self.layout][0]]
            tables = [self.context.own(table, positions) for table in tables]
        return PassInputs(tables, starts, offsets, weights)


class _QKNormRope:
    """The bodies of a match."""

    def __init__(self, covered: _Covered) -> None:
        self._covered = covered
        self._forward = self._called(covered.forward_pass())
        bias = [] if covered.bias is None else [f"{covered.bias_at}.bias"]
        self._names = [*bias, *(f"{covered.norm}.{name}" for name in covered.norm_names)]
        self._read = "0.output" if covered.bias is not None else "input"
        self._backward: dict[tuple[str, ...], tuple[TurnedPass, Turned]] = {}  # by the gradients that are needed

    def _called(self, p: TurnedPass) -> tuple[TurnedPass, Turned]:
        return p, Turned(p, self._covered.layout, self._covered.eps)

    def forward(self, m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        """One pass that norms and turns."""
        p, run = self._forward
        return run(x, self._covered.given(m, p, x))[0]

    def backward(self, m: FusionCall, dy: torch.Tensor) -> Any:
        """The same back, with the gradients of parameters."""
        c, wanted = self._covered, tuple(name for name in self._names if m.needs(name))
        if wanted not in self._backward:
            self._backward[wanted] = self._called(c.backward_pass(wanted))
        p, run = self._backward[wanted]
        read = None if c.norm is None else m[self._read]
        dx, sums = run(dy, c.given(m, p, dy), read=read, scaled=rotary_embedding.scaled_by(m), later=m.later)
        names = [*([f"{c.bias_at}.bias"] if p.columns else []), *(f"{c.norm}.{n}" for n in p.gradients)]
        return (dx, dict(zip(names, sums, strict=True))) if names else dx


# One for all matches that are alike, so that plans of several lengths that run the same are seen to.
_turned = functools.lru_cache(maxsize=512)(_QKNormRope)


# ------------------------------------------------------------------------------------------ what is matched


def _places(m: Match) -> dict[type, int]:
    return {m[k].kind: k for k in range(len(m))}


def _groups(op: Any) -> Groups:
    return Groups.of(op.heads, op.kv_heads, op.head_dim, op.packing)


def _covered(m: Match) -> _Covered:
    places = _places(m)
    rotation, norm = places.get(RotaryByAngles), places.get(HeadNorm)
    last = norm is not None and rotation is not None and norm > rotation
    op = m[len(m) - 1].op
    tables: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    turning, norming, layout, eps, context = None, None, "tokens", 0.0, Context()
    if rotation is not None:
        rotary, inputs = cast(RotaryByAngles, m[rotation].op), m[rotation].inputs
        context = rotary._context
        tables = _tables(inputs)
        turning, layout = _turning(rotary, inputs, tables), rotary.layout
    if norm is not None:
        normed = cast(HeadNorm, m[norm].op)
        names, eps = tuple(normed.parameter_shapes()), normed.eps
        dtype = m[norm].dtype_of(names[0]) if names else None
        norming = Norming(normed.norm, normed.zero_centered_gamma and bool(names), last, dtype)
    at, stored = places.get(Bias), rotary_embedding.quantizes(m)
    bias = None if at is None else m[at].dtype_of("bias")
    ops = rotation, norm, tables, turning, norming, names, eps, bias, at
    return _Covered(_groups(op), m.dtype, layout, *ops, stored, context)


def _tables(inputs: Any) -> tuple[str, ...]:
    names = ("cos", "sin") if "cos" in inputs else ("angles", "key_angles")
    return tuple(name for name in names if name in inputs)


def _turning(op: RotaryByAngles, inputs: Any, tables: Sequence[str]) -> Turning:
    pair = "key_angles" in op.named_inputs()
    kind = "cos_sin" if "cos" in tables else "pair" if len(tables) == 2 else "angles"
    queries, keys = (not pair or "angles" in tables), (not pair or "key_angles" in tables)
    # The kernel reads no float64: angles of that are rounded to float32 first, as the op rounds them.
    dtype = next((inputs[name].dtype for name in tables if inputs[name].dtype in GENERATED), torch.float32)
    starts, offsets = (inputs[name].dtype if name in inputs else None for name in ("starts", "offsets"))
    rotary = int(inputs[tables[0]].shape[3])
    return Turning(rotary, op.style, kind, queries, keys, dtype, starts, offsets, op.padded)


def _why_not(m: Match) -> str | None:
    """Why the kernel cannot run on what the match covers; None where it can."""
    places = _places(m)
    if len(places) < len(m):
        return "it norms once and turns once, and here one of them is done twice"
    ops = [m[k].op for k in range(len(m)) if m[k].kind in (HeadNorm, RotaryByAngles)]
    groups = {_groups(op) for op in ops}
    if len(groups) > 1:
        return f"heads are normed and turned as they lie differently: {', '.join(map(str, groups))}"
    rotation = places.get(RotaryByAngles)
    if rotation is not None and m[rotation].op.offsets and m[rotation].op.context.size > 1:
        return "ranks cut sequences that lie one behind the other, and it counts positions from the first row"
    if rotation is not None and len(m) > 1 and len(m.x.shape) != (2 if m[rotation].op.offsets else 3):
        return f"it turns rows of positions and samples, the input is {len(m.x.shape)}-dimensional"
    norm, dtypes = places.get(HeadNorm), [m.dtype]
    if norm is not None:
        names = tuple(m[norm].op.parameter_shapes())
        found = {m[norm].dtype_of(name) for name in names}
        if len(found) > 1:
            return f"its norm's parameters are of several dtypes: {', '.join(sorted(map(text_of, found)))}"
        dtypes += found
    if Bias in places:
        dtypes.append(m[places[Bias]].dtype_of("bias"))
    head_dim = next(iter(groups)).head_dim
    why = kernel.reason_not(head_dim, *dtypes)
    return why if why or rotation is None else _why_not_these_angles(m, m[rotation].inputs)


def _why_not_these_angles(m: Match, inputs: Any) -> str | None:
    tables = [inputs[name] for name in _tables(inputs)]
    if len({(table.shape[3], table.dtype) for table in tables}) > 1:
        got = " and ".join(f"{text_of(table.dtype)} [.., {table.shape[3]}]" for table in tables)
        return f"it takes two tables of one dtype and size, there are {got}"
    whole = [inputs[name] for name in ("starts", "offsets") if name in inputs]
    if len({spec.dtype for spec in whole}) > 1 or any(spec.dtype not in kernel.WHOLE for spec in whole):
        return f"starts and offsets are int32 or int64, both alike, got {', '.join(text_of(s.dtype) for s in whole)}"
    away = next((spec.device for spec in (*tables, *whole) if spec.device != m.device), None)
    return None if away is None else f"its angles, starts or offsets are on {away}, the input on {m.device}"


def _when(m: Match) -> bool | str:
    return m.why_no_cuda() or rotary_embedding.why_not_scaled(m) or _why_not(m) or True


def _cost_reading(m: Match) -> Cost:
    return Cost(2 * m.x.nbytes, m.x.nbytes)


def _compiles(m: Match, direction: str, needed: frozenset[str]) -> Iterable[TurnedPass]:
    covered = _covered(m)
    yield covered.forward_pass() if direction == "forward" else covered.backward_pass(needed)


def _choose(m: Match, method: str) -> Callable[..., Any]:
    return getattr(_turned(_covered(m)), method)  # type: ignore[no-any-return]


def _reads(ops: int) -> tuple[str, ...]:
    return tuple(f"{k}.{name}?" for k in range(ops) for name in (*_GIVEN, "weight", "key_weight"))


def _details(ops: int) -> Details:
    sums = tuple(f"{k}.{name}" for k in range(ops) for name in WEIGHTS)
    return Details(compiles=_compiles, choose=_choose, sums=sums)


@fusion(
    forward=[Repeat(OneOf(HeadNorm, RotaryByAngles))],
    when=_when,
    cost=lambda m: Cost(m.x.nbytes, m.x.nbytes),
    details=Details(compiles=_compiles, choose=_choose),
)
def turned_heads_forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """One pass that norms query and key heads and turns them, in the order of the list."""
    raise NotImplementedError  # `choose` gives what runs


@fusion(
    backward=[*rotary_embedding.BEFORE, RotaryByAngles],
    when=_when,
    cost=rotary_embedding.cost_back,
    reads=_reads(3),
    details=_details(3),
)
def turned_heads_backward(m: FusionCall, dy: torch.Tensor) -> Any:
    """One pass that turns back, and adds up columns for the gradient of the bias."""
    raise NotImplementedError  # `choose` gives what runs


@fusion(backward=_NORMED, when=_when, cost=_cost_reading, reads=("input", *_reads(3)), details=_details(3))
def turned_heads_norm_backward(m: FusionCall, dy: torch.Tensor) -> Any:
    """One pass back through a norm of heads and a rotation, with the gradients of the norm's parameters."""
    raise NotImplementedError  # `choose` gives what runs


@fusion(
    backward=(Bias, *_NORMED),
    when=_when,
    cost=_cost_reading,
    reads=("0.output", *_reads(4)),
    details=_details(4),
)
def turned_heads_bias_norm_backward(m: FusionCall, dy: torch.Tensor) -> Any:
    """The same with the columns added up for the gradient of the bias before them."""
    raise NotImplementedError  # `choose` gives what runs
