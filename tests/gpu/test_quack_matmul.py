"""Products of quack-kernels on a GPU: values, repeated bits, strides, captures, threads; and plans that have them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.fusions import Cost
from te_fuser.kernels.packages import quack as products
from tests.gpu.captures import captured
from tests.gpu.packing_providers import installed_version
from tests.kernels.packages.fake_packages import behind, turned
from tests.kernels.packages.fake_quack import gelu
from tests.threads import in_threads
from tests.twins import randomize

VERSION = installed_version(products.PACKAGE.name)
pytestmark = pytest.mark.skipif(VERSION is None, reason=f"needs {products.PACKAGE}")
GATED = "swiglu_matmul_quack"
NAMES = ("matmul_bias_gelu_quack", "matmul_bias_gelu_quack_aux", "bias_gelu_matmul_quack", GATED)
GPU = torch.device("cuda", 0)
EPS = 2.0**-8


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.PACKAGE, "version", lambda: VERSION)


def tensors(rows: tuple[int, ...], inner: int, outer: int) -> list[torch.Tensor]:
    """x, W, b, dy, and h: of both signs, some far out in GELU's negative tail."""
    rng = torch.Generator().manual_seed(3)
    shapes = ((*rows, inner), (outer, inner), (outer,), (*rows, outer), (*rows, inner))
    x, w, b, dy, h = (torch.randn(*shape, generator=rng) for shape in shapes)
    return [t.to(GPU, torch.bfloat16) for t in (x, w * inner**-0.5, b, dy, 3 * h)]


def slope(h: torch.Tensor) -> torch.Tensor:
    h = h.detach().requires_grad_()
    return torch.autograd.grad(gelu(h).sum(), h)[0]


def gated_tensors(rows: tuple[int, ...], inner: int, outer: int) -> list[torch.Tensor]:
    """dy, W, and h of a gate, some of it far out in SiLU's negative tail, and as many others."""
    up, w, _, dy, gate = tensors(rows, inner, outer)
    if gate.numel():
        gate.view(-1, inner)[0, :4] = torch.tensor([0.0, 12.0, -30.0, -100.0])
    return [dy, w, torch.cat((gate, up), -1)]


