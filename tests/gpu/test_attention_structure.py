"""Attention told of windows, lengths and offsets on a GPU, by provider: values, all gradients, no waiting."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from tests.gpu.captures import captured
from tests.gpu.packing_providers import NEEDS_FRONT_END, NEEDS_PACKAGE, in_plans, nothing_waits  # noqa: F401
from tests.gpu.test_attention_apart import check, gradients, takes
from tests.kernels.attention import structured
from tests.twins import randomize

TOLD = [
    "cuda_flash",
    pytest.param("cuda_flash_attn_4", marks=NEEDS_PACKAGE),
    pytest.param("cuda_cudnn_frontend", marks=NEEDS_FRONT_END),
]
BY_BIAS = ["cuda_cudnn", "cuda_efficient"]
DTYPE = torch.bfloat16
pytestmark = pytest.mark.usefixtures("in_plans")


def names(**scores: object) -> list[str]:
    return [name for name, _, _ in structured.cases(**scores)]


def model_of(name: str, dim: int, times: int, **scores: object) -> tuple[te_fuser.Sequential, torch.Tensor, dict]:
    """The list of that case's op, its input and its named ones, on the CPU."""
    _, op, tensors = next(case for case in structured.cases(dim, DTYPE, times, **scores) if case[0] == name)
    inputs = {op.hides.names.get(argument, argument): t for argument, t in tensors.items()}
    return randomize(te_fuser.Sequential(op)), inputs.pop("input"), inputs


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("provider", TOLD + BY_BIAS)
def test_values_and_gradients(provider: str, name: str) -> None:
    sizes = [(128, 37)] if provider == "cuda_flash_attn_4" else [(64, 1), (128, 37), (64, 19)]
    for dim, times in sizes:
        model, x, inputs = model_of(name, dim, times)
        with fusions.only("stretch", f"attention_{provider}"):
            found = takes(provider, model, x, inputs, DTYPE)
            print(provider, name, dim, times, found)
            if found is not True:
                refused = (
                    "own offsets", "padded", "bottom right", "tokens", "cuDNN has no", "may differ", "later positions",
                )  # fmt: skip
                assert provider != "cuda_flash" and any(words in f"{name} {found}" for words in refused), found
                continue
            check(model, x, inputs, DTYPE)


@NEEDS_PACKAGE
@pytest.mark.parametrize(
    "name", [n for n in names() if n.endswith(("blocked: offsets", "causal lengths", "causal window"))]
)
@pytest.mark.parametrize("scores", [{"soft_cap": 0.7}, {"sink": "zero"}, {"sink": "learned"}], ids=str)
def test_soft_caps_and_sinks(name: str, scores: dict[str, object]) -> None:
    model, x, inputs = model_of(name, 128, 37, **scores)
    with fusions.only("stretch", "attention_cuda_flash_attn_4"):
        assert takes("cuda_flash_attn_4", model, x, inputs, DTYPE) is True
        check(model, x, inputs, DTYPE)


def on_gpu(model: te_fuser.Sequential, x: torch.Tensor, inputs: dict) -> tuple[te_fuser.Sequential, torch.Tensor, dict]:
    floats = {n: t.to("cuda", DTYPE if t.is_floating_point() else torch.int32) for n, t in inputs.items()}
    return model.to("cuda", DTYPE), x.to("cuda", DTYPE), floats


@pytest.mark.parametrize("name", ["tokens, interleaved: causal", "sequence_first, interleaved: lengths"])
@pytest.mark.parametrize("provider", TOLD)
def test_nothing_waits_for_the_device(provider: str, name: str) -> None:
    """Other lengths run by the same plan, and the host asks the device for none of them."""
    model, x, inputs = on_gpu(*model_of(name, 128, 37))
    with fusions.only("stretch", f"attention_{provider}"):
        if takes(provider, model, x, inputs, DTYPE) is not True:
            pytest.skip("it is not called for this")
        gradients(model, model, x, inputs)
        dy = torch.ones_like(model(x, **inputs))
        x = x.detach().requires_grad_()
        with nothing_waits():
            torch.autograd.grad(model(x, **inputs), x, dy)


@pytest.mark.parametrize("provider", TOLD)
def test_a_capture_takes_other_lengths(provider: str) -> None:
    model, x, inputs = on_gpu(*model_of("batch_first, blocked: causal lengths", 128, 37))
    with fusions.only("stretch", f"attention_{provider}"):
        if takes(provider, model, x, inputs, DTYPE) is not True:
            pytest.skip("it is not called for this")
    with fusions.only("stretch", f"attention_{provider}"), torch.no_grad():
        graph, y = captured(lambda: model(x, **inputs))
        for lengths in ([1, 200, 0], [259, 259, 259]):
            inputs["lengths"].copy_(torch.tensor(lengths))
            graph.replay()
            want = model(x, **inputs)
            assert torch.equal(y, want), lengths


def test_dropout_repeats() -> None:
    op = ops.DotProductAttention(4, 64, mask=ops.AttentionMask(offsets="cu", longest=40), layout="tokens", dropout=0.25)
    model = te_fuser.Sequential(op).to("cuda", DTYPE)
    x = torch.randn(100, op.packed.features, device="cuda", dtype=DTYPE)
    cu = {"cu": torch.tensor([0, 40, 61, 99], device="cuda")}
    with fusions.only("stretch", "attention_cuda_flash"):
        assert takes("cuda_flash", model, x, cu, DTYPE) is True
        results = []
        for _ in range(2):
            torch.manual_seed(3)
            results.append(gradients(model, model, x, cu))
        assert torch.equal(results[0][0], results[1][0])
        ones = x.clone().view(100, 4, 3, 64)
        ones[:, :, 2] = 1.0  # values of 1 give the sum of kept probabilities, 1 on average
        y = model(ones.view(100, -1), **cu).float()
        assert 0.9 < y[:99].mean() < 1.1 and y[:99].std() > 0.01 and (y[99] == 0).all()


@pytest.mark.parametrize("provider", TOLD)
@pytest.mark.parametrize("counts", [[0], [0, 0], [0, 0, 5, 5], [0, 5], [0, 1, 2, 3, 4, 5]], ids=str)
def test_few_tokens(provider: str, counts: list[int]) -> None:
    """No sequence, empty ones, tokens of none, single ones."""
    op = ops.DotProductAttention(2, 64, mask=ops.AttentionMask(causal=True, offsets="cu"), layout="tokens")
    for tokens in (5, 6, 130):
        x = torch.randn(tokens, op.packed.features, dtype=DTYPE)
        inputs = {"cu": torch.tensor(counts)}
        with fusions.only("stretch", f"attention_{provider}"):
            if takes(provider, te_fuser.Sequential(op), x, inputs, DTYPE) is True:
                check(te_fuser.Sequential(op), x, inputs, DTYPE)
