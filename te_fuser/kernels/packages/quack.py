"""Matrix products of the package quack-kernels (imported as `quack`), whose epilogues compute GELU, slopes, 8 bits.

The package is optional, and imported when a plan on a machine with a GPU first asks for it. Its kernels are written in
CUTLASS's Python language: each is compiled when it first runs, by one thread at a time and never while a stream is
captured; the package keeps them on disk. What it plans for sizes and strides is kept here, and later calls hand over
tensors alone. They run on PyTorch's current stream. Sums are in float32; a product gives the same bits each time.
Where the package fails they raise RuntimeError.

Products of 8 bits: y = (x inverse_x) (W inverse_W)^T for x [..., I] and W [O, I] in float8_e4m3fn, both along what is
summed. They are summed in fewer bits than float32 has, as forward's products may be; numbers are float32 [], read on
the device.

Legend: N rows, I = in, O = out features.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_fuser.kernels.packages.optional import PACKAGES, FirstRuns, why_changed

MULTIPLE = 8  # of elements in a row: what its loads and stores need
_CONFIG, _FRONTEND = "quack.gemm_config", "quack.epilogue.frontend"
PACKAGE = PACKAGES["quack-kernels"]
_EPILOGUES = "te_fuser.kernels.packages.quack_epilogues"
_GATED_EPILOGUES = "te_fuser.kernels.packages.quack_gated_epilogues"
# What plans have of it.
_FUSIONS = "'matmul_bias_gelu_quack', 'matmul_bias_gelu_quack_aux', 'bias_gelu_matmul_quack', 'swiglu_matmul_quack'"
# What is called of the package, with the arguments that it is given here.
_PLANNED = ("A", "B", "C", "out", "config", "operands")
_TAKEN = {
    (_CONFIG, "GemmConfig"): ("tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n", "is_dynamic_persistent"),
    (_FRONTEND, "EpiPlan.run"): ("A", "B", "C", "out", "scratch", "operands"),
    (_EPILOGUES, "gelu_of_sum.plan"): _PLANNED,
    (_EPILOGUES, "dgelu_with_sum.plan"): _PLANNED,
}
_TAKEN_BY_GATES = {(_GATED_EPILOGUES, "dswiglu_of_halves.plan"): _PLANNED}
runs = FirstRuns(PACKAGE.name)


@functools.cache
def unusable() -> str | None:
    """Reason for which the installed package cannot be called; None when it can."""
    return why_not_as_it_was(_TAKEN)


@functools.cache
def unusable_by_gates() -> str | None:
    """Reason why the functions of `input_gradient_dswiglu` cannot be called."""
    return unusable() or why_not_as_it_was(_TAKEN_BY_GATES)


def why_not_as_it_was(called: Mapping[tuple[str, str], tuple[str, ...]]) -> str | None:
    """Reason why functions of the package do not take these arguments any more."""
    return PACKAGE.unusable(
        lambda: (why_changed(module(where), name, taken) for (where, name), taken in called.items())
    )


def linear_bias_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x W^T + b) in the tanh form, for x [..., I], W [O, I], b [O] in bfloat16."""
    return _linear_bias_gelu(x, weight, bias, None)