def swiglu_gradients(da: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dh and silu(gate) * up, where da is the gradient of that."""
    leaf = h.detach().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    y = torch.nn.functional.silu(gate) * up
    return torch.autograd.grad(y, leaf, da)[0], y.detach()


def close(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> bool:
    """At most twice the error of plain PyTorch, and one unit of bfloat16 at the largest value."""
    error, usual = ((t.double() - exact).abs().max() for t in (found, plain))
    return bool(error <= 2 * usual + EPS * exact.abs().max()) and found.shape == exact.shape


SIZES = (((1,), 64, 64), ((3, 7), 136, 72), ((200,), 1000, 264), ((129, 2), 512, 2048), ((0, 4), 64, 128))


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_forward(rows: tuple[int, ...], inner: int, outer: int) -> None:
    x, w, b, *_ = tensors(rows, inner, outer)
    y, h = products.linear_bias_gelu_aux(x, w, b)
    again = products.linear_bias_gelu_aux(x, w, b)
    assert torch.equal(y, again[0]) and torch.equal(h, again[1])
    assert torch.equal(y, products.linear_bias_gelu(x, w, b))
    if not y.numel():
        assert y.shape == h.shape == (*rows, outer)
        return
    exact = x.double() @ w.double().t() + b.double()
    plain = torch.nn.functional.linear(x, w, b)
    assert close(h, exact, plain) and close(y, gelu(exact), gelu(plain))


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_backward(rows: tuple[int, ...], inner: int, outer: int) -> None:
    _, w, _, dy, h = tensors(rows, inner, outer)
    made, again = (products.input_gradient_dgelu_sum(dy, w, h) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    dh, y, total = made
    assert total.shape == (inner,) and total.dtype == torch.float32
    if not dh.numel():
        assert dh.shape == y.shape == h.shape and not total.any()
        return
    exact = (dy.double() @ w.double()) * slope(h.double())
    plain = (dy @ w) * slope(h)
    assert close(dh, exact, plain) and close(y, gelu(h.double()), gelu(h))
    rough = plain.flatten(0, -2).sum(0)
    assert close(total, exact.flatten(0, -2).sum(0), rough)


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_backward_of_swiglu(rows: tuple[int, ...], inner: int, outer: int) -> None:
    """Each half of dh by itself, for a stray one must not hide behind the larger."""
    dy, w, h = gated_tensors(rows, inner, outer)
    made, again = (products.input_gradient_dswiglu(dy, w, h) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    dh, y = made
    assert dh.shape == h.shape and y.shape == (*rows, inner)
    if not dh.numel():
        return
    exact = swiglu_gradients(dy.double() @ w.double(), h.double())
    plain = swiglu_gradients(dy @ w, h)
    for ours, wanted, usual in zip(dh.chunk(2, -1), exact[0].chunk(2, -1), plain[0].chunk(2, -1), strict=True):
        assert close(ours, wanted, usual)
    assert close(y, exact[1], plain[1])


def test_strides_and_offsets() -> None:
    """Tensors that its loads cannot read are copied; others are read where they lie, and not changed."""
    x, w, b, dy, h = tensors((48, 3), 136, 72)
    wide = torch.cat((h, x), -1)

    def results(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor, h: torch.Tensor, wide: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        backward = *products.input_gradient_dgelu_sum(dy, w, h), *products.input_gradient_dswiglu(dy, w, wide)
        return *products.linear_bias_gelu_aux(x, w, b), *backward

    want = results(x, w, b, dy, h, wide)

    def wider(t: torch.Tensor) -> torch.Tensor:
        return torch.cat((t, t), -1)[..., : t.shape[-1]]

    for change in (wider, behind, turned):
        given = [change(t) for t in (x, w, b, dy, h, wide)]
        kept = [t.clone() for t in given]
        for ours, theirs in zip(results(*given), want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
        assert all(torch.equal(a, c) for a, c in zip(given, kept, strict=True))


def test_calls_of_one_form_on_two_streams_have_sums_of_their_own() -> None:
    _, w, _, dy, h = tensors((512,), 1024, 264)
    inputs = [(dy * k, w, h.roll(k, 0)) for k in range(1, 5)]
    want = [products.input_gradient_dgelu_sum(*given) for given in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for k, given in enumerate(inputs):
        with torch.cuda.stream(streams[k % 2]):
            found.append(products.input_gradient_dgelu_sum(*given))
    torch.cuda.synchronize()
    for ours, theirs in zip(found, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def cheap() -> Iterator[tuple[object, ...]]:
    """Its fusions at no cost, in the place of cuBLASLt's with GELU and of generated kernels."""
    yield tuple(dataclasses.replace(fusions.get(name), cost=lambda m: Cost(seconds=0.0)) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_verified(name: str) -> None:
    report = te_fuser.verify(name, dtypes=(torch.bfloat16,), device=GPU)
    assert report.passed and len(report.rows) > 2


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_in_a_model(cheap: tuple[fusions.Fusion, ...], memory: str) -> None:
    model = Sequential(ops.LayerNorm(72), ops.Linear(72, 264), ops.GELU(), ops.Linear(264, 72), memory=memory)
    model = randomize(model).to(GPU, torch.bfloat16)
    x = torch.randn(65, 3, 72, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    with fusions.only(*cheap, "stretch", "matmul", "matmul_backward", "matmul_bias"):
        plan = model.plan(x)
        assert NAMES[1] in {s.name for s in plan.forward} and NAMES[2] in {s.name for s in plan.backward}
        assert "gelu.output" not in {k.name for k in plan.kept}
        te_fuser.verify(model, x)
        results = [torch.autograd.grad(model(x), [x, *model.parameters()], dy) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        with torch.no_grad():
            assert {s.name for s in model.plan(x).forward} & set(NAMES[:2])  # at no cost either will do
            torch.testing.assert_close(model(x), model.reference(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_swiglu_in_a_model(cheap: tuple[fusions.Fusion, ...], memory: str) -> None:
    up, down = ops.Linear(72, 528, bias=False), ops.Linear(264, 72, bias=False)
    model = randomize(Sequential(ops.RMSNorm(72), up, ops.SwiGLU(), down, memory=memory)).to(GPU, torch.bfloat16)
    x = torch.randn(65, 3, 72, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(72, 3, 65, device=GPU, dtype=torch.bfloat16).permute(2, 1, 0)
    with fusions.only(*cheap, "stretch", "matmul", "matmul_backward"):
        plan = model.plan(x)
        assert GATED in {s.name for s in plan.backward}
        assert "swiglu.output" not in {k.name for k in plan.kept}
        te_fuser.verify(model, x)
        leaves = [x, *model.parameters()]
        results = [torch.autograd.grad(model(x), leaves, dy) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    plain = torch.autograd.grad(model.reference(x), leaves, dy)
    twin = copy.deepcopy(model).double()
    x64 = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(twin.reference(x64), [x64, *twin.parameters()], dy.double())
    for ours, wanted, usual in zip(results[0], exact, plain, strict=True):
        assert close(ours, wanted, usual)


def gradients_in_float64(model: Sequential, x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    twin = copy.deepcopy(model).double()
    names = [next(n for n, p in model.named_parameters() if p is parameter) for parameter in parameters]
    exact = x.detach().double().requires_grad_()
    return torch.autograd.grad(twin.reference(exact).sum(), [exact, *(twin.get_parameter(n) for n in names)])


@pytest.mark.parametrize("gated", [False, True])
def test_main_grad_and_frozen_parameters(gated: bool, cheap: tuple[fusions.Fusion, ...]) -> None:
    """Of GELU the first bias is frozen then, of SwiGLU, around which there is none, the last weight."""
    first, last = (
        ops.Linear(72, 264 * (1 + gated), bias=not gated),
        ops.Linear(264, 72, bias=not gated, accumulate_into_main_grad=True),
    )
    model = randomize(Sequential(first, ops.SwiGLU() if gated else ops.GELU(), last)).to(GPU, torch.bfloat16)
    x = torch.randn(33, 72, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight, biases = last.weight, [] if gated else [first.bias]
    weight.main_grad = torch.ones(weight.shape, device=GPU)
    plain = torch.autograd.grad(model.reference(x).float().sum(), [x, weight, *biases])
    exact = gradients_in_float64(model, x, weight, *biases)
    with fusions.only(*cheap, "stretch", "matmul", "matmul_backward", "matmul_bias", "matmul_main_grad"):
        assert not gated or GATED in {s.name for s in model.plan(x).backward}
        model(x).float().sum().backward()
        found = [x.grad, weight.main_grad - 1, *(bias.grad for bias in biases)]
        assert all(close(*three) for three in zip(found, exact, plain, strict=True))
        (weight if gated else first.bias).requires_grad_(False)
        x.grad = None
        model(x).float().sum().backward()
        assert close(x.grad, exact[0], plain[0])


def test_captures_streams_threads() -> None:
    x, w, b, dy, h = tensors((96,), 264, 136)
    *_, wide = gated_tensors((96,), 264, 136)
    products.runs.forget()
    with pytest.raises(RuntimeError, match="run the model once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        products.linear_bias_gelu(x, w, b)
    with pytest.raises(RuntimeError, match="run the model once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        products.input_gradient_dswiglu(dy, w, wide)
    found = in_threads(lambda: products.input_gradient_dgelu_sum(dy, w, h))

    def results() -> tuple[tuple[torch.Tensor, ...], ...]:
        backward = products.input_gradient_dgelu_sum(dy, w, h), products.input_gradient_dswiglu(dy, w, wide)
        return *backward, products.linear_bias_gelu_aux(x, w, b)

    want = results()
    assert all(torch.equal(a, c) for a, c in zip(found[0], want[0], strict=True))
    graph, made = captured(results)
    for t in itertools.chain(*made):
        t.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, c) for a, c in zip(itertools.chain(*made), itertools.chain(*want), strict=True))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = torch.zeros_like(dy)
        late.copy_(dy)
        other = *products.input_gradient_dgelu_sum(late, w, h), *products.input_gradient_dswiglu(late, w, wide)
    side.synchronize()
    assert all(torch.equal(a, c) for a, c in zip(other, (*want[0], *want[1]), strict=True))
