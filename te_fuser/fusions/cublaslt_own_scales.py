"""OwnScalesMatMul by cuBLASLt: what it multiplies is quantized by blocks beside it, by rows and turned.

Forward keeps x and W in 8 bits, turned as dW and dx read them. Backward quantizes dy once for both of its products; and
W again, where `fully_shard` takes it away in between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from te_fuser.codegen.description import Layout
from te_fuser.codegen.written import WrittenKernel
from te_fuser.dtypes import name_of, text_of
from te_fuser.fusions.cublaslt_float8 import (
    FACTORS,
    MAIN_GRAD,
    ProductRow8,
    declare,
    product_form,
    put_weight_gradient,
    why_no_epilogue,
)
from te_fuser.fusions.match import Body, ByBlocks, Cost, FusionCall, Match
from te_fuser.fusions.registry import Fusion
from te_fuser.kernels import quantizers
from te_fuser.kernels.cublaslt import products as products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.kernels.quantizers import DTYPES, FOUR, BlocksOf, Factor, padded
from te_fuser.ops.bias import Bias
from te_fuser.ops.float8_matmul import OwnScalesMatMul
from te_fuser.ops.float8_products import Float8Form
from te_fuser.ops.own_scales import Scaling
from te_fuser.ops.sizes import asked

# The share of the rate of products with one scale that those by blocks reach on an H200, of y, and of dx and dW
# together: 0.78 to 0.92 where one factor has squares, 0.62 to 0.74 where none has.
_OF_BLOCKS = {1: 0.87, 2: 0.74}
_OF_KINDS = {"bias": 0.91}  # and of that by kind: 669 us for 613, which is less than a kernel that adds it
_OF_KERNELS = Scaling((1, 128), power_of_two=True)  # those of generated kernels
_SIDES: tuple[Layout, ...] = ("blocks", "transposed_blocks")
Multiply = Callable[..., torch.Tensor]  # f(data of a, data of b, inverse of a, inverse of b, *bias)
_SAVED = ("turned", "inverse", "weight_turned", "weight_inverse")


def _scaling(form: Float8Form, role: int) -> Scaling:
    assert form.scalings is not None
    return form.scalings[role]


def _form_of(form: Float8Form, which: str, kind: str = "plain") -> ProductForm:
    """One of the three products as it is configured."""
    a, b = FACTORS[which]
    return product_form(form, which, kind, scales=(_lie(form, a), _lie(form, b)))


def _onto_main_grad(form: Float8Form, over: bool = False) -> ProductForm:
    """dW as it is added to main_grad, or written over it."""
    return _form_of(form, "dW", "plain" if over else "onto").giving(MAIN_GRAD)


def _product(form: Float8Form, which: str, kind: str = "plain") -> Multiply:
    """What multiplies the data of two factors by their inverses, one of the three products."""
    return products.product_of(_form_of(form, which, kind)).make


def _quantizer(form: Float8Form, role: int, dtype: torch.dtype, wanted: str) -> BlocksOf:
    """What makes a factor in 8 bits of what is in a dtype."""
    return BlocksOf(quantizers.kernel_of(dtype, form.formats[role], _scaling(form, role), wanted))


def _rows_of(x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """What a product made of x, without the rows that were put behind x."""
    if made.shape[:-1] == x.shape[:-1]:
        return made
    return made[: math.prod(x.shape[:-1])].clone().view(*x.shape[:-1], made.shape[-1])


def _lie(form: Float8Form, role: int) -> str:
    """How the scales of a factor lie, as the native product calls it."""
    block = _scaling(form, role).block
    return "squares" if block is not None and block[0] > 1 else "rows"


# ------------------------------------------------------------------------------------------- what runs


class _ForwardProduct(NamedTuple):
    """y of x in 8 bits; what stands for x says how many rows there are."""

    of_weight: BlocksOf
    multiply: Multiply
    keeps: bool  # what backward reads: x turned, and W unless it is made again

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor, of: BlocksOf
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """y = x W^T + b."""
        by_rows, turned = of(x)
        return self._product(x, by_rows, turned if self.keeps else None, weight, bias)

    def forward_by_blocks(
        self, x8: torch.Tensor, *given: torch.Tensor, features: int
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """y of x by blocks, and of x^T by blocks where that is kept."""
        by_rows = quantizers.unpacked(x8, features)
        turned = quantizers.unpacked_turned(given[0], math.prod(x8.shape[:-1])) if self.keeps else None
        weight, *bias = given[1:] if self.keeps else given
        return self._product(by_rows[0], by_rows, turned, weight, bias)

    def _product(
        self,
        x: torch.Tensor,
        by_rows: Factor,
        turned: Factor | None,
        weight: torch.Tensor,
        bias: Sequence[torch.Tensor],
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """y; with x turned, that and W turned, too."""
        (data, inverse), ((weights, weight_inverse), weight_turned) = by_rows, self.of_weight(weight)
        y = _rows_of(x, self.multiply(data, weights, inverse, weight_inverse, *bias))
        return y if turned is None else (y, *turned, *weight_turned)


class _Gradients(NamedTuple):
    """dx and dW of dy in 8 bits; what stands for dy says how many rows there are.

    Attributes:
        weight_again: what makes W turned, where forward has not kept it.
        of_input, of_weight: the products; the latter None where dW goes to main_grad.
        onto: those that add to main_grad, and write over it.
    """

    weight_again: BlocksOf | None
    of_input: Multiply
    of_weight: Multiply | None
    onto: tuple[ProductForm, ProductForm]

    @classmethod
    def of(cls, m: Match) -> _Gradients:
        """Those of a match."""
        op = cast(OwnScalesMatMul, m[0])
        form, weight = op.form, m[0].dtype_of("weight")
        again = None if op.keeps_weight else _quantizer(form, 1, weight, "turned")
        of_weight = None if op.accumulate_into_main_grad else _product(form, "dW")
        return cls(again, _product(form, "dx"), of_weight, (_onto_main_grad(form), _onto_main_grad(form, over=True)))

    def backward(
        self, m: FusionCall, dy: torch.Tensor, of: Mapping[str, BlocksOf]
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """dx = dy W and dW = dy^T x, as far as somebody needs them."""
        for_input, for_weight = m.needs("input"), m.needs("0.weight")
        wanted = "both" if for_input and for_weight else "rows" if for_input else "turned"
        return self._products(m, dy, *of[wanted](dy))

    def backward_by_blocks(
        self, m: FusionCall, dy8: torch.Tensor, features: int
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """dx and dW of dy and dy^T by blocks."""
        by_rows = quantizers.unpacked(dy8, features)
        turned = quantizers.unpacked_turned(m["dy.transposed_blocks"], math.prod(dy8.shape[:-1]))
        return self._products(m, by_rows[0], by_rows, turned)

    def _products(
        self, m: FusionCall, dy: torch.Tensor, by_rows: Factor, turned: Factor
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """dx, and dW by its name, as far as somebody needs them."""
        dx = None
        if m.needs("input"):
            weight = m["weight_turned"], m["weight_inverse"]
            if self.weight_again is not None:
                _, weight = self.weight_again(m[0].weight)
            dx = _rows_of(dy, self.of_input(by_rows[0], weight[0], by_rows[1], weight[1]))
        if not m.needs("0.weight"):
            return dx, {}
        (data, inverse), x, x_inverse = turned, m["turned"], m["inverse"]
        if self.of_weight is not None:
            return dx, {"0.weight": self.of_weight(data, x, inverse, x_inverse)}

        def scales(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Scales of some rows of dy^T, and of x^T."""
            if len(rows) == len(data):
                return inverse, x_inverse
            first = (rows.storage_offset() - data.storage_offset()) // rows.stride(0)
            return inverse[:, first : first + len(rows)].contiguous(), x_inverse

        op = m[0]
        return dx, {"0.weight": put_weight_gradient(self.onto, data, x, scales, op.weight, op.overwrite_main_grad)}


