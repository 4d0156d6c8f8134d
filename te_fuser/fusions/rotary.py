"""Heads that turn by their position on CUDA, as one kernel each way: RotaryEmbedding; HeadNorm and RotaryByAngles.

RotaryEmbedding runs with the Bias of the projection before it, y = turn(x + b): backward turns dy back and adds up its
columns for the bias in the same pass; for a product of 8 bits it stores 8 bits. HeadNorm and RotaryByAngles run in
either order, each alone too, and backward makes the gradients of the norm's parameters in that pass: of a norm it reads
the input again; a rotation alone keeps nothing but its angles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from te_fuser.dtypes import GENERATED, text_of
from te_fuser.fusions.declaration import Details, chosen, fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.pattern import OneOf, Optional, PatternPart, Repeat
from te_fuser.kernels import packed_heads
from te_fuser.kernels import qk_norm_rope as kernel
from te_fuser.kernels.heads_pass import Scaled, reason_not
from te_fuser.kernels.qk_norm_rope import WEIGHTS, Groups, Norming, PassInputs, Turned, TurnedPass, Turning
from te_fuser.ops.attention.head_norm import HeadNorm
from te_fuser.ops.attention.heads import LAYOUTS
from te_fuser.ops.bias_scale import Bias
from te_fuser.ops.casts import QuantizeGradient
from te_fuser.ops.rotary_by_angles import RotaryByAngles
from te_fuser.ops.rotary_embedding import RotaryEmbedding
from te_fuser.ops.sharing import Context

# Of the ops before what reads heads, those that a pass over their gradients takes in.
BEFORE = (Optional(QuantizeGradient), Optional(Bias))
_FORWARD, _BACKWARD = (Optional(Bias), RotaryEmbedding), (*BEFORE, RotaryEmbedding)


def rotation_of(op: RotaryEmbedding) -> packed_heads.Rotation:
    """Rotation of heads by an op."""
    return packed_heads.Rotation(op.rotary_dim, op.base, op.style, op.position_offset, op._context)


def why_no_kernel(m: Match) -> str | None:
    """Reason why the kernel over packed heads cannot run on what enters the match."""
    bias, why = bias_of(m), why_not_scaled(m)
    return why or m.why_no_cuda() or reason_not(m.dtype, m.dtype if bias is None else m[bias].own_dtype_of("bias"))


def why_not_scaled(m: Match) -> str | None:
    """Reason why no kernel stands for QuantizeGradient at the match's beginning."""
    if m[0].kind is QuantizeGradient and m[0].own is not None:
        return "its scale follows from the gradient that it quantizes, which has to be there first"
    if m[0].kind is QuantizeGradient and not m[0].reads("amax"):
        return "its kernel raises amax, and nobody bound one to QuantizeGradient"
    return None


def bias_of(m: Match | FusionCall) -> int | None:
    """Index of the bias among the matched ops; None where there is none."""
    return next((k for k in range(min(len(m), len(BEFORE))) if m[k].kind is Bias), None)


def quantizes(m: Match | FusionCall) -> torch.dtype | None:
    """The dtype of 8 bits in which the gradient of what enters the match is wanted."""
    return m[0].dtype if m[0].kind is QuantizeGradient else None  # type: ignore[no-any-return]


def scaled_by(m: FusionCall) -> Scaled | None:
    """Scaling by which the kernel stores that gradient; None where it is not quantized."""
    dtype = quantizes(m)
    return None if dtype is None else Scaled(dtype, m["0.scale"], m["0.amax"])


def _rotary(m: Match | FusionCall) -> RotaryEmbedding:
    return cast(RotaryEmbedding, m[len(m) - 1].op)


def _when_packed(m: Match) -> bool | str:
    return why_no_kernel(m) or True


def cost_back(m: Match) -> Cost:
    """Cost of one pass over the gradient."""
    return Cost(m.x.nbytes, gradient_bytes(m))


def gradient_bytes(m: Match) -> float:
    """Bytes of the gradient of what enters the match."""
    dtype = quantizes(m)
    return m.x.nbytes if dtype is None else m.x.nbytes * dtype.itemsize / m.dtype.itemsize


def _compiles_packed(m: Match, direction: str, needed: frozenset[str]) -> Iterable[packed_heads.PackedPass]:
    op, place = _rotary(m), bias_of(m)
    bias = None if place is None else m[place].dtype_of("bias")
    if direction == "backward":
        sums = bias if f"{place}.bias" in needed else None
        stored = quantizes(m)
        yield packed_heads.PackedPass.of(op.packed, m.dtype, rotation_of(op), back=True, sums=sums, stored=stored)
    else:
        yield packed_heads.PackedPass.of(op.packed, m.dtype, rotation_of(op), bias=bias)


