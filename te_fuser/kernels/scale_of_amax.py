"""Scales that follow from largest magnitudes, with their reciprocals, in one small launch on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from te_fuser.codegen.written import TextKernel, over_rows
from te_fuser.ops.own_scales import Scaling, scale_by

if TYPE_CHECKING:
    from te_fuser import _native

_THREADS = 32
_ALL = 1 << 30  # rows of one block, as there is but one


@dataclass(frozen=True)
class ScaleOfAmax(TextKernel["_native.CudaKernel"]):
    """kernel((amaxes, scales, inverses), 1, 1, 1, (count, apart)), all float32; the amaxes are zero afterwards.

    From one inverse to the next it is `apart` numbers: products read such that begin at a multiple of 16 bytes.

    Attributes:
        narrow: the 8 bits that are scaled to.
        power_of_two, epsilon: as `Scaling` has them.
    """

    narrow: torch.dtype
    power_of_two: bool = False
    epsilon: float = 0.0
    name: ClassVar[str] = "scale_of_amax"

    @classmethod
    def of(cls, dtype: torch.dtype, scaling: Scaling) -> ScaleOfAmax:
        """That of a factor's one scale."""
        return cls(dtype, scaling.power_of_two, scaling.epsilon)

    def text(self) -> str:
        """The CUDA text."""
        most = torch.finfo(self.narrow).max
        lines = [
            '#include "te_cuda_quantize.cuh"',
            "",
            f"constexpr float kMost = {most}f, kEpsilon = {float(self.epsilon)!r}f;",
            f"constexpr bool kPowerOfTwo = {str(self.power_of_two).lower()};",
            "",
        ]
        return "\n".join([*lines, Path(__file__).with_suffix(".cu").read_text()])

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        return over_rows(self.name, cubin, [("float32", 4)] * 3, 1, 2, _THREADS, _ALL, blocks=1)


def by_torch(amax: torch.Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale that follows from a largest magnitude, and its reciprocal, on any device; amax is zero afterwards."""
    with torch.no_grad():
        scale = scale_by(amax, dtype, scaling)
        amax.zero_()
        return scale, scale.reciprocal()