def _choose(m: Match, method: str, kind: str) -> Body:
    form, keeps = cast(OwnScalesMatMul, m[0]).form, m.needs_grad
    by_blocks = _by_blocks(m, method, kind)
    if method == "forward":
        of = _quantizer(form, 0, m.dtype, "both" if keeps else "rows")
        run = functools.partial(_output_of(m, kind).forward, of=of)
        describe = functools.partial(_algorithms, m.exact(), ("y",), kind)
        return Body(run, plain=True, describe=describe, by_blocks=by_blocks)
    describe = functools.partial(_algorithms, m.exact(), ("dx", "dW"))
    ways = {wanted: _quantizer(form, 2, form.dtype, wanted) for wanted in ("both", "rows", "turned")}
    backward = functools.partial(_Gradients.of(m).backward, of=ways)
    return Body(backward, describe=describe, by_blocks=by_blocks)


def _output_of(m: Match, kind: str) -> _ForwardProduct:
    form, weight = cast(OwnScalesMatMul, m[0]).form, m[0].dtype_of("weight")
    sides = "both" if _keeps_weight(m) else "rows"
    return _ForwardProduct(_quantizer(form, 1, weight, sides), _product(form, "y", kind), m.needs_grad)


def _by_blocks(m: Match, method: str, kind: str) -> ByBlocks | None:
    """How a direction runs with x, or dy, as generated kernels make it by blocks; None where it cannot.

    These have the scales that the recipe has by default, and products take as many rows as they come.
    """
    op, role = cast(OwnScalesMatMul, m[0]), 0 if method == "forward" else 2
    form = op.form
    if _scaling(form, role) != _OF_KERNELS or not asked(_are_whole_fours, m.x.rows):
        return None
    if role == 2:
        cost = functools.partial(_backward_cost, by_blocks=True)
        backward = functools.partial(_Gradients.of(m).backward_by_blocks, features=op.out_features)
        written = () if op.keeps_weight else (_of_weight(m, "turned"),)
        return ByBlocks("dy", _SIDES, form.formats[2], backward, cost, written, frozenset(("input", "0.weight")))
    cost = functools.partial(_forward_cost, kind=kind, by_blocks=True)
    forward = functools.partial(_output_of(m, kind).forward_by_blocks, features=op.in_features)
    weight = _of_weight(m, "both" if _keeps_weight(m) else "rows")
    return ByBlocks("input", _SIDES if m.needs_grad else _SIDES[:1], form.formats[0], forward, cost, (weight,))


