"""Epilogues of products of a gated MLP, in the terms of quack-kernels; imported where that is installed.

Apart from `quack_epilogues`, so that what another version of the package does not take here leaves those as they are.
"""

from __future__ import annotations

from typing import Any

from quack.activation import dswiglu
from quack.epilogue.frontend import gemm_epilogue


@gemm_epilogue(outputs=("up_gradient", "activated"))
def dswiglu_of_halves(acc: Any, c: Any, up: Any) -> dict[str, Any]:
    """(acc * up * silu'(c), acc * silu(c), silu(c) * up), where c is the gate, by the exponential.

    Gate and up are tiles of the product's own size each, as are their gradients: pairs that lie side by side would be
    another mode of the package.
    """
    gate_gradient, up_gradient, activated = dswiglu(c, up, acc)
    return {"D": gate_gradient, "up_gradient": up_gradient, "activated": activated}
