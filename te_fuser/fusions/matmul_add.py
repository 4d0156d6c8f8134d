"""MatMul + Add by cuBLASLt, maybe with a Bias and a Dropout that drops nothing between them: y = x W^T + b + other.

The product starts from `other` (beta = 1) and writes a tensor of its own, so it does not matter who else reads it.
"""

from __future__ import annotations

import itertools

import torch

from te_fuser.fusions.match import Match
from te_fuser.fusions.matmul import cost_of, native, why_no_product
from te_fuser.fusions.matmul_bias import why_no_bias
from te_fuser.fusions.registry import Fusion, fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.add import Add
from te_fuser.ops.bias import Bias
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.matmul import MatMul


def _declare(bias: bool, dropout: bool) -> Fusion:
    pattern = [MatMul, *([Bias] if bias else []), *([Dropout] if dropout else []), Add]
    last, kind = len(pattern) - 1, "forward_bias_add" if bias else "forward_add"

    def when(m: Match) -> bool | str:
        added = m[last].dtype_of("other")
        if dropout and m[last - 1].op.draws():
            return "an epilogue drops nothing, and this Dropout does"
        if added != m.dtype:
            return f"what is added is in {added}, the product in {m.dtype}"
        return (why_no_bias(m) if bias else None) or why_no_product(m, kind) or True

    def body(*tensors: torch.Tensor) -> torch.Tensor:
        return (products.linear_bias_add if bias else products.linear_add)(*tensors)

    body.__doc__ = f"y = x W^T{' + b' * bias} + other{', where Dropout drops nothing' * dropout}."
    return fusion(
        forward=pattern,
        name=f"matmul_add{'_bias' * bias}{'_dropout' * dropout}",
        takes=("input", "0.weight", f"{last}.other", *(["1.bias"] if bias else [])),
        when=when,
        cost=lambda m: cost_of(m, kind),
        choose=lambda m, method: native(m, kind),
    )(body)


FUSIONS = tuple(_declare(bias, dropout) for bias, dropout in itertools.product((False, True), repeat=2))
