"""What decides which kernel can compute an attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_fuser.ops.attention.dot_product_attention import KERNEL_SWITCHES, AttentionSettings
from te_fuser.ops.base import Spec

_RECENT_CUDNN = 91900

# Provider -> PyTorch's own switch for its kernel (torch.nn.attention.sdpa_kernel sets them).
SWITCHES = {f"cuda_{name}": enabled for name, enabled in KERNEL_SWITCHES.items()}


@dataclass(frozen=True)
class AttentionProblem:
    """Everything that decides which kernel can compute an attention; hashable, so it can be part of a plan's key.

    `at_hand` is the index of the GPU at hand, if there is one, and `backward_on` that where it runs the backward too.
    """

    settings: AttentionSettings
    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    samples: int
    positions: int
    deterministic: bool = False
    switched_off: frozenset[str] = frozenset()
    cudnn: int = 0
    backward_on: int | None = None
    keys: int | None = None  # None: as many as positions
    at_hand: int | None = None

    @property
    def key_positions(self) -> int:
        """How many keys there are."""
        return self.positions if self.keys is None else self.keys

    @classmethod
    def of(
        cls,
        settings: AttentionSettings,
        x: Spec,
        capability: tuple[int, int] | None = None,
        needs_grad: bool = False,
        keys: int | None = None,
    ) -> AttentionProblem:
        """The problem of packed heads x on the device that they are on, under PyTorch's switches as they are now.

        `capability` is that of a GPU which is not at hand; it is then taken to have a recent cuDNN.
        """
        samples, positions = settings.heads.lengths(x.shape if len(x.shape) == 3 else (1, *x.shape))
        on_cuda = x.device.type == "cuda"
        at_hand = on_cuda and capability is None
        return cls(
            settings=settings,
            device_type=x.device.type,
            capability=capability or (torch.cuda.get_device_capability(x.device) if on_cuda else (0, 0)),
            dtype=x.dtype,
            samples=samples,
            positions=positions,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            switched_off=frozenset(name for name, enabled in SWITCHES.items() if not enabled()),
            cudnn=_RECENT_CUDNN if capability else (torch.backends.cudnn.version() or 0) if on_cuda else 0,
            backward_on=x.device.index if at_hand and needs_grad else None,
            keys=keys,
            at_hand=x.device.index if at_hand else None,
        )