def _are_whole_fours(rows: int) -> bool:
    return rows % FOUR == 0


def _of_weight(m: Match, sides: str) -> WrittenKernel:
    """What quantizes W."""
    form = cast(OwnScalesMatMul, m[0]).form
    return quantizers.kernel_of(m[0].dtype_of("weight"), form.formats[1], _scaling(form, 1), sides)


def _algorithms(m: Match, which: Iterable[str], kind: str = "plain") -> str:
    """What the products of a match run by, as far as that is known."""
    found = [algorithms_of(*_asked(m, product, m.x.rows, kind)) for product in which]
    return ", ".join(dict.fromkeys(filter(None, found)))


def _keeps_weight(m: Match) -> bool:
    return m.needs_grad and cast(OwnScalesMatMul, m[0]).keeps_weight


def _kernels(m: Match, direction: str, needed: frozenset[str]) -> Iterator[WrittenKernel]:
    """Those that its bodies launch beside the products."""
    op = cast(OwnScalesMatMul, m[0])
    form = op.form
    if direction == "forward":
        keeps = "both" if m.needs_grad else "rows"
        yield quantizers.kernel_of(form.dtype, form.formats[0], _scaling(form, 0), keeps)
        yield _of_weight(m, "both" if _keeps_weight(m) else "rows")
        return
    both = {"input", "0.weight"} <= needed
    wanted = "both" if both else "rows" if "input" in needed else "turned"
    yield quantizers.kernel_of(form.dtype, form.formats[2], _scaling(form, 2), wanted)
    if "input" in needed and not op.keeps_weight:
        yield _of_weight(m, "turned")


# ------------------------------------------------------------------------------ why not, and what it costs


def _why_not(m: Match, kind: str, keeps: bool) -> str | bool:
    """Why cuBLASLt cannot run the products of a match; True when it can."""
    if m.needs_grad != keeps:
        return "there is no backward to read what it keeps" if keeps else "it keeps nothing that backward reads"
    why = why_no_epilogue(m)
    if why is not None:
        return why
    block = _scaling(cast(OwnScalesMatMul, m[0]).form, 0).block
    scales = "block" if block is not None and block[1] == 128 else "mx"  # what has one scale
    why = products.obstacle_on(m.device, m.capability, scales)
    if why is not None:
        return f"{why}; it is emulated"
    if m.target != "cuda":
        return "the kernels that quantize its factors are compiled for the GPU at hand, and this plan has none of these"
    for name, dtype in (("x", m.dtype), ("the weight", m[0].dtype_of("weight"))):
        if dtype not in DTYPES:
            return f"it quantizes {', '.join(map(text_of, DTYPES))}, {name} is in {text_of(dtype)}"
    if m.capability is not None:  # a GPU that is not at hand cannot be asked
        return True
    which = ("y", "dx", "dW") if keeps else ("y",)
    found = (asked(_refusal, m, product, m.x.rows, kind) for product in which)
    return next((words for words in found if words), True)


