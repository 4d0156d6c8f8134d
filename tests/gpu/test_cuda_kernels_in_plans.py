"""Models on a GPU: their plans run generated CUDA kernels, and these are right, repeatable and at home in PyTorch."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from te_fuser import Residual, Sequential, fusions, ops
from te_fuser.formula.random import keep_bits, threshold
from te_fuser.fuser.run.loading import draw_seed
from te_fuser.verify.examples import LAYOUTS, Case
from te_fuser.verify.models import Subject, example_call
from tests.formula.test_row_ops import OPS, row_op
from tests.gpu.captures import captured
from tests.threads import in_threads
from tests.twins import randomize

GPU = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Fusions that a package brings which te_fuser does not ask for.
OF_PACKAGES = [name for name in fusions.names() if re.search("quack|frontend|flash_attn_4", name)]
# Op -> why no generated kernel runs it.
LEFT_OUT = {"cast": "makes float64", "add": "reads its branch from a Fork", "fork": "has no kernel of its own"}
ROW_OPS = [name for name in OPS if name not in LEFT_OUT]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def generated(*parts: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Sequential:
    """A Sequential on the GPU with random parameters, which must run generated kernels."""
    return randomize(Sequential(*parts, kernels="generated", **options)).to(GPU, dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def mlp(width: int, hidden: int, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Sequential:
    branch = Residual(
        ops.LayerNorm(width), ops.Linear(width, hidden), ops.GELU("tanh"), ops.Linear(hidden, width),
        ops.Dropout(dropout),
    )  # fmt: skip
    return generated(branch, ops.LayerNorm(width), dtype=dtype)


def gpt_block(width: int, heads: int, dropout: float, dtype: torch.dtype) -> Sequential:
    """A layer as in GPT-2: attention and MLP, each a branch beside the residual stream."""
    attention = Residual(
        ops.LayerNorm(width), ops.Linear(width, 3 * width),
        ops.DotProductAttention(heads, width // heads, mask="causal", layout="sequence_first"),
        ops.Linear(width, width), ops.Dropout(dropout),
    )  # fmt: skip
    feed_forward = Residual(
        ops.LayerNorm(width), ops.Linear(width, 4 * width), ops.GELU("tanh"), ops.Linear(4 * width, width),
        ops.Dropout(dropout),
    )  # fmt: skip
    return scaled_down(generated(attention, feed_forward, ops.LayerNorm(width), dtype=dtype))


def llama_block(width: int, heads: int, dtype: torch.dtype) -> Sequential:
    """A layer as in Llama: RMSNorm, rotary positions, SwiGLU."""
    attention = Residual(
        ops.RMSNorm(width), ops.Linear(width, 3 * width, bias=False),
        ops.RotaryEmbedding(width // heads, heads=heads),
        ops.DotProductAttention(heads, width // heads, mask="causal", layout="sequence_first"),
        ops.Linear(width, width, bias=False),
    )  # fmt: skip
    feed_forward = Residual(
        ops.RMSNorm(width), ops.Linear(width, 4 * width, bias=False), ops.SwiGLU(),
        ops.Linear(2 * width, width, bias=False),
    )  # fmt: skip
    return scaled_down(generated(attention, feed_forward, dtype=dtype))


def scaled_down(model: Sequential) -> Sequential:
    """Matrices that keep values of about one."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(p.shape[-1] ** -0.5)
    return model


def results(
    model: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module, x: torch.Tensor
) -> list[torch.Tensor]:
    """Output, and the gradients of the input and of every parameter, for a fixed output gradient."""
    torch.manual_seed(11)
    x = x.detach().requires_grad_()
    y = model(x)
    dy = normal(*y.shape, dtype=y.dtype, seed=5)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True)
    )


# ------------------------------------------------------------------------------------- against float64


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for leading in ((), (1,), (33,), (0, 4), (5, 7), (2, 300)):
        yield Case(f"{name_of(dtype)} {list(leading)}", dtype, leading)
    plain = Case(name_of(dtype), dtype, (6, 9))
    for layout in LAYOUTS:
        yield Case(f"{plain.name}, input {layout}", dtype, plain.leading, layout)
        yield Case(f"{plain.name}, gradient {layout}", dtype, plain.leading, upstream=layout)
    for frozen in ("input", "parameters", "all"):
        yield Case(f"{plain.name}, {frozen} frozen", dtype, plain.leading, frozen=frozen)


# Through several products what PyTorch errs by is itself a matter of luck: so many times what one op may err.
BLOCK = 2.0


def failures(
    model: Sequential, dtype: torch.dtype, features: int, leading: tuple[int, ...] | None = None, share: float = 1.0
) -> list[str]:
    """Results that differ from float64 by more than `share` of verify's tolerance, in every case or for one shape."""
    subject = Subject(model, dtype, GPU)
    found = []
    for case in cases(dtype) if leading is None else [Case(str(leading), dtype, leading)]:
        assert case.leading is not None
        rng = torch.Generator().manual_seed(3)
        try:
            call = example_call(subject.fused, (*case.leading, features), dtype, GPU, rng)
        except (ValueError, TypeError, IndexError):
            continue  # an op that counts samples takes no single row
        found += [row for row in subject.check(case, call) if row.share > share]
    # Attention's kernels do not promise to add up in the same order in every backward.
    promised = not any(isinstance(op, ops.DotProductAttention) for op in model.operations())
    return [str(row) for row in found if promised or "not repeated" not in row.note]


