"""Passes over rows of heads by kernels written by hand: how threads share them, where partners and strided rows lie."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel
from te_fuser.dtypes import GENERATED, text_of


def readable(x: torch.Tensor, vector: int) -> torch.Tensor:
    """x, or a copy whose vectors of so many neighbours a kernel can read."""
    *steps, last = x.stride()
    for step in steps:
        if step % vector or step // vector >= 2**31:
            last = 0
    return x if last == 1 or not x.numel() else x.contiguous()


def reach(x: torch.Tensor) -> int:
    """All that x reaches, as one contiguous dimension; 0 where it is contiguous."""
    if x.is_contiguous():
        return 0
    return 1 + sum([(size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)])


def as_one(x: torch.Tensor, reaches: int) -> torch.Tensor:
    """x as the native runtime takes it, contiguous alone: `reaches` as `reach` says."""
    return x.as_strided((reaches,), (1,)) if reaches else x


WARP = 32
MOST_ROWS = 2**31 - 1
_ACCESS = 16  # bytes: the widest access
_LINE = 128  # bytes of a line of the cache
_THREADS = range(256, 0, -32)  # of a block
_RESIDENT = 512  # threads of a multiprocessor: fewer do not hide the latency of memory, more were slower on an H200


@dataclass(frozen=True)
class Scaled:
    """Way to store a result in 8 bits: times a scale; its largest magnitude raises `amax`."""

    dtype: torch.dtype
    scale: torch.Tensor  # float32, one element, as amax is
    amax: torch.Tensor


@dataclass(frozen=True)
class HeadsPass(TextKernel[_native.CudaKernel]):
    """Case of such a pass: `heads` of `head_dim` features, read and stored in `dtype`."""

    heads: Any
    dtype: torch.dtype

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Count of features of a head that turn; 0: none."""

    @property
    @abstractmethod
    def style(self) -> str:
        """Partners: halves of what turns ("half") or neighbours ("interleaved")."""

    @property
    @abstractmethod
    def lanes(self) -> int:
        """Threads of a row."""

    @property
    def resident(self) -> int:
        """Threads of a multiprocessor."""
        return _RESIDENT

    @property
    def vector(self) -> int:
        """Neighbours that a thread takes at once: 16 bytes at most, within a head."""
        wanted = _ACCESS // self.dtype.itemsize
        unit = self.rotary_dim // 2 if self.style == "half" else self.rotary_dim
        while self.heads.head_dim % wanted or (unit and unit % wanted):
            wanted //= 2
        return wanted

    @property
    def partner(self) -> str:
        """Place where a thread finds partners: "kInside" its vector, in its "kSecond" one, or in another "kLane".

        Half of what turns should be a whole line of the cache where it is a vector of its own.
        """
        vector = self.vector
        if not self.rotary_dim or (self.style == "interleaved" and vector > 1):
            return "kInside"
        half, whole = self.rotary_dim // 2, self.heads.head_dim // vector
        in_a_warp = _is_power_of_two(whole) and whole <= WARP and _is_power_of_two(half // vector)
        narrow = half * self.dtype.itemsize < _LINE and vector * self.dtype.itemsize == _ACCESS
        return "kLane" if self.style == "half" and narrow and in_a_warp else "kSecond"

    @property
    def units(self) -> int:
        """Parts of a head, of one vector or of two."""
        vectors = self.heads.head_dim // self.vector
        pairs = self.rotary_dim // 2 // self.vector
        return pairs + (vectors - 2 * pairs + 1) // 2 if self.partner == "kSecond" else vectors

    @property
    def threads(self) -> int:
        """Threads of a block: as many as leave the fewest idle."""
        lanes = self.lanes
        return min((t for t in _THREADS if 2 * t <= self.resident), key=lambda t: -(-lanes // t) * t)

    @property
    def tiles(self) -> int:
        """Blocks side by side in a row."""
        return -(-self.lanes // self.threads)

    @property
    def per_multiprocessor(self) -> int:
        """Blocks that a multiprocessor holds at once."""
        return self.resident // self.threads


def reason_not(*dtypes: torch.dtype) -> str | None:
    """Reason why such a kernel does not take tensors of these dtypes."""
    wrong = next((dtype for dtype in dtypes if dtype not in GENERATED), None)
    taken = ", ".join(map(text_of, GENERATED))
    return None if wrong is None else f"its kernel takes {taken}, there is {text_of(wrong)}"


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