def _refusal(m: Match, which: str, rows: int, kind: str) -> str | None:
    if not rows:
        return None
    return products.refusal_of(*_asked(m, which, rows, kind), m.device)


def _asked(m: Match, which: str, rows: int, kind: str) -> tuple[ProductForm, tuple[int, int, int]]:
    """A product of so many rows, and its sizes (m, n, k)."""
    op = cast(OwnScalesMatMul, m[0])
    inner, out, turned = op.in_features, op.out_features, padded(rows)
    rows = turned if rows % FOUR else rows
    sizes = {"y": (rows, out, inner), "dx": (rows, inner, out), "dW": (out, inner, turned)}[which]
    if which == "dW" and op.accumulate_into_main_grad:
        return _onto_main_grad(op.form), sizes
    return _form_of(op.form, which, kind if which == "y" else "plain"), sizes


def _forward_cost(m: Match, kind: str, by_blocks: bool = False) -> Cost:
    op, weight = cast(OwnScalesMatMul, m[0]), m[0].dtype_of("weight")
    x, w = m.x.rows * op.in_features, op.in_features * op.out_features
    quantized = 0 if by_blocks else x
    read = quantized * m.dtype.itemsize + w * weight.itemsize
    written = (2 if m.needs_grad else 1) * quantized + (2 if _keeps_weight(m) else 1) * w
    made = m.x.rows * op.out_features * op.form.dtype.itemsize
    cost = _cost(op, m.x.rows, 1, read, written, x + w, made, 2 - by_blocks)
    return replace(cost, efficiency=cost.efficiency * _OF_KINDS.get(kind, 1.0))


def _backward_cost(m: Match, by_blocks: bool = False) -> Cost:
    op, weight = cast(OwnScalesMatMul, m[0]), m[0].dtype_of("weight")
    rows, inner, out = m.x.rows, op.in_features, op.out_features
    again = 0 if op.keeps_weight else inner * out
    quantized = 0 if by_blocks else rows * out
    read = quantized * op.form.dtype.itemsize + again * weight.itemsize
    made = rows * inner * op.form.dtype.itemsize + inner * out * op.form.weight_dtype.itemsize
    written, launches = 2 * quantized + again, 4 - op.keeps_weight - by_blocks
    return _cost(op, rows, 2, read, written, 2 * rows * out + inner * out + rows * inner, made, launches)


def _cost(
    op: OwnScalesMatMul, rows: int, products: int, read: int, written: int, factors: int, made: int, launches: int
) -> Cost:
    """What is read and written to quantize counts as bytes apart."""
    flops = 2.0 * products * rows * op.in_features * op.out_features
    name, share = name_of(op.form.formats[0]), _OF_BLOCKS[products]
    return Cost(read + factors, written + made, flops, launches, efficiency=share, apart=read + written, dtype=name)


def _saved_bytes(m: Match) -> Mapping[str, int]:
    op = cast(OwnScalesMatMul, m[0])
    weight = op.in_features * op.out_features if op.keeps_weight else 0
    numbers = dict.fromkeys(("inverse", "weight_inverse"), 4)
    return {"turned": op.in_features * padded(m.x.rows), "weight_turned": weight, **numbers}


# ---------------------------------------------------------------------------------------------- the fusions


_TAKES = ("input", "0.weight")
_ROWS = (
    ProductRow8(
        "own_scales_matmul", "y, dx and dW by cuBLASLt, of factors that are quantized beside them.", (OwnScalesMatMul,)
    ),
    ProductRow8(
        "own_scales_matmul_bias",
        "The same, where the product's epilogue adds the bias.",
        (OwnScalesMatMul, Bias),
        kind="bias",
        adds=("1.bias",),
    ),
)


def _declare(row: ProductRow8, keeps: bool) -> Fusion:
    """A row with its backward, or y alone where nothing needs a gradient."""
    why_not = functools.partial(_why_not, keeps=keeps)
    if not keeps:
        alone = replace(row, name=f"{row.name}_alone", doc=f"{row.doc} y alone, where nothing needs a gradient.")
        return declare(alone, _TAKES, why_not, _forward_cost, _choose, compiles=_kernels)
    return declare(
        row,
        _TAKES,
        why_not,
        lambda m, kind: (_forward_cost(m, kind), _backward_cost(m)),
        _choose,
        saves=_SAVED,
        saved_bytes=_saved_bytes,
        reads=("0.weight",),
        backward_ops=slice(0, 1),
        compiles=_kernels,
    )


FUSIONS = tuple(_declare(row, keeps) for keeps in (True, False) for row in _ROWS)
