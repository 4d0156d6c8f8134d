"""Products of 8 bits on a GPU, against float64: all dtypes, sums, addends and sizes, alone and in plans."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.kernels import quantizers
from te_fuser.kernels.cublaslt import products
from te_fuser.ops.quantized_matmul import product
from te_fuser.quantization import QuantizedTensor, quantize
from tests.float8 import E4M3, E5M2
from tests.gpu.captures import captured
from tests.kernels.test_quantizers import turned_wrongly

pytestmark = pytest.mark.usefixtures("narrow_products")

GPU = torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
# Rows, columns, and what is summed: few and many, none of the first a multiple of anything.
SIZES = [(1024, 512, 2048), (17, 48, 16), (1, 16, 4096), (1000, 1040, 272), (4099, 256, 128)]
SPLIT = 1e-3  # what sums err by, as a share of the largest result, where only 128 terms are added in fewer bits

pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(str(d)[12:] for d in p))
sums = pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int) -> QuantizedTensor:
    x = torch.randn(rows, columns, device=GPU, generator=torch.Generator(GPU).manual_seed(seed))
    return quantize(x, dtype, torch.finfo(dtype).max / x.abs().max() if x.numel() else 1.0)


def wide(t: QuantizedTensor) -> torch.Tensor:
    return t.data.double() * t.scale_inverse.double()


def given(a: QuantizedTensor, b: QuantizedTensor) -> tuple[torch.Tensor, ...]:
    return a.data, a.scale_inverse, b.data, b.scale_inverse


def multiply(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.dtype,
    *bias: torch.Tensor,
    fast: bool = False,
) -> torch.Tensor:
    """(a scale_a) (b scale_b)^T + bias, as plans run it."""
    form = products.form_of_8("bias" if bias else "plain", a.dtype, b.dtype, out, fast)
    return products.product_of(form).make(a, b, scale_a, scale_b, *bias)  # type: ignore[return-value]


def add_onto(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    onto: torch.Tensor,
    fast: bool = False,
) -> None:
    """Add (a scale_a) (b scale_b)^T to `onto`."""
    form = products.form_of_8("onto", a.dtype, b.dtype, onto.dtype, fast)
    products.product_of(form)((a, b, scale_a, scale_b, onto))


def close(found: torch.Tensor, exact: torch.Tensor, fast: bool, k: int = 0) -> None:
    """Within one rounding, and what sums of k terms err by.

    The matrix units drop what lies below some 14 bits of a sum each time that they add 32 products to it.
    """
    assert found.shape == exact.shape
    share = max(SPLIT, k / 32 * 2.0**-14) if fast else SPLIT
    eps, size = torch.finfo(found.dtype).eps, exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(found.double(), exact, rtol=eps, atol=share * size)


@sums
@pytest.mark.parametrize("out_dtype", [BF16, F16, F32])
@pairs
def test_plain(pair: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, fast: bool) -> None:
    form = products.form_of_8("plain", *pair, out_dtype, fast)
    for m, n, k in SIZES:
        a, b = numbers(m, k, pair[0], seed=m), numbers(n, k, pair[1], seed=n)
        assert products.refusal_of(form, (m, n, k), GPU) is None, (m, n, k)
        found = multiply(*given(a, b), out_dtype, fast=fast)
        assert found.dtype == out_dtype
        close(found, wide(a) @ wide(b).mT, fast, k)


@sums
@pytest.mark.parametrize("out_dtype", [BF16, F16])
@pairs
def test_with_a_bias(pair: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, fast: bool) -> None:
    for m, n, k in SIZES:
        a, b = numbers(m, k, pair[0], seed=m), numbers(n, k, pair[1], seed=n)
        bias = torch.randn(n, device=GPU, generator=torch.Generator(GPU).manual_seed(k)).to(out_dtype)
        found = multiply(*given(a, b), out_dtype, bias, fast=fast)
        close(found, wide(a) @ wide(b).mT + bias.double(), fast, k)


@sums
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pairs
def test_onto(pair: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, fast: bool) -> None:
    """Twice onto what is there."""
    for m, n, k in SIZES:
        a, b = numbers(m, k, pair[0], seed=m), numbers(n, k, pair[1], seed=n)
        exact = wide(a) @ wide(b).mT
        onto = torch.full((m, n), 3.0, device=GPU, dtype=out_dtype)
        for _ in range(2):
            before = onto.double()
            add_onto(*given(a, b), onto, fast)
            close(onto, before + exact, fast, k)


@pytest.mark.parametrize("out_dtype", [BF16, F16, F32])
@pytest.mark.parametrize("sizes", [(0, 32, 48), (32, 16, 0), (0, 16, 0)])
def test_nothing(sizes: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    m, n, k = sizes
    a, b, bias = numbers(m, k, E4M3, 0), numbers(n, k, E5M2, 1), torch.ones(n, device=GPU, dtype=out_dtype)
    assert torch.equal(multiply(*given(a, b), out_dtype), bias.new_zeros(m, n))
    if out_dtype != F32:
        assert torch.equal(multiply(*given(a, b), out_dtype, bias), bias.new_ones(m, n))
    onto = bias.new_ones(m, n)
    add_onto(*given(a, b), onto)
    assert torch.equal(onto, bias.new_ones(m, n))


def test_rows_of_no_multiple_of_16() -> None:
    for pair in PAIRS:
        why = products.refusal_of(products.form_of_8("plain", *pair, BF16), (16, 16, 40), GPU)
        assert why is not None and "multiples of 16" in why


@sums
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 1000, 4099])
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_the_three_products_of_a_layer(tokens: int, format: torch.dtype, fast: bool) -> None:
    """Of any number of tokens: what is turned has zeros up to the next 16."""
    features, out = 512, 768
    x, w, dy = numbers(tokens, features, E4M3, 0), numbers(out, features, E4M3, 1), numbers(tokens, out, format, 2)
    turned = {name: quantizers.transpose_by_kernel(t.data) for name, t in (("x", x), ("w", w), ("dy", dy))}
    for name, t in (("x", x), ("w", w), ("dy", dy)):
        assert not turned_wrongly(t.data, turned[name])
        assert not turned_wrongly(t.data, t.transposed)
    y = multiply(x.data, x.scale_inverse, w.data, w.scale_inverse, BF16, fast=fast)
    close(y, wide(x) @ wide(w).mT, fast, features)
    dx = multiply(dy.data, dy.scale_inverse, turned["w"], w.scale_inverse, BF16, fast=fast)
    close(dx, wide(dy) @ wide(w), fast, out)
    exact = wide(dy).mT @ wide(x)
    factors = turned["dy"], dy.scale_inverse, turned["x"], x.scale_inverse
    close(multiply(*factors, BF16, fast=fast), exact, fast, tokens)
    onto = torch.ones(out, features, device=GPU)
    add_onto(*factors, onto, fast)
    close(onto, exact + 1.0, fast, tokens)


def test_streams() -> None:
    """Each on its own, at the same time, with numbers that its stream makes."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for k, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for round_ in range(5):
                a, b = numbers(512, 1024, E4M3, 10 * k + round_), numbers(256, 1024, E5M2, 100 + 10 * k + round_)
                found.append(multiply(*given(a, b), F32))
                wanted.append(wide(a) @ wide(b).mT)
    torch.cuda.synchronize()
    for y, exact in zip(found, wanted, strict=True):
        close(y, exact, False)


