"""Weights in 8 bits by the scales that follow from themselves: a launch makes these of all, another one quantizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from te_fuser.codegen.description import NUMBERS
from te_fuser.kernels.quantize_weights import DTYPE, QuantizeWeights, Weight8, quantizer_on
from te_fuser.kernels.scale_of_amax import in_kernels, of_nothing
from te_fuser.ops.own_scales import Scaling

_SCALE, _INVERSE = NUMBERS.index("scale"), NUMBERS.index("inverse")


def measuring_weights(scaling: Scaling) -> QuantizeWeights:
    """The kernel that makes scales of weights."""
    return QuantizeWeights(DTYPE, in_kernels(DTYPE, scaling))


class OwnWeights:
    """f(*weights) -> (what is made of them in 8 bits, their scales, the reciprocals of these).

    Plans compile the kernels.

    Args:
        weights: what is made of each.
        scalings: how each gets its scale; by one launch for those that do alike.
    """

    def __init__(self, device: torch.device, weights: Sequence[Weight8], scalings: Sequence[Scaling]) -> None:
        self._device, self._made = device, sum([w.rows + w.turned for w in weights])
        self._quantize = quantizer_on(device, [replace(w, records=False) for w in weights])
        alike: dict[Scaling, list[int]] = {}
        for place, scaling in enumerate(scalings):
            alike.setdefault(scaling, []).append(place)
        looked = [replace(w, rows=False, turned=False, records=True) for w in weights]
        self._measure = [
            (places, quantizer_on(device, [looked[k] for k in places], scale=in_kernels(DTYPE, scaling)))
            for scaling, places in alike.items()
        ]

    def __call__(self, *weights: torch.Tensor) -> tuple[Sequence[Any], Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        numbers = of_nothing(len(weights), self._device)
        each, columns = numbers.unbind(), numbers.unbind(1)
        for places, measure in self._measure:
            measure(*[t for k in places for t in (weights[k], each[k], each[k])])
        scales = columns[_SCALE].unbind()
        made = self._quantize(*[t for pair in zip(weights, scales, strict=True) for t in pair])
        return made if self._made != 1 else (made,), scales, columns[_INVERSE].unbind()