def linear_bias_gelu_aux(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gelu(h), h) for h = x W^T + b, in the tanh form."""
    before = _room(x, weight, x.dtype)
    return _linear_bias_gelu(x, weight, bias, before), before


def _linear_bias_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, before: torch.Tensor | None
) -> torch.Tensor:
    y = _room(x, weight, x.dtype)
    if y.numel():
        tensors = rows_of(x), rows_of(weight), aligned(bias), flat(y), None if before is None else flat(before)
        run("x W^T + b", before is not None, tensors, lambda: _Product(_EPILOGUES, "gelu_of_sum", _launch_sum))
    return y


def _launch_sum(
    product: _Product,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    y: torch.Tensor,
    before: torch.Tensor | None,
) -> None:
    outs = {"activated": y} if before is None else {"activated": y, "D": before}
    product.launch(x, w.t(), out=outs, bias=bias)


def input_gradient_dgelu_sum(
    dy: torch.Tensor, weight: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dh, gelu(h), the sum of dh over its rows) for dh = (dy W) * gelu'(h), in the tanh form.

    dy is [..., O], W [O, I], h = `before` [..., I]; the sum [I] is in float32.
    """
    dh, y = before.new_empty(before.shape), before.new_empty(before.shape)
    if not dh.numel():
        return dh, y, before.new_zeros(before.shape[-1], dtype=torch.float32)
    tensors = rows_of(dy), rows_of(weight), rows_of(before), flat(dh), flat(y)
    slope = functools.partial(_Product, _EPILOGUES, "dgelu_with_sum", _launch_slope)
    return dh, y, run("(dy W) * gelu'(h)", True, tensors, slope)


