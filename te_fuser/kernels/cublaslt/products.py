"""Matrix products on CUDA by cuBLASLt, with what their epilogues can do: thin fronts of the native type.

Weights are [out, in], as torch.nn.Linear's; x, dy and outputs may have leading dimensions and any row stride, and lie
transposed; where they cannot be read as they are, a copy is. Sums are in float32. float32 products follow
`torch.backends.cuda.matmul.fp32_precision` (and `allow_tf32`, which sets it), read at each call. The algorithm is the
library's first guess for the problem, or the one that `tune` found. Empty sizes give zeros, or what is added.

Products of 8 bits are y = (a scale_a) (b scale_b)^T for a [..., K] and b [N, K], one of them in float8_e4m3fn, the
other in that or in float8_e5m2, K a multiple of 16: both lie along what is summed, as Hopper's matrix units take them.
So all three products of a layer are this one: y of x and W, dx of dy and W^T, dW of dy^T and x^T, where transposed ones
are at hand. Compute capability 10 takes them as they lie (`takes_any_layout`). Scales are float32 [], what 8 bits are
multiplied by (`QuantizedTensor.scale_inverse`), read on the device at each run. Elsewhere their ops emulate them.

Legend: N rows, I = in, O = out features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_fuser import _native
from te_fuser.codegen.nvrtc import nvidia_folders
from te_fuser.config import config
from te_fuser.dtypes import text_of
from te_fuser.kernels.cublaslt import tuned
from te_fuser.kernels.cublaslt.tuned import ProductForm, ProductProblem, found_for
from te_fuser.ops.quantized_matmul import STEP

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The pre-activation that GELU's epilogue writes, and its backward reads, has rows of a multiple of 8 elements.
GELU_MULTIPLE = 8

version = _native.cublaslt_version


def obstacle() -> str | None:
    """Reason for which cuBLASLt cannot be used here, in words; None if it can."""
    why = _native.cublaslt_refusal()
    if why is not None and torch.version.cuda is not None:
        # A PyTorch that has not loaded it yet depends on NVIDIA's package of it.
        files = [f for folder in nvidia_folders() for f in folder.glob("*/lib/libcublasLt.so.*")]
        for path in sorted(files, reverse=True):
            _native.set_cublaslt(str(path))
            if _native.cublaslt_refusal() is None:
                return None
        _native.set_cublaslt("")
    return why


def refusal(
    kind: str, dtype: torch.dtype, m: int, n: int, k: int, device: torch.device, out_dtype: torch.dtype | None = None
) -> str | None:
    """Reason against the product of that kind in these sizes on this device."""
    return refusal_of(form_of(kind, dtype, out_dtype or dtype), (m, n, k), device)


def refusal_of(form: ProductForm, sizes: tuple[int, int, int], device: torch.device) -> str | None:
    """Reason why cuBLASLt cannot run a product of sizes (m, n, k) on a device."""
    why = obstacle()
    if why is not None:
        return why
    m, n, k = sizes
    rows = (m if form.transpose_a else k, k if form.transpose_b else n)
    uneven = next((row for row in rows if row % STEP), None) if form.in_8_bits else None
    if uneven is not None:
        return f"rows of {uneven} numbers of 8 bits: cuBLASLt takes multiples of {STEP}"
    index = torch.cuda.current_device() if device.index is None else device.index
    return product_of(form).refusal(*sizes, index)


# Kind -> how the native type is configured. `forward` is y = x W^T, `dgrad` dx = dy W, `wgrad` dW = dy^T x. A call
# takes the two factors, then what is named behind the kind here, in that order.
Options = dict[str, object]
_FORWARD: Options = {"transpose_b": True}
_DGRAD: Options = {}
_WGRAD: Options = {"transpose_a": True}
KINDS: dict[str, Options] = {
    "forward": _FORWARD,
    "forward_bias": {**_FORWARD, "epilogue": "bias"},  # b [O]
    "forward_add": {**_FORWARD, "add": "c"},  # what is added [..., O], which is only read
    "forward_bias_add": {**_FORWARD, "epilogue": "bias", "add": "c"},  # what is added, b
    "forward_bias_relu": {**_FORWARD, "epilogue": "relu_bias"},  # b
    "forward_bias_gelu": {**_FORWARD, "epilogue": "gelu_bias"},  # b; the tanh form, in float32 right to 1e-5
    "forward_bias_gelu_aux": {**_FORWARD, "epilogue": "gelu_aux_bias"},  # b; (gelu(h), h), O a multiple of 8
    "dgrad": _DGRAD,
    "dgrad_dgelu": {**_DGRAD, "epilogue": "dgelu"},  # h [..., I], a multiple of 8; dx * gelu'(h)
    "wgrad": _WGRAD,
    "wgrad_sum": {**_WGRAD, "epilogue": "sum_a"},  # (dW, the sum of dy over its rows [O])
    "wgrad_onto": {**_WGRAD, "add": "out"},  # onto what the output holds: not by `multiply`
}


def product_sizes(kind: str, rows: int, n_in: int, n_out: int) -> tuple[int, int, int]:
    """(m, n, k) of out[m, n] = a[m, k] b[k, n] for a weight [n_out, n_in] and so many rows."""
    options = KINDS[kind]
    if options.get("transpose_a"):
        return n_out, n_in, rows
    return (rows, n_out, n_in) if options.get("transpose_b") else (rows, n_in, n_out)


@functools.cache
def configured(kind: str, dtype: torch.dtype, out_dtype: torch.dtype) -> _native.CudaMatmul:
    """The process's native product of that kind, which knows every problem that it met."""
    form = form_of(kind, dtype, out_dtype)
    for given in (dtype, out_dtype):
        if given not in DTYPES:
            raise TypeError(f"cuBLASLt's products are in {', '.join(map(text_of, DTYPES))}, got {text_of(given)}")
    return product_of(form)


