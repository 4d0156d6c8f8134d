"""Providers of attention: which one is taken, why others are not, and operators that a torch lacks."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser.kernels.attention import PROVIDERS, AttentionProblem
from te_fuser.kernels.attention.provider import fits, why_no_operator
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.base import Spec
from tests.kernels.attention.cases import BY_NAME, CPU, H200, LAYOUTS, PACKINGS, by_provider, problem


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("cpu_flash", {}, "runs on cpu, the input is on cuda"),
        ("cpu_flash", {"device_type": "cpu", "dropout": 0.25}, r"no dropout, and 0\.25 of"),
        ("cuda_flash", {"device_type": "cpu"}, "runs on cuda, the input is on cpu"),
        ("cuda_flash", {"mask": "given"}, "takes no mask tensor"),
        ("cuda_flash", {"head_dim": 264}, "head_dim must be a multiple of 8 up to 256, it is 264"),
        ("cuda_flash", {"head_dim": 256, "capability": (8, 9)}, "head_dim 256 passes this GPU's shared memory"),
        ("cuda_flash", {"capability": (7, 5)}, r"compute capability 8\.0, this GPU has 7\.5"),
        ("cuda_flash", {"dtype": torch.float32}, r"takes bfloat16, float16, the input is torch\.float32"),
        ("cuda_flash", {"dropout": 1.0}, "cannot drop all"),
        ("cuda_flash", {"switched_off": frozenset({"cuda_flash"})}, "switched off in torch.backends.cuda"),
        ("cuda_flash", {"heads": 4096, "samples": 32}, r"passes 65535: 32 \* 4096"),
        ("cuda_cudnn", {"cudnn": 8900}, "needs cuDNN 9.0, found 8900"),
        ("cuda_cudnn", {"cudnn": 91200, "dropout": 0.125}, "cuDNN 91200 has no dropout"),
        ("cuda_cudnn", {"positions": 1}, "no sequence of length 1"),
        ("cuda_cudnn", {"deterministic": True}, "does not repeat bit for bit"),
        ("cuda_cudnn", {"head_dim": 136}, "up to 128, it is 136"),
        ("cuda_efficient", {"head_dim": 6, "dtype": torch.float32}, "multiple of 4, it is 6"),
        ("cuda_efficient", {"capability": (7, 0)}, r"bfloat16 needs compute capability 8\.0"),
    ],
)
def test_provider_that_cannot_says_why(name, changes, words):
    reason = BY_NAME[name].reason_not(problem(**changes))
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)


FOUR, FRONT = ("cuda_flash_attn_4", flash_attn_4, "_module"), ("cuda_cudnn_frontend", cudnn_frontend, "_package")
OF_FOUR = [
    (None, {}, 'flash-attn-4 is not installed: pip install "flash-attn-4>=4.0.0b36"'),
    ("4.0.0b9", {}, "it needs flash-attn-4 4.0.0b36, found 4.0.0b9"),
    ("4.0.0a40", {}, "it needs flash-attn-4 4.0.0b36, found 4.0.0a40"),
    ("4.0.0b36", {"mask": "given"}, "it takes no mask tensor, only none or causal"),
    ("4.0.0b36", {"dropout": 0.1}, "it has no dropout, and 0.1 of the probabilities are to be dropped"),
    ("4.0.0b36", {"capability": (8, 0)}, "it is meant for compute capability 9 alone, this GPU has 8.0"),
    ("4.0.0b36", {"capability": (10, 0)}, "it is meant for compute capability 9 alone, this GPU has 10.0"),
    ("4.0.0b36", {"deterministic": True}, "its backward is called without what makes it repeat its bits"),
    ("4.0.0b36", {"switched_off": frozenset({"cuda_flash"})}, "it is switched off in torch.backends.cuda"),
    ("4.0.0b36", {"dtype": torch.float32}, "it takes bfloat16, float16, the input is torch.float32"),
    ("4.0.0b36", {"head_dim": 256}, "head_dim must be a multiple of 8 up to 128, it is 256"),
    ("4.0.0b36", {"heads": 4, "kv_heads": 4, "samples": 40000}, "batch * heads passes 65535"),
    ("4.0.0b36", {}, None),
    ("4.0.0", {"head_dim": 96}, None),
    ("4.1.0b1", {"mask": "causal"}, None),
]
OF_FRONT = [
    (None, {}, 'nvidia-cudnn-frontend is not installed: pip install "nvidia-cudnn-frontend>=1.32"'),
    ("1.9.0", {}, "it needs nvidia-cudnn-frontend 1.32, found 1.9.0"),
    ("1.32.0", {"mask": "given"}, "it takes no mask tensor, only none or causal"),
    ("1.32.0", {"capability": (8, 0)}, "it needs compute capability 9.0, this GPU has 8.0"),
    ("1.32.0", {"deterministic": True}, "its backward does not repeat bit for bit"),
    ("1.32.0", {"switched_off": frozenset({"cuda_cudnn"})}, "it is switched off in torch.backends.cuda"),
    ("1.32.0", {"cudnn": 91200, "dropout": 0.125}, "cuDNN 91200 has no dropout in attention"),
    ("1.32.0", {"dtype": torch.float32}, "it takes bfloat16, float16, the input is torch.float32"),
    ("1.32.0", {}, None),
    ("2.0rc1", {"dropout": 0.1}, None),
]


@pytest.mark.parametrize(
    ("which", "version", "changes", "words"), [*((FOUR, *row) for row in OF_FOUR), *((FRONT, *row) for row in OF_FRONT)]
)
def test_provider_of_a_package_says_what_is_missing_and_imports_nothing(which, version, changes, words, monkeypatch):
    name, module, imported = which
    monkeypatch.setattr(module.PACKAGE, "version", lambda: version)
    monkeypatch.setattr(module, imported, lambda: pytest.fail("the package was imported"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if which is FOUR:
        changes = {"head_dim": 128, **changes}
    reason = BY_NAME[name].reason_not(problem(**changes))
    assert reason is None if words is None else words in reason


def test_a_problem_is_taken_from_settings_and_spec():
    op = DotProductAttention(4, 8, kv_heads=2, layout="batch_first", dropout=0.25, mask="none")
    found = AttentionProblem.of(op.settings(), Spec((3, 9, 64), torch.float32, torch.device("cpu")))
    assert (found.samples, found.positions, found.device_type) == (3, 9, "cpu")
    assert found.settings.dropout == 0.25 and not found.switched_off and not found.deterministic
    assert hash(found) == hash(AttentionProblem.of(op.settings(), Spec((3, 9, 64), torch.float32, torch.device("cpu"))))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        off = AttentionProblem.of(op.settings(), Spec((3, 9, 64), torch.float32, torch.device("cpu"))).switched_off
    assert off == {"cuda_cudnn", "cuda_flash", "cuda_efficient"}


def test_schemas_are_compared():
    for provider in PROVIDERS:
        assert provider._unavailable is None
    known = "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key) -> Tensor"
    assert "has changed in torch" in why_no_operator(known)
    assert "has no aten::_no_such_attention" in why_no_operator("aten::_no_such_attention(Tensor q) -> Tensor")
    parse = torch._C.parse_schema
    base = parse("aten::f(Tensor q, *, float? scale=None) -> (Tensor out)")
    assert fits(parse("aten::f(Tensor q, *, float? scale=None, int? more=None) -> Tensor"), base)
    for other in (
        "aten::f(Tensor q, *, int more, float? scale=None) -> Tensor",
        "aten::f(Tensor q, float? scale=None) -> Tensor",
        "aten::f(Tensor q, *, float? scale=None) -> (Tensor, Tensor)",
        "aten::f(Tensor? q, *, float? scale=None) -> Tensor",
        "aten::f(Tensor q, Tensor? k=None, *, float? scale=None) -> Tensor",
    ):
        assert not fits(parse(other), base)


def test_an_unavailable_operator_is_a_reason():
    class Changed(type(CPU)):
        schemas = ("aten::_no_such_attention(Tensor q) -> Tensor", CPU.schemas[1])

    assert "has no aten::_no_such_attention" in Changed().reason_not(H200)


def able(p: AttentionProblem) -> list[str]:
    """The providers that can compute a problem, in the order of preference."""
    return [provider.name for provider in PROVIDERS if provider.reason_not(p) is None]


def test_the_best_provider():
    assert able(H200) == ["cuda_cudnn", "cuda_flash", "cuda_efficient"]
    for changes, best in (
        ({}, "cuda_cudnn"),
        ({"deterministic": True}, "cuda_flash"),
        ({"dropout": 0.1}, "cuda_cudnn"),
        ({"dropout": 0.1, "deterministic": True}, "cuda_flash"),
        ({"head_dim": 256}, "cuda_flash"),
        ({"mask": "given"}, "cuda_cudnn"),
        ({"mask": "given", "dropout": 0.1}, "cuda_cudnn"),
        ({"mask": "given", "deterministic": True}, "cuda_efficient"),
        ({"dtype": torch.float32}, "cuda_efficient"),
        ({"switched_off": frozenset({"cuda_cudnn"})}, "cuda_flash"),
        ({"device_type": "cpu", "capability": (0, 0)}, "cpu_flash"),
    ):
        assert able(problem(**changes))[0] == best, changes
    assert able(problem(dtype=torch.float64)) == []
    assert able(problem(head_dim=63)) == []
    assert able(problem(device_type="cpu", dropout=0.5)) == []


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (1, 1)])
def test_empty_and_single(shape):
    for provider, layout, packing in itertools.product(PROVIDERS, LAYOUTS, PACKINGS):
        if shape == (1, 1) and provider is not CPU:
            continue
        op = DotProductAttention(4, 8, kv_heads=2, layout=layout, packing=packing, mask="none")
        y, dx = by_provider(provider, op, torch.randn(*shape, 64), torch.randn(*shape, 32))
        assert y.shape == (*shape, 32) and dx.shape == (*shape, 64) and y.isfinite().all() and dx.isfinite().all()
