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

from te_fuser.codegen.cuda_source_kernel import WrittenKernel
from te_fuser.codegen.description import Layout, padded
from te_fuser.dtypes import name_of
from te_fuser.fusions.cublaslt_float8 import (
    ProductRow8,
    declare,
    form_of,
    onto_main_grad,
    problem_of,
    put_weight_gradient,
)
from te_fuser.fusions.match import Body, ByBlocks, Cost, FusionCall, Match
from te_fuser.fusions.registry import Fusion
from te_fuser.kernels import quantizers
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.kernels.quantizers import FOUR, BlocksOf, Factor, QuantizeBlocks
from te_fuser.ops.bias_scale import Bias
from te_fuser.ops.float8_matmul import OwnScalesMatMul
from te_fuser.ops.sizes import asked
from te_fuser.recipe.recipes import OwnScales, QParams

# The share of the rate of products with one scale that those by blocks reach on an H200, of y, and of dx and dW
# together: 0.78 to 0.92 where one factor has squares, 0.62 to 0.74 where none has.
_OF_BLOCKS = {1: 0.87, 2: 0.74}
_OF_KINDS = {"bias": 0.91}  # and of that by kind: 669 us for 613, which is less than a kernel that adds it
_OF_KERNELS = OwnScales(QParams(power_2_scale=True), (1, 128))  # those of generated kernels
_SIDES: tuple[Layout, ...] = ("blocks", "transposed_blocks")
Multiply = Callable[..., torch.Tensor]  # f(data of a, data of b, inverse of a, inverse of b, *bias)
_SAVED = ("turned", "inverse", "weight_turned", "weight_inverse")


def _op(m: Match) -> OwnScalesMatMul:
    return cast(OwnScalesMatMul, m[0])


def _scaling(m: Match, role: int) -> OwnScales:
    """Rule by which x, W or dy gets its scales."""
    scalings = _op(m).form.scalings
    assert scalings is not None
    return scalings[role]


def _product(m: Match, which: str, kind: str = "plain") -> Multiply:
    """One of the three products: it multiplies the data of two factors by their inverses."""
    return products.product_of(form_of(m, which, kind)).make


def _kernel(m: Match, role: int, sides: str) -> QuantizeBlocks:
    """Kernel that makes x, W or dy in 8 bits, by rows, turned or both."""
    form = _op(m).form
    dtype = (form.dtype, m[0].dtype_of("weight"), form.dtype)[role]
    return quantizers.kernel_of(dtype, form.formats[role], _scaling(m, role), sides)


