"""RotaryByAngles: rotary position embedding whose angles, or cosines and sines, the call gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fuser.ops.base import FusableOperation, Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_features, check_floating, check_name
from te_fuser.ops.dot_product_attention import LAYOUTS, TOKENS, PackedHeads, one_of
from te_fuser.ops.parameters import alike
from te_fuser.ops.rotary_embedding import STYLES
from te_fuser.ops.unfused_operation import UnfusedOperation

_TABLES = ("angles", "key_angles", "cos", "sin")


class RotaryByAngles(UnfusedOperation):
    """Turns pairs of features of heads by angles that the call gives: (a, b) -> (a cos - b sin, b cos + a sin).

    Angles are [L, 1 or B, 1, D] in every layout, with L positions, as many as x has or more, and an even D, the
    first features of a head, which turn; a and b each by their own. Where a call gives none, nothing turns.

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
        padded: whether rows whose positions have no angles are padding, which turns as the last angles say. Else they
            are a ValueError on a CPU, and NaN on a GPU, where nobody waits for the device to raise.
        layout, packing, style: see `RotaryEmbedding`.

    Raises:
        ValueError, TypeError: in a call, for tensors of other shapes or kinds.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """

    idles_without = _TABLES
    prototype_arguments = {"head_dim": 8, "heads": 2}
    other_choices = {"layout": "batch_first", "style": "interleaved"}

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
        if kv_heads is not None:
            PackedHeads(heads, kv_heads, head_dim, "sequence_first", packing)
        self.head_dim, self.heads, self.kv_heads = head_dim, heads, kv_heads
        self.angles, self.cos_sin, self.starts, self.offsets = angles, cos_sin, starts, offsets
        self.layout, self.packing, self.padded = layout, packing, padded
        self.style = one_of("style", style, STYLES)
        for given in self.named_inputs().values():
            check_name(given.name)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        if self.cos_sin is not None:
            names = dict(zip(("cos", "sin"), self.cos_sin, strict=True))
        elif isinstance(self.angles, str):
            names = {"angles": self.angles}
        else:
            names = dict(zip(("angles", "key_angles"), self.angles, strict=True))
        names |= {name: own for name in ("starts", "offsets") if (own := getattr(self, name)) is not None}
        return {argument: NamedInput(name, None, optional=True, gradient=False) for argument, name in names.items()}

    def infer(self, x: Spec) -> Spec:
        """As x."""
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
            starting = batch
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

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return self._turned(call, x, self._turn)

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dy turned back."""
        return {"input": self._turned(call, dy, self._turn_back)}

    def example(self, features: int, rng: torch.Generator) -> FusableOperation:
        layout = {"layout": "sequence_first", "offsets": None} if self.offsets else {}
        return alike(self, features, head_dim=features, heads=1, kv_heads=None, **layout)

    def _turned(self, call: OpCall, x: torch.Tensor, turn: Any) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        shape, x = x.shape, x if self.offsets is None else x[:, None]
        tables = self._tables(call, x, wide)
        if tables is None:
            return x.view(shape)
        groups = (self.kv_heads or 1) if self.packing == "interleaved" else 1
        heads = x.reshape(*x.shape[:2], groups, x.shape[2] // (groups * self.head_dim), self.head_dim)
        count = self.heads // groups
        keys = 0 if self.kv_heads is None else self.kv_heads // groups
        parts = [
            self._with_others(part, table, turn, wide)
            for part, table in zip(heads.split([count, keys, heads.shape[3] - count - keys], 3), tables, strict=True)
        ]
        return torch.cat(parts, 3).view(shape)

    def _with_others(self, heads: torch.Tensor, table: Any, turn: Any, wide: torch.dtype) -> torch.Tensor:
        if table is None or not heads.numel():
            return heads
        cos, sin = table
        turning, others = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
        return torch.cat((turn(turning.to(wide), cos, sin).to(heads.dtype), others), -1)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        style = STYLES[self.style]
        (a, b), (cos_a, cos_b), (sin_a, sin_b) = style.apart(x), style.apart(cos), style.apart(sin)
        return style.together(a * cos_a - b * sin_a, b * cos_b + a * sin_b)

    def _turn_back(self, dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        style = STYLES[self.style]
        (a, b), (cos_a, cos_b), (sin_a, sin_b) = style.apart(dy), style.apart(cos), style.apart(sin)
        return style.together(a * cos_a + b * sin_b, b * cos_b - a * sin_a)

    def _tables(self, call: OpCall, x: torch.Tensor, wide: torch.dtype) -> tuple[Any, Any, None] | None:
        """(cos, sin) of queries, of keys, and of values none; None where nothing turns."""
        cos, sin = call.get("cos"), call.get("sin")
        if cos is not None and sin is not None:
            both = self._placed(call, cos, x).to(wide), self._placed(call, sin, x).to(wide)
            return both, both, None
        found = []
        for given in (call.get("angles"), call.get("key_angles")):
            placed = None if given is None else self._placed(call, given, x).to(wide)
            found.append(None if placed is None else (placed.cos(), placed.sin()))
        if "key_angles" not in self.named_inputs():
            found[1] = found[0]
        return None if found == [None, None] else (found[0], found[1], None)

    def _placed(self, call: OpCall, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The rows of a table that x has, as they broadcast against heads."""
        sequence, batch = LAYOUTS[self._order]
        length, samples, starts = x.shape[sequence], x.shape[batch], call.get("starts")
        if self.offsets is not None:
            return self._rows(given, self._places(call, length)).unsqueeze(2)
        if starts is None:
            rows = given[:length]
        else:
            places = starts.to(x.device) + torch.arange(length, device=x.device)[:, None]
            rows = self._rows(given, places, torch.arange(samples, device=x.device))
        rows = rows.unsqueeze(2)
        return rows if sequence == 0 else rows.transpose(0, 1)

    def _rows(self, given: torch.Tensor, places: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Those of a table at places [S, B] of samples [B], or at places [T].

        Raises:
            ValueError: on a CPU, for places that it does not have, where they are not padding.
        """
        last = given.shape[0] - 1
        within = places.clamp(0, last)
        rows = given[within] if samples is None else given.expand(-1, len(samples), -1, -1)[within, samples]
        if self.padded:
            return rows
        outside = within != places
        if given.device.type == "cpu" and len(found := outside.nonzero()):
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
        at = torch.arange(tokens, device=offsets.device)
        sequence = torch.bucketize(at, offsets[1:], right=True)
        places = at - offsets[sequence]
        if starts is not None:
            places = places + torch.cat((starts.long(), starts.new_zeros(1, dtype=torch.long)))[sequence]
        return places.masked_fill(sequence == len(offsets) - 1, 0)
