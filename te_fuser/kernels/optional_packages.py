"""What packages that may be installed beside PyTorch and run kernels have in common: are they there, may they run now.

Their versions are looked up without importing them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import threading

import torch
from torch.torch_version import TorchVersion

_thread = threading.local()


@functools.cache
def version_of(package: str) -> str | None:
    """The version of a package that is installed, if any."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_missing(package: str, oldest: str, version: str | None) -> str | None:
    """Why a package of that version (None: it is not there) is none to use; None where it is."""
    install = f'pip install "{package}>={oldest}"'
    if version is None:
        return f"{package} is not installed: {install}"
    if TorchVersion(version) < oldest:
        return f"it needs {package} {oldest}, found {version}: {install}"
    return None


def give_context(device: int) -> None:
    """Let the CUDA runtime give this thread the device's context: threads of backward passes begin without one."""
    known = _thread.__dict__.setdefault("devices", set())
    if device not in known:
        torch.empty(1, device=torch.device("cuda", device)).zero_()
        known.add(device)


def refuse_capture(needed: str) -> None:
    """Refuse to make what a call needs while its stream is captured.

    Raises:
        RuntimeError: when it is.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"this call needs {needed}, and its stream is being captured into a CUDA graph: run the model once with "
            "inputs like these before the capture"
        )
