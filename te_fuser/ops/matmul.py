"""MatMul: the matrix product of a linear layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_fuser.distributed.dtensor import filled
from te_fuser.ops.base import Gradient, Spec
from te_fuser.ops.checks import check_features, check_floating, feature_size, function_or_none, yes_or_no
from te_fuser.ops.construction import constructed, empty
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.products import linear, product
from te_fuser.ops.sharing import COLUMN, ROW, Cut
from te_fuser.ops.tensor_function import forward_of, gradient_of
from te_fuser.params.main_grad import put_gradient
from te_fuser.params.scales import HoldsScales


def _forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = x W^T."""
    if x.dtype != weight.dtype:
        raise TypeError(
            f"MatMul takes x and weight of one dtype, got {x.dtype} and {weight.dtype}: "
            "convert one with .to(), or run under torch.autocast"
        )
    return in_shape_of(x, linear(as_rows(x), weight))


def _input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dx = dy W."""
    return in_shape_of(dy, product(as_rows(dy), weight))


def weight_gradient_of(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW = dy^T x."""
    return product(as_rows(dy).t(), as_rows(x))


def main_gradient_of(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, over: bool = False) -> torch.Tensor:
    """main_grad += dy^T x, or main_grad = dy^T x; gives what stands for it."""
    return put_gradient(dy, x, weight, over, _put)


def _put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
    gradient = weight_gradient_of(dy, x)
    main_grad.copy_(gradient) if over else main_grad.add_(gradient)


class MatMul(Cut, UnfusedOperation, HoldsScales):
    """Multiply each row with a learnable matrix: y = x W^T, dx = dy W, dW = dy^T x.

    Ranks of a group share it by `parallel_mode`, see `Cut`: "column" gives each rank its part of y's features, "row"
    takes its part of x's, and y is the sum.

    Args:
        in_features: the size of x's last dimension; x is [..., in_features].
        out_features: the size of y's last dimension; `weight` is [out_features, in_features].
        init_method: called with the weight to fill it; by default it is filled as torch.nn.Linear's.
        accumulate_into_main_grad: add the weight's gradient to `weight.main_grad`, as Megatron keeps it, in place of
            giving it to autograd: see `te_fuser.params.main_grad`. `weight.grad` then gets none, or zeros where the
            weight has `grad_added_to_main_grad`.
        overwrite_main_grad: write over it instead, as for the first of several micro-batches.
        delay_wgrad_compute: leave the weight's gradient to `te_fuser.parallel.backward_dw`: backward gives dx alone.
        dtype: the parameter's, torch's default if None.
        device: the parameter's, torch's default if None.

    Raises:
        ValueError: when x has another feature size.
        TypeError: when x and weight differ in dtype.
        RuntimeError: in backward, when the weight should have a main_grad and has none that fits.
    """

    weight: torch.nn.Parameter | None
    delay_wgrad_compute: bool = False
    _gathered: bool = False  # whether what a column gathers has been gathered before it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        overwrite_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features = feature_size(in_features, "in_features")
        self.out_features = feature_size(out_features, "out_features")
        self.init_method = function_or_none(type(self).__name__, "init_method", init_method)
        if overwrite_main_grad and not accumulate_into_main_grad:
            raise ValueError(
                "overwrite_main_grad=True takes accumulate_into_main_grad=True: else no gradient goes there"
            )
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.overwrite_main_grad = overwrite_main_grad
        if yes_or_no(type(self).__name__, "delay_wgrad_compute", delay_wgrad_compute):
            self.delay_wgrad_compute = True
        self.weight = empty(self.out_features, self.in_features, dtype=dtype, device=device)
        self.reset_parameters()
        constructed(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        constructed(self)

    def reset_parameters(self) -> None:
        """Fill the weight by `init_method`, or uniformly in +-1/sqrt(in_features)."""
        self.reset_scales()
        filled(self, "weight", lambda weight: init_linear_weight(weight, self.init_method))

    @property
    def own_features(self) -> tuple[int, int]:
        """in_features and out_features of this rank's weight."""
        mode = self.parallel_mode
        inner = self.share(self.in_features, "in_features") if mode == ROW else self.in_features
        return inner, self.share(self.out_features, "out_features") if mode == COLUMN else self.out_features

    def infer(self, x: Spec) -> Spec:
        check_floating(x)
        check_features(self, x, self.in_features)
        return x.with_features(self.out_features)

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": self.own_features[::-1]}

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        inner, outer = self.own_features
        return 2.0 * x.rows * inner * outer

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        later = self.delay_wgrad_compute
        weight = Gradient(("weight",), ("input",), "weight_gradient", delayed=later)
        if self.accumulate_into_main_grad:
            method = "new_main_gradient" if self.overwrite_main_grad else "main_gradient"
            weight = Gradient(("weight",), ("input", "weight"), method, by_attributes=("weight",), delayed=later)
        return Gradient(("input",), ("weight",), "input_gradient"), weight

    op_forward = forward_of(_forward, "input", "weight")
    input_gradient = gradient_of("input", _input_gradient, "dy", "weight")
    weight_gradient = gradient_of("weight", weight_gradient_of, "dy", "input")
    main_gradient = gradient_of("weight", main_gradient_of, "dy", "input", "weight")
    new_main_gradient = gradient_of("weight", functools.partial(main_gradient_of, over=True), "dy", "input", "weight")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, features], also where one of them is 0."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def in_shape_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[rows, features] with the leading dimensions of x."""
    return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.shape[-1])


def init_linear_weight(weight: torch.Tensor, init_method: Callable[[torch.Tensor], Any] | None) -> None:
    """Fill the weight [out, in] of a linear layer: as torch.nn.Linear does, if no method is given."""
    if init_method is None:
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        return
    with torch.no_grad():
        init_method(weight)
