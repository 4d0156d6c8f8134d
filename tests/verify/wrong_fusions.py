"""Wrong fusions, each in one way: which list it is for, what is wrong, and what verify says of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from te_fuser import ops
from te_fuser.fusions import Body, Details, Fusion, fusion

Tensor = torch.Tensor
Case = tuple[Fusion, str, dict[str, Any]]
WRONG: dict[str, Case] = {}
_NOT = Details(registered=False)


def forward(kind: str, words: str, *pattern: Any, details: Details = _NOT, **given: Any) -> Callable[[Any], Any]:
    """Note a body for `Bias, SiLU`, or another pattern, that gives the value between them."""
    parts, emits = list(pattern or (ops.Bias, ops.SiLU)), () if pattern else ("0.output",)

    def note(body: Callable[..., Any]) -> Callable[..., Any]:
        made = fusion(forward=parts, emits=emits, name=body.__name__, details=details)(body)
        WRONG[f"{kind}: {body.__name__}"] = made, words, given
        return body

    return note


def backward(kind: str, words: str, **given: Any) -> Callable[[Any], Any]:
    """Note a body for the backward of `Bias, ReLU`."""

    def note(body: Callable[..., Any]) -> Callable[..., Any]:
        made = fusion(backward=[ops.Bias, ops.ReLU], reads=["output"], name=body.__name__, details=_NOT)(body)
        WRONG[f"{kind}: {body.__name__}"] = made, words, given
        return body

    return note


def bias_silu(m: Any, x: Tensor) -> Tensor:
    """As it should be."""
    before = x + m[0].bias
    m.emit("0.output", before)
    return torch.nn.functional.silu(before)


def summed(dx: Tensor) -> Tensor:
    """A bias's gradient, as it should be."""
    return dx.reshape(-1, dx.shape[-1]).sum(0)


def rows_of(t: Tensor) -> int:
    """Number of rows."""
    return t.numel() // t.shape[-1]


# ------------------------------------------------------------------------------------------------- gradients


@backward("gradient", "gradient of")
def forgets_the_slope(m: Any, dy: Tensor) -> Any:
    return dy, {"0.bias": summed(dy)}


@backward("gradient", "gradient of")
def takes_the_slope_at_zero(m: Any, dy: Tensor) -> Any:
    dx = dy * (m["output"] >= 0)
    return dx, {"0.bias": summed(dx)}


@backward("gradient", "gradient of 0.bias")
def sums_a_row_twice(m: Any, dy: Tensor) -> Any:
    dx = dy * (m["output"] > 0)
    return dx, {"0.bias": summed(dx) + dx.reshape(-1, dx.shape[-1])[-1]}


@backward("gradient", "gradient of")
def errs_by_little(m: Any, dy: Tensor) -> Any:
    dx = dy * (m["output"] > 0) * (1 + 1e-5)
    return dx, {"0.bias": summed(dx)}


@backward("gradient", "gave no gradient for '0.bias'")
def gives_none(m: Any, dy: Tensor) -> Any:
    return dy * (m["output"] > 0), {"0.bias": None}


@backward("gradient", "gradient of 0.bias|says float32")
def sums_one_dimension(m: Any, dy: Tensor) -> Any:
    dx = dy * (m["output"] > 0)
    return dx, {"0.bias": dx.sum(-2) if dx.dim() > 1 else dx}


# ---------------------------------------------------------------------------------------------------- writes


@backward("write", "gradient that came for .*was changed by the run")
def writes_into_dy(m: Any, dy: Tensor) -> Any:
    """And what it writes is what it would write again."""
    if dy.stride(-1):
        dy.mul_(m["output"] > 0)
    dx = dy * (m["output"] > 0)
    return dx, {"0.bias": summed(dx)}


@backward("write", "gradient that came for .*was changed by the run")
def writes_into_dy_of_many_rows(m: Any, dy: Tensor) -> Any:
    if rows_of(dy) > 281 and dy.stride(-1):
        dy.mul_(m["output"] > 0)
    dx = dy * (m["output"] > 0)
    return dx, {"0.bias": summed(dx)}


@backward("write", "changed its input 'output'")
def clears_what_it_read(m: Any, dy: Tensor) -> Any:
    dx = dy * (m["output"] > 0)
    m["output"].data.zero_()
    return dx, {"0.bias": summed(dx)}


@forward("write", "input: was changed|changed its input 'input'")
def clamps_its_input(m: Any, x: Tensor) -> Tensor:
    """In-place clamp, which does nothing the second time."""
    x.clamp_(-1.0, 1.0)
    return bias_silu(m, x)


@forward("write", "0.bias: was changed|changed its input '0.bias'")
def clamps_its_parameter(m: Any, x: Tensor) -> Tensor:
    m[0].bias.data.clamp_(-0.1, 0.1)
    return bias_silu(m, x)