@fusion(
    forward=_FORWARD,
    when=_when_packed,
    cost=lambda m: Cost(m.x.nbytes, m.x.nbytes),
    details=Details(compiles=_compiles_packed),
)
def rotary_embedding_forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """One pass that adds the bias, if there is one, and turns queries and keys."""
    op, bias = _rotary(m), m["0.bias"] if len(m) > 1 else None
    return packed_heads.turn(op.packed, rotation_of(op), x, bias=bias)[0]


@fusion(backward=_BACKWARD, when=_when_packed, cost=cost_back, details=Details(compiles=_compiles_packed))
def rotary_embedding_backward(m: FusionCall, dy: torch.Tensor) -> Any:
    """One pass that turns back, and adds up columns for the gradient of the bias."""
    op, bias = _rotary(m), f"{bias_of(m)}.bias"
    sums, scaled = m[bias].dtype if m.needs(bias) else None, scaled_by(m)
    dx, dbias = packed_heads.turn(op.packed, rotation_of(op), dy, back=True, sums=sums, scaled=scaled)
    return dx if sums is None else (dx, {bias: dbias})


_NORMED = Optional(RotaryByAngles), HeadNorm, Optional(RotaryByAngles)
_GIVEN = ("angles", "key_angles", "cos", "sin", "starts", "offsets")


@dataclass(frozen=True)
class _Covered:
    """Summary of a match's ops: all that bodies need beside a call's tensors.

    Attributes:
        rotation, norm, bias_at: the places of these in the match, if they are there; `bias` is the dtype of that.
        tables: names of the rotation's inputs that are given: angles of queries, of keys; or cosines and sines.
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
        """Pass that forward launches."""
        return TurnedPass(self.heads, self.dtype, self.turning, self.norming)

    def backward_pass(self, needed: Iterable[str]) -> TurnedPass:
        """Pass that backward launches where these gradients are needed."""
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
        """One pass back, with the gradients of parameters."""
        c, wanted = self._covered, tuple(name for name in self._names if m.needs(name))
        if wanted not in self._backward:
            self._backward[wanted] = self._called(c.backward_pass(wanted))
        p, run = self._backward[wanted]
        read = None if c.norm is None else m[self._read]
        dx, sums = run(dy, c.given(m, p, dy), read=read, scaled=scaled_by(m))
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
    at, stored = places.get(Bias), quantizes(m)
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
    """Reason why the kernel cannot run on what the match covers."""
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
    why = kernel.reason_not(next(iter(groups)).head_dim, *dtypes)
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


_TURNED_HEADS: dict[str, Any] = {
    "when": lambda m: m.why_no_cuda() or why_not_scaled(m) or _why_not(m) or True,
    "compiles": lambda m, direction, needed: [
        _covered(m).forward_pass() if direction == "forward" else _covered(m).backward_pass(needed)
    ],
    "choose": lambda m, method: getattr(_turned(_covered(m)), method),
}
chosen(
    "turned_heads_forward",
    "forward",
    [Repeat(OneOf(HeadNorm, RotaryByAngles))],
    "One pass that norms query and key heads and turns them, in the order of the list.",
    cost=lambda m: Cost(m.x.nbytes, m.x.nbytes),
    **_TURNED_HEADS,
)
# Backward: what it is called, its pattern, what it does, what it reads beside what is given, of how many ops at most.
_BACKWARD_ROWS: tuple[tuple[str, tuple[PatternPart, ...], str, tuple[str, ...], int], ...] = (
    (
        "",
        (*BEFORE, RotaryByAngles),
        "One pass that turns back, and adds up columns for the gradient of the bias.",
        (),
        3,
    ),
    (
        "norm_",
        _NORMED,
        "One pass back through a norm of heads and a rotation, with the gradients of the norm's parameters.",
        ("input",),
        3,
    ),
    (
        "bias_norm_",
        (Bias, *_NORMED),
        "The same with the columns added up for the gradient of the bias before them.",
        ("0.output",),
        4,
    ),
)
for _name, _pattern, _doc, _read, _ops in _BACKWARD_ROWS:
    chosen(
        f"turned_heads_{_name}backward",
        "backward",
        _pattern,
        _doc,
        cost=(lambda m: Cost(2 * m.x.nbytes, m.x.nbytes)) if _read else cost_back,
        reads=(*_read, *(f"{k}.{name}?" for k in range(_ops) for name in (*_GIVEN, "weight", "key_weight"))),
        **_TURNED_HEADS,
    )
