"""Products of 8 bits on machines without a GPU: a library that computes on the CPU, and the emulation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from te_fuser import _native
from te_fuser.config import config
from te_fuser.kernels.cublaslt import products
from te_fuser.ops.blockwise_scaling import quantized, spread
from te_fuser.ops.quantized_matmul import product as emulated
from te_fuser.quantization import QuantizedTensor, quantize
from te_fuser.recipe import OwnScales, QParams
from tests.fake_cublaslt import FakeCublasLt
from tests.float8 import E4M3, E5M2
from tests.needs import needs_compiler

M, N, K = 7, 12, 48
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(str(d)[12:] for d in p))


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> QuantizedTensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return quantize(x, dtype, torch.finfo(dtype).max / x.abs().max().item() if x.numel() else 1.0)


def native(*how: Any, **more: Any) -> _native.CudaMatmul:
    """The product of a form, as plans run it."""
    return products.product_of(products.form_of_8(*how, **more))


def exactly(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    wide = (t.data.double() * t.scale_inverse.double() for t in (a, b))
    return next(wide) @ next(wide).mT


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=2 * eps, atol=2 * eps * exact.abs().max().item())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(M,), (2, 3), (1,)])
@pairs
def test_values(
    cublaslt: FakeCublasLt, pair: tuple[torch.dtype, torch.dtype], rows: tuple[int, ...], out_dtype: torch.dtype
) -> None:
    """By the native type and by the emulation, with a bias and without, and onto what is there."""
    a, b = numbers(*rows, K, dtype=pair[0], seed=0), numbers(N, K, dtype=pair[1], seed=1)
    exact = exactly(a, b)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(2)).to(out_dtype)
    for fast, with_bias in itertools.product((False, True), repeat=2):
        kind, more = ("bias", (bias,)) if with_bias else ("plain", ())
        product = native(kind, *pair, out_dtype, fast)
        found = product.make(a.data, b.data, a.scale_inverse, b.scale_inverse, *more)
        wanted = exact + bias.double() if with_bias else exact
        assert found.shape == (*rows, N) and found.dtype == out_dtype and cublaslt.last_fast == fast
        close(found, wanted)
        close(emulated(a.data, a.scale_inverse, b.data, b.scale_inverse, out_dtype, *more), wanted)
    onto = torch.ones(exact.flatten(0, -2).shape, dtype=out_dtype)
    product = native("onto", *pair, out_dtype)
    product((a.data.flatten(0, -2), b.data, a.scale_inverse, b.scale_inverse, onto))
    close(onto, exact.flatten(0, -2) + 1.0)


def test_three_products_of_a_layer_by_transposed_operands(cublaslt: FakeCublasLt) -> None:
    tokens, features, out = 13, 32, 48
    x, w = numbers(tokens, features, dtype=E4M3, seed=0), numbers(out, features, dtype=E4M3, seed=1)
    dy = numbers(tokens, out, dtype=E5M2, seed=2)

    def run(a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = native("plain", a.dtype, b.dtype, torch.float32).make(a, b, *scales)
        assert isinstance(found, torch.Tensor)
        return found

    wide = {n: t.data.double() * t.scale_inverse.double() for n, t in (("x", x), ("w", w), ("dy", dy))}
    close(run(x.data, w.data, (x.scale_inverse, w.scale_inverse)), wide["x"] @ wide["w"].mT)
    close(run(dy.data, w.transposed, (dy.scale_inverse, w.scale_inverse)), wide["dy"] @ wide["w"])
    close(run(dy.transposed, x.transposed, (dy.scale_inverse, x.scale_inverse)), wide["dy"].mT @ wide["x"])


@pytest.mark.parametrize("scales", [("rows", "squares"), ("rows", "rows"), ("squares", "rows")])
@pytest.mark.parametrize("sizes", [(8, 144, 384), (132, 16, 128), (140, 144, 512)])
def test_scales_of_blocks(cublaslt: FakeCublasLt, sizes: tuple[int, int, int], scales: tuple[str, str]) -> None:
    """As they lie in memory: by columns of blocks, or by rows of them that are padded."""
    m, n, k = sizes
    product, given = native("plain", E4M3, E4M3, torch.float32, scales=scales), []
    for rows, lies, seed in ((m, scales[0], 0), (n, scales[1], 1)):
        t = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
        t *= torch.exp2(torch.arange(k) // 128 - 2.0)
        block = (1, 128) if lies == "rows" else (128, 128)
        data, inverse = quantized(t, E4M3, OwnScales(QParams(True), block))
        wide = data.double() * spread(inverse.double(), t.shape, block)
        if lies == "rows":
            inverse = inverse.mT.contiguous()
        else:
            inverse = torch.nn.functional.pad(inverse, (0, -inverse.shape[1] % 4), value=torch.nan)
        given.append((data, inverse, wide))
    (a, of_a, wide_a), (b, of_b, wide_b) = given
    close(product.make(a, b, of_a, of_b), wide_a @ wide_b.mT)
    onto = torch.ones(m, n)
    native("onto", E4M3, E4M3, torch.float32, scales=scales)((a, b, of_a, of_b, onto))
    close(onto, wide_a @ wide_b.mT + 1.0)


def test_factors_as_they_lie(cublaslt: FakeCublasLt) -> None:
    """GPUs that read both by rows: dx of dy and W, dW of dy and x; any number of tokens."""
    cublaslt.any_layout = 1
    tokens, features, out = 13, 32, 48
    x, w = numbers(tokens, features, dtype=E4M3, seed=0), numbers(out, features, dtype=E4M3, seed=1)
    dy = numbers(tokens, out, dtype=E5M2, seed=2)
    wide = {n: t.data.double() * t.scale_inverse.double() for n, t in (("x", x), ("w", w), ("dy", dy))}
    for b, transposes, exact in (
        (w, (False, False), wide["dy"] @ wide["w"]),
        (x, (True, False), wide["dy"].mT @ wide["x"]),
    ):
        product = native("plain", E5M2, E4M3, torch.float32, transposes=transposes)
        close(product.make(dy.data, b.data, dy.scale_inverse, b.scale_inverse), exact)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "any_layout"), [((8, 9), False), ((9, 0), False), ((10, 3), True), ((12, 0), False)]
)
def test_who_takes_any_layout(capability: tuple[int, int], any_layout: bool) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert products.takes_any_layout(gpu, capability) == any_layout
    assert not products.takes_any_layout(cpu, capability)


def test_each_run_reads_its_scales(cublaslt: FakeCublasLt) -> None:
    a, b = numbers(M, K, dtype=E4M3, seed=0), numbers(N, K, dtype=E4M3, seed=1)
    product = native("plain", E4M3, E4M3, torch.float32, True)
    out = torch.empty(M, N)
    product((a.data, b.data, a.scale_inverse, b.scale_inverse, out))
    first = out.clone()
    product((a.data, b.data, 2 * a.scale_inverse, b.scale_inverse.reshape(1), out))
    assert torch.equal(out, 2 * first) and cublaslt.heuristics == 1


def test_scales_that_lie_anywhere(cublaslt: FakeCublasLt) -> None:
    """The library reads them at multiples of 16 bytes alone."""
    a, b = numbers(M, K, dtype=E4M3, seed=0), numbers(N, K, dtype=E4M3, seed=1)
    product = native("plain", E4M3, E4M3, torch.float32)
    scales = torch.stack([a.scale_inverse, a.scale_inverse, b.scale_inverse])[1:].unbind()
    close(product.make(a.data, b.data, *scales), exactly(a, b))


def test_operands_that_lie_otherwise_are_copied(cublaslt: FakeCublasLt) -> None:
    a, b = numbers(32, 32, dtype=E4M3, seed=0), numbers(N, 32, dtype=E4M3, seed=1)
    product = native("plain", E4M3, E4M3, torch.float32)
    shifted = torch.zeros(N * 32 + 3, dtype=torch.uint8)[3:].view(E4M3).view(N, 32)
    shifted.view(torch.uint8).copy_(b.data.view(torch.uint8))
    turned = a.data.view(torch.uint8).mT.contiguous().mT.view(E4M3)
    want = product.make(a.data, b.data, a.scale_inverse, b.scale_inverse)
    assert torch.equal(product.make(turned, shifted, a.scale_inverse, b.scale_inverse), want)


@pytest.mark.parametrize("sizes", [(0, N, K), (M, N, 0), (M, 0, K)])
def test_nothing_to_multiply(cublaslt: FakeCublasLt, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = numbers(m, k, dtype=E4M3, seed=0), numbers(n, k, dtype=E5M2, seed=1)
    bias = torch.ones(n)
    found = native("bias", E4M3, E5M2, torch.float32).make(a.data, b.data, a.scale_inverse, b.scale_inverse, bias)
    assert torch.equal(found, torch.ones(m, n))


def test_what_the_library_takes(cublaslt: FakeCublasLt) -> None:
    device, form = torch.device("cuda", 0), products.form_of_8("plain", E4M3, E5M2, torch.bfloat16)
    assert products.refusal_of(form, (M, N, K), device) is None
    why = products.refusal_of(form, (M, N, 40), device)
    assert why == "rows of 40 numbers of 8 bits: cuBLASLt takes multiples of 16"


def test_machines(cublaslt: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without products of 8 bits is refused, unless they may be emulated; a CPU emulates them."""
    device, capability = torch.device("cuda", 0), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    words = "products of 8 bits take compute capability 8.9, this GPU has 8.0"
    assert products.obstacle_on(device) == words
    with pytest.raises(RuntimeError, match=rf"FP8 on cuda:0: {words}; leave the region .*emulate_fp8 = True"):
        products.check_machine(device)
    monkeypatch.setattr(config, "emulate_fp8", True)
    products.check_machine(device)
    monkeypatch.setattr(config, "emulate_fp8", False)
    products.check_machine(torch.device("cpu"))
    capability = (8, 9)
    products.check_machine(device)
    monkeypatch.setattr(products, "obstacle", lambda: "there is no cuBLASLt")
    with pytest.raises(RuntimeError, match="there is no cuBLASLt"):
        products.check_machine(device)
    assert products.obstacle_on(device, (9, 0)) is None


