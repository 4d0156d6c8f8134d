"""Products of numbers of 8 bits by cuBLASLt, on CUDA; elsewhere their ops emulate them.

y = (a scale_a) (b scale_b)^T for a [..., K] and b [N, K], one of them in float8_e4m3fn, the other in that or in
float8_e5m2, K a multiple of 16: both lie along what is summed, as Hopper's matrix units take them. So all three
products of a layer are this one: y of x and W, dx of dy and W^T, dW of dy^T and x^T, where transposed ones are at hand.
Compute capability 10 takes them as they lie (`takes_any_layout`).
Scales are float32 [], what 8 bits are multiplied by (`QuantizedTensor.scale_inverse`), read on the device at each run.
"""

from __future__ import annotations

import functools

import torch

from te_fuser import _native
from te_fuser.config import config
from te_fuser.kernels.cublaslt.products import native, obstacle, version
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.ops.quantized_matmul import STEP

FIRST = (8, 9)  # the first compute capability with products of 8 bits
BLOCKS = (9, 0)  # that whose products take a scale for each block of 128 numbers
BLOCKS_SINCE = 120900  # cuBLASLt's version
_ANY_LAYOUT = 10  # the compute capability, whatever its minor number, whose products take factors as they lie
ALONG = (False, True)  # a [m, k] and b [n, k]: both lie along what is summed
ONE = ("one", "one")  # a scale for each factor

# What is added before the one rounding: nothing, a bias [N] in the output's dtype, or what the output holds.
# Kind -> epilogue and addend, as the native type calls them.
KINDS: dict[str, tuple[str, str]] = {"plain": ("none", "none"), "bias": ("bias", "none"), "onto": ("none", "out")}


def form_of(
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
        a, b, out: dtypes of the factors and of the result.
        fast: sums in fewer bits than float32 has, as forward may have them.
        transposes: whether a comes as [k, m], and b as [n, k].
        scales: of a and b, as the native type has them.

    Raises:
        KeyError: when there is no such kind.
    """
    name = "quantized" + ("" if kind == "plain" else f"_{kind}")
    return ProductForm(name, a, b, out, *transposes, *KINDS[kind], fast, *scales)


@functools.cache
def configured(form: ProductForm) -> _native.CudaMatmul:
    """The native product of a form; one for the process.

    Raises:
        ValueError: for dtypes that cuBLASLt does not take together.
    """
    return native(form, functools.partial(_write_empty, form.add))


def _write_empty(
    add: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
    *bias: torch.Tensor,
) -> None:
    """What a product over nothing gives."""
    if add != "out":
        out.zero_()
    for b in bias:
        out += b


def takes_any_layout(device: torch.device, capability: tuple[int, int] | None = None) -> bool:
    """Whether a device's products of 8 bits take factors as they lie, and not along what is summed alone.

    Args:
        capability: the compute capability of a GPU that is not at hand.
    """
    if device.type != "cuda":
        return False
    return (capability or torch.cuda.get_device_capability(device))[0] == _ANY_LAYOUT


def obstacle_on(device: torch.device, capability: tuple[int, int] | None = None, scales: str = "tensor") -> str | None:
    """Why a device has no products of 8 bits, in words; None where it has.

    Args:
        capability: the compute capability of a GPU that is not at hand.
        scales: what has one scale: a "tensor", a "block" of 128 numbers, or one of 32, "mx".
    """
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
    """Refuse FP8 on a GPU that would emulate it, unless `te_fuser.config.emulate_fp8` says that it may.

    Raises:
        RuntimeError: with why it has no products of 8 bits, and what to do.
    """
    if device.type != "cuda" or config.emulate_fp8:
        return
    why = obstacle_on(device, scales=scales)
    if why is not None:
        raise RuntimeError(
            f"FP8 on {device}: {why}; leave the region out here, or set te_fuser.config.emulate_fp8 = True to have it "
            "emulated, which is slower than without FP8"
        )


def emulated_on(device: torch.device, capability: tuple[int, int] | None, scales: str) -> str:
    """How a device runs products that it has none for, in words: "", where it has such products."""
    if device.type != "cuda":
        return f", emulated on {device.type}: multiplied in float32"
    why = obstacle_on(device, capability, scales)
    if why is None:
        return ""
    if config.emulate_fp8:
        return f", emulated, as te_fuser.config.emulate_fp8 says, since {why}: multiplied in float32"
    emulated = "emulated and multiplied in float32, they run with te_fuser.config.emulate_fp8 = True"
    return f", refused when they are called, since {why}; as planned here, {emulated}"


def refusal(form: ProductForm, sizes: tuple[int, int, int], device: torch.device) -> str | None:
    """Why cuBLASLt cannot run a product of sizes (m, n, k) on a device; None if it can."""
    why = obstacle()
    if why is not None:
        return why
    m, n, k = sizes
    rows = (m if form.transpose_a else k, k if form.transpose_b else n)
    uneven = next((row for row in rows if row % STEP), None)
    if uneven is not None:
        return f"rows of {uneven} numbers of 8 bits: cuBLASLt takes multiples of {STEP}"
    index = torch.cuda.current_device() if device.index is None else device.index
    return configured(form).refusal(*sizes, index)
