"""What calls cost the host: a table for a CPU, which is its own host, and for that of a GPU."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Seconds that the host is busy with calls.

    Attributes:
        calls: of one call, by how a step is called (`Task.call`).
        node: of an autograd node of ours beyond its steps, forward and backward.
        gradient: of each gradient that such a node gives.
        guard: of refusing that PyTorch's own nodes are differentiated once more, for each result.
    """

    calls: Mapping[str, float]
    node: tuple[float, float] = (0.0, 0.0)
    gradient: float = 0.0
    guard: float = 0.0


# How a step is called -> the seconds of a call of a CPU, and of that of a GPU. "torch" is one of PyTorch's operations,
# "function" one or a few of them as a native step, "method" Python code with a call object around it; "recorded" and
# "recorded backward" are a function of PyTorch's that autograd records, and its node with one operation.
_CALLS = {
    "kernel": (1.6e-6, 9e-6),
    "product": (2.5e-6, 9e-6),
    "function": (2.5e-6, 12e-6),
    "method": (6e-6, 25e-6),
    "torch": (1.0e-6, 7e-6),
    "recorded": (3.2e-6, 15e-6),
    "recorded backward": (3.4e-6, 16e-6),
}
# By calls on tiny tensors, one thread of an AMD EPYC (9005), torch 2.13.
CPU_HOST = Host({kind: cpu for kind, (cpu, _) in _CALLS.items()}, node=(3e-6, 4e-6), gradient=0.3e-6, guard=1.7e-6)
# The host of an H200: from what eager PyTorch, te_fuser and an idle node take at 16 x 256 (docs/performance.md,
# by hand, commit 6ac7f2f). Steps of attention and of quack's products state theirs as so many calls of PyTorch, more
# than they take by now: what that leaves to others in small sizes was measured to be faster, or as fast.
GPU_HOST = Host({kind: gpu for kind, (_, gpu) in _CALLS.items()}, node=(9e-6, 14e-6), gradient=0.5e-6, guard=4e-6)
FREE_HOST = Host(dict.fromkeys(_CALLS, 0.0))

# Whether calls of this thread are to be captured: plans made now are for a device whose calls are replayed.
capturing: contextvars.ContextVar[bool] = contextvars.ContextVar("te_fuser_capturing", default=False)
