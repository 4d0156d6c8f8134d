"""KeyValueCache: keys and values of new positions behind those of earlier calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_fuser.ops.attention.dot_product_attention import LAYOUTS, PackedHeads
from te_fuser.ops.attention.head_parallel import OfHeads
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_name, may_look

_INTEGERS = (torch.int32, torch.int64)


class KeyValueCache(OfHeads):
    """Write keys and values of packed heads into caches that the call gives, and return the queries: y = q.

    Caches are [L + 1, B, kv_heads * head_dim], in the order of the layout. Row s of sample b goes to position starts[b]
    + s; rows from counts[b] on are padding, for which the cache's last row becomes zeros. An attention with keys apart
    and key_lengths = starts + counts then sees the keys of earlier calls, too. Positions beyond L raise on a CPU; on a
    GPU, which would have to wait, their queries become NaN. Attention may multiply keys behind a length by 0, and 0 *
    NaN is NaN: clear caches where a sequence has ended, as `InferenceParams` does.

    Args:
        head_dim: features of one head.
        heads: query heads.
        kv_heads: key and value heads.
        key_cache, value_cache: the names of the caches in the call, which are written to.
        starts, counts: the names of whole numbers [B].
        layout, packing: see `PackedHeads`.

    Raises:
        ValueError, TypeError: in a call, for tensors of other shapes or kinds.
        RuntimeError: in backward.
    """

    writes = ("key_cache", "value_cache")

    def __init__(
        self,
        head_dim: int,
        *,
        heads: int,
        kv_heads: int,
        key_cache: str = "key_cache",
        value_cache: str = "value_cache",
        starts: str = "starts",
        counts: str = "counts",
        layout: str = "sequence_first",
        packing: str = "interleaved",
    ) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = head_dim, heads, kv_heads
        self.key_cache, self.value_cache = check_name(key_cache), check_name(value_cache)
        self.starts, self.counts = check_name(starts), check_name(counts)
        self.layout, self.packing = layout, packing
        self._heads()

    def _heads(self) -> PackedHeads:
        return PackedHeads(self.heads, self.kv_heads, self.head_dim, self.layout, self.packing)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        names = {name: getattr(self, name) for name in ("key_cache", "value_cache", "starts", "counts")}
        return {argument: NamedInput(name, None, gradient=False) for argument, name in names.items()}

    def infer(self, x: Spec) -> Spec:
        """The queries."""
        self._heads().check(type(self).__name__, x)
        return x.with_features(self.heads * self.head_dim)

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        if len(x.shape) != 3:
            return  # infer says what is wrong
        sequence, batch = LAYOUTS[self.layout]
        samples, features = x.shape[batch], self.kv_heads * self.head_dim
        for argument in ("key_cache", "value_cache"):
            spec = inputs[argument]
            fits = len(spec.shape) == 3 and spec.shape[batch] == samples and spec.shape[2] == features
            if not fits or spec.shape[sequence] < 1:
                raise ValueError(
                    f"KeyValueCache: a {argument} has {samples} samples of {features} features, in the order of "
                    f"{self.layout!r}, got {list(spec.shape)}"
                )
            if spec.dtype != x.dtype:
                raise TypeError(
                    f"KeyValueCache: the {argument} is {spec.dtype}, and what is new {x.dtype}: use one dtype"
                )
        for argument in ("starts", "counts"):
            spec = inputs[argument]
            if spec.shape != (samples,) or spec.dtype not in _INTEGERS:
                raise ValueError(
                    f"KeyValueCache: {argument} are whole numbers [{samples}], got {spec.dtype} {list(spec.shape)}"
                )

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), (), "no_gradient"),)

    def no_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Refuse a gradient: what later calls read of the caches is not known."""
        raise RuntimeError("KeyValueCache has no gradient: call the model under torch.no_grad()")

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        heads = self._heads()
        q, k, v = heads.split(x.detach())
        sequence, batch = LAYOUTS[self.layout]
        rows = torch.arange(x.shape[sequence], device=x.device)
        places = call["starts"].long() + rows[:, None]  # [S, B]
        last = call["key_cache"].shape[sequence] - 1
        padding = rows[:, None] >= call["counts"]
        lost = ((places < 0) | (places >= last)) & ~padding
        self._check_room(call, lost, last)
        nowhere = lost | padding
        places.masked_fill_(nowhere, last)
        samples = torch.arange(x.shape[batch], device=x.device).expand_as(places)
        index = (places, samples) if sequence == 0 else (samples, places)
        for cache, part in ((call["key_cache"], k), (call["value_cache"], v)):
            new = part.permute(2, 0, 1, 3).flatten(2)
            cache.index_put_(index, new.masked_fill(nowhere[..., None], 0.0))
        lost = lost.mT[:, None, None, :, None]  # [B, 1, 1, S, 1]
        return heads.merge_output(torch.where(lost, torch.nan, q))

    def _check_room(self, call: OpCall, lost: torch.Tensor, room: int) -> None:
        """Refuse rows of a CPU behind the end of a cache."""
        if not may_look(lost.device) or not len(found := lost.nonzero()):
            return
        sample = int(found[0, 1])
        raise ValueError(
            f"KeyValueCache: sample {sample} begins at position {int(call['starts'][sample])} and adds "
            f"{int(call['counts'][sample])}, and its caches have room for {room} and one more for padding: enlarge "
            f"{self.key_cache!r} and {self.value_cache!r}, or end the sequence"
        )
