"""Matrix products of the package quack-kernels (imported as `quack`), whose epilogues compute GELU and slopes.

The package is optional, and imported when a plan on a machine with a GPU first asks for it. Its kernels are written in
CUTLASS's Python language: each is compiled when it first runs, by one thread at a time and never while a stream is
captured; the package keeps them on disk. They run on PyTorch's current stream. Sums are in float32, and a product gives
the same bits each time.

Legend: N rows, I = in, O = out features.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_fuser.kernels.packages.optional import FirstRuns, Fit, version_of, why_changed, why_missing, why_unusable

PACKAGE = "quack-kernels"
MULTIPLE = 8  # of elements in a row: what its loads and stores need
_OLDEST = "0.6.5"
FIT = Fit(PACKAGE, _OLDEST, libraries_13="nvidia-cutlass-dsl-libs-cu13")
_INTERFACE, _CONFIG = "quack.gemm_interface", "quack.gemm_config"
_EPILOGUES = "te_fuser.kernels.packages.quack_epilogues"
_GATED_EPILOGUES = "te_fuser.kernels.packages.quack_gated_epilogues"
_ACTIVATION = "gelu_tanh_approx"
# What plans have of it.
_FUSIONS = "'matmul_bias_gelu_quack', 'matmul_bias_gelu_quack_aux', 'bias_gelu_matmul_quack', 'swiglu_matmul_quack'"
# What is called of the package, with the arguments that it is given here.
_TAKEN = {
    (_INTERFACE, "gemm_act"): (
        "A",
        "B",
        "bias",
        "activation",
        "preact_out",
        "postact_out",
        "store_preact",
        "tuned",
        "config",
    ),
    (_CONFIG, "GemmConfig"): ("tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n", "is_dynamic_persistent"),
    (_EPILOGUES, "dgelu_with_sum"): ("A", "B", "C", "out", "config", "tuned"),
}
_TAKEN_BY_GATES = {(_GATED_EPILOGUES, "dswiglu_of_halves"): ("A", "B", "C", "out", "config", "tuned", "operands")}
runs = FirstRuns(PACKAGE)


def installed_version() -> str | None:
    """The version of the package that is installed, if any."""
    return version_of(PACKAGE)


def missing() -> str | None:
    """Why there is no package to use, found without importing it; None where there is one."""
    return why_missing(PACKAGE, _OLDEST, installed_version())


@functools.cache
def unusable() -> str | None:
    """Why the package that is installed cannot be called; None when it can."""
    return _why_not_as_it_was(_TAKEN)


@functools.cache
def unusable_by_gates() -> str | None:
    """The same of what `input_gradient_dswiglu` calls."""
    return unusable() or _why_not_as_it_was(_TAKEN_BY_GATES)


def _why_not_as_it_was(called: Mapping[tuple[str, str], tuple[str, ...]]) -> str | None:
    return why_unusable(
        PACKAGE,
        _OLDEST,
        installed_version(),
        lambda: (why_changed(_module(module), name, taken) for (module, name), taken in called.items()),
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
    rows, w, b = _rows(x), _rows(weight), _aligned(bias)

    def call() -> None:
        _module(_INTERFACE).gemm_act(
            rows,
            w.t(),
            bias=b,
            activation=_ACTIVATION,
            preact_out=None if before is None else _flat(before),
            postact_out=_flat(y),
            store_preact=with_before,
            tuned=False,
            config=_config(),
        )

    _run("x W^T + b", (rows, w), (with_before,), call)
    return y, before


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
    rows, w, h = _rows(dy), _rows(weight), _rows(before)

    def call() -> torch.Tensor:
        # As dh^T = W^T dy^T: the sum then goes along the tiles' rows, and tiles of 208 tokens are the fastest.
        out = {"D": _flat(dh).t(), "activated": _flat(y).t()}
        made = _module(_EPILOGUES).dgelu_with_sum(w.t(), rows.t(), h.t(), out=out, config=_config(), tuned=False)
        total: torch.Tensor = made["total"]
        return total.flatten()

    return dh, y, _run("(dy W) * gelu'(h)", (rows, w, h), (), call)


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
    rows, w, h = _rows(dy), _rows(weight), _rows(before)
    gate, up, gate_gradient, up_gradient = (t.t() for t in (*h.chunk(2, 1), *_flat(dh).chunk(2, 1)))

    def call() -> None:
        # As dh^T = W^T dy^T both factors and what the epilogue moves lie in rows of 128 bytes in shared memory, for any
        # multiple of 16 tokens that a tile has. With tiles of 128 x 208 the epilogue's two loads and three stores
        # (64 x 16 numbers each, in four stages: 40 KiB) leave room for four stages of the factors, as many as one load
        # and two stores do.
        out = {"D": gate_gradient, "up_gradient": up_gradient, "activated": _flat(y).t()}
        options = {"config": _config(), "tuned": False}
        _module(_GATED_EPILOGUES).dswiglu_of_halves(w.t(), rows.t(), gate, out=out, up=up, **options)

    _run("(dy W) * swiglu'(h)", (rows, w, h), (), call)
    return dh, y


def _run(what: str, tensors: tuple[torch.Tensor, ...], options: tuple[bool, ...], call: Callable[[], Any]) -> Any:
    first = tensors[0]
    form = (what, options, first.dtype, first.device, *((t.shape, t.stride()) for t in tensors))

    def failed(error: Exception) -> Exception:
        sizes = " and ".join(str(list(t.shape)) for t in tensors[:2])
        return RuntimeError(
            f"{PACKAGE}'s product {what} failed for {sizes}, {first.dtype}: {type(error).__name__}: {error}; "
            f"te_fuser.fusions.disabled({_FUSIONS}) plans without it"
        )

    return runs.run(first.device.index, form, call, failed)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[N, features] over the same memory."""
    return tensor.view(-1, tensor.shape[-1])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[N, features] as its loads need it: features side by side, rows and the first element in steps of 16 bytes."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    if rows.stride(1) != 1 or rows.stride(0) % MULTIPLE or rows.stride(0) < rows.shape[1]:
        rows = rows.contiguous()
    return _aligned(rows)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@functools.cache
def _config() -> Any:
    """How a product is cut into tiles: of those that the package tries, the fastest for a layer's products on an H200.

    (8192 rows, 4096 to 16384 features and back.) One object for the process: the package knows it again by identity.
    """
    make = _module(_CONFIG).GemmConfig
    return make(tile_m=128, tile_n=208, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(name)
