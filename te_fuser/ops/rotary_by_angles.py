"""RotaryByAngles: rotary position embedding whose angles, or cosines and sines, the call gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fuser.ops import op_table
from te_fuser.ops.attention.dot_product_attention import LAYOUTS, TOKENS, PackedHeads, one_of
from te_fuser.ops.attention.head_parallel import OfPositions
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_features, check_floating, check_name, count, may_look, yes_or_no
from te_fuser.ops.rotary_embedding import STYLES

_TABLES = ("angles", "key_angles", "cos", "sin")


@op_table.idles_without.row(_TABLES)
class RotaryByAngles(OfPositions):
    """Rotate pairs of features of heads by angles of the call: (a, b) -> (a cos - b sin, b cos + a sin).

    Angles are [L, 1 or B, 1, D] in every layout, for at least as many positions L as x has, and for the first D (even)
    features of a head; a and b have an angle each. Without angles in a call, y = x.

    Args:
        head_dim: features of one head.
        heads: query heads.
        kv_heads: key and value heads packed with them, of which the keys turn too; None: x holds heads alone.
        angles: the name of the angles in the call, or two, of the queries' and the keys'; cosines and sines by
            `cos_sin` instead.
        cos_sin: the names of both.
        starts: the name of whole numbers [B]: the position of each sample's first row; where not given, 0.
        offsets: for layout="tokens", the name of whole numbers [N + 1]: x is [tokens, features], and sequence n begins
            with token offsets[n].
        padded: rows at positions without angles are padding, and use the last angles. Otherwise they raise a ValueError
            on a CPU and become NaN on a GPU, which would have to wait for an error.
        layout, packing, style: see `RotaryEmbedding`.

    Attributes:
        context: ranks that cut the sequence, which a list with an attention on such a part says by itself. Angles are
            those of whole sequences then, too.

    Raises:
        ValueError, TypeError: in a call, for tensors of other shapes or kinds.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """

    def __init__(
        self,
        head_dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        angles: str | tuple[str, str] = "rotary_pos_emb",
        cos_sin: tuple[str, str] | None = None,
        starts: str | None = None,
        offsets: str | None = None,
        padded: bool = False,
        layout: str = "sequence_first",
        packing: str = "interleaved",
        style: str = "half",
    ) -> None:
        super().__init__()
        one_of("layout", layout, (*LAYOUTS, TOKENS))
        if (layout == TOKENS) != (offsets is not None):
            raise ValueError(f'layout="tokens" takes offsets, and no other does, got {layout!r} with {offsets!r}')
        who = type(self).__name__
        count(who, "head_dim", head_dim)
        count(who, "heads", heads)
        if kv_heads is not None:
            count(who, "kv_heads", kv_heads)
            PackedHeads(heads, kv_heads, head_dim, "sequence_first", packing)
        self.head_dim, self.heads, self.kv_heads = head_dim, heads, kv_heads
        self.angles, self.cos_sin, self.starts, self.offsets = angles, cos_sin, starts, offsets
        self.layout, self.packing, self.padded = layout, packing, yes_or_no(who, "padded", padded)
        self.style = one_of("style", style, STYLES)
        for argument, names in (("angles", angles), ("cos_sin", cos_sin)):
            is_pair = isinstance(names, (tuple, list)) and len(names) == 2
            if not (names is None or isinstance(names, str) and argument == "angles" or is_pair):
                takes = "a name, or a pair of names" if argument == "angles" else "a pair of names"
                raise ValueError(f"{who} takes {takes} as {argument}, got {names!r}")
        for given in self.named_inputs().values():
            check_name(given.name)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        if self.cos_sin is not None:
            names = dict(zip(("cos", "sin"), self.cos_sin, strict=True))
        elif isinstance(self.angles, str):
            names = {"angles": self.angles}
        else:
            names = dict(zip(("angles", "key_angles"), self.angles, strict=True))
        names |= {name: getattr(self, name) for name in ("starts", "offsets") if getattr(self, name) is not None}
        return {argument: NamedInput(name, None, optional=True, gradient=False) for argument, name in names.items()}

    @property
    def sequence_dim(self) -> int:
        return LAYOUTS[self._order][0]

    def infer(self, x: Spec) -> Spec:
        """Spec of x, as it is."""
        if self.kv_heads is not None:
            packed = PackedHeads(self.heads, self.kv_heads, self.head_dim, self._order, self.packing)
            packed.check(type(self).__name__, self._lifted(x))
            return x
        check_floating(x)
        check_features(self, x, self.heads * self.head_dim)
        if len(self._lifted(x).shape) != 3:
            takes = "[tokens, features]" if self.offsets else "[S, B, features] or [B, S, features]"
            raise ValueError(f"RotaryByAngles takes {takes}, got {list(x.shape)}")
        return x

    @property
    def _order(self) -> str:
        return "sequence_first" if self.offsets else self.layout

    def _lifted(self, x: Spec) -> Spec:
        """Tokens as one sample."""
        tokens = self.offsets is not None and len(x.shape) == 2
        return replace(x, shape=(x.shape[0], 1, x.shape[1])) if tokens else x

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        x = self._lifted(x)
        if len(x.shape) != 3:
            return  # infer says what is wrong
        sequence, batch = (x.shape[k] for k in LAYOUTS[self._order])
        offsets = inputs.get("offsets")
        if self.offsets is not None:
            if offsets is None or len(offsets.shape) != 1 or offsets.dtype.is_floating_point:
                got = "none" if offsets is None else f"{offsets.dtype} {[*offsets.shape]}"
                raise ValueError(f"RotaryByAngles: {self.offsets} are whole numbers [sequences + 1], got {got}")
            sequence, starting = 0, offsets.shape[0] - 1
        else:
            starting, sequence = batch, sequence * self.context.size
        if ("cos" in inputs) != ("sin" in inputs):
            raise ValueError("RotaryByAngles takes cosines and sines together, got one of them alone")
        for name in (n for n in _TABLES if n in inputs):
            given = inputs[name]
            fits = len(given.shape) == 4 and given.shape[0] >= sequence and given.shape[1] in (1, batch)
            if not fits or given.shape[2] != 1 or given.shape[3] % 2 or not 0 < given.shape[3] <= self.head_dim:
                raise ValueError(
                    f"RotaryByAngles: {name} must be [{sequence} or more, 1 or {batch}, 1, D] with an even D of at "
                    f"most {self.head_dim}, got {list(given.shape)}"
                )
            if not given.dtype.is_floating_point:
                raise TypeError(f"RotaryByAngles: {name} are floating-point numbers, got {given.dtype}")
        starts = inputs.get("starts")
        if starts is not None and (starts.shape != (starting,) or starts.dtype.is_floating_point):
            raise ValueError(
                f"RotaryByAngles: starts are whole numbers [{starting}], got {starts.dtype} {list(starts.shape)}"
            )

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (
            Gradient(("input",), tuple(n for n in (*_TABLES, "starts", "offsets") if n in names), "input_gradient"),
        )

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The formula, recorded by autograd."""
        apart, together, made = STYLES[self.style].apart, STYLES[self.style].together, []
        for heads, table in self._spans(x, self._tables(call, x)):
            if table is None or not heads.numel():
                made.append(heads)
                continue
            cos, sin = table
            turning, others = heads[..., : cos.shape[-1]].to(cos.dtype), heads[..., cos.shape[-1] :]
            (a, b), (cos_a, cos_b), (sin_a, sin_b) = apart(turning), apart(cos), apart(sin)
            turned = together(a * cos_a - b * sin_a, b * cos_b + a * sin_b)
            made.append(torch.cat((turned.to(x.dtype), others), -1))
        return torch.cat(made, -2).view(x.shape)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """x with queries and keys turned."""
        return self._turned(call, x, 1)

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dy turned back."""
        return {"input": self._turned(call, dy, -1)}

    def _turned(self, call: OpCall, x: torch.Tensor, direction: int) -> torch.Tensor:
        """x turned, in one tensor that each span of heads is written into."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        tables = self._tables(call, x)
        for (source, table), (target, _) in zip(self._spans(x, tables), self._spans(y, tables), strict=True):
            turning = 0 if table is None else table[0].shape[-1]
            if turning < self.head_dim:
                target[..., turning:].copy_(source[..., turning:])
                source, target = source[..., :turning], target[..., :turning]
            if table is not None and x.numel():
                cos, sin = table
                self._turn(source, target, cos, sin, direction)
        return y

    def _turn(
        self, source: torch.Tensor, target: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int
    ) -> None:
        """Write heads turned into `target`, rounded once."""
        made, apart = target, STYLES[self.style].apart
        if target.dtype != cos.dtype:
            source, made = source.to(cos.dtype), torch.empty_like(target, dtype=cos.dtype)
        (a, b), (to_a, to_b), (cos_a, cos_b), (sin_a, sin_b) = apart(source), apart(made), apart(cos), apart(sin)
        if direction < 0:
            sin_a, sin_b = sin_b, sin_a
        torch.mul(a, cos_a, out=to_a).addcmul_(b, sin_a, value=-direction)
        torch.mul(b, cos_b, out=to_b).addcmul_(a, sin_b, value=direction)
        if made is not target:
            target.copy_(made)

    @property
    def _groups(self) -> int:
        return (self.kv_heads or 1) if self.packing == "interleaved" else 1

    def _spans(self, x: torch.Tensor, tables: tuple[Any, Any]) -> list[tuple[torch.Tensor, Any]]:
        """Heads one behind the other, [.., .., (groups,) heads, head_dim], and what they turn by."""
        groups = self._groups
        rows = x.shape[:2] if self.offsets is None else (x.shape[0], 1)
        count = x.shape[-1] // (groups * self.head_dim)
        whole = x.reshape(*rows, *((groups,) if groups > 1 else ()), count, self.head_dim)
        if self.kv_heads is None:
            return [(whole, tables[0])]
        queries, keys = self.heads // groups, self.kv_heads // groups
        if tables[0] is tables[1]:
            turning, values = torch.split_with_sizes(whole, (queries + keys, keys), -2)
            return [(turning, tables[0]), (values, None)]
        return list(zip(torch.split_with_sizes(whole, (queries, keys, keys), -2), (*tables, None), strict=True))

    def _tables(self, call: OpCall, x: torch.Tensor) -> tuple[Any, Any]:
        """(cos, sin) of queries, and of keys; None for what does not turn."""
        cos, sin = call.get("cos"), call.get("sin")
        if cos is not None and sin is not None:
            both = self._placed(call, cos, x), self._placed(call, sin, x)
            return both, both
        found: list[Any] = []
        for given in (call.get("angles"), call.get("key_angles")):
            placed = None if given is None else self._placed(call, given, x)
            found.append(None if placed is None else (placed.cos(), placed.sin()))
        return found[0], found[1] if "key_angles" in self.named_inputs() else found[0]

    def _placed(self, call: OpCall, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Rows of a table that x has, as they broadcast against heads, in their dtype."""
        sequence, batch = LAYOUTS[self._order]
        starts, wide = call.get("starts"), torch.promote_types(x.dtype, torch.float32)
        length = x.shape[sequence]
        if self.offsets is not None:
            rows = self._rows(given, self._places(call, length))
        elif starts is None:
            rows = given if given.shape[0] == length else self._context.own(given, length)
        else:
            places = starts.to(x.device) + torch.arange(length, device=x.device)[:, None]
            rows = self._rows(given, places, torch.arange(x.shape[batch], device=x.device))
        rows = rows if sequence == 0 else rows.transpose(0, 1)
        rows = rows if self._groups == 1 else rows.unsqueeze(2)
        return rows if rows.dtype == wide else rows.to(wide)

    def _rows(self, given: torch.Tensor, places: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a table at places [S, B] of samples [B], or at places [T]."""
        last = given.shape[0] - 1
        within = places.clamp(0, last)
        rows = given[within] if samples is None else given.expand(-1, len(samples), -1, -1)[within, samples]
        if self.padded:
            return rows
        outside = within != places
        if may_look(given.device) and len(found := outside.nonzero()):
            at = found[0].tolist()
            of = f" of sample {at[1]}" if samples is not None else ""
            raise ValueError(
                f"RotaryByAngles: row {at[0]}{of} stands at position {int(places[tuple(at)])}, and there are angles of "
                f"{last + 1} positions: give more of them, or lower {self.starts or self.offsets}"
            )
        return rows.masked_fill(outside[(...,) + (None,) * (rows.dim() - outside.dim())], torch.nan)

    def _places(self, call: OpCall, tokens: int) -> torch.Tensor:
        """The position of each token in its sequence; those behind the last one are at 0."""
        offsets, starts = call["offsets"].long(), call.get("starts")
        ((first, _),) = self._context.spans(tokens)
        at = torch.arange(first, first + tokens, device=offsets.device)
        sequence = torch.bucketize(at, offsets[1:], right=True)
        places = at - offsets[sequence]
        if starts is not None:
            places = places + torch.cat((starts.long(), starts.new_zeros(1, dtype=torch.long)))[sequence]
        return places.masked_fill(sequence == len(offsets) - 1, 0)
