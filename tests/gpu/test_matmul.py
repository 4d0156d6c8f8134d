"""Products by cuBLASLt on a GPU: every epilogue against float64, odd sizes, strides, empty, repetition, capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from te_fuser import _native
from te_fuser.kernels.cublaslt import products
from tests.gpu.captures import captured
from tests.kernels.cublaslt.test_products import gelu, gelu_backward
from tests.kernels.cublaslt.test_products import strided as lying_otherwise

GPU = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Function:
    """A kind of product, what it means, and the names of its tensors."""

    kind: str
    meaning: Callable[..., torch.Tensor | Tensors]
    takes: str


def rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1])


FUNCTIONS = {
    "linear": Function("forward", lambda x, w: x @ w.T, "x w"),
    "linear_bias": Function("forward_bias", F.linear, "x w b"),
    "linear_add": Function("forward_add", lambda x, w, y: x @ w.T + y, "x w y"),
    "linear_bias_add": Function("forward_bias_add", lambda x, w, y, b: F.linear(x, w, b) + y, "x w y b"),
    "linear_bias_relu": Function("forward_bias_relu", lambda x, w, b: F.linear(x, w, b).relu(), "x w b"),
    "linear_bias_gelu": Function("forward_bias_gelu", lambda x, w, b: gelu(F.linear(x, w, b)), "x w b"),
    "linear_bias_gelu_aux": Function(
        "forward_bias_gelu_aux", lambda x, w, b: (gelu(F.linear(x, w, b)), F.linear(x, w, b)), "x w b"
    ),
    "input_gradient": Function("dgrad", lambda dy, w: dy @ w, "dy w"),
    "input_gradient_dgelu": Function("dgrad_dgelu", lambda dy, w, x: gelu_backward(dy @ w, x), "dy w x"),
    "weight_gradient": Function("wgrad", lambda dy, x: rows(dy).T @ rows(x), "dy x"),
    "weight_and_bias_gradient": Function("wgrad_sum", lambda dy, x: (rows(dy).T @ rows(x), rows(dy).sum(0)), "dy x"),
}


def inputs(takes: str, leading: tuple[int, ...], n_in: int, n_out: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = {"x": (*leading, n_in), "w": (n_out, n_in), "b": (n_out,), "y": (*leading, n_out), "dy": (*leading, n_out)}
    scale = {"w": n_in**-0.5}
    return [normal(*shapes[t], dtype=dtype, seed=k) * scale.get(t, 1.0) for k, t in enumerate(takes.split())]


def several(result: torch.Tensor | Tensors) -> Tensors:
    return result if isinstance(result, tuple) else (result,)


def assert_exact_enough(function: Function, tensors: list[torch.Tensor]) -> None:
    """At most twice what plain PyTorch errs in that dtype, plus one ulp of the output's scale."""
    got, torchs = several(products.multiply(function.kind, *tensors)), several(function.meaning(*tensors))
    exact = several(function.meaning(*[t.double() for t in tensors]))
    for g, t, e in zip(got, torchs, exact, strict=True):
        assert g.shape == e.shape and g.dtype == tensors[0].dtype
        if not e.numel():
            continue
        scale = torch.finfo(g.dtype).eps * float(e.abs().max())
        for norm in (lambda d: d.abs().max(), lambda d: d.square().mean().sqrt()):
            assert norm(g.double() - e) <= 2 * norm(t.double() - e) + scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(), (1,), (33,), (2, 75), (3, 0), (512,)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, leading: tuple[int, ...], dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    if "gelu" in name and dtype == torch.float32:
        pytest.skip("the epilogue's tanh errs by 1e-5: no plan uses it for float32")
    for n_in, n_out in ((64, 40), (264, 1024)):
        assert_exact_enough(function, inputs(function.takes, leading, n_in, n_out, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "gelu" not in n and "weight_and" not in n])
def test_odd_sizes(name: str, dtype: torch.dtype) -> None:
    """Features that no vector divides: the library says no, or computes them."""
    function = FUNCTIONS[name]
    for n_in, n_out in ((17, 33), (1, 5), (5, 1)):
        tensors = inputs(function.takes, (19,), n_in, n_out, dtype)
        try:
            assert_exact_enough(function, tensors)
        except RuntimeError as error:
            assert "cuBLASLt has no algorithm" in str(error)


def strided(t: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        **lying_otherwise(t, apart=8),
        "same rows": t[:1].expand(t.shape),
        "ones": t.new_ones(()).expand(t.shape),
    }


