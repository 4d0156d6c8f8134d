"""Interface of a CUDA kernel that is written by hand, and `TextKernel` for one that is a text."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch

from te_fuser.codegen import nvrtc
from te_fuser.config import config

if TYPE_CHECKING:
    from te_fuser import _native


class Loadable(Protocol):
    """A native kernel."""

    def load(self, device: int) -> None:
        """Load on a device; nothing happens where it is loaded already."""


Made = TypeVar("Made", bound=Loadable)


class WrittenKernel(Hashable, Protocol):
    """A kernel with its own text, for one setting of the text's constants; equal ones are one kernel."""

    @property
    def name(self) -> str:
        """Name of the kernel in errors and in the refusal of a captured stream."""

    def compile(self, arch: str, cache: Path | None) -> Loadable:
        """The kernel for an architecture such as "sm_90a", whatever the folder."""


class MadeOnce(Generic[Made]):
    """make(kernel, architecture, folder) once in a process, whatever later folders."""

    def __init__(self, make: Callable[[Any, str, Path | None], Made]) -> None:
        self._make = make
        self._made: dict[tuple[Any, str], Made] = {}
        self._lock = threading.Lock()

    def __call__(self, kernel: Hashable, arch: str, cache: Path | None) -> Made:
        found = self._made.get((kernel, arch))
        if found is None:  # made outside the lock: several kernels compile at the same time
            made = self._make(kernel, arch, cache)
            with self._lock:
                found = self._made.setdefault((kernel, arch), made)
        return found

    def cache_clear(self) -> None:
        self._made.clear()


class TextKernel(ABC, Generic[Made]):
    """A kernel that is a text for NVRTC and what the native runtime makes of its machine code.

    A subclass is a frozen dataclass of what its text depends on: equal ones are one kernel.
    """

    name: ClassVar[str]
    source: ClassVar[Path]
    headers: ClassVar[tuple[str, ...]] = ()

    def constants(self) -> Iterable[str]:
        """Lines before the source: what this one has for itself."""
        return ()

    def text(self) -> str:
        """The CUDA text: headers, constants and source."""
        lines = [f'#include "{name}"' for name in self.headers]
        lines += ["", *self.constants(), ""] if lines else []
        return "\n".join([*lines, self.source.read_text()])

    @abstractmethod
    def native(self, cubin: bytes) -> Made:
        """The kernel as the native runtime takes it; nothing is loaded yet, and no driver is needed."""

    def compile(self, arch: str, cache: Path | None) -> Made:
        """The kernel for an architecture; made once in a process."""
        return cast(Made, _compiled(self, arch, cache))

    def ready(self, device: torch.device) -> Made:
        """The kernel, loaded on a CUDA device."""
        index = device.index
        return _loaded(self, index_of(device) if index is None else index)  # type: ignore[no-any-return]


def constants_of(types: Mapping[str, str], integers: Mapping[str, object], flags: Mapping[str, object]) -> list[str]:
    lines = [f"using {name} = {ctype};" for name, ctype in types.items()]
    lines += [f"constexpr int {name} = {value};" for name, value in integers.items()]
    return lines + [f"constexpr bool {name} = {str(bool(value)).lower()};" for name, value in flags.items()]


@MadeOnce
def _compiled(kernel: TextKernel[Any], arch: str, cache: Path | None) -> Loadable:
    return kernel.native(nvrtc.compile_source(kernel.text(), arch, name=kernel.name, cache=cache).cubin)


@functools.cache
def _loaded(kernel: TextKernel[Any], index: int) -> Any:
    made = kernel.compile(arch_on(index), config.cache_dir)
    made.load(index)  # now, since the threads of a backward pass have no context of their own
    return made


def over_rows(
    name: str,
    cubin: bytes,
    tensors: Sequence[tuple[str, int]],
    inputs: int,
    integers: int,
    threads: int,
    rows: int = 1,
    *,
    blocks: int,
    shared_bytes: int = 0,
) -> _native.CudaKernel:
    """A kernel of one launch over rows, which takes tensors, the rows, how many blocks share them, and integers.

    Args:
        tensors: dtype and alignment in bytes of each; the first `inputs` are read.
        rows: that a block, of so many threads and bytes of dynamic shared memory, looks at together.
        blocks: of a multiprocessor.
    """
    from te_fuser import _native

    dtypes, alignments = zip(*tensors, strict=True)
    arguments = [("tensor", k) for k in range(len(tensors))] + [("rows", 0), ("groups", 0)]
    arguments += [("integer", k) for k in range(integers)]
    launch = (name, threads, shared_bytes, (1, rows, blocks, False, False), tuple(arguments))
    return _native.CudaKernel(name, cubin, dtypes, alignments, inputs, (launch,), (), 0, integers, waits=True)


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; the current one's where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def arch_on(index: int) -> str:
    """The architecture to compile for on a CUDA device."""
    return nvrtc.arch_of(torch.cuda.get_device_capability(index))
