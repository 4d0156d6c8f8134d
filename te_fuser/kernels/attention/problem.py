"""Problems of attention, and the conditions under which kernels can compute them, with their words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_fuser.dtypes import text_of
from te_fuser.kernels.attention.qkv_views import has_one_stride, lead
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
        """Count of keys."""
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
        """The problem of packed heads x now, on their device or a GPU of that capability."""
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


Condition = Callable[[AttentionProblem], str | None]

_LARGEST_GRID = 65535


def needs(holds: Callable[[AttentionProblem], bool], words: Callable[[AttentionProblem], str]) -> Condition:
    """The condition `holds`, with the words for a problem where it does not."""
    return lambda problem: None if holds(problem) else words(problem)


def runs_on(device_type: str) -> Condition:
    """The input is on such a device."""
    return needs(
        lambda p: p.device_type == device_type, lambda p: f"it runs on {device_type}, the input is on {p.device_type}"
    )


def takes(*dtypes: torch.dtype) -> Condition:
    """The input has one of these dtypes."""
    names = ", ".join(map(text_of, dtypes))
    return needs(lambda p: p.dtype in dtypes, lambda p: f"it takes {names}, the input is {p.dtype}")


def head_dim(most: int | None = None, multiple: Callable[[AttentionProblem], int] = lambda p: 8) -> Condition:
    """The features of a head are a multiple of so many, and at most so many."""

    def fits(p: AttentionProblem) -> bool:
        dim = p.settings.heads.head_dim
        return dim % multiple(p) == 0 and (most is None or dim <= most)

    limit = "" if most is None else f" up to {most}"
    return needs(
        fits, lambda p: f"head_dim must be a multiple of {multiple(p)}{limit}, it is {p.settings.heads.head_dim}"
    )


def capability(major: int) -> Condition:
    """The GPU has at least compute capability `major`.0."""
    return needs(
        lambda p: p.capability[0] >= major,
        lambda p: f"it needs compute capability {major}.0, this GPU has {p.capability[0]}.{p.capability[1]}",
    )


def switched_on(name: str) -> Condition:
    """PyTorch's own switch for the provider of that name is on."""
    return needs(
        lambda p: name not in p.switched_off,
        lambda p: "it is switched off in torch.backends.cuda (enable_..._sdp, or torch.nn.attention.sdpa_kernel)",
    )


def cuda_kernel(name: str, major: int, *dtypes: torch.dtype) -> tuple[Condition, ...]:
    """Conditions of a CUDA kernel of PyTorch: the GPU, the switch, dtypes, `major`.0."""
    return runs_on("cuda"), switched_on(name), takes(*dtypes), capability(major)


NO_DROPOUT = needs(
    lambda p: p.settings.dropout == 0.0,
    lambda p: f"it has no dropout, and {p.settings.dropout} of the probabilities are to be dropped",
)
DROPS_SOME = needs(lambda p: p.settings.dropout < 1.0, lambda p: "it cannot drop all probabilities")
SEVERAL_POSITIONS = needs(
    lambda p: p.key_positions != 1,
    lambda p: "with one position every probability is 1, which it computes as exp(s - log(exp(s))) in backward",
)
ONE_SIZE = needs(
    lambda p: p.settings.heads.value_dim == p.settings.heads.head_dim,
    lambda p: f"heads of values have {p.settings.heads.value_dim} features, those of keys {p.settings.heads.head_dim}",
)
SQUARE_IF_CAUSAL = needs(
    lambda p: not p.settings.is_causal or p.key_positions == p.positions,
    lambda p: f"it hides later positions of as many keys as queries, these are {p.key_positions} and {p.positions}",
)
NO_MASK = needs(lambda p: not p.settings.masked, lambda p: "it takes no mask tensor, only none or causal")
ONE_STRIDE = needs(
    lambda p: bool(p.settings.beyond) or has_one_stride(p.settings, p.samples),
    lambda p: (
        "query heads of several groups have no common stride in packing='interleaved' with layout='batch_first', so "
        "their gradient cannot be stored there: use another of the two"
    ),
)
IN_GRID = needs(
    lambda p: max(lead(p.settings, p.samples)) <= _LARGEST_GRID,
    lambda p: f"batch * heads passes {_LARGEST_GRID}: {p.samples} * {p.settings.heads.heads}",
)
