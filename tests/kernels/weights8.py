"""Matrices of 8 bits turned and weights quantized, held against the definitions: for tests on CPUs and GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_fuser.kernels.quantizers import Weight8, quantizer_on, weights_by_torch
from te_fuser.quantization import quantize
from tests.float8 import E4M3, codes

# Tokens and features: whole tiles, parts of them, next to none.
SIZES = [(128, 128), (256, 384), (1, 16), (17, 48), (130, 272), (127, 128), (129, 144), (300, 16), (16, 2064)]
NOTHING = [(0, 48), (5, 0), (0, 0)]
SHAPES = [(128, 128), (16, 16), (48, 272), (272, 48), (144, 400), (16, 16), (256, 128)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Quantized = tuple[torch.Tensor, torch.Tensor]  # by rows and turned


def bytes_like(tokens: int, features: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """All codes, in no order."""
    rng = torch.Generator().manual_seed(tokens * 31 + features)
    found = torch.randint(0, 256, (tokens, features), dtype=torch.uint8, generator=rng)
    return found.to(device).view(dtype)


def turned_wrongly(data: torch.Tensor, turned: torch.Tensor) -> str:
    """Complaint about a matrix that should be data [tokens, features] turned; empty: nothing."""
    tokens, features = data.shape
    room = math.ceil(tokens / 16) * 16
    if turned.dtype != data.dtype or turned.shape != (features, room) or not turned.is_contiguous():
        return f"{turned.dtype} {list(turned.shape)}"
    if not torch.equal(codes(turned)[:, :tokens], codes(data).mT):
        return f"{(codes(turned)[:, :tokens] != codes(data).mT).sum()} of {data.numel()} bytes"
    return "" if not codes(turned)[:, tokens:].any() else "what is behind the tokens"


def weights_like(dtypes: Sequence[torch.dtype], device: str = "cpu") -> list[torch.Tensor]:
    """Weights of `SHAPES`, each of the next dtype."""
    rng = torch.Generator().manual_seed(len(dtypes))
    made = []
    for k, shape in enumerate(SHAPES):
        w = torch.randn(shape, generator=rng) * 10.0 ** (k - 3)
        made.append(w.to(dtypes[k % len(dtypes)]).to(device))
    return made


def scales_like(count: int, device: str = "cpu") -> torch.Tensor:
    return (torch.rand(count, generator=torch.Generator().manual_seed(count)) * 400 + 0.3).to(device)


def quantize_weights(
    weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor] | None = None
) -> list[Quantized]:
    """Weights as weight caches quantize them: on a GPU by the kernel."""
    wanted = [Weight8(w.dtype, records=amaxes is not None) for w in weights]
    device = weights[0].device
    run = quantizer_on(device, wanted) if device.type == "cuda" else functools.partial(weights_by_torch, wanted)
    numbers = [scales] if amaxes is None else [scales, amaxes]
    made = run(*[t for each in zip(weights, *numbers, strict=True) for t in each])
    return list(zip(made[::2], made[1::2], strict=True))


def weights_wrongly(
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    found: Sequence[Quantized],
    before: Sequence[float],
    amaxes: Sequence[torch.Tensor] | None = None,
) -> list[str]:
    """Complaints about weights quantized by scales, and about amaxes that were `before`."""
    wrong = []
    for k, (w, scale, (rows, turned)) in enumerate(zip(weights, scales, found, strict=True)):
        expected = quantize(w, E4M3, scale)
        for name, ours, exact in (("rows", rows, expected.data), ("turned", turned, expected.transposed)):
            if ours.shape != exact.shape or ours.dtype != exact.dtype or not torch.equal(codes(ours), codes(exact)):
                wrong.append(f"{name} of weight {k}, {w.dtype} {list(w.shape)}")
        if amaxes is not None:
            wanted = torch.maximum(torch.full_like(expected.amax, before[k]), expected.amax)
            if not torch.equal(wanted.nan_to_num(-1.0), amaxes[k].nan_to_num(-1.0)):
                wrong.append(f"amax {amaxes[k]} of weight {k}, not {wanted}")
    return wrong


def run_weights(
    weights: Sequence[torch.Tensor], quantizer: Callable[[Sequence[Weight8]], Callable[..., Any]]
) -> list[str]:
    """Quantizes weights by scales in no order, with amaxes of which one is larger already, and looks at both."""
    device, count = weights[0].device.type, len(weights)
    scales, before = scales_like(count, device), [0.0, 1e6, *[0.0] * (count - 2)]
    amaxes = torch.tensor(before, device=device).unbind()
    given = [t for each in zip(weights, scales.unbind(), amaxes, strict=True) for t in each]
    made = quantizer([Weight8(w.dtype, records=True) for w in weights])(*given)
    return weights_wrongly(weights, scales.unbind(), list(zip(made[::2], made[1::2], strict=True)), before, amaxes)
