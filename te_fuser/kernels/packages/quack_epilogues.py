"""Epilogues of products, in the terms of the package quack-kernels; imported where that is installed."""

from __future__ import annotations

from typing import Any

from quack.activation import dgelu_tanh_approx, gelu_tanh_approx
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecReduce, RowVecLoad


@gemm_epilogue(outputs=("activated",), ops={"bias": RowVecLoad("bias")})
def gelu_of_sum(acc: Any, bias: Any) -> dict[str, Any]:
    """(acc + bias, gelu(acc + bias)), in the tanh form; the bias has a number for each column."""
    total = acc + bias
    return {"D": total, "activated": gelu_tanh_approx(total)}


@gemm_epilogue(outputs=("activated",), reduces={"total": ColVecReduce("total")})
def dgelu_with_sum(acc: Any, c: Any) -> dict[str, Any]:
    """(acc * gelu'(c), gelu(c), the sum of the first over the columns), in the tanh form."""
    gradient, activated = dgelu_tanh_approx(c, acc)
    return {"D": gradient, "activated": activated, "total": gradient}
