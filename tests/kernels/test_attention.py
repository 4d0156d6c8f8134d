"""Every attention provider against the op's own math, and what each says it cannot do."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from te_fuser.kernels import attention
from te_fuser.kernels.attention import PROVIDERS, AttentionProblem, choose, providers
from te_fuser.ops.base import OpCall, Spec
from te_fuser.ops.dot_product_attention import DotProductAttention

LAYOUTS = ("sequence_first", "batch_first")
PACKINGS = ("interleaved", "blocked")
BY_NAME = {provider.name: provider for provider in PROVIDERS}
CPU = BY_NAME["cpu_flash"]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make(heads=4, kv_heads=4, dim=8, samples=2, positions=7, dtype=torch.float64, device="cpu", **arguments):
    op = DotProductAttention(heads, dim, kv_heads=kv_heads, **arguments)
    shape = (positions, samples) if op.layout == "sequence_first" else (samples, positions)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, op.packed.features, generator=rng, dtype=torch.float64).to(device, dtype)
    dy = torch.randn(*shape, heads * dim, generator=rng, dtype=torch.float64).to(device, dtype)
    return op, x, dy


def boolean_mask(kind, samples=2, heads=4, positions=7, device="cpu"):
    shape = {
        "padding": (samples, 1, 1, positions),
        "some": (samples, heads, positions, positions),
        "square": (positions, positions),
        "column": (samples, 1, positions, 1),
    }[kind]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    if kind == "some":
        mask[0, 1, 2] = True
    return mask.to(device)


def by_op(op, x, dy, mask=None):
    call = OpCall({"attention_mask": mask})
    y = op.op_forward(call, x)
    return y, op.op_backward(OpCall({"input": x, "attention_mask": mask, **call.emitted}), dy)


def by_provider(provider, op, x, dy, mask=None):
    settings = op.settings()
    y, saved = provider.forward(settings, x, mask)
    assert tuple(saved) == provider.emits and all(isinstance(t, torch.Tensor) for t in saved.values())
    known = {"input": x, "output": y, "attention_mask": mask, **saved}
    return y, provider.backward(settings, {name: known[name] for name in provider.reads(settings)}, dy)


def assert_matches(provider, op, x, dy, mask=None, tolerance=1e-12):
    for ours, want in zip(by_provider(provider, op, x, dy, mask), by_op(op, x, dy, mask), strict=True):
        assert ours.dtype == x.dtype and ours.isfinite().all()
        torch.testing.assert_close(ours, want, rtol=0, atol=tolerance)


MASKS = [("none", None), ("causal", None)] + [
    (mask, kind) for mask in ("given", "causal_and_given") for kind in ("padding", "some", "square", "column")
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_cpu_flash(layout, packing, kv_heads):
    for (mask, kind), (dim, samples) in itertools.product(MASKS, ((5, 2), (8, 1), (16, 2), (33, 2))):
        op, x, dy = make(kv_heads=kv_heads, dim=dim, samples=samples, mask=mask, layout=layout, packing=packing)
        assert CPU.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is None
        assert_matches(CPU, op, x, dy, None if kind is None else boolean_mask(kind, samples))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cpu_flash_errs_no_more_than_twice_pytorch(dtype, kv_heads):
    for mask, packing in itertools.product(("none", "causal"), PACKINGS):
        op, x, dy = make(kv_heads=kv_heads, dim=16, positions=130, dtype=dtype, mask=mask, packing=packing)
        ours = by_provider(CPU, op, x, dy)
        exact = by_op(op, x.double(), dy.double())
        leaf = x.clone().requires_grad_()
        q, k, v = op.packed.split(leaf)
        heads = F.scaled_dot_product_attention(
            q.flatten(1, 2), k, v, is_causal=mask == "causal", enable_gqa=kv_heads != op.heads
        )
        y = op.packed.merge_output(heads.unflatten(1, (kv_heads, -1)))
        for one, other, want in zip(ours, (y.detach(), torch.autograd.grad(y, leaf, dy)[0]), exact, strict=True):
            ulp = torch.finfo(dtype).eps * want.abs().max()
            for measure in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
                assert measure(one.double() - want) <= 2 * measure(other.double() - want) + ulp


def test_cpu_flash_and_the_op_share_their_logsumexp():
    for layout, packing, kv_heads, mask in itertools.product(LAYOUTS, PACKINGS, (4, 2), ("causal", "given")):
        op, x, dy = make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        given = boolean_mask("some") if mask == "given" else None
        call = OpCall({"attention_mask": given})
        y = op.op_forward(call, x)
        _, saved = CPU.forward(op.settings(), x, given)
        torch.testing.assert_close(saved["logsumexp"], call.emitted["logsumexp"])
        assert not saved["logsumexp"]._is_view()
        want = op.op_backward(OpCall({"input": x, "attention_mask": given, **call.emitted}), dy)
        crossed = op.op_backward(OpCall({"input": x, "attention_mask": given, **saved}), dy)
        torch.testing.assert_close(crossed, want)
        tensors = {"input": x, "output": y, "attention_mask": given, **call.emitted}
        torch.testing.assert_close(CPU.backward(op.settings(), tensors, dy), want)


def test_heads_are_read_where_they_lie():
    for layout, packing, kv_heads, samples in itertools.product(LAYOUTS, PACKINGS, (4, 2, 1), (1, 2)):
        op, x, _ = make(kv_heads=kv_heads, layout=layout, packing=packing, samples=samples)
        views = attention._Views(op.settings(), samples, 7)
        parts = views.split(x)
        where = x.untyped_storage().data_ptr()
        copied = [part.untyped_storage().data_ptr() != where for part in parts]
        # Query heads of groups have no common stride, and batch-first samples none with the groups.
        unavoidable = packing == "interleaved" and layout == "batch_first" and kv_heads in (2,) and samples > 1
        assert copied == [unavoidable, False, False]
        assert views.split_output(torch.empty(*x.shape[:2], 32)).shape == parts[0].shape


def test_results_own_their_storage():
    for layout, packing, kv_heads, mask in itertools.product(LAYOUTS, PACKINGS, (4, 2), ("none", "given")):
        op, x, dy = make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        for made in by_provider(CPU, op, x, dy, boolean_mask("padding") if mask == "given" else None):
            assert made.is_contiguous() and not made._is_view()
            assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_gradients(layout):
    for packing, kv_heads, mask in itertools.product(PACKINGS, (4, 2), ("none", "given")):
        op, x, dy = make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        given = boolean_mask("some") if mask == "given" else None
        transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
        for strided in (transposed, torch.cat((x, x), -1)[..., : x.shape[-1]], torch.stack((x, x), -1)[..., 0]):
            assert_matches(CPU, op, strided, dy, given)
        for few in (dy[:1, :1, :1], dy[:1], dy[:, :1], dy[..., :1]):
            assert_matches(CPU, op, x, few.expand(dy.shape), given)


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (1, 1)])
def test_empty_and_single(shape):
    for provider, layout, packing in itertools.product(PROVIDERS, LAYOUTS, PACKINGS):
        if shape == (1, 1) and provider is not CPU:
            continue
        op = DotProductAttention(4, 8, kv_heads=2, layout=layout, packing=packing)
        y, dx = by_provider(provider, op, torch.randn(*shape, 64), torch.randn(*shape, 32))
        assert y.shape == (*shape, 32) and dx.shape == (*shape, 64) and y.isfinite().all() and dx.isfinite().all()


# What decides, and the reasons.

H200 = AttentionProblem(
    DotProductAttention(4, 64).settings(), "cuda", (9, 0), torch.bfloat16, 2, 128, deterministic=False, cudnn=91900
)


def problem(base=H200, **changes):
    op = {name: changes.pop(name) for name in ("heads", "kv_heads", "head_dim", "mask", "dropout") if name in changes}
    if op:
        settings = DotProductAttention(**{"heads": 4, "head_dim": 64, **op}).settings()
        changes["settings"] = settings
    return dataclasses.replace(base, **changes)


def test_the_best_provider():
    assert [p.name for p, reason in providers(H200) if reason is None] == ["cuda_cudnn", "cuda_flash", "cuda_efficient"]
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
        assert choose(problem(**changes)).name == best, changes
    assert choose(problem(dtype=torch.float64)) is None
    assert choose(problem(head_dim=63)) is None
    assert choose(problem(device_type="cpu", dropout=0.5)) is None


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
def test_reasons(name, changes, words):
    reason = BY_NAME[name].reason_not(problem(**changes))
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)


def test_a_problem_is_taken_from_settings_and_spec():
    op = DotProductAttention(4, 8, kv_heads=2, layout="batch_first", dropout=0.25)
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
    assert "has changed in torch" in attention._schema_problem(known)
    assert "has no aten::_no_such_attention" in attention._schema_problem(
        "aten::_no_such_attention(Tensor q) -> Tensor"
    )
    parse = torch._C.parse_schema
    base = parse("aten::f(Tensor q, *, float? scale=None) -> (Tensor out)")
    assert attention._fits(parse("aten::f(Tensor q, *, float? scale=None, int? more=None) -> Tensor"), base)
    for other in (
        "aten::f(Tensor q, *, int more, float? scale=None) -> Tensor",
        "aten::f(Tensor q, float? scale=None) -> Tensor",
        "aten::f(Tensor q, *, float? scale=None) -> (Tensor, Tensor)",
        "aten::f(Tensor? q, *, float? scale=None) -> Tensor",
        "aten::f(Tensor q, Tensor? k=None, *, float? scale=None) -> Tensor",
    ):
        assert not attention._fits(parse(other), base)


def test_an_unavailable_operator_is_a_reason():
    class Changed(type(CPU)):
        schemas = ("aten::_no_such_attention(Tensor q) -> Tensor", CPU.schemas[1])

    assert "has no aten::_no_such_attention" in Changed().reason_not(H200)


# The CUDA providers with their kernels played by plain math: what they pass, in which order, and how masks come out.


class Played:
    """Stands for one operator: takes arguments as its schema says, and computes in PyTorch."""

    def __init__(self, provider, index):
        self.schema = torch._C.parse_schema(provider.schemas[index])
        self.grouped = provider.name != "cuda_efficient"

    def __call__(self, *args, **kwargs):
        positional = [a for a in self.schema.arguments if not a.kwarg_only]
        assert len(args) <= len(positional)
        given = {a.name: value for a, value in zip(positional, args, strict=False)} | kwargs
        for a in self.schema.arguments:
            assert a.name in given or a.has_default_value(), a.name
            value = given.setdefault(a.name, a.default_value)
            kind = {"Tensor": torch.Tensor, "float": float, "bool": bool, "int": int}.get(str(a.type), object)
            may_be_nothing = a.name in ("cum_seq_q", "cum_seq_k", "attn_bias")
            assert isinstance(value, kind) or (value is None and may_be_nothing), (a.name, value)
        return self.computed(given)

    def heads(self, given):
        q, k, v, bias = given["query"], given["key"], given["value"], given.get("attn_bias")
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert self.grouped or q.shape[1] == k.shape[1] == v.shape[1]
        if bias is not None:
            assert bias.dtype == q.dtype and bias.dim() == 4 and bias.shape[-1] == q.shape[2] and bias.stride(-1) == 1
            assert bias.isfinite().all() and all(
                s % 16 == 0 for s, n in zip(bias.stride()[:3], bias.shape, strict=False)
            )
            assert self.grouped or bias.shape == (*q.shape[:3], q.shape[2])
        q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            repeats = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(repeats, 1).mT * given["scale"]
            if bias is not None:
                scores = scores + bias
            if given["is_causal"]:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
            return (q, k, v), scores.softmax(-1) @ v.repeat_interleave(repeats, 1), scores.logsumexp(-1)

    def computed(self, given):
        parts, out, logsumexp = self.heads(given)
        names = [r.name for r in self.schema.returns]
        if "philox_seed" not in given:
            seeds = {"philox_seed": torch.tensor(7), "rng_state": torch.tensor(7), "philox_offset": torch.tensor(9)}
            seeds["unused"] = torch.tensor(9)
            sums = {"output": out.detach(), "logsumexp": logsumexp.detach(), "log_sumexp": logsumexp.detach()}
            lengths = {"max_q": out.shape[2], "max_k": out.shape[2]}
            return tuple({**sums, **seeds, **lengths}.get(name) for name in names)
        assert given["philox_seed"] == 7 and given["philox_offset"] == 9
        torch.testing.assert_close(given["logsumexp"], logsumexp.detach())
        dout = given.get("grad_out", given.get("grad_out_"))
        hidden_anyway = given.get("attn_bias") is not None
        assert hidden_anyway or torch.equal(given["out"], out.detach())
        assert self.grouped or given["out"].transpose(1, 2).is_contiguous()
        return (*torch.autograd.grad(out, parts, dout), *(None for _ in names[3:]))


@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_cuda_providers_with_played_kernels(name, layout, packing, monkeypatch):
    provider = BY_NAME[name]
    monkeypatch.setattr(provider, "_forward", Played(provider, 0))
    monkeypatch.setattr(provider, "_backward", Played(provider, 1))
    for (mask, kind), kv_heads in itertools.product(MASKS, (4, 2, 1)):
        if name == "cuda_flash" and kind is not None:
            continue
        op, x, dy = make(kv_heads=kv_heads, mask=mask, layout=layout, packing=packing)
        given = None if kind is None else boolean_mask(kind)
        assert_matches(provider, op, x, dy, given)
        odd = torch.cat((x, x[..., :1]), -1)[..., : x.shape[-1]]
        assert_matches(provider, op, odd, dy[..., :1].expand(dy.shape), given)


# On a GPU.


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_cuda_providers(name, layout, packing):
    provider = BY_NAME[name]
    sizes = itertools.product(MASKS, (4, 2, 1), ((8, 7), (64, 130), (128, 64)), (torch.bfloat16, torch.float32))
    ran = 0
    for (mask, kind), kv_heads, (dim, positions), dtype in sizes:
        op, x, dy = make(kv_heads=kv_heads, dim=dim, positions=positions, dtype=dtype, device="cuda", mask=mask,
                         layout=layout, packing=packing)  # fmt: skip
        if provider.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is not None:
            continue
        given = None if kind is None else boolean_mask(kind, positions=positions, device="cuda")
        exact = by_op(op, x.double(), dy.double(), given)
        for one, want in zip(by_provider(provider, op, x, dy, given), exact, strict=True):
            error, scale = (one.double() - want).abs().max(), want.abs().max()
            assert error <= (0.02 if dtype == torch.bfloat16 else 2e-3) * scale, (mask, kind, kv_heads, dim, dtype)
        ran += 1
    assert ran


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
def test_cuda_dropout_repeats_in_backward(name):
    """The output is linear in the values, so sum(dy y) = sum(dv v) holds exactly when both drop the same."""
    provider = BY_NAME[name]
    op, x, dy = make(dim=64, positions=256, dtype=torch.bfloat16, device="cuda", dropout=0.25, mask="causal")
    if provider.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is not None:
        pytest.skip("not on this GPU")
    y, dx = by_provider(provider, op, x, dy)
    assert not torch.equal(y, by_provider(provider, op, x, dy)[0])
    v, dv = op.packed.split(x.double())[2], op.packed.split(dx.double())[2]
    forward, backward = (dy.double() * y.double()).sum(), (dv * v).sum()
    assert (forward - backward).abs() <= 0.01 * (dy.double() * y.double()).abs().sum().sqrt() * y.abs().max()
    ones = torch.ones_like(x)
    kept = provider.forward(op.settings(), ones)[0].double().mean()
    assert (kept - 1.0).abs() < 0.02