def test_a_captured_product_reads_its_scales_at_each_replay() -> None:
    a, b = numbers(64, 64, E4M3, 0), numbers(64, 64, E4M3, 1)
    scale = torch.ones((), device=GPU)

    def run() -> torch.Tensor:
        return multiply(a.data, scale, b.data, b.scale_inverse, F32)

    first = run()
    graph, found = captured(run)
    scale.fill_(3.0)
    graph.replay()
    torch.testing.assert_close(found, 3.0 * first)


@sums
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_lists_give_what_the_emulation_gives(dtype: torch.dtype, bias: bool, fast: bool) -> None:
    """Within one rounding: by plans with cuBLASLt, without it, and by the reference; with gradients."""
    inner, out = 768, 512
    parts = [ops.Quantize(E4M3), ops.QuantizedMatMul(inner, out, dtype=dtype, fast_accumulation=fast)]
    model = te_fuser.Sequential(*parts, *([ops.Bias(out)] if bias else [])).to(GPU, dtype)
    rng = torch.Generator(GPU).manual_seed(0)
    if bias:
        torch.nn.init.normal_(model[2].bias, generator=rng)
    x = torch.randn(333, inner, device=GPU, generator=rng).to(dtype).requires_grad_()
    dy = torch.randn(333, out, device=GPU, generator=rng).to(dtype)
    w, scale = numbers(out, inner, E4M3, 1), torch.tensor(100.0, device=GPU)
    named = {"weight": w.data, "scale": scale, "input_scale": scale.reciprocal(), "weight_scale": w.scale_inverse}
    steps = [step.name for step in model.plan(x, **named).forward]
    assert any(name.startswith("quantized_matmul") for name in steps), steps
    y = model(x, **named)
    data = quantize(x.detach(), E4M3, scale)
    emulated = product(data.data, data.scale_inverse, w.data, w.scale_inverse, F32)
    close(y.detach(), (emulated + model[2].bias.float() if bias else emulated).double(), fast, inner)
    with fusions.disabled("quantized_matmul", "quantized_matmul_bias"):
        apart = model(x, **named)
    leaves = [x, *model.parameters()]
    ours = torch.autograd.grad(y, leaves, dy)
    for other in (apart, model.reference(x, **named)):
        close(y.detach(), other.detach().double(), fast, inner)
        for a, b in zip(ours, torch.autograd.grad(other, leaves, dy), strict=True):
            eps = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(a, b, rtol=eps, atol=max(eps, SPLIT) * b.abs().max().item())


def test_a_bias_in_float32_in_a_list() -> None:
    """Stays with the row op behind the product, and explain says why."""
    model = te_fuser.Sequential(
        ops.Quantize(E4M3), ops.QuantizedMatMul(64, 32, dtype=F32), ops.Bias(32), ops.GELU(), kernels="generated"
    ).to(GPU)
    x, one = torch.randn(17, 64, device=GPU), torch.ones((), device=GPU)
    named = {"weight": numbers(32, 64, E4M3, 1).data, "scale": one, "input_scale": one, "weight_scale": one}
    plan = model.plan(x, **named)
    assert [step.name for step in plan.forward] == ["quantize_fwd", "quantized_matmul", "bias_gelu_fwd"]
    assert "not every cuBLASLt adds a bias in float32" in str(model.explain(x, **named, details=True))
    want = model.reference(x, **named)
    close(model(x, **named), want.double(), True, 64)


def test_scales_that_lie_anywhere() -> None:
    a, b = numbers(64, 128, E4M3, 0), numbers(32, 128, E4M3, 1)
    scales = torch.stack([a.scale_inverse, a.scale_inverse, b.scale_inverse])[1:].unbind()
    found = multiply(a.data, scales[0], b.data, scales[1], F32)
    close(found, wide(a) @ wide(b).mT, False)
