"""KeyValueCache on CUDA as one kernel; caches that it cannot reach are written by PyTorch's operations."""

from __future__ import annotations

import functools
from typing import cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.kernels import key_value_cache as kernel
from te_fuser.kernels.key_value_cache import CacheWrite
from te_fuser.ops.base import OpCall
from te_fuser.ops.key_value_cache import KeyValueCache

_NAMES = ("key_cache", "value_cache", "starts", "counts")


def _op(m: Match) -> KeyValueCache:
    return cast(KeyValueCache, m[0].op)


def _kernel(m: Match) -> CacheWrite:
    op = _op(m)
    whole = m[0].inputs["starts"].dtype
    return CacheWrite(op.head_dim, op.kv_heads, op.heads // op.kv_heads, op.packing, m.dtype, whole)


def _why_not(m: Match) -> str | None:
    """Why the kernel is none for a match; None where it is."""
    starts, counts = (m[0].inputs[name].dtype for name in ("starts", "counts"))
    why = m.why_no_cuda()
    if why is None and starts != counts:
        why = f"it takes starts and counts of one dtype, they are {text_of(starts)} and {text_of(counts)}"
    return why or kernel.reason_not(_op(m).head_dim, m.dtype)


class _Put:
    """The body: what no call changes is asked while planning."""

    def __init__(self, made: CacheWrite, layout: str) -> None:
        self._kernel, self._sequence_first = made, layout == "sequence_first"
        self._plain = KeyValueCache(
            made.head_dim,
            heads=made.kv_heads * made.per_group,
            kv_heads=made.kv_heads,
            layout=layout,
            packing=made.packing,
        )

    def forward(self, m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        """The queries."""
        given = {name: m[f"0.{name}"] for name in _NAMES}
        if not kernel.can_reach(given["key_cache"], given["value_cache"]):
            return self._plain.op_forward(OpCall({**given, "input": x}), x)
        key_cache, value_cache, starts, counts = given.values()
        return kernel.put(self._kernel, x.detach(), key_cache, value_cache, starts, counts, self._sequence_first)


_body = functools.lru_cache(maxsize=512)(_Put)


@fusion(
    forward=[KeyValueCache],
    when=lambda m: _why_not(m) or True,
    cost=lambda m: Cost(m.x.nbytes, m.x.nbytes),
    details=Details(
        choose=lambda m, method: _body(_kernel(m), _op(m).layout).forward,
        compiles=lambda m, direction, needed: [_kernel(m)],
    ),
)
def key_value_cache(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """One pass that writes keys and values, and gives the queries."""
    raise NotImplementedError  # `choose` gives what runs
