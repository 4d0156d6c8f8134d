"""Weights of products of 8 bits, all of a list at once, before the first step of each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from te_fuser.codegen.cuda_source_kernel import WrittenKernel
from te_fuser.fusions.match import Cost
from te_fuser.fusions.registry import Maker, Wanted, register_maker
from te_fuser.kernels.quantizers import OwnWeights, QuantizeWeights, Weight8, measuring_weights, quantizer_on
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.params.concatenated_parameter import made_of
from te_fuser.recipe.recipes import OwnScales


class Weights8(Maker):
    """All weights of a list in 8 bits by one launch, which raises their amaxes, too."""

    name = "quantize_weights"
    of = ("weight", "weight_scale", "weight_amax")
    makes = ("weight_data", "weight_turned")
    in_forward = ("weight_data",)

    def takes(self, op: FusableOperation) -> bool:
        return isinstance(op, Float8MatMul) and not op.form.weight_is_kept and op.form.scalings is None

    def cost(self, wanted: Sequence[Wanted]) -> Cost:
        specs = [(w, w.given["weight"]) for w in wanted]
        written = sum([len(w.makes) * spec.rows * spec.features for w, spec in specs])
        return Cost(sum([spec.nbytes for _, spec in specs]), written, calls=1.0 + 0.5 * len(wanted))

    def written(self, wanted: Sequence[Wanted]) -> tuple[WrittenKernel, ...]:
        return (QuantizeWeights(),)

    def function(self, wanted: Sequence[Wanted], device: torch.device) -> Callable[..., Any]:
        run = quantizer_on(device, [_told(w) for w in wanted])
        if not any(w.again for w in wanted):
            return run
        return functools.partial(_noting, run, wanted, [turning_again(w, device) for w in wanted])


class OwnWeights8(Maker):
    """Weights in 8 bits by scales of their own."""

    name = "quantize_weights"
    of = ("weight",)
    makes = ("weight_data", "weight_turned", "weight_inverse")
    in_forward = ("weight_data", "weight_inverse")

    def takes(self, op: FusableOperation) -> bool:
        return isinstance(op, Float8MatMul) and op.form.scalings is not None

    def cost(self, wanted: Sequence[Wanted]) -> Cost:
        specs = [(w, w.given["weight"]) for w in wanted]
        written = sum([len({*w.makes} & {*Weights8.makes}) * spec.rows * spec.features for w, spec in specs])
        read = 2 * sum([spec.nbytes for _, spec in specs])
        return Cost(read, written, launches=3, calls=8.0 + 2.0 * len(wanted))

    def written(self, wanted: Sequence[Wanted]) -> tuple[WrittenKernel, ...]:
        return (QuantizeWeights(), *dict.fromkeys([measuring_weights(_scaling(w)) for w in wanted]))

    def function(self, wanted: Sequence[Wanted], device: torch.device) -> Callable[..., Any]:
        run = OwnWeights(device, [_told(w) for w in wanted], [_scaling(w) for w in wanted])
        return functools.partial(_own, run, wanted, [turning_again(w, device) for w in wanted])


def _scaling(w: Wanted) -> OwnScales:
    scalings = cast(Float8MatMul, w.op).form.scalings
    assert scalings is not None
    return scalings[1]


def _own(
    run: OwnWeights, wanted: Sequence[Wanted], again: Sequence[Callable[..., Any] | None], *weights: torch.Tensor
) -> Any:
    """Tensors made of each weight, in the order of what is wanted."""
    data, scales, inverses = run(*weights)
    tensors, made = iter(data), []
    for w, weight, turn, scale, inverse in zip(wanted, weights, again, scales, inverses, strict=True):
        for name in w.makes:
            made.append(inverse if name == "weight_inverse" else next(tensors))
            if name in w.again and turn is not None:
                made_of(made[-1], [weight, scale], turn)
    return tuple(made) if len(made) != 1 else made[0]


def _told(w: Wanted) -> Weight8:
    return Weight8(
        w.given["weight"].dtype, "weight_data" in w.makes, "weight_turned" in w.makes, "weight_amax" in w.given
    )


def turning_again(w: Wanted, device: torch.device) -> Callable[..., Any] | None:
    """f(weight, scale) -> W^T, for backward where `fully_shard` takes the weight away."""
    return quantizer_on(device, [Weight8(w.given["weight"].dtype, rows=False)]) if w.again else None


def _noting(
    run: Callable[..., Any], wanted: Sequence[Wanted], again: Sequence[Callable[..., Any] | None], *given: torch.Tensor
) -> Any:
    """Tensors that are made, noted with how W^T is made again."""
    made = run(*given)
    tensors, parts = iter(made if isinstance(made, tuple) else (made,)), iter(given)
    for w, turn in zip(wanted, again, strict=True):
        sources = [next(parts) for _ in w.given]
        for name, t in [(name, next(tensors)) for name in w.makes]:
            if name in w.again and turn is not None:
                made_of(t, sources[:2], turn)
    return made


register_maker(Float8MatMul, Weights8(), OwnWeights8())