def form_of(kind: str, dtype: torch.dtype, out_dtype: torch.dtype) -> ProductForm:
    """Configuration of the product of that kind."""
    return ProductForm(kind, dtype, dtype, out_dtype, **KINDS[kind])  # type: ignore[arg-type]


in_use: dict[ProductForm, _native.CudaMatmul] = {}  # what this process has configured


@functools.cache
def product_of(form: ProductForm) -> _native.CudaMatmul:
    """The process's native product of a form, which runs by what was measured."""
    in_use[form] = _native.CudaMatmul(
        f"matmul_{form.kind}",
        text_of(form.dtype),
        b_dtype=text_of(form.b_dtype),
        out_dtype=text_of(form.out_dtype),
        transpose_a=form.transpose_a,
        transpose_b=form.transpose_b,
        epilogue=form.epilogue,
        add=form.add,
        fast_accumulation=form.fast_accumulation,
        scales_a=form.scales_a,
        scales_b=form.scales_b,
        on_empty=functools.partial(_write_empty, form),
        tuned=(functools.partial(tuned.algorithm_of, form), functools.partial(tuned.drop, form)),
    )
    return in_use[form]


def algorithms_of(form: ProductForm, sizes: tuple[int, int, int]) -> str:
    """Algorithms of a product in the sizes (m, n, k), where known or planned."""
    known = in_use[form].problems() if form in in_use else ()
    met = [ProductProblem(*p) for p in known if p[1:4] == sizes]
    found = {str(f) for p in met if (f := found_for(form, p)) is not None}
    return ", ".join(sorted(found)) or ("first heuristic" if met else "")


def _write_empty(form: ProductForm, a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor) -> None:
    """Write a product's result over nothing: the addend and the bias, sums of zeros."""
    out, *given = others[2:] if form.in_8_bits else others  # behind both scales
    if form.add == "none":
        out.zero_()
    elif form.add == "c":
        out.copy_(given.pop(0))
    if form.epilogue in ("sum_a", "sum_b"):
        rows = a if form.epilogue == "sum_a" else b
        given[0].copy_(rows.reshape(-1, rows.shape[-1]).sum(0))
    elif "bias" in form.epilogue:
        out += given[0]
        if "relu" in form.epilogue:
            out.relu_()
        elif "gelu" in form.epilogue:
            if "aux" in form.epilogue:
                given[1].copy_(out)
            out.copy_(torch.nn.functional.gelu(out, approximate="tanh"))


def multiply(kind: str, a: torch.Tensor, *others: torch.Tensor) -> Any:
    """The product of that kind, in the dtype of `a`: one tensor, or a tuple of them."""
    return configured(kind, a.dtype, a.dtype).make(a, *others)


