"""Weights in 8 bits by the scales that follow from themselves: measured, scaled and quantized, all by a launch each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from te_fuser.kernels.fold_amaxes import APART
from te_fuser.kernels.quantize_weights import DTYPE, Weight8, quantizer_on
from te_fuser.kernels.scale_of_amax import ScaleOfAmax
from te_fuser.ops.own_scales import Scaling


class OwnWeights:
    """f(*weights) -> (what is made of them in 8 bits, their scales, the reciprocals of these).

    Plans compile the kernels.

    Args:
        weights: what is made of each.
        scalings: how each gets its scale.
    """

    def __init__(self, device: torch.device, weights: Sequence[Weight8], scalings: Sequence[Scaling]) -> None:
        plain = [replace(w, records=False) for w in weights]
        # What is only measured has a scale in no layout.
        self._measure = quantizer_on(device, [replace(w, rows=False, turned=False, records=True) for w in weights])
        self._quantize = quantizer_on(device, plain)
        self._made = sum([w.rows + w.turned for w in weights])
        self._device, self._places = device, dict[ScaleOfAmax, list[int]]()
        for place, scaling in enumerate(scalings):
            self._places.setdefault(ScaleOfAmax.of(DTYPE, scaling), []).append(place)

    def __call__(self, *weights: torch.Tensor) -> tuple[Sequence[Any], list[torch.Tensor], list[torch.Tensor]]:
        count = len(weights)
        amaxes = torch.zeros(count, dtype=torch.float32, device=self._device)
        scales, inverses = torch.empty_like(amaxes), amaxes.new_empty(count, APART)
        slots, numbers = amaxes.unbind(), scales.unbind()
        self._measure(*[t for w, slot in zip(weights, slots, strict=True) for t in (w, slot, slot)])
        for kernel, places in self._places.items():
            ready = kernel.ready(self._device)
            if len(places) == count:
                ready((amaxes, scales, inverses), 1, 1, 1, (count, APART))
                continue
            for k in places:
                ready((slots[k], numbers[k], inverses[k]), 1, 1, 1, (1, APART))
        made = self._quantize(*[t for pair in zip(weights, numbers, strict=True) for t in pair])
        return (made if self._made != 1 else (made,)), [*numbers], [*inverses[:, 0].unbind()]