ALONG = {"transpose_b": True, "out_dtype": "float32"}
BY_ROWS = {"scales_a": "rows", "scales_b": "rows"}
IN_E4M3 = "float8_e4m3fn"
# The dtype of the first factor, how the product is configured, and the words.
CONFIGURED: dict[str, tuple[str, dict[str, Any], str]] = {
    "epilogue": (
        "bfloat16",
        {"epilogue": "swiglu"},
        "product 'p': the epilogue 'swiglu' is unknown .known: none, bias, ",
    ),
    "add": ("bfloat16", {"add": "beta"}, "product 'p': add is 'none', 'out' or 'c', got 'beta'"),
    **{
        f"to {out}": ("bfloat16", {"out_dtype": out}, f"'p': its dtypes are float32, bfloat16 and float16, got {out}")
        for out in ("float64", "uint8", IN_E4M3)
    },
    "two in E5M2": ("float8_e5m2", ALONG, "one of its factors is float8_e4m3fn"),
    "one of 8 bits": ("float8_e5m2", {"b_dtype": "bfloat16", **ALONG}, "both of 8 bits"),
    "two dtypes": ("float32", {"b_dtype": "bfloat16"}, "of one dtype, or both of 8 bits"),
    "in 8 bits": (IN_E4M3, {"transpose_b": True}, "float16, got float8_e4m3fn"),
    "fast": ("bfloat16", {"fast_accumulation": True}, "is for factors of 8 bits"),
    "scales": (IN_E4M3, {"scales_a": "columns", **ALONG}, "'one', 'rows' or"),
    "scales of wide factors": ("float32", BY_ROWS, "of factors of 8 bits"),
    "blocks of one": (IN_E4M3, {"scales_a": "rows", **ALONG}, "for each block, or"),
    "squares twice": (IN_E4M3, {"scales_a": "squares", "scales_b": "squares", **ALONG}, "got squares twice"),
    "blocks lying otherwise": (IN_E4M3, {"out_dtype": "float32", **BY_ROWS}, "a scale for each block lie along"),
    "fast blocks": (IN_E4M3, {"fast_accumulation": True, **BY_ROWS, **ALONG}, "sums over blocks are not fast"),
}
A, B, ONE, ones = torch.zeros(M, K).to(E4M3), torch.zeros(N, K).to(E4M3), torch.ones(()), torch.ones
OF_ROWS = {"scales": ("rows", "rows")}
# The form of a product, its tensors, the error and the words.
RUNS: dict[str, tuple[dict[str, Any], tuple[torch.Tensor, ...], type[Exception], str]] = {
    "lying otherwise": ({"transposes": (False, False)}, (A, ones(K, 16).to(E4M3), ONE, ONE), RuntimeError,
     "CUBLAS_STATUS_NOT_SUPPORTED"),
    "15 in a row": ({}, (A[:, :15], B[:, :15], ONE, ONE), ValueError,
     "a has 15 numbers of 8 bits in a row; cuBLASLt takes multiples of 16"),
    "several scales": ({}, (A, B, ones(2), ONE), ValueError, "scale_a is one number"),
    "too few scales": ({"scales": ("rows", "squares")}, (A[:4], B, ones(1, 4), ones(1, 1)), ValueError,
     "scale_b has 1 numbers and must have 4"),
    "too many scales": (OF_ROWS, (A[:4], B, ones(2, 4), ones(1, N)), ValueError,
     "scale_a has 8 numbers and must have 4"),
    "fours of rows": (OF_ROWS, (A, B, ones(1, M), ones(1, N)), RuntimeError, "NOT_SUPPORTED"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURED)
def test_wrong_configurations(name: str) -> None:
    dtype, options, words = CONFIGURED[name]
    with pytest.raises(ValueError, match=words):
        _native.CudaMatmul("p", dtype, **options)


@pytest.mark.parametrize("name", RUNS)
def test_wrong_calls(name: str, cublaslt: FakeCublasLt) -> None:
    form, tensors, error, words = RUNS[name]
    with pytest.raises(error, match=words):
        native("plain", E4M3, E4M3, torch.float32, **form).make(*tensors)


pytestmark = needs_compiler
