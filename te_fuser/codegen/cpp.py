"""C++ from a kernel description: readable text for a CPU core, and what the runtime must know to call it.

The schedule is `cpp_schedule`'s, expressions are `cpp_scope`'s, and `cpp_kernel` writes the functions around them.
"""

from __future__ import annotations

from dataclasses import dataclass

from te_fuser.codegen.cpp_kernel import Kernel
from te_fuser.codegen.cpp_text import ELEMENTS
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.text import identifier


@dataclass(frozen=True)
class CppKernel:
    """The text of one kernel, and what the runtime must know to call it.

    `source` defines `<symbol>_rows` and, when there are sums over rows, `<symbol>_finish`; it needs `te_cpu.h`.
    """

    description: KernelDescription
    symbol: str
    source: str
    dtypes: tuple[str, ...]  # of the tensors: loads, maxima, then the seed if there are random streams, stores, sums
    partial_floats: int
    partial_floats_per_sample: int
    scratch_floats: int
    row_elements: int  # how many plain elements the work on one row is worth


def generate(description: KernelDescription) -> CppKernel:
    """Write the kernel.

    Raises:
        ValueError: for a dtype that kernels do not know, float64 above all; for what is stored by blocks.
    """
    for tensor in description.tensors:
        if tensor.dtype not in ELEMENTS:
            raise ValueError(
                f"kernel {description.name}: {tensor.name} is {tensor.dtype}; "
                f"generated kernels know {', '.join(ELEMENTS)}"
            )
    if description.in_blocks:
        raise ValueError(f"kernel {description.name}: blocks of 8 bits are made by kernels of a GPU alone")
    symbol = symbol_of(description)
    kernel = Kernel(symbol, description)
    raised = ("float32",) * len(description.maxima)
    seed = ("int64",) if description.streams else ()
    return CppKernel(
        description=description,
        symbol=symbol,
        source=kernel.write(),
        dtypes=(*(t.dtype for t in description.loads), *raised, *seed, *(t.dtype for t in description.outputs)),
        partial_floats=kernel.partial_floats,
        partial_floats_per_sample=kernel.partial_floats_per_sample,
        scratch_floats=kernel.scratch_floats,
        row_elements=kernel.schedule.row_elements(),
    )


def symbol_of(description: KernelDescription) -> str:
    """The name in the library: role and digest."""
    return f"{identifier(description.name)}_{description.key}"
