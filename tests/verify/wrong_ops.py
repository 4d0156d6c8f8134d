"""Wrong opaque ops, each in one way: what is wrong, and what verify says of the op alone or behind another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from te_fuser import ops
from te_fuser.ops.base import OpCall, Spec

Tensor = torch.Tensor


class Cube(ops.UnfusedOperation):
    """y = x^3, as it should be."""

    def op_forward(self, call: OpCall, x: Tensor) -> Tensor:
        return x * x * x

    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        return dy * 3.0 * call["input"].square()


class WrongFactor(Cube):
    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        return dy * 2.0 * call["input"].square()


class ReadsTheGlobal(Cube):
    """Op whose backward reads the input of the last call."""

    def op_forward(self, call: OpCall, x: Tensor) -> Tensor:
        self.__dict__["last"] = x.detach()
        return super().op_forward(call, x)

    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        return dy * 3.0 * self.__dict__["last"].square()


class WritesIntoX(Cube):
    def op_forward(self, call: OpCall, x: Tensor) -> Tensor:
        x.detach().clamp_(-1.0, 1.0)
        return super().op_forward(call, x)


class WritesIntoSaved(Cube):
    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        dx = super().op_backward(call, dy)
        call["input"].data.clamp_(-1.0, 1.0)
        return dx


class WritesIntoDy(Cube):
    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        if dy.stride(-1):
            dy.clamp_(-1.0, 1.0)
        return super().op_backward(call, dy)


class KeepsItsOutput(Cube):
    def op_forward(self, call: OpCall, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return super().op_forward(call, x)  # as its own meaning
        kept = self.__dict__.setdefault("kept", {})
        y = kept.setdefault((x.shape, x.dtype), torch.empty_like(x))
        return y.copy_(super().op_forward(call, x))


class SaysTwice(Cube):
    def infer(self, x: Spec) -> Spec:
        return x.with_features(2 * x.features)


class GivesTwice(Cube):
    def op_forward(self, call: OpCall, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)

    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        first, second = dy.chunk(2, -1)
        return first + second


class SaysFloat64(Cube):
    def infer(self, x: Spec) -> Spec:
        return replace(x, dtype=torch.float64)


class GradientOfOneColumn(Cube):
    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        return super().op_backward(call, dy)[..., :1]


class EmitsTheFirstRow(ops.UnfusedOperation):
    """y = x / |x|, whose backward reads the norm of each row."""

    reads, emits = ("output", "norm"), ("norm",)

    def op_forward(self, call: OpCall, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        call.emit("norm", norm[..., :1, :].expand(norm.shape) if norm.dim() > 1 else norm)
        return x / norm

    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        y = call["output"]
        return (dy - y * (dy * y).sum(-1, keepdim=True)) / call["norm"]


class ErrsAtManyRows(Cube):
    def op_backward(self, call: OpCall, dy: Tensor) -> Any:
        dx = super().op_backward(call, dy)
        return dx * 1.5 if dy.numel() // dy.shape[-1] > 600 else dx


# Wrong op -> words of verify.
WRONG: dict[type[ops.UnfusedOperation], str] = {
    WrongFactor: "gradient of input: error",
    ReadsTheGlobal: "two calls, one backward: gradient of input: error",
    WritesIntoX: "input: was changed|changed its input 'input'",
    WritesIntoSaved: "input: was changed|changed its input 'input'",
    WritesIntoDy: "gradient that came for .*was changed|changed its input 'dy'",
    KeepsItsOutput: "lies in the memory of an earlier call's",
    SaysTwice: r"is float32 \[.*\] cpu, the plan says float32 \[",
    GivesTwice: r"is float32 \[.*\] cpu, the plan says float32 \[",
    SaysFloat64: r"is float32 \[.*\] cpu, the plan says float64 \[",
    GradientOfOneColumn: "the plan says|planned were|RuntimeError",
    EmitsTheFirstRow: "gradient of input: error",
    ErrsAtManyRows: "gradient of input: error",
}
