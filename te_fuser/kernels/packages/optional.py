"""Packages that may be installed beside PyTorch and run kernels: a table, are they there, may they run now.

Their versions are looked up without importing them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

from te_fuser.codegen.progress import Progress

_FORMS_KEPT = 4096
_thread = threading.local()


@functools.cache
def version_of(package: str) -> str | None:
    """The version of a package that is installed, if any."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(eq=False)
class Package:
    """A package that may be installed: whether it is there and can be called, and where it is of use.

    Attributes:
        hopper_alone: whether it is used on compute capability 9 alone, or on newer GPUs too.
        libraries_13: what it needs beside itself for CUDA 13, a package that its extra `cu13` brings; empty: nothing.
    """

    name: str
    oldest: str
    hopper_alone: bool = True
    libraries_13: str = ""

    def __str__(self) -> str:
        return self.name

    def version(self) -> str | None:
        """Installed version, if any."""
        return version_of(self.name)

    def missing(self) -> str | None:
        """Reason why there is no package to use, found without an import."""
        version, install = self.version(), f'pip install "{self.name}>={self.oldest}"'
        if version is None:
            return f"{self.name} is not installed: {install}"
        if TorchVersion(version) < self.oldest:
            return f"it needs {self.name} {self.oldest}, found {version}: {install}"
        return None

    def unusable(self, changes: Callable[[], Iterable[str | None]]) -> str | None:
        """Reason why the package cannot be called as it was, by `changes`."""
        version = self.version()
        try:
            with Progress(f"importing {self.name} {version}"):
                gone = [words for words in changes() if words]
        except Exception as error:  # whatever an import of it may raise
            return f"{self.name} does not load: {type(error).__name__}: {error}"
        return f"{self.name} {version} is not as it was in {self.oldest}: {'; '.join(gone)}" if gone else None

    def requirement(self, cuda: str) -> str:
        """Requirement for pip where PyTorch is built for that CUDA."""
        return f"{self.name}{'[cu13]' if self._needs_libraries(cuda) else ''}>={self.oldest}"

    def state(self, cuda: str | None, capability: tuple[int, int] | None) -> str:
        """State in words: is it there, does it fit PyTorch's CUDA and a GPU of that capability."""
        version = version_of(self.name)
        there = "not installed" if version is None else f"version {version}"
        unfit = self._unfit(cuda, capability)
        if unfit is not None or cuda is None:
            return f"{there}; of no use here: {unfit}"
        install = f'pip install "{self.requirement(cuda)}"'
        if version is None:
            return f"{there}; fits CUDA {cuda}: {install}"
        if TorchVersion(version) < self.oldest:
            return f"{there}; too old: {install}"
        if self._needs_libraries(cuda) and version_of(self.libraries_13) is None:
            return f"{there}; its libraries for CUDA {cuda} are missing: {install}"
        return f"{there}; fits CUDA {cuda}"

    def _needs_libraries(self, cuda: str) -> bool:
        return bool(self.libraries_13) and int(cuda.partition(".")[0]) >= 13

    def _unfit(self, cuda: str | None, capability: tuple[int, int] | None) -> str | None:
        if cuda is None:
            return "PyTorch is built without CUDA"
        if capability is None or capability[0] == 9 or (capability[0] > 9 and not self.hopper_alone):
            return None
        wanted = "9 alone" if self.hopper_alone else "9.0 and newer"
        return f"it is used on compute capability {wanted}, this GPU has {capability[0]}.{capability[1]}"


# All of them: attention's backward that packs its gradient itself; attention on Hopper; products with epilogues there.
PACKAGES = {
    package.name: package
    for package in (
        Package("nvidia-cudnn-frontend", "1.32", hopper_alone=False),
        Package("flash-attn-4", "4.0.0b36", libraries_13="nvidia-cutlass-dsl-libs-cu13"),
        Package("quack-kernels", "0.6.5", libraries_13="nvidia-cutlass-dsl-libs-cu13"),
    )
}


def why_changed(owner: Any, name: str, taken: Sequence[str] = ()) -> str | None:
    """Reason why a function, class or method ("A.f") does not take these arguments."""
    try:
        function = operator.attrgetter(name)(owner)
    except AttributeError:
        return f"it has no {name}"
    parameters = inspect.signature(function).parameters if taken else ()
    lost = [argument for argument in taken if argument not in parameters]
    return f"{name} takes no {', '.join(lost)}" if lost else None


def give_context(device: int) -> None:
    """Give this thread the device's context in the CUDA runtime, as backward's have none."""
    known = _thread.__dict__.setdefault("devices", set())
    if device not in known:
        torch.empty(1, device=torch.device("cuda", device)).zero_()
        known.add(device)


def current_stream(device: int) -> int:
    """PyTorch's current stream on a device, as the CUDA runtime knows it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def refuse_capture(needed: str) -> None:
    """Refuse to make what a call needs while its stream is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"this call needs {needed}, and its stream is being captured into a CUDA graph: run the model once with "
            "inputs like these before the capture"
        )


class FirstRuns:
    """Calls of a package that compiles a kernel when a form first runs."""

    def __init__(self, package: str) -> None:
        self._package, self._unmade = package, f"kernels of {package} that are compiled at their first run"
        self._lock = threading.RLock()
        self._launches: dict[Hashable, Callable[..., Any]] = {}

    def run(
        self,
        device: int,
        form: Hashable,
        prepare: Callable[[], Callable[..., Any]],
        tensors: Sequence[torch.Tensor | None],
        failed: Callable[[Exception], Exception],
    ) -> Any:
        """Call what prepare() made at the form's first run; `failed` words errors."""
        with torch.cuda.device(device):
            launch = self._launches.get(form)
            if launch is None:
                refuse_capture(self._unmade)
            give_context(device)
            try:
                return self._first(form, prepare, tensors) if launch is None else launch(*tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise failed(error) from error

    def forget(self) -> None:
        """Take every form for one that did not run."""
        self._launches.clear()

    def __len__(self) -> int:
        return len(self._launches)

    def _first(
        self, form: Hashable, prepare: Callable[[], Callable[..., Any]], tensors: Sequence[torch.Tensor | None]
    ) -> Any:
        with self._lock, Progress(f"{self._package} prepares a kernel that it did not run in this process yet"):
            launch = self._launches.get(form) or prepare()
            made = launch(*tensors)
            if len(self._launches) >= _FORMS_KEPT:
                self._launches.clear()
            self._launches[form] = launch
        return made