def halves(name: str) -> int:
    """Gated units take two halves."""
    return 2 if issubclass(OPS[name][0], ops.GatedUnit) else 1


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ROW_OPS)
def test_row_ops(name: str, dtype: torch.dtype) -> None:
    features = 40 * halves(name)
    assert not failures(Sequential(row_op(name, features), kernels="generated"), dtype, features)


SIZES = (1, 3, 257, 1000, 4096, 8200)
SIZED = ("layer_norm", "rms_norm", "l2_norm", "gelu_tanh", "swiglu", "bias", "scale", "dropout")


@pytest.mark.parametrize(
    ("name", "features"), [(n, f) for n in SIZED for f in SIZES if (n, f) != ("layer_norm", 1)], ids=str
)
def test_feature_sizes(name: str, features: int) -> None:
    features *= halves(name)
    for dtype in (torch.float32, torch.bfloat16):
        model = Sequential(row_op(name, features), kernels="generated")
        assert not failures(model, dtype, features, (37,))


def test_layer_norm_of_one_feature() -> None:
    """Outputs do not depend on x: its gradient is the difference of two equal terms, each of which may be off by an
    ulp, so its own size says nothing about how large an error is."""
    model, x = generated(ops.LayerNorm(1)), normal(37, 1)
    y, dx, dweight, dbias = results(model, model, x)
    weight, bias = (p.detach() for p in model.parameters())
    terms = weight.abs() / ops.LayerNorm(1).eps ** 0.5 * normal(37, 1, seed=5).abs()
    assert torch.equal(y, bias.expand(37, 1)) and not dweight.any()
    assert (dx.abs() <= 2 * torch.finfo(torch.float32).eps * terms).all()
    torch.testing.assert_close(dbias, normal(37, 1, seed=5).sum(0))


@pytest.mark.parametrize("features", [20000, 65536])
def test_rows_that_no_block_holds(features: int) -> None:
    model = Sequential(row_op("layer_norm", features), kernels="generated")
    assert not failures(model, torch.bfloat16, features, (19,))


GPT_BLOCKS = {"with dropout": (64, 0.2, (16, 3)), "without": (256, 0.0, (33, 2))}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("width", "dropout", "leading"), GPT_BLOCKS.values(), ids=GPT_BLOCKS)
def test_gpt_block(width: int, dropout: float, leading: tuple[int, int], dtype: torch.dtype) -> None:
    """Under memcheck too, where packages that compile kernels would take minutes; they have tests of their own."""
    with fusions.disabled(*OF_PACKAGES):
        assert not failures(gpt_block(width, 4, dropout, dtype), dtype, width, leading, BLOCK)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_llama_block(dtype: torch.dtype) -> None:
    assert not failures(llama_block(128, 4, dtype), dtype, 128, (24, 2), BLOCK)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_mlp_block_in_every_case(dtype: torch.dtype) -> None:
    assert not failures(scaled_down(mlp(48, 96, 0.1, dtype)), dtype, 48, share=BLOCK)


def test_autocast_reads_float32_parameters() -> None:
    model = mlp(64, 256)
    x = normal(32, 64)
    with torch.autocast("cuda", torch.bfloat16):
        got, want = results(model, model, x), results(model.reference, model, x)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).abs().max() <= 0.05 * b.double().abs().max()