def put_weight_gradient(dy: torch.Tensor, x: torch.Tensor, onto: torch.Tensor, add: bool = True) -> None:
    """onto += dy^T x in place, or onto = dy^T x; `onto` is [O, I], as dy or float32."""
    configured("wgrad_onto" if add else "wgrad", dy.dtype, onto.dtype)((dy, x, onto))
    torch.autograd.graph.increment_version(onto)


FIRST = (8, 9)  # the first compute capability with products of 8 bits
BLOCKS = (9, 0)  # that whose products take a scale for each block of 128 numbers
BLOCKS_SINCE = 120900  # cuBLASLt's version
_ANY_LAYOUT = 10  # the compute capability, whatever its minor number, whose products take factors as they lie
ALONG = (False, True)  # a [m, k] and b [n, k]: both lie along what is summed
ONE = ("one", "one")  # a scale for each factor

# What is added before the one rounding: nothing, a bias [N] in the output's dtype, or what the output holds.
# Kind -> epilogue and addend, as the native type calls them.
KINDS_8: dict[str, tuple[str, str]] = {"plain": ("none", "none"), "bias": ("bias", "none"), "onto": ("none", "out")}


def form_of_8(
    kind: str,
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    fast: bool = False,
    transposes: tuple[bool, bool] = ALONG,
    scales: tuple[str, str] = ONE,
) -> ProductForm:
    """A product of that kind as it is configured.

    Args:
        fast: sums in fewer bits than float32 has, as forward may have them.
        transposes: whether a comes as [k, m], and b as [n, k].
        scales: of a and b, as the native type has them.
    """
    name = "quantized" + ("" if kind == "plain" else f"_{kind}")
    return ProductForm(name, a, b, out, *transposes, *KINDS_8[kind], fast, *scales)


def takes_any_layout(device: torch.device, capability: tuple[int, int] | None = None) -> bool:
    """True where products of 8 bits take factors as they lie, not along the sum alone."""
    if device.type != "cuda":
        return False
    return (capability or torch.cuda.get_device_capability(device))[0] == _ANY_LAYOUT


def obstacle_on(device: torch.device, capability: tuple[int, int] | None = None, scales: str = "tensor") -> str | None:
    """Reason why a device has no products of 8 bits with such `Recipe.scales`."""
    if device.type != "cuda":
        return f"cuBLASLt runs on cuda, the input is on {device.type}"
    at_hand = capability is None
    capability = capability or torch.cuda.get_device_capability(device)
    has = ".".join(map(str, capability))
    if capability < FIRST:
        return f"products of 8 bits take compute capability 8.9, this GPU has {has}"
    if scales == "mx":
        return "products with a scale for each 32 numbers are emulated alone"
    if scales == "block" and capability != BLOCKS:
        return f"products with a scale for each block of 128 numbers take compute capability 9.0, this GPU has {has}"
    if not at_hand:
        return None
    why, found = obstacle(), version()
    if why is None and scales == "block" and found is not None and found < BLOCKS_SINCE:
        has = f"{found // 10000}.{found // 100 % 100}"
        return f"products with a scale for each block of 128 numbers take cuBLAS 12.9, this PyTorch has {has}"
    return why


def check_machine(device: torch.device, scales: str = "tensor") -> None:
    """Refuse FP8 on a GPU that would emulate it, unless the config says so."""
    if device.type != "cuda" or config.emulate_fp8:
        return
    why = obstacle_on(device, scales=scales)
    if why is not None:
        raise RuntimeError(
            f"FP8 on {device}: {why}; leave the region out here, or set te_fuser.config.emulate_fp8 = True to have it "
            "emulated, which is slower than without FP8"
        )


def emulated_on(device: torch.device, capability: tuple[int, int] | None, scales: str) -> str:
    """Words on how a device emulates products; "" where it has them."""
    if device.type != "cuda":
        return f", emulated on {device.type}: multiplied in float32"
    why = obstacle_on(device, capability, scales)
    if why is None:
        return ""
    if config.emulate_fp8:
        return f", emulated, as te_fuser.config.emulate_fp8 says, since {why}: multiplied in float32"
    emulated = "emulated and multiplied in float32, they run with te_fuser.config.emulate_fp8 = True"
    return f", refused when they are called, since {why}; as planned here, {emulated}"
