"""Linear: a matrix product and a bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fuser.distributed.dtensor import filled
from te_fuser.ops.base import LoweredOp, OpCall, Spec, output_specs
from te_fuser.ops.bias_scale import Bias
from te_fuser.ops.bound import Bound, bound_parts
from te_fuser.ops.checks import function_or_none, yes_or_no
from te_fuser.ops.construction import empty
from te_fuser.ops.matmul import MatMul, init_linear_weight
from te_fuser.ops.sharing import SHARING, Cut
from te_fuser.params.scales import HoldsScales


@bound_parts.row(lambda linear: linear._parts)
class Linear(Cut, HoldsScales):
    """Apply a learnable affine map to each row: y = x W^T + bias; stands for MatMul and Bias.

    Ranks of a group share it by `parallel_mode`, see `Cut`; what is set here holds for both.

    Args:
        in_features: the size of x's last dimension; x is [..., in_features].
        out_features: the size of y's last dimension; `weight` is [out_features, in_features], `bias` [out_features].
        bias: whether there is one.
        init_method: called with the weight to fill it, and the bias starts at 0; by default both are filled as
            torch.nn.Linear's, with the same random numbers.
        accumulate_into_main_grad, overwrite_main_grad, delay_wgrad_compute: where the weight's gradient goes, and when:
            see `MatMul`.
        dtype: the parameters', torch's default if None.
        device: the parameters', torch's default if None.

    Raises:
        ValueError: when x has another feature size.
        TypeError: when x and weight differ in dtype.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    delay_wgrad_compute: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        overwrite_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        product = MatMul(
            in_features,
            out_features,
            accumulate_into_main_grad=accumulate_into_main_grad,
            overwrite_main_grad=overwrite_main_grad,
            device="meta",
        )
        # A tuple, so that torch.nn.Module does not take the two for submodules.
        self._parts = (
            Bound(product, self, weight="weight"),
            Bound(Bias(out_features, device="meta"), self, bias="bias"),
        )
        if yes_or_no("Linear", "delay_wgrad_compute", delay_wgrad_compute):
            self.delay_wgrad_compute = True
        self.in_features, self.out_features = product.in_features, product.out_features
        self.init_method = function_or_none(type(self).__name__, "init_method", init_method)
        self.weight = empty(out_features, in_features, dtype=dtype, device=device)
        self.register_parameter("bias", empty(out_features, dtype=dtype, device=device) if bias else None)
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in (*SHARING, "delay_wgrad_compute") and "_parts" in self.__dict__:
            for part in self._parts if name in SHARING else self._parts[:1]:
                setattr(part.op, name, value)

    def reset_parameters(self) -> None:
        """Fill weight and bias uniformly in +-1/sqrt(in_features), or by `init_method` and with 0."""
        self.reset_scales()
        filled(self, "weight", lambda weight: init_linear_weight(weight, self.init_method))
        filled(self, "bias", self._fill_bias)

    def _fill_bias(self, bias: torch.Tensor) -> None:
        if self.init_method is not None or not self.in_features:
            torch.nn.init.zeros_(bias)
        else:
            bound = 1 / math.sqrt(self.in_features)
            torch.nn.init.uniform_(bias, -bound, bound)

    def lower(self) -> list[LoweredOp]:
        product, add_bias = self._parts
        lowered = [replace(low, suffix=".matmul") for low in product.lower()]
        if not add_bias.reads_none:
            lowered += [replace(low, suffix=".bias") for low in add_bias.lower()]
        return lowered

    def infer(self, x: Spec) -> Spec:
        for part in self.lower():
            x = output_specs(part.op, x)["output"]
        return x

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        return self._parts[0].flops(x, parameters)

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        for part in self.lower():
            x = part.op.reference(call, x)
        return x