def _rows_of(x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Result of a product of x, without the rows that were put behind x."""
    if made.shape[:-1] == x.shape[:-1]:
        return made
    return made[: _tokens(x)].clone().view(*x.shape[:-1], made.shape[-1])


def _tokens(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])


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
        turned = quantizers.unpacked(given[0], _tokens(x8), turned=True) if self.keeps else None
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
        """Gradients of a match."""
        again = None if _op(m).keeps_weight else BlocksOf(_kernel(m, 1, "turned"))
        of_weight = None if _op(m).accumulate_into_main_grad else _product(m, "dW")
        return cls(again, _product(m, "dx"), of_weight, onto_main_grad(m))

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
        turned = quantizers.unpacked(m["dy.transposed_blocks"], _tokens(dy8), turned=True)
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
    by_blocks = _by_blocks(m, method, kind)
    if method == "forward":
        of = BlocksOf(_kernel(m, 0, "both" if m.needs_grad else "rows"))
        run = functools.partial(_output_of(m, kind).forward, of=of)
        describe = functools.partial(_algorithms, m.exact(), ("y",), kind)
        return Body(run, plain=True, describe=describe, by_blocks=by_blocks)
    describe = functools.partial(_algorithms, m.exact(), ("dx", "dW"))
    ways = {wanted: BlocksOf(_kernel(m, 2, wanted)) for wanted in ("both", "rows", "turned")}
    return Body(functools.partial(_Gradients.of(m).backward, of=ways), describe=describe, by_blocks=by_blocks)


def _output_of(m: Match, kind: str) -> _ForwardProduct:
    return _ForwardProduct(BlocksOf(_kernel(m, 1, _sides_of_weight(m))), _product(m, "y", kind), m.needs_grad)


def _sides_of_weight(m: Match) -> str:
    """Layouts in which forward makes W: turned, too, where it keeps that."""
    return "both" if m.needs_grad and _op(m).keeps_weight else "rows"


def _by_blocks(m: Match, method: str, kind: str) -> ByBlocks | None:
    """Way in which a direction runs with x, or dy, by blocks of generated kernels."""
    op, role = _op(m), 0 if method == "forward" else 2
    if _scaling(m, role) != _OF_KERNELS or not asked(_are_whole_fours, m.x.rows):
        return None
    if role == 2:
        cost = functools.partial(_backward_cost, by_blocks=True)
        backward = functools.partial(_Gradients.of(m).backward_by_blocks, features=op.out_features)
        written = () if op.keeps_weight else (_kernel(m, 1, "turned"),)
        return ByBlocks("dy", _SIDES, op.form.formats[2], backward, cost, written, frozenset(("input", "0.weight")))
    cost = functools.partial(_forward_cost, kind=kind, by_blocks=True)
    forward = functools.partial(_output_of(m, kind).forward_by_blocks, features=op.in_features)
    sides = _SIDES if m.needs_grad else _SIDES[:1]
    return ByBlocks("input", sides, op.form.formats[0], forward, cost, (_kernel(m, 1, _sides_of_weight(m)),))


def _are_whole_fours(rows: int) -> bool:
    return rows % FOUR == 0


def _algorithms(m: Match, which: Iterable[str], kind: str = "plain") -> str:
    """Algorithms of the products of a match, as far as they are known."""
    found = [algorithms_of(*problem_of(m, product, m.x.rows, kind)) for product in which]
    return ", ".join(dict.fromkeys(filter(None, found)))


def _kernels(m: Match, direction: str, needed: frozenset[str]) -> Iterator[WrittenKernel]:
    """Kernels that its bodies launch beside the products."""
    if direction == "forward":
        yield _kernel(m, 0, "both" if m.needs_grad else "rows")
        yield _kernel(m, 1, _sides_of_weight(m))
        return
    both = {"input", "0.weight"} <= needed
    yield _kernel(m, 2, "both" if both else "rows" if "input" in needed else "turned")
    if "input" in needed and not _op(m).keeps_weight:
        yield _kernel(m, 1, "turned")


# --------------------------------------------------------------------------------------------- what it costs


def _forward_cost(m: Match, kind: str, by_blocks: bool = False) -> Cost:
    op, weight = _op(m), m[0].dtype_of("weight")
    x, w = m.x.rows * op.in_features, op.in_features * op.out_features
    quantized = 0 if by_blocks else x
    read = quantized * m.dtype.itemsize + w * weight.itemsize
    written = (2 if m.needs_grad else 1) * quantized + (2 if _sides_of_weight(m) == "both" else 1) * w
    made = m.x.rows * op.out_features * op.form.dtype.itemsize
    cost = _cost(op, m.x.rows, 1, read, written, x + w, made, 2 - by_blocks)
    return replace(cost, efficiency=cost.efficiency * _OF_KINDS.get(kind, 1.0))


def _backward_cost(m: Match, by_blocks: bool = False) -> Cost:
    op, weight = _op(m), m[0].dtype_of("weight")
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
    """Cost of so many products; bytes that are moved to quantize count apart."""
    flops = 2.0 * products * rows * op.in_features * op.out_features
    name, share = name_of(op.form.formats[0]), _OF_BLOCKS[products]
    return Cost(read + factors, written + made, flops, launches, efficiency=share, apart=read + written, dtype=name)


def _saved_bytes(m: Match) -> Mapping[str, int]:
    op = _op(m)
    weight = op.in_features * op.out_features if op.keeps_weight else 0
    numbers = dict.fromkeys(("inverse", "weight_inverse"), 4)
    return {"turned": op.in_features * padded(m.x.rows), "weight_turned": weight, **numbers}


_DOC = "y, dx and dW by cuBLASLt, of factors that are quantized beside them."
_BIAS = "The same, where the product's epilogue adds the bias."
_ROWS = (
    ProductRow8("own_scales_matmul", _DOC, (OwnScalesMatMul,)),
    ProductRow8("own_scales_matmul_bias", _BIAS, (OwnScalesMatMul, Bias), kind="bias", adds=("1.bias",)),
)


def _declare(row: ProductRow8) -> Fusion:
    """A row with its backward."""
    return declare(
        row,
        ("y", "dx", "dW"),
        lambda m: None if m.needs_grad else "there is no backward to read what it keeps",
        lambda m, kind: (_forward_cost(m, kind), _backward_cost(m)),
        _choose,
        saves=_SAVED,
        saved_bytes=_saved_bytes,
        reads=("0.weight",),
        backward_ops=slice(0, 1),
        compiles=_kernels,
    )


def _declare_alone(row: ProductRow8) -> Fusion:
    """y alone, where nothing needs a gradient."""
    return declare(
        replace(row, name=f"{row.name}_alone", doc=f"{row.doc} y alone, where nothing needs a gradient."),
        ("y",),
        lambda m: "it keeps nothing that backward reads" if m.needs_grad else None,
        _forward_cost,
        _choose,
        compiles=_kernels,
    )


FUSIONS = (*map(_declare, _ROWS), *map(_declare_alone, _ROWS))
