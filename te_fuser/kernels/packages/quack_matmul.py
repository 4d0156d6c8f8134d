"""Matrix products of the package quack-kernels (imported as `quack`), whose epilogues compute GELU and slopes.

The package is optional, and imported when a plan on a machine with a GPU first asks for it. Its kernels are written in
CUTLASS's Python language: each is compiled when it first runs, by one thread at a time and never while a stream is
captured; the package keeps them on disk. What it plans for sizes and strides is kept here, and later calls hand over
tensors alone. They run on PyTorch's current stream. Sums are in float32; a product gives the same bits each time.

Legend: N rows, I = in, O = out features.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_fuser.kernels.packages.optional import FirstRuns, Package, why_changed

MULTIPLE = 8  # of elements in a row: what its loads and stores need
_CONFIG, _FRONTEND = "quack.gemm_config", "quack.epilogue.frontend"
PACKAGE = Package("quack-kernels", "0.6.5", libraries_13="nvidia-cutlass-dsl-libs-cu13")
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
Launch = Callable[..., Any]


@functools.cache
def unusable() -> str | None:
    """Why the package that is installed cannot be called; None when it can."""
    return why_not_as_it_was(_TAKEN)


@functools.cache
def unusable_by_gates() -> str | None:
    """The same of what `input_gradient_dswiglu` calls."""
    return unusable() or why_not_as_it_was(_TAKEN_BY_GATES)


def why_not_as_it_was(called: Mapping[tuple[str, str], tuple[str, ...]]) -> str | None:
    """Why something of it does not take these arguments any more; by module and name."""
    return PACKAGE.unusable(
        lambda: (why_changed(module(where), name, taken) for (where, name), taken in called.items())
    )


def linear_bias_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x W^T + b) in the tanh form, for x [..., I], W [O, I], b [O] in bfloat16.

    Raises:
        RuntimeError: when the package fails.
    """
    return _linear_bias_gelu(x, weight, bias, with_before=False)[0]


def linear_bias_gelu_aux(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gelu(h), h) for h = x W^T + b, in the tanh form.

    Raises:
        RuntimeError: when the package fails.
    """
    y, before = _linear_bias_gelu(x, weight, bias, with_before=True)
    assert before is not None
    return y, before


def _linear_bias_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, with_before: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    before = torch.empty_like(y) if with_before else None
    if not y.numel():
        return y, before
    tensors = rows_of(x), rows_of(weight), aligned(bias), flat(y), None if before is None else flat(before)
    run("x W^T + b", with_before, tensors, _planned_sum)
    return y, before


def _planned_sum() -> Launch:
    product = _Product(module(_EPILOGUES).gelu_of_sum)

    def launch(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, y: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        outs = {"activated": y} if before is None else {"activated": y, "D": before}
        product(x, w.t(), out=outs, bias=bias)

    return launch


def input_gradient_dgelu_sum(
    dy: torch.Tensor, weight: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dh, gelu(h), the sum of dh over its rows) for dh = (dy W) * gelu'(h), in the tanh form.

    dy is [..., O], W [O, I], h = `before` [..., I]; the sum [I] is in float32.

    Raises:
        RuntimeError: when the package fails.
    """
    dh, y = before.new_empty(before.shape), before.new_empty(before.shape)
    if not dh.numel():
        return dh, y, before.new_zeros(before.shape[-1], dtype=torch.float32)
    tensors = rows_of(dy), rows_of(weight), rows_of(before), flat(dh), flat(y)
    return dh, y, run("(dy W) * gelu'(h)", True, tensors, _planned_slope)


def _planned_slope() -> Launch:
    product = _Product(module(_EPILOGUES).dgelu_with_sum)

    def launch(dy: torch.Tensor, w: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # As dh^T = W^T dy^T: the sum then goes along the tiles' rows, and tiles of 208 tokens are the fastest.
        (partial,) = product(w.t(), dy.t(), h.t(), out={"D": dh.t(), "activated": y.t()})
        return partial.sum(-1).flatten()

    return launch


def input_gradient_dswiglu(
    dy: torch.Tensor, weight: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dh, silu(gate) * up), dh the gradient of h = [gate, up] where dy W is that of silu(gate) * up.

    dy is [..., O], W [O, I], h = `before` [..., 2 I], whose first half is the gate.

    Raises:
        RuntimeError: when the package fails.
    """
    dh, y = before.new_empty(before.shape), before.new_empty(*before.shape[:-1], before.shape[-1] // 2)
    if not dh.numel():
        return dh, y
    tensors = rows_of(dy), rows_of(weight), rows_of(before), flat(dh), flat(y)
    run("(dy W) * swiglu'(h)", True, tensors, _planned_gates)
    return dh, y


def _planned_gates() -> Launch:
    product = _Product(module(_GATED_EPILOGUES).dswiglu_of_halves)

    def launch(dy: torch.Tensor, w: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, y: torch.Tensor) -> None:
        # As dh^T = W^T dy^T both factors and what the epilogue moves lie in rows of 128 bytes in shared memory, for any
        # multiple of 16 tokens that a tile has. With tiles of 128 x 208 the epilogue's two loads and three stores
        # (64 x 16 numbers each, in four stages: 40 KiB) leave room for four stages of the factors, as many as one load
        # and two stores do.
        (gate, up), (gate_gradient, up_gradient) = _turned_halves(h), _turned_halves(dh)
        out = {"D": gate_gradient, "up_gradient": up_gradient, "activated": y.t()}
        product(w.t(), dy.t(), gate, out=out, up=up)

    return launch


def _turned_halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of [N, 2 I], each as [I, N]."""
    (count, features), step, first = rows.shape, rows.stride(0), rows.storage_offset()
    size, strides = (features // 2, count), (1, step)
    return rows.as_strided(size, strides, first), rows.as_strided(size, strides, first + features // 2)


class _Product:
    """One of the package's products, planned for the sizes and strides of its first call: all others have them too."""

    def __init__(self, epilogue: Any) -> None:
        self._epilogue = epilogue
        self._plan: Any = None
        self._partial: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def __call__(
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
    prepare: Callable[[], Launch],
    fusions: str = _FUSIONS,
) -> Any:
    """What prepare() makes at the first run of such tensors, called with these.

    Args:
        what, option: which product it is.
        fusions: those that have it, for whoever plans without it.

    Raises:
        RuntimeError: when the package fails.
    """
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
    """[N, features] as its loads need it: features side by side, rows and the first element in steps of 16 bytes."""
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
    """How a product is cut into tiles: of those that the package tries, the fastest for a layer's products on an H200.

    (8192 rows, 4096 to 16384 features and back.) One object for the process: the package knows it again by identity.
    """
    make = module(_CONFIG).GemmConfig
    return make(tile_m=128, tile_n=208, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)


@functools.cache
def module(name: str) -> Any:
    """A module of the package, or one of te_fuser that is written in its terms."""
    return importlib.import_module(name)
