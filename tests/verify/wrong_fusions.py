"""Wrong fusions and opaque ops, each in one way: what is wrong, and what verify says of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from te_fuser import ops
from te_fuser.formula import row_mean, rsqrt
from te_fuser.fusions import Body, Details, Fusion, fusion
from te_fuser.ops.base import OpCall, Spec

Tensor = torch.Tensor
_NOT = Details(registered=False)
_RUNS = itertools.count()
_KEPT: dict[Any, Tensor] = {}


def bias_silu(m: Any, x: Tensor) -> Tensor:
    """As it should be."""
    before = x + m[0].bias
    m.emit("0.output", before)
    return torch.nn.functional.silu(before)


def summed(dx: Tensor) -> Tensor:
    """A bias's gradient, as it should be."""
    return dx.reshape(-1, dx.shape[-1]).sum(0)


def masked(m: Any, dy: Tensor) -> Tensor:
    """The gradient of x behind a ReLU, as it should be."""
    return dy * (m["output"] > 0)


def both(dx: Tensor, of_bias: Tensor | None = None) -> Any:
    """The gradients of x, and of the bias, by default as it should be."""
    return dx, {"0.bias": summed(dx) if of_bias is None else of_bias}


def rows_of(t: Tensor) -> int:
    """Number of rows."""
    return t.numel() // t.shape[-1]


# ---- backward of `Bias, ReLU`


def sums_a_row_twice(m: Any, dy: Tensor) -> Any:
    dx = masked(m, dy)
    return both(dx, summed(dx) + dx.reshape(-1, dx.shape[-1])[-1])


def sums_one_dimension(m: Any, dy: Tensor) -> Any:
    dx = masked(m, dy)
    return both(dx, dx.sum(-2) if dx.dim() > 1 else dx)


def writes_into_dy(m: Any, dy: Tensor, above: int = 0) -> Any:
    """And what it writes is what it would write again."""
    if rows_of(dy) > above and dy.stride(-1):
        dy.mul_(m["output"] > 0)
    return both(masked(m, dy))


def clears_what_it_read(m: Any, dy: Tensor) -> Any:
    dx = masked(m, dy)
    m["output"].data.zero_()
    return both(dx)


Row = tuple[str, Callable[[Any, Tensor], Any], dict[str, Any]]  # words of verify, a body, and arguments of verify
WRITES = "gradient that came for .*was changed by the run"
BACKWARD: dict[str, Row] = {
    "gradient: forgets the slope": ("gradient of", lambda m, dy: both(dy), {}),
    "gradient: takes the slope at zero": ("gradient of", lambda m, dy: both(dy * (m["output"] >= 0)), {}),
    "gradient: sums a row twice": ("gradient of 0.bias", sums_a_row_twice, {}),
    "gradient: errs by little": ("gradient of", lambda m, dy: both(masked(m, dy) * (1 + 1e-5)), {}),
    "gradient: gives none": ("no gradient for '0.bias'", lambda m, dy: (masked(m, dy), {"0.bias": None}), {}),
    "gradient: sums one dimension": ("gradient of 0.bias|says float32", sums_one_dimension, {}),
    "write: into dy": (WRITES, writes_into_dy, {}),
    "write: into dy of many rows": (WRITES, lambda m, dy: writes_into_dy(m, dy, 281), {}),
    "write: clears what it read": ("changed its input 'output'", clears_what_it_read, {}),
    "width: leaves the sum to autograd": (
        r"gradient of bias of .* is float32 \[.*, the plan says",
        lambda m, dy: both(masked(m, dy), masked(m, dy)),
        {},
    ),
    "dtype: gives its gradient in float32": (
        "is float32 .*the plan says bfloat16",
        lambda m, dy: (masked(m, dy).float(), {"0.bias": summed(masked(m, dy))}),
        {"dtypes": [torch.bfloat16]},
    ),
}


# ---- forward of `Bias, SiLU`


def clamps_its_input(m: Any, x: Tensor) -> Tensor:
    """In-place clamp, which does nothing the second time."""
    x.clamp_(-1.0, 1.0)
    return bias_silu(m, x)


def clamps_its_parameter(m: Any, x: Tensor) -> Tensor:
    m[0].bias.data.clamp_(-0.1, 0.1)
    return bias_silu(m, x)


def overwrites_what_it_gave(m: Any, x: Tensor) -> Tensor:
    before = x + m[0].bias
    m.emit("0.output", before)
    return torch.nn.functional.silu(before, inplace=True)


def keeps_its_output(m: Any, x: Tensor) -> Tensor:
    y = bias_silu(m, x)
    return _KEPT.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


