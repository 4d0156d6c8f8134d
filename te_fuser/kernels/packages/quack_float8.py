"""Products of 8 bits of the package quack-kernels, whose epilogues add biases, residuals, compute GELU, quantize it.

y = (x inverse_x) (W inverse_W)^T for x [..., I] and W [O, I] in float8_e4m3fn, both along what is summed. They are
summed in fewer bits than float32 has, as forward's products may be; numbers are float32 [], read on the device.
How they are found, compiled and kept: `quack_matmul`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_fuser.kernels.packages.quack_matmul import aligned, flat, module, rows_of, run, why_not_as_it_was

MULTIPLE = 16  # of elements in a row: what its loads and stores need
_EPILOGUES = "te_fuser.kernels.packages.quack_float8_epilogues"
_HOST, _HOPPER = "quack.gemm_runtime.host", "quack.gemm_sm90"
# What plans have of it.
_FUSIONS = (
    "'float8_matmul_bias_quack', 'float8_matmul_add_bias_quack', 'float8_matmul_add_bias_quack_dropout', "
    "'float8_matmul_gelu_quack', 'float8_matmul_gelu_quack_aux'"
)
# Of the tiles that were tried, the fastest for a layer's products on an H200, as those of bfloat16.
_TILES = {"tile_M": 128, "tile_N": 208, "cluster_M": 2, "cluster_N": 1, "pingpong": True}
_NARROWER = _TILES | {"tile_N": 160}  # which leave room for what is added
_SUMMED = "fp8_slow_accum"  # of its kernels: whether registers add up what the matrix units have summed
_PLANNED = ("A", "B", "D", "C", "epi_args", *_TILES, "post_init_attrs", "_launch")
_TAKEN = {
    (_EPILOGUES, "sum_with_bias.gemm"): _PLANNED,
    (_EPILOGUES, "sum_with_bias_and_addend.gemm"): _PLANNED,
    (_EPILOGUES, "gelu_in_8_bits.gemm"): _PLANNED,
    (_EPILOGUES, "gelu_in_8_bits_alone.gemm"): _PLANNED,
    (_HOST, "run_gemm_epi_plan"): ("plan", "A", "B", "D", "C", "epi_values"),
    (_HOPPER, "GemmSm90.__init__"): ("fp8_fast_accum",),
}


@functools.cache
def unusable() -> str | None:
    """Why the package that is installed cannot be called; None when it can."""
    why = why_not_as_it_was(_TAKEN)
    if why is None and _SUMMED not in module(_HOPPER).GemmSm90.__init__.__code__.co_names:
        return f"quack-kernels is not as it was: {_HOPPER} has no {_SUMMED}"
    return why


def linear_bias(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """h = x W^T + b in bfloat16, for b [O] in bfloat16.

    Raises:
        RuntimeError: when the package fails.
    """
    h = _of(x, weight, torch.bfloat16)
    _run("sum_with_bias", x, weight, h, a_inverse=x_inverse, b_inverse=weight_inverse, bias=aligned(bias))
    return h


def linear_bias_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
    addend: torch.Tensor,
) -> torch.Tensor:
    """x W^T + b + addend [..., O] in bfloat16, for b [O] and an addend in that.

    Raises:
        RuntimeError: when the package fails.
    """
    y = _of(x, weight, torch.bfloat16)
    operands = {"a_inverse": x_inverse, "b_inverse": weight_inverse, "bias": aligned(bias)}
    _run("sum_with_bias_and_addend", x, weight, y, addend, **operands)
    return y


def linear_bias_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """gelu(h) times a scale in float8_e4m3fn, for h = x W^T + b rounded to bfloat16, in the tanh form.

    Raises:
        RuntimeError: when the package fails.
    """
    y = _of(x, weight, torch.float8_e4m3fn)
    operands = {"a_inverse": x_inverse, "b_inverse": weight_inverse, "bias": aligned(bias), "scale": scale}
    _run("gelu_in_8_bits_alone", x, weight, None, activated=flat(y), **operands)
    return y


def linear_bias_gelu_aux(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the same, h); raises `amax` to the largest magnitude of gelu(h).

    Raises:
        RuntimeError: when the package fails.
    """
    y, h = _of(x, weight, torch.float8_e4m3fn), _of(x, weight, torch.bfloat16)
    operands = {"a_inverse": x_inverse, "b_inverse": weight_inverse, "bias": aligned(bias), "scale": scale}
    _run("gelu_in_8_bits", x, weight, h, activated=flat(y), **operands, amax=amax)
    return y, h


def _of(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for what the product gives."""
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)


# Epilogue -> what the product computes with it.
_COMPUTED = {
    "sum_with_bias": "x W^T + b",
    "sum_with_bias_and_addend": "x W^T + b + addend",
    "gelu_in_8_bits": "gelu(x W^T + b)",
    "gelu_in_8_bits_alone": "gelu(x W^T + b)",
}


def _run(
    epilogue: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    h: torch.Tensor | None,
    addend: torch.Tensor | None = None,
    **operands: torch.Tensor,
) -> None:
    """Launch the product with this epilogue; `operands`: what that reads and writes beside h and the addend."""
    if x.numel() and weight.numel():
        result, added = None if h is None else flat(h), None if addend is None else rows_of(addend)
        matrices = rows_of(x, MULTIPLE), rows_of(weight, MULTIPLE), result, added
        prepare = functools.partial(_Float8Product, epilogue, tuple(operands))
        run(_COMPUTED[epilogue], h is not None, (*matrices, *operands.values()), prepare, _FUSIONS)


class _Float8Product:
    """One of the package's products, planned for the sizes and strides of its first call: all others have them too."""

    def __init__(self, epilogue: str, operands: tuple[str, ...]) -> None:
        self._epilogue: Any = getattr(module(_EPILOGUES), epilogue)
        self._operands = operands
        self._plan: Any = None

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor | None,
        c: torch.Tensor | None,
        *operands: torch.Tensor,
    ) -> None:
        given = dict(zip(self._operands, operands, strict=True))
        if self._plan is None:
            how = (_TILES if c is None else _NARROWER) | {"post_init_attrs": ((_SUMMED, False),), "_launch": False}
            self._plan = self._epilogue.gemm(a, b, d, C=c, epi_args=given, **how)
        module(_HOST).run_gemm_epi_plan(self._plan, a, b, d, c, given)