def _launch_slope(
    product: _Product, dy: torch.Tensor, w: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    # As dh^T = W^T dy^T: the sum then goes along the tiles' rows, and tiles of 208 tokens are the fastest.
    (partial,) = product.launch(w.t(), dy.t(), h.t(), out={"D": dh.t(), "activated": y.t()})
    return partial.sum(-1).flatten()


def input_gradient_dswiglu(
    dy: torch.Tensor, weight: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dh, silu(gate) * up), dh the gradient of h = [gate, up] where dy W is that of silu(gate) * up.

    dy is [..., O], W [O, I], h = `before` [..., 2 I], whose first half is the gate.
    """
    dh, y = before.new_empty(before.shape), before.new_empty(*before.shape[:-1], before.shape[-1] // 2)
    if dh.numel():
        tensors = rows_of(dy), rows_of(weight), rows_of(before), flat(dh), flat(y)
        gates = functools.partial(_Product, _GATED_EPILOGUES, "dswiglu_of_halves", _launch_gates)
        run("(dy W) * swiglu'(h)", True, tensors, gates)
    return dh, y


def _launch_gates(
    product: _Product, dy: torch.Tensor, w: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, y: torch.Tensor
) -> None:
    # As dh^T = W^T dy^T both factors and what the epilogue moves lie in rows of 128 bytes in shared memory, for any
    # multiple of 16 tokens that a tile has. With tiles of 128 x 208 the epilogue's two loads and three stores
    # (64 x 16 numbers each, in four stages: 40 KiB) leave room for four stages of the factors, as many as one load
    # and two stores do.
    (gate, up), (gate_gradient, up_gradient) = _turned_halves(h), _turned_halves(dh)
    out = {"D": gate_gradient, "up_gradient": up_gradient, "activated": y.t()}
    product.launch(w.t(), dy.t(), gate, out=out, up=up)


def _turned_halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Halves of [N, 2 I], each as [I, N]."""
    (count, features), step, first = rows.shape, rows.stride(0), rows.storage_offset()
    size, strides = (features // 2, count), (1, step)
    return rows.as_strided(size, strides, first), rows.as_strided(size, strides, first + features // 2)


class _Product:
    """One of the package's products, planned for the sizes and strides of its calls."""

    def __init__(self, where: str, epilogue: str, call: Callable[..., Any]) -> None:
        self._epilogue, self._call = getattr(module(where), epilogue), call
        self._plan: Any = None
        self._partial: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        return self._call(self, *tensors)

    def launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        out: dict[str, torch.Tensor],
        **operands: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Launch it; gives the partial sums that the epilogue makes, each [.., tiles]."""
        if self._plan is None:
            self._plan = self._epilogue.plan(a, b, c, out=out, config=_config(), **operands)
            # What a plan holds would be written by all streams.
            self._partial = {name: (t.shape, t.dtype) for name, t in self._plan.scratch.items()}
            self._plan.scratch = {}
        scratch = {name: a.new_empty(shape, dtype=dtype) for name, (shape, dtype) in self._partial.items()}
        self._plan.run(a, b, c, out=out, scratch=scratch, **operands)
        return list(scratch.values())


def run(
    what: str,
    option: bool,
    tensors: Sequence[torch.Tensor | None],
    prepare: Callable[[], Callable[..., Any]],
    fusions: str = _FUSIONS,
) -> Any:
    """Call what prepare() makes at the first run of such tensors of a product."""
    first, second = tensors[:2]
    assert first is not None and second is not None
    form = (what, option, first.dtype, first.device, *[None if t is None else (t.shape, t.stride()) for t in tensors])

    def failed(error: Exception) -> Exception:
        return RuntimeError(
            f"{PACKAGE}'s product {what} failed for {list(first.shape)} and {list(second.shape)}, {first.dtype}: "
            f"{type(error).__name__}: {error}; te_fuser.fusions.disabled({fusions}) plans without it"
        )

    return runs.run(first.device.index, form, prepare, tensors, failed)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """[N, features] over the same memory."""
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


def rows_of(tensor: torch.Tensor, multiple: int = MULTIPLE) -> torch.Tensor:
    """[N, features] as its loads need it: all in steps of 16 bytes, features side by side."""
    if tensor.dim() == 2 and _lies_in_rows(tensor, multiple):
        return aligned(tensor)
    rows = tensor.reshape(-1, tensor.shape[-1])
    return aligned(rows if _lies_in_rows(rows, multiple) else rows.contiguous())


def _lies_in_rows(rows: torch.Tensor, multiple: int) -> bool:
    step, along = rows.stride()
    return along == 1 and not step % multiple and step >= rows.shape[1]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Its first element in steps of 16 bytes, elements side by side."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@functools.cache
def _config() -> Any:
    """Tiles of a product: of those that the package tries, the fastest for a layer's products on an H200.

    (8192 rows, 4096 to 16384 features and back.) One object for the process: the package knows it again by identity.
    """
    make = module(_CONFIG).GemmConfig
    return make(tile_m=128, tile_n=208, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)


@functools.cache
def module(name: str) -> Any:
    """A module of the package, or one of te_fuser that is written in its terms."""
    return importlib.import_module(name)


MULTIPLE_8 = 16  # of elements in a row: what its loads and stores need
_EPILOGUES_8 = "te_fuser.kernels.packages.quack_float8_epilogues"
_HOST, _HOPPER = "quack.gemm_runtime.host", "quack.gemm_sm90"
# What plans have of it.
_FUSIONS_8 = (
    "'float8_matmul_bias_quack', 'float8_matmul_add_bias_quack', 'float8_matmul_add_bias_quack_dropout', "
    "'float8_matmul_gelu_quack', 'float8_matmul_gelu_quack_aux'"
)
# Of the tiles that were tried, the fastest for a layer's products on an H200, as those of bfloat16.
_TILES = {"tile_M": 128, "tile_N": 208, "cluster_M": 2, "cluster_N": 1, "pingpong": True}
_NARROWER = _TILES | {"tile_N": 160}  # which leave room for what is added
_SUMMED = "fp8_slow_accum"  # of its kernels: whether registers add up what the matrix units have summed
_PLANNED_8 = ("A", "B", "D", "C", "epi_args", *_TILES, "post_init_attrs", "_launch")
_TAKEN_8 = {
    (_EPILOGUES_8, "sum_with_bias.gemm"): _PLANNED_8,
    (_EPILOGUES_8, "sum_with_bias_and_addend.gemm"): _PLANNED_8,
    (_EPILOGUES_8, "gelu_in_8_bits.gemm"): _PLANNED_8,
    (_EPILOGUES_8, "gelu_in_8_bits_alone.gemm"): _PLANNED_8,
    (_HOST, "run_gemm_epi_plan"): ("plan", "A", "B", "D", "C", "epi_values"),
    (_HOPPER, "GemmSm90.__init__"): ("fp8_fast_accum",),
}


@functools.cache
def unusable_8() -> str | None:
    """Reason why the installed package cannot be called for 8 bits."""
    why = why_not_as_it_was(_TAKEN_8)
    if why is None and _SUMMED not in module(_HOPPER).GemmSm90.__init__.__code__.co_names:
        return f"quack-kernels is not as it was: {_HOPPER} has no {_SUMMED}"
    return why


def linear_bias_8(x: torch.Tensor, weight: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
    """h = x W^T + b in bfloat16; `numbers` are the inverse scales of x and of W, and b [O]."""
    h = _room(x, weight, torch.bfloat16)
    _run_8("sum_with_bias", x, weight, h, None, numbers)
    return h


def linear_bias_add_8(x: torch.Tensor, weight: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """x W^T + b + addend [..., O] in bfloat16; the addend comes last."""
    (*numbers, addend), y = given, _room(x, weight, torch.bfloat16)
    _run_8("sum_with_bias_and_addend", x, weight, y, addend, numbers)
    return y


def linear_bias_gelu_8(x: torch.Tensor, weight: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
    """gelu(h) times a scale in float8_e4m3fn, of h in bfloat16, the tanh form; the scale comes last."""
    y = _room(x, weight, torch.float8_e4m3fn)
    _run_8("gelu_in_8_bits_alone", x, weight, None, None, numbers, activated=flat(y))
    return y


def linear_bias_gelu_aux_8(
    x: torch.Tensor, weight: torch.Tensor, *numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the same, h); raises the amax of gelu(h), which comes behind the scale."""
    y, h = _room(x, weight, torch.float8_e4m3fn), _room(x, weight, torch.bfloat16)
    _run_8("gelu_in_8_bits", x, weight, h, None, numbers, activated=flat(y))
    return y, h


def _room(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for the result of a product of x."""
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)


# Epilogue -> what the product computes with it.
_COMPUTED = {
    "sum_with_bias": "x W^T + b",
    "sum_with_bias_and_addend": "x W^T + b + addend",
    "gelu_in_8_bits": "gelu(x W^T + b)",
    "gelu_in_8_bits_alone": "gelu(x W^T + b)",
}
_NUMBERS = ("a_inverse", "b_inverse", "bias", "scale", "amax")  # as epilogues call them


def _run_8(
    epilogue: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    h: torch.Tensor | None,
    addend: torch.Tensor | None,
    numbers: Sequence[torch.Tensor],
    **operands: torch.Tensor,
) -> None:
    """Launch the product with this epilogue; `operands`: what that writes beside h."""
    if x.numel() and weight.numel():
        operands |= dict(zip(_NUMBERS, numbers, strict=False)) | {"bias": aligned(numbers[2])}
        result, added = None if h is None else flat(h), None if addend is None else rows_of(addend)
        matrices = rows_of(x, MULTIPLE_8), rows_of(weight, MULTIPLE_8), result, added
        prepare = functools.partial(_Float8Product, epilogue, tuple(operands))
        run(_COMPUTED[epilogue], h is not None, (*matrices, *operands.values()), prepare, _FUSIONS_8)


class _Float8Product:
    """One of the package's products, planned for the sizes and strides of its calls."""

    def __init__(self, epilogue: str, operands: tuple[str, ...]) -> None:
        self._epilogue: Any = getattr(module(_EPILOGUES_8), epilogue)
        self._operands = operands
        self._plan: Any = None

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor | None, c: torch.Tensor | None, *operands: torch.Tensor
    ) -> None:
        given = dict(zip(self._operands, operands, strict=True))
        if self._plan is None:
            how = (_TILES if c is None else _NARROWER) | {"post_init_attrs": ((_SUMMED, False),), "_launch": False}
            self._plan = self._epilogue.gemm(a, b, d, C=c, epi_args=given, **how)
        module(_HOST).run_gemm_epi_plan(self._plan, a, b, d, c, given)