@pytest.mark.parametrize("how", strided(torch.zeros(2, 2)))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides(name: str, how: str) -> None:
    function = FUNCTIONS[name]
    for leading in ((33,), (2, 16)):
        tensors = inputs(function.takes, leading, 64, 40, torch.bfloat16)
        assert_exact_enough(function, [strided(t)[how] for t in tensors])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_accumulation(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    x, dy = normal(2, 65, 64, dtype=dtype), normal(2, 65, 40, dtype=dtype, seed=1)
    held = normal(40, 64, dtype=out_dtype or dtype, seed=2)
    exact = held.double() + rows(dy).double().T @ rows(x).double()
    plain = held + (rows(dy).T @ rows(x)).to(held.dtype)
    products.put_weight_gradient(dy, x, held)
    assert (held - exact).abs().max() <= 2 * (plain - exact).abs().max() + torch.finfo(
        held.dtype
    ).eps * exact.abs().max()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_element_is_written_and_runs_repeat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = FUNCTIONS[name]
    tensors = inputs(function.takes, (4, 300), 512, 1024, torch.bfloat16)
    first = [t.clone() for t in several(products.multiply(function.kind, *tensors))]
    empty = torch.empty
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        for _ in range(5):
            # Memory of the next outputs holds NaN.
            junk = [empty(t.shape, dtype=t.dtype, device=GPU).fill_(torch.nan) for t in first]
            del junk
            again = several(products.multiply(function.kind, *tensors))
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_tf32_is_pytorchs_setting() -> None:
    x, w = normal(256, 1024, dtype=torch.float32), normal(512, 1024, dtype=torch.float32, seed=1)
    exact = x.double() @ w.double().T
    errors = {}
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        errors[allowed] = float((products.multiply("forward", x, w) - exact).abs().max())
        torchs = float((x @ w.T - exact).abs().max())
        assert 0.5 <= errors[allowed] / torchs <= 2
    assert errors[True] > 10 * errors[False]


def test_algorithms() -> None:
    product = products.configured("forward", torch.bfloat16, torch.bfloat16)
    x, w = normal(512, 1024), normal(768, 1024, seed=1) / 32
    out = torch.empty(512, 768, device=GPU, dtype=torch.bfloat16)
    want = x.double() @ w.double().T
    problem = product.problem((x, w, out))
    found = product.algorithms(problem, 8)
    assert 1 <= len(found) <= 8
    for algorithm, _, _ in found:
        product.choose(problem, algorithm)
        out.fill_(torch.nan)
        product((x, w, out))
        torch.testing.assert_close(out.double(), want, rtol=0.01, atol=0.01)
    product.choose(problem, found[0][0])


def test_products_of_a_program_share_a_workspace() -> None:
    """With the algorithms that take the most of it, of different sizes: the results are those of calls apart."""
    x, w, dy = normal(16, 4096), normal(512, 4096, seed=1) / 64, normal(16, 512, seed=2)
    makes, sizes = [], []
    for kind, a, b in (("forward", x, w), ("dgrad", dy, w), ("wgrad", dy, x)):
        product = _native.CudaMatmul(kind, "bfloat16", **products.KINDS[kind])  # no other test meets its choice
        product.make(a, b)
        (problem,) = product.problems()
        algorithm, size, _ = max(product.algorithms(problem, 64), key=lambda found: found[1])
        product.choose(problem, algorithm)
        makes.append((product.make, a, b))
        sizes.append(size)
    if not any(sizes):
        pytest.skip("no algorithm of these takes a workspace")
    alone = [make(a, b) for make, a, b in makes]
    steps = [
        _native.FunctionStep("product", make, [3 * k, 3 * k + 1], [3 * k + 2]) for k, (make, _, _) in enumerate(makes)
    ]
    program = _native.Program([(step, []) for step in steps])
    for _ in range(50):
        slots = [t for _, a, b in makes for t in (a, b, None)]
        program.run(slots)
        for got, want in zip(slots[2::3], alone, strict=True):
            torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_in_a_graph_and_on_another_stream() -> None:
    x, w, b = inputs("x w b", (64,), 128, 256, torch.bfloat16)
    want = products.multiply("forward_bias_gelu_aux", x, w, b)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = x.clone()
        got = products.multiply("forward_bias_gelu_aux", late, w, b)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    graph, (y, h) = captured(lambda: products.multiply("forward_bias_gelu_aux", x, w, b))
    x.copy_(normal(64, 128, seed=9))
    graph.replay()
    for a, c in zip((y, h), products.multiply("forward_bias_gelu_aux", x, w, b), strict=True):
        assert torch.equal(a, c)


def test_what_never_ran_is_not_captured() -> None:
    x, w = normal(24, 136), normal(72, 136)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="run the model once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        products.multiply("forward", x, w)
    torch.cuda.synchronize()
    assert products.multiply("forward", x, w).isfinite().all()


def test_refusals_come_from_the_library() -> None:
    assert products.obstacle() is None and _native.cublaslt_version() >= 120000
    for kind in products.KINDS:
        assert products.refusal(kind, torch.bfloat16, 8192, 4096, 1024, GPU) is None
    words = products.refusal("wgrad_sum", torch.bfloat16, 4096, 1024, 8192, GPU, torch.float32)
    assert words is None or "cuBLASLt has no algorithm" in words


def test_tensors_elsewhere() -> None:
    with pytest.raises(ValueError, match="must be on a CUDA device"):
        products.multiply("forward", normal(4, 64), normal(8, 64).cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu() -> None:
    x, w = normal(64, 128), normal(256, 128, seed=1)
    want = products.multiply("forward", x, w)
    got = products.multiply("forward", x.to("cuda:1"), w.to("cuda:1"))
    assert torch.cuda.current_device() == 0 and torch.equal(want, got.to(GPU))