# ------------------------------------------------------------------- memory, repetition, what is written


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch that are NaN before the kernel change nothing."""
    model, x = mlp(257, 300, 0.1), normal(65, 257)
    clean = results(model, model, x)

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*arguments: Any, **options: Any) -> torch.Tensor:
            made = make(*arguments, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return filled

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    assert equal(clean, results(model, model, x))
    monkeypatch.undo()
    # The native runtime takes its scratch from at::empty, which fills it with NaN in this mode.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        norms = generated(ops.LayerNorm(257), ops.RMSNorm(257))
        poisoned_sums = results(norms, norms, x)
    finally:
        torch.use_deterministic_algorithms(before)
    assert equal(results(norms, norms, x), poisoned_sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_runs_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    model = generated(
        ops.LayerNorm(1024), ops.Bias(1024), ops.GELU("tanh"), ops.Dropout(0.1), ops.Scale(1024), dtype=dtype
    )
    x = normal(8192, 1024, dtype=dtype)
    first = results(model, model, x)
    assert all(equal(first, results(model, model, x)) for _ in range(10))


def test_memory_goes_back() -> None:
    model, x = mlp(512, 1024), normal(256, 512)
    for _ in range(3):
        results(model, model, x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        results(model, model, x)
    assert torch.cuda.memory_allocated() == before


def test_misaligned_inputs_and_parameters() -> None:
    model = generated(ops.LayerNorm(64), ops.Bias(64), ops.GELU("tanh"))
    x = normal(33, 64)
    want = results(model, model, x)
    for p in model.parameters():  # as a flat buffer of parameters would place them
        p.data = LAYOUTS["misaligned"](p.detach())
    assert equal(want, results(model, model, LAYOUTS["misaligned"](x)))


# --------------------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("width", [8, 40, 257])
def test_masks_are_those_of_the_seed(width: int, dtype: torch.dtype) -> None:
    model = generated(ops.Dropout(0.3), dtype=dtype)
    x = torch.ones(33, width, device=GPU, dtype=dtype, requires_grad=True)
    torch.manual_seed(5)
    value, offset = draw_seed(GPU).tolist()
    bits = keep_bits(torch.arange(33), width, value, offset, 0) >= threshold(0.3)
    torch.manual_seed(5)
    y = model(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(y != 0, bits.to(GPU)) and torch.equal(dx, y)
    torch.manual_seed(5)
    assert torch.equal(y, model.reference(x))
    assert not torch.equal(y, model(x))


def test_the_interpreted_path_draws_the_same_masks() -> None:
    model, x = generated(ops.Bias(64), ops.Dropout(0.5)), normal(64, 64)
    torch.manual_seed(1)
    fused = model(x)
    model.kernels = "reference"
    torch.manual_seed(1)
    assert torch.equal(fused, model(x))


def test_checkpointing_draws_the_same_masks_again() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = mlp(64, 128, 0.3), normal(32, 64)
    plain = results(model, model, x)
    assert equal(plain, results(lambda t: checkpoint(model, t, use_reentrant=False), model, x))


# ------------------------------------------------------------------------------- streams, threads, graphs, devices

_LONG = 200_000_000  # cycles: about a tenth of a second


def test_kernels_run_on_the_current_stream() -> None:
    model, x = mlp(64, 128), normal(32, 64)
    want = results(model, model, x)
    stream, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_LONG)
        late.copy_(x)
        got = results(model, model, late)
    stream.synchronize()
    assert equal(want, got)


def test_nothing_waits_for_the_gpu() -> None:
    model, x = mlp(64, 128, 0.1), normal(32, 64).requires_grad_()
    done = torch.cuda.Event()

    def step() -> None:
        model(x).sum().backward()
        done.record()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(_LONG)
    step()
    assert not done.query()  # the host is through while the GPU still sleeps
    torch.cuda.synchronize()


def test_a_thread_without_a_context() -> None:
    model, x = mlp(64, 128), normal(32, 64)
    want = results(model, model, x)
    found = in_threads(*[lambda: results(model, model, x)] * 4)
    torch.cuda.synchronize()
    assert all(torch.allclose(a, b, atol=1e-5) for f in found for a, b in zip(f, want, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_forward_in_a_graph(dropout: float) -> None:
    model, x = mlp(64, 128, dropout), normal(32, 64)
    with torch.no_grad():
        graph, y = captured(lambda: model(x))
        replays = []
        for seed in range(3):
            x.copy_(normal(32, 64, seed=seed))
            graph.replay()
            replays.append(y.clone())
            if not dropout:
                assert torch.equal(y, model(x))
        graph.replay()
    assert torch.equal(y, replays[-1]) == (not dropout)  # new masks at each replay


def test_forward_and_backward_in_a_graph() -> None:
    model, x = mlp(257, 128), normal(33, 257)
    wanted = [x, *model.parameters()]
    x.requires_grad_()
    dy = normal(33, 257, seed=5)
    graph, made = captured(lambda: torch.autograd.grad(model(x), wanted, dy))
    with torch.no_grad():
        x.copy_(normal(33, 257, seed=9))
    graph.replay()
    want = torch.autograd.grad(model(x), wanted, dy)
    assert equal(list(made), list(want))


def test_a_graph_of_what_was_never_run_is_refused() -> None:
    model, x = generated(ops.LayerNorm(72), ops.SiLU()), normal(4, 72)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    message = "run the model once with inputs like these before the capture"
    with pytest.raises(RuntimeError, match=message), torch.no_grad(), torch.cuda.graph(graph):
        model(x)
    torch.cuda.synchronize()
    with torch.no_grad():
        assert model(x).isfinite().all()


def test_a_tensor_elsewhere_is_refused() -> None:
    model = generated(ops.LayerNorm(64), ops.Bias(64))
    model(normal(2, 64))
    model[1].cpu()
    with pytest.raises((ValueError, RuntimeError, TypeError), match="cpu|CUDA device"):
        model(normal(2, 64))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu() -> None:
    first = mlp(64, 128)
    x = normal(16, 64)
    want = results(first, first, x)
    second = mlp(64, 128).to("cuda:1")
    got = results(second, second, x.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(torch.allclose(a.cpu(), b.cpu(), atol=1e-5) for a, b in zip(want, got, strict=True))


def test_explain_names_the_target() -> None:
    model, x = mlp(64, 128), normal(4, 64)
    assert "generated CUDA C++" in str(model.explain(x, details=True))
    assert "te_cuda.cuh" in str(model.explain(x, source=True, details=True))
