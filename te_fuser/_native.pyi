"""The native runtime."""

from typing import SupportsIndex

import torch

version: str
kernel_abi_version: int

class CpuKernel:
    """A generated CPU kernel, loaded from a library; see `codegen/include/te_kernel_abi.h` for what it must export."""

    def __new__(
        cls,
        library: str,
        symbol: str,
        dtypes: tuple[str, ...],
        partial_floats: int,
        partial_floats_per_sample: int,
        scratch_floats: int,
        row_elements: int,
    ) -> CpuKernel:
        """Load `<symbol>_rows` and, with partial floats, `<symbol>_finish`.

        Raises RuntimeError if the library or a symbol is missing, ValueError for an unknown dtype or a negative size.
        """

    def __call__(
        self,
        tensors: tuple[torch.Tensor, ...],
        rows: SupportsIndex,
        batch_inner: SupportsIndex,
        batch_size: SupportsIndex,
        integers: tuple[SupportsIndex, ...],
    ) -> None:
        """Run on contiguous CPU tensors; their sizes are the caller's business and not checked here.

        Raises TypeError for a tensor that is a subclass, has no memory of its own or another dtype, ValueError for a
        tensor that is not on the CPU or not contiguous and for a wrong number of tensors, MemoryError.
        """

def num_threads() -> int:
    """Return how many threads a kernel may use now: as many as torch."""

def thread_backend() -> str:
    """Return where kernels run: 'openmp' is torch's own pool, 'std' makes threads for every call."""

def set_thread_backend(name: str) -> None:
    """Choose where kernels run; raises ValueError if that backend is not there."""