def emits(value: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A body that is right but for the value that it gives beside the output."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = bias_silu(m, x)
        m.emit("0.output", value(m, x))
        return y

    return body


def keeps_its_parameter(m: Any, x: Tensor) -> Tensor:
    bias = m[0].bias
    kept = _KEPT.setdefault(id(bias), bias.detach().clone())
    if kept.shape != bias.shape or kept.dtype != bias.dtype:
        kept = bias
    before = x + kept
    m.emit("0.output", before)
    return torch.nn.functional.silu(before)


def wrong_where(wrong: Callable[[Tensor], bool]) -> Row:
    """A body that is right but where that holds of its input."""
    return "output: error", lambda m, x: bias_silu(m, x) * (1.5 if wrong(x) else 1.0), {}


FORWARD: dict[str, Row] = {
    "size: errs above 600 rows": wrong_where(lambda x: rows_of(x) > 600),
    "size: errs above 16000 rows": wrong_where(lambda x: rows_of(x) > 16_000),
    "size: errs at whole blocks": wrong_where(lambda x: rows_of(x) % 64 == 0),
    "size: errs at one row": wrong_where(lambda x: rows_of(x) == 1),
    "size: errs at odd widths": wrong_where(lambda x: x.shape[-1] % 2 == 1),
    "size: errs in three dimensions": wrong_where(lambda x: x.dim() == 3),
    "size: errs at strides": wrong_where(lambda x: not x.is_contiguous()),
    "size: errs unaligned": wrong_where(lambda x: x.data_ptr() % 16 != 0),
    "size: takes every row as dense": (
        "transposed input",
        lambda m, x: bias_silu(m, x.as_strided(x.shape, torch.empty(x.shape).stride())),
        {},
    ),
    "read: what is not declared": (
        "KeyError: .*is not declared",
        lambda m, x: bias_silu(m, m["1.output"]),
        {},
    ),
    "write: clamps its input": ("input: was changed|changed its input 'input'", clamps_its_input, {}),
    "write: clamps its parameter": ("0.bias: was changed|changed its input '0.bias'", clamps_its_parameter, {}),
    "write: overwrites what it gave": ("gradient of", overwrites_what_it_gave, {}),
    "alias: keeps its output": ("lies in the memory of an earlier call's", keeps_its_output, {}),
    "width: gives half of it": (
        "output.*(is|says)|RuntimeError",
        lambda m, x: bias_silu(m, x)[..., : x.shape[-1] // 2],
        {},
    ),
    "emits: the wrong value": ("gradient of", emits(lambda m, x: x), {}),
    "dtype: emits float32": (
        "bias.output is float32 .*the plan says bfloat16",
        emits(lambda m, x: (x + m[0].bias).float()),
        {"dtypes": [torch.bfloat16]},
    ),
    "dtype: gives float32": (
        "is float32 .*(plain PyTorch gives|the plan says) .*bfloat16",
        lambda m, x: bias_silu(m, x).float(),
        {"dtypes": [torch.bfloat16]},
    ),
    "dtype: rounds in between": ("output: .*error", lambda m, x: bias_silu(m, x.bfloat16().to(x.dtype)), {}),
    "dtype: forgets float64": (
        "float64 .*error",
        lambda m, x: bias_silu(m, x.float().to(x.dtype)),
        {"dtypes": [torch.float64]},
    ),
    "state: keeps its parameter": ("parameters changed in place.*error", keeps_its_parameter, {}),
    "state: is another each time": (
        "is not repeated bit for bit",
        lambda m, x: bias_silu(m, x) * (1 + 1e-6 * (next(_RUNS) % 2)),
        {},
    ),
}


# ---- other lists


def draws_by_itself(m: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, m[0].p, m.draws(0))


def says_plain_of_a_view(x: Tensor) -> Tensor:
    raise NotImplementedError


def _same(x: Tensor) -> Tensor:
    return x.view(x.shape)


def _norm(wrong_eps: float, wrong_rows: int) -> Fusion:
    def run_forward(m: Any, x: Tensor) -> Tensor:
        rstd = (x.square().mean(-1, keepdim=True) + m[0].eps).rsqrt()
        kept = (x.square().mean(-1, keepdim=True) + m[0].eps + wrong_eps).rsqrt()
        m.emit("rstd", kept.roll(wrong_rows, 0) if kept.dim() > 1 else kept)
        return x * rstd

    def run_backward(m: Any, dy: Tensor) -> Any:
        x, rstd = m["input"], m["rstd"]
        normed = x * rstd
        return rstd * (dy - normed * (dy * normed).mean(-1, keepdim=True))

    body = type("Norm", (), {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)})
    details = Details(registered=False, saved_bytes=lambda m: {"rstd": 4 * m.x.rows})
    return fusion(joint=[Normed], reads=["input"], saves=["rstd"], name="norm", details=details)(body)


class Normed(ops.RowOp):
    """x / rms(x)."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def compute(self, x: Any) -> Any:
        return x * rsqrt(row_mean(x * x) + self.eps)


_PLAIN = Details(registered=False, takes=("input",), gives=("output",), choose=lambda m, d: Body(_same, plain=True))
_BIASES: dict[str, dict[str, Any]] = {
    "backward": {"backward": [ops.Bias, ops.ReLU], "reads": ["output"]},
    "forward": {"forward": [ops.Bias, ops.SiLU], "emits": ["0.output"]},
}
WRONG: dict[str, tuple[Fusion, str, dict[str, Any]]] = {
    **{
        name: (fusion(**_BIASES[kind], name=name.replace(" ", "_"), details=_NOT)(body), words, given)
        for kind, rows in (("backward", BACKWARD), ("forward", FORWARD))
        for name, (words, body, given) in rows.items()
    },
    "alias: says plain of a view": (
        fusion(forward=[ops.Scale], details=_PLAIN)(says_plain_of_a_view),
        "lies in the memory of its input .*says that it is plain",
        {"ops": [[ops.Scale(value=1.0)]]},
    ),
    "state: draws by itself": (
        fusion(forward=[ops.Dropout], details=_NOT)(draws_by_itself),
        "error|train and eval swapped",
        {},
    ),
    "statistic: saved with another eps": (_norm(1e-3, 0), "gradient of input", {}),
    "statistic: saved for another row": (_norm(0.0, 1), "gradient of input", {}),
}


# ---- opaque ops, alone or behind another one


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
WRONG_OPS: dict[type[ops.UnfusedOperation], str] = {
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
