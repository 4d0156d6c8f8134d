"""What a thread needs before libraries other than PyTorch run kernels from it."""

from __future__ import annotations

import threading

import torch

_thread = threading.local()


def give_context(device: int) -> None:
    """Let the CUDA runtime give this thread the device's context: threads of backward passes begin without one."""
    known = _thread.__dict__.setdefault("devices", set())
    if device not in known:
        torch.empty(1, device=torch.device("cuda", device)).zero_()
        known.add(device)
