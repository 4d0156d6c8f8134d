"""What follows a product in its kernel, in the terms of the package quack-kernels; imported where that is installed."""

from __future__ import annotations

from typing import Any

from quack.activation import dgelu_tanh_approx, dswiglu
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecReduce


@gemm_epilogue(outputs=("activated",), reduces={"total": ColVecReduce("total")})
def dgelu_with_sum(acc: Any, c: Any) -> dict[str, Any]:
    """(acc * gelu'(c), gelu(c), the sum of the first over the columns), in the tanh form."""
    gradient, activated = dgelu_tanh_approx(c, acc)
    return {"D": gradient, "activated": activated, "total": gradient}


@gemm_epilogue(outputs=("up_gradient", "activated"))
def dswiglu_of_halves(acc: Any, c: Any, up: Any) -> dict[str, Any]:
    """(acc * up * silu'(c), acc * silu(c), silu(c) * up), where c is the gate, by the exponential.

    Gate and up are tiles of the product's own size each, as are their gradients: pairs that lie side by side would be
    another mode of the package.
    """
    gate_gradient, up_gradient, activated = dswiglu(c, up, acc)
    return {"D": gate_gradient, "up_gradient": up_gradient, "activated": activated}


__all__ = ["dgelu_with_sum", "dswiglu_of_halves"]