@forward("write", "gradient of")
def overwrites_what_it_gave(m: Any, x: Tensor) -> Tensor:
    before = x + m[0].bias
    m.emit("0.output", before)
    return torch.nn.functional.silu(before, inplace=True)


# --------------------------------------------------------------------------------------------------- aliases

_KEPT: dict[Any, Tensor] = {}


@forward("alias", "lies in the memory of an earlier call's")
def keeps_its_output(m: Any, x: Tensor) -> Tensor:
    y = bias_silu(m, x)
    kept = _KEPT.setdefault((y.shape, y.dtype), torch.empty_like(y))
    return kept.copy_(y)


def _same(x: Tensor) -> Tensor:
    return x.view(x.shape)


_PLAIN = Details(registered=False, takes=("input",), gives=("output",), choose=lambda m, d: Body(_same, plain=True))


@forward(
    "alias",
    "lies in the memory of its input .*says that it is plain",
    ops.Scale,
    details=_PLAIN,
    ops=[[ops.Scale(value=1.0)]],
)
def says_plain_of_a_view(x: Tensor) -> Tensor:
    raise NotImplementedError


# ------------------------------------------------------------------------------------------ widths and dtypes


@backward("width", r"gradient of bias of .* is float32 \[.*, the plan says")
def leaves_the_sum_to_autograd(m: Any, dy: Tensor) -> Any:
    dx = dy * (m["output"] > 0)
    return dx, {"0.bias": dx.clone()}


@forward("dtype", "bias.output is float32 .*the plan says bfloat16", dtypes=[torch.bfloat16])
def emits_float32(m: Any, x: Tensor) -> Tensor:
    y = bias_silu(m, x)
    m.emit("0.output", (x + m[0].bias).float())
    return y


@backward("dtype", "is float32 .*the plan says bfloat16", dtypes=[torch.bfloat16])
def gives_its_gradient_in_float32(m: Any, dy: Tensor) -> Any:
    dx = dy * (m["output"] > 0)
    return dx.float(), {"0.bias": summed(dx)}


# ------------------------------------------------------------------------------------------------ statistics


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
        from te_fuser.formula import row_mean, rsqrt

        return x * rsqrt(row_mean(x * x) + self.eps)


WRONG["statistic: saved with another eps"] = _norm(1e-3, 0), "gradient of input", {}
WRONG["statistic: saved for another row"] = _norm(0.0, 1), "gradient of input", {}


# ------------------------------------------------------------------------------------------------- what it keeps


@forward("state", "parameters changed in place.*error")
def keeps_its_parameter(m: Any, x: Tensor) -> Tensor:
    bias = m[0].bias
    kept = _KEPT.setdefault(id(bias), bias.detach().clone())
    if kept.shape != bias.shape or kept.dtype != bias.dtype:
        kept = bias
    before = x + kept
    m.emit("0.output", before)
    return torch.nn.functional.silu(before)


# ------------------------------------------------------------------------------------------------- in one line

_RUNS = itertools.count()


def _wrong_where(wrong: Callable[[Tensor], bool]) -> Callable[[Any, Tensor], Tensor]:
    """A body that is right but where that holds of its input."""
    return lambda m, x: bias_silu(m, x) * (1.5 if wrong(x) else 1.0)


LINES: dict[str, tuple[str, Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "size: errs above 600 rows": ("output: error", _wrong_where(lambda x: rows_of(x) > 600), {}),
    "size: errs above 16000 rows": ("output: error", _wrong_where(lambda x: rows_of(x) > 16_000), {}),
    "size: errs at whole blocks": ("output: error", _wrong_where(lambda x: rows_of(x) % 64 == 0), {}),
    "size: errs at one row": ("output: error", _wrong_where(lambda x: rows_of(x) == 1), {}),
    "size: errs at odd widths": ("output: error", _wrong_where(lambda x: x.shape[-1] % 2 == 1), {}),
    "size: errs in three dimensions": ("output: error", _wrong_where(lambda x: x.dim() == 3), {}),
    "size: errs at strides": ("output: error", _wrong_where(lambda x: not x.is_contiguous()), {}),
    "size: errs unaligned": ("output: error", _wrong_where(lambda x: x.data_ptr() % 16 != 0), {}),
    "width: gives half of it": (
        "output.*(is|says)|RuntimeError",
        lambda m, x: bias_silu(m, x)[..., : x.shape[-1] // 2],
        {},
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
    "state: is another each time": (
        "is not repeated bit for bit",
        lambda m, x: bias_silu(m, x) * (1 + 1e-6 * (next(_RUNS) % 2)),
        {},
    ),
}
for name, (words, body, given) in LINES.items():
    body.__name__ = name.partition(": ")[2].replace(" ", "_")
    forward(name.partition(":")[0], words, **given)(body)


@forward("state", "error|train and eval swapped", ops.Dropout)
def draws_by_itself(m: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, m[0].p, m.draws(0))
