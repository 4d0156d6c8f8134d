"""Attention with what comes before it on a GPU: bias, rotation and packing in one pass; values and all gradients."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.fuser.plan.plan import Plan
from tests.twins import randomize


def projected(heads: int, kv_heads: int, dim: int, rope: bool = True, **options: str) -> list[ops.FusableOperation]:
    """A bias, maybe a rotation, causal attention."""
    common = {"heads": heads, "kv_heads": kv_heads, **options}
    features = (heads + 2 * kv_heads) * dim
    rotation = [ops.RotaryEmbedding(dim, **common)] if rope else []
    attention = ops.DotProductAttention(head_dim=dim, mask="causal", **{"layout": "sequence_first", **common})
    return [ops.Bias(features), *rotation, attention]


def gradients(model: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, reference: bool = False) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = model.reference(x) if reference else model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy.to(y.dtype))]


def names(plan: Plan) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    forward, backward = ({s.name: (s.start, s.stop) for s in steps} for steps in (plan.forward, plan.backward))
    return forward, backward


def assert_near(
    model: Sequential, x: torch.Tensor, dy: torch.Tensor, found: list[torch.Tensor], units: tuple[int, int] = (2, 16)
) -> None:
    """Errors against float64 are at most twice those of the ops' own math in this dtype, and some units.

    Args:
        units: of 16 bits, and of float32, whose sums err by the order they are added in.
    """
    plain = gradients(model, x, dy, reference=True)
    exact = gradients(model.double(), x.double(), dy, reference=True)
    model.to(x.dtype)
    for one, usual, want in zip(found, plain, exact, strict=True):
        unit = units[x.dtype == torch.float32] * torch.finfo(x.dtype).eps * want.abs().max()
        assert (one.double() - want).abs().max() <= 2 * (usual.double() - want).abs().max() + unit


def check(parts: list[ops.FusableOperation], samples: int, positions: int, dtype: torch.dtype, layout: str) -> Plan:
    shape = (positions, samples) if layout == "sequence_first" else (samples, positions)
    rng = torch.Generator().manual_seed(1)
    model = randomize(Sequential(*parts)).to("cuda", dtype)
    sizes = parts[0].features, parts[-1].heads * parts[-1].head_dim
    x, dy = (torch.randn(*shape, n, generator=rng).to("cuda", dtype) for n in sizes)
    got, again = gradients(model, x, dy), gradients(model, x, dy)
    assert torch.equal(got[0], again[0])
    assert_near(model, x, dy, got)
    return model.plan(x.requires_grad_())


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients(layout: str, packing: str, dtype: torch.dtype) -> None:
    options = {"layout": layout, "packing": packing}
    for rope, kv_heads, (dim, positions) in itertools.product((True, False), (4, 2, 1), ((16, 33), (64, 130))):
        parts = projected(4, kv_heads, dim, rope, **options)
        forward, backward = names(check(parts, 3, positions, dtype, layout))
        (name,) = (n for n in backward if n.startswith("attention_cuda"))
        assert backward[name] == (0, 2 + rope) and forward[name] == (1 + rope, 2 + rope)
        assert ("rotary_embedding_forward" in forward) == rope


@pytest.mark.parametrize("name", ["attention_cuda_cudnn", "attention_cuda_flash", "attention_cuda_efficient"])
def test_each_provider(name: str) -> None:
    """Also what PyTorch's operators return in another order of memory."""
    others = {"attention_cuda_cudnn", "attention_cuda_flash", "attention_cuda_efficient"} - {name}
    for kv_heads, samples, layout in itertools.product((4, 2, 1), (1, 3), ("sequence_first", "batch_first")):
        with te_fuser.fusions.disabled(*others):
            plan = check(projected(4, kv_heads, 64, layout=layout), samples, 70, torch.bfloat16, layout)
            assert names(plan)[1][name] == (0, 3)


def test_rotation_alone() -> None:
    for bias, style, rotary in itertools.product((True, False), ("half", "interleaved"), (64, 16)):
        rotation = ops.RotaryEmbedding(64, heads=4, kv_heads=2, style=style, rotary_dim=rotary)
        model = randomize(Sequential(ops.Linear(32, 512, bias=bias), rotation, ops.SiLU())).to("cuda", torch.bfloat16)
        x = torch.randn(50, 3, 32, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(50, 3, 512, device="cuda", dtype=torch.bfloat16)
        assert_near(model, x, dy, gradients(model, x, dy), (1, 0))


def test_a_gradient_of_stride_0_and_a_frozen_bias() -> None:
    model = randomize(Sequential(*projected(4, 4, 64))).to("cuda", torch.bfloat16)
    x = torch.randn(40, 2, 768, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(40, 2, 256)
    got, want = gradients(model, x, ones), gradients(model, x, ones.contiguous())
    assert all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(got, want, strict=True))
    model[0].bias.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(model(leaf), leaf, ones)
    torch.testing.assert_close(dx, want[1], rtol=0.05, atol=0.05)


def launched(run: Callable[[], object], folder: Path) -> list[str]:
    """The kernels that a call launches, in the order in which they begin, without copies and fills."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return [e["name"] for e in kernels]


@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
def test_nothing_is_copied(layout: str, packing: str, tmp_path: Path) -> None:
    """Forward is rotation and attention; backward attention's own kernels, one pass, and what adds up its sums."""
    model = Sequential(*projected(8, 8, 64, layout=layout, packing=packing)).to("cuda", torch.bfloat16)
    x = torch.randn(128, 128, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = model(x)
    dy = torch.randn_like(y)
    torch.autograd.grad(y, [x, *model.parameters()], dy, retain_graph=True)
    forward = launched(lambda: model(x), tmp_path)
    assert len(forward) == 2 and "packed_heads" in forward[0], forward
    again = lambda: torch.autograd.grad(y, [x, *model.parameters()], dy, retain_graph=True)  # noqa: E731
    backward = launched(again, tmp_path)
    assert [n for n in backward if "packed_heads" in n] == backward[-2:] and backward[-1] == "packed_heads_finish"
    assert not [n for n in backward if "elementwise" in n or "CatArray" in n or "reduce" in n], backward


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Make equal calls give equal bits, attention's gradients included, and fill fresh memory with NaN.

    PyTorch's own products are refused in here, and its attention repeats itself only where such things are.
    """
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def layer(kind: str) -> Sequential:
    """A norm, a projection with its bias, and what is named: the kernels of two have sums."""
    bias, rotation, attention = projected(4, 4, 64)
    after = {"attention": [attention], "rotation and attention": [rotation, attention], "rotation": [rotation]}[kind]
    model = randomize(Sequential(ops.LayerNorm(256), ops.MatMul(256, 768), bias, *after))
    with torch.no_grad():
        model[1].weight.mul_(1 / 16)  # scores of some hundreds would make float16's own errors a tenth of the gradients
    return model


def batch(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input of such a layer, and the gradient of its output."""
    widths = 256, 768 if kind == "rotation" else 256
    rng = torch.Generator("cuda").manual_seed(1)
    x, dy = (torch.randn(150, 3, width, generator=rng, device="cuda", dtype=dtype) for width in widths)
    return x, dy


KINDS = ("attention", "rotation and attention", "rotation")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_two_kernels(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit the same in each call, and right in float64."""
    model = layer(kind).to("cuda", dtype)
    x, dy = batch(kind, dtype)
    with repeatable():
        found, again = gradients(model, x, dy), gradients(model, x, dy)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "a call does not repeat itself"
    assert_near(model, x, dy, found, (4, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_layer_has_the_same_sums(kind: str) -> None:
    model = layer(kind).to("cuda", torch.bfloat16)
    x, dy = batch(kind, torch.bfloat16)
    with repeatable():
        replayed = te_fuser.cuda_graph(model, x.clone().requires_grad_())
        wanted = gradients(model, x, dy)[1:]
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        # A graph writes its gradients to the same memory again.
        found = [t.clone() for t in torch.autograd.grad(replayed(leaf), [leaf, *model.parameters()], dy)]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_dropout_is_unbiased() -> None:
    """Uniform attention over values of one: the mean is what is kept, scaled; of 16 million draws."""
    op = ops.DotProductAttention(16, 64, dropout=0.1, layout="batch_first", mask="none").to("cuda")
    x = torch.zeros(4, 512, 3, 16, 64, device="cuda", dtype=torch.float16)
    heads = op.packed.split(x.view(4, 512, -1))
    heads[2].fill_(1.0)
    x.requires_grad_()
    assert "attention_cuda_cudnn" in names(Sequential(op).plan(x.view(4, 512, -1)))[0]
    y = torch.stack([op(x.view(4, 512, -1)).double().mean() for _ in range(4)])
    # One standard deviation is sqrt(0.1 / 0.9 / draws).
    assert (y.mean() - 1.0).abs() <= 6 * (0.1 / 0.9 / (4 * 4 * 16 * 512 * 512)) ** 0.5 + 2.0**-12
