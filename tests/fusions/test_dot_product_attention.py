"""Attention's fusions: by the CPU provider, in decoding, by packages that are computed or told on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Fusion
from te_fuser.fusions.dot_product_attention import FUSIONS, declare
from te_fuser.kernels.attention import AttentionProblem, Provider, Speed
from te_fuser.kernels.attention.cudnn import CudaCudnnFrontend
from te_fuser.kernels.attention.flash_attn_4 import CudaFlashAttn4
from tests.fake_cuda import FakeDriver
from tests.fusions import decoding
from tests.fusions.decoding import MASK, cache
from tests.fusions.models import attention as planned_attention
from tests.fusions.separate_attention import cases, tokens
from tests.kernels.attention import padded, structured, told
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.packages import fake_cudnn, fake_flash_attn
from tests.kernels.played import Played
from tests.needs import needs_compiler
from tests.twins import assert_as_meant, sequential, tensor

CPU = "attention_cpu_flash"
SAMPLES, POSITIONS = 2, 5


def attention(**options):
    return ops.DotProductAttention(2, 4, **{"mask": "none", "layout": "batch_first", **options})


def layer(op):
    return sequential(
        te_fuser.Residual(ops.LayerNorm(8), ops.Linear(8, op.packed.features), op, ops.Linear(8, 8), ops.Dropout(0.25))
    )


def names(model, x, **inputs):
    plan = model.plan(x, **inputs)
    return [s.name for s in plan.forward], [s.name for s in plan.backward]


def mask():
    hidden = torch.rand(SAMPLES, 2, POSITIONS, POSITIONS, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden[..., 0] = False
    return hidden


# the op's options -> whether it reads a mask
KINDS = {
    "plain": ({}, False),
    "causal": ({"mask": "causal"}, False),
    "given": ({"mask": "given"}, True),
    "causal_and_given": ({"mask": "causal_and_given"}, True),
    "grouped": ({"kv_heads": 1, "mask": "causal"}, False),
    "blocked": ({"packing": "blocked"}, False),
    "sequence_first": ({"layout": "sequence_first", "mask": "causal"}, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_fires_in_both_directions_and_is_right(name):
    options, masked = KINDS[name]
    model, x = layer(attention(**options)), tensor(SAMPLES, POSITIONS, 8)
    inputs = {"attention_mask": mask()} if masked else {}
    if options.get("layout") == "sequence_first":
        x = tensor(POSITIONS, SAMPLES, 8)
    forward, backward = names(model, x, **inputs)
    assert CPU in forward and CPU in backward
    want = assert_as_meant(model, x, tolerance=1e-10, **inputs)
    with fusions.only("stretch"):
        forward, backward = names(model, x, **inputs)
        assert "dot_product_attention" in forward and CPU not in backward
        torch.testing.assert_close(assert_as_meant(model, x, tolerance=1e-10, **inputs), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_stated_of_the_logsumexp_is_its_size(dtype, fused):
    model, x = sequential(attention(mask="causal"), dtype=dtype), tensor(SAMPLES, POSITIONS, 24, dtype=dtype)
    with fusions.only(*(fusions.names() if fused else ())):
        (stated,) = (k.bytes for k in model.plan(x).kept if k.name.endswith("logsumexp"))
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            model(x)
    shape = (SAMPLES, 2, POSITIONS)
    assert [t.nbytes for t in saved if t.shape == shape] == [stated]


def test_dropout_and_one_position_run_the_ops_own_math_and_the_plan_says_why():
    model, x = layer(attention(dropout=0.3)), tensor(SAMPLES, POSITIONS, 8)
    forward, backward = names(model, x)
    assert "dot_product_attention" in forward and CPU not in backward
    (reason,) = (r.reason for r in model.plan(x).refusals if r.name == CPU)
    assert reason == "it has no dropout, and 0.3 of the probabilities are to be dropped"
    assert_as_meant(model, x, tolerance=1e-10)
    assert CPU in names(model.eval(), x)[0]
    assert_as_meant(model, x, tolerance=1e-10)
    # Every probability is 1 there, and plain PyTorch errs by nothing.
    model, x = sequential(attention(), dtype=torch.float32), tensor(3, 1, 24, dtype=torch.float32)
    (reason,) = (r.reason for r in model.plan(x).refusals if r.name == CPU)
    assert reason.startswith("with one position every probability is 1")
    assert CPU in names(model, tensor(3, 2, 24, dtype=torch.float32))[1]


def test_verified_and_providers_of_other_devices_say_so():
    assert te_fuser.verify(CPU).passed
    refusals = {r.name: r.reason for r in sequential(attention()).plan(tensor(SAMPLES, POSITIONS, 24)).refusals}
    assert {n for n in refusals if n.startswith("attention_cuda")} == {f.name for f in FUSIONS} - {CPU}
    assert all(
        r == "it runs on cuda, the input is on cpu" for n, r in refusals.items() if n.startswith("attention_cuda")
    )


def test_no_positions_no_samples_and_other_masks():
    model = layer(attention(mask="causal"))
    for shape in ((0, POSITIONS, 8), (SAMPLES, 0, 8), (SAMPLES, 1, 8)):
        assert_as_meant(model, tensor(*shape), tolerance=1e-10)
    model, x = sequential(attention(mask="given")), tensor(SAMPLES, POSITIONS, 24)
    for hidden in (mask(), ~mask() & mask().roll(1, 0), mask()[:, :1], mask()[:1, :1]):
        assert_as_meant(model, x, tolerance=1e-10, attention_mask=hidden)


def taken(model, x, **inputs):
    plan = model.plan(x, **inputs)
    return [CPU in [s.name for s in steps] for steps in (plan.forward, plan.backward)]


@pytest.mark.parametrize("packing", ["interleaved", "blocked", "apart"])
def test_sequences_one_behind_the_other(packing):
    _, model, x, inputs = tokens(packing)
    assert taken(model, x, **inputs) == [True, True]
    assert_as_meant(model, x, tolerance=1e-10, **inputs)


@pytest.mark.parametrize("layout", ["batch_first", "sequence_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
def test_packed_heads_in_windows(layout, packing):
    mask = ops.AttentionMask(causal=True, window=(2, 0), lengths="lengths")
    op = ops.DotProductAttention(4, 4, kv_heads=2, mask=mask, layout=layout, packing=packing)
    rotary = ops.RotaryEmbedding(4, heads=4, kv_heads=2, layout=layout, packing=packing)
    model = sequential(ops.Linear(6, 32), rotary, op, ops.Linear(16, 6))
    x = tensor(3, 7, 6) if layout == "batch_first" else tensor(7, 3, 6)
    inputs = {"lengths": torch.tensor([7, 0, 2])}
    assert taken(model, x, **inputs) == [True, True]
    assert_as_meant(model, x, tolerance=1e-10, **inputs)


@pytest.mark.parametrize("size", [(7, 5), (1, 5), (5, 1), (0, 3), (3, 0), (13, 17)])
def test_keys_and_values_apart_and_odd_sizes(size):
    for name, model, x, inputs in cases(sizes=size):
        assert min(size) < 2 or taken(model, x, **inputs) == [True, True], name
        assert_as_meant(model, x, tolerance=1e-10, **inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_as_the_ops_own(dtype):
    for name, model, x, inputs in cases(8, dtype):
        y = model(x, **inputs)
        with fusions.only():
            want = model(x, **inputs)
        assert y.dtype == dtype and y.isfinite().all(), name
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)


def test_only_what_needs_a_gradient_gets_one():
    _, model, x, inputs = next(cases())
    model.requires_grad_(False)
    for leaf in (x.detach(), *(t.detach() for t in inputs.values())):
        leaf.requires_grad_()
    x, value = x.detach(), inputs["value"].detach().requires_grad_()
    model(x, key=inputs["key"].detach(), value=value).sum().backward()
    assert value.grad is not None and x.grad is None


def reasons(op, x, **inputs):
    return {r.name: r.reason for r in sequential(op).plan(x, **inputs).refusals}


def test_reasons():
    def apart(**options):
        return ops.DotProductAttention(2, 4, **{"mask": "none", "packing": "apart", "layout": "batch_first", **options})

    x, inputs = tensor(3, 7, 8), {"key": tensor(3, 5, 8), "value": tensor(3, 5, 8)}
    wide = {**inputs, "value": tensor(3, 5, 10)}
    assert reasons(apart(packing=ops.Apart(value_dim=5)), x, **wide)[CPU] == (
        "heads of values have 5 features, those of keys 4"
    )
    capped = ops.AttentionScores(soft_cap=1.0, sink="zero")
    assert reasons(apart(scores=capped), x, **inputs)[CPU] == "it is not called for a soft cap and a sink"
    assert reasons(apart(), x, **{**inputs, "key": tensor(3, 5, 8, dtype=torch.float32)})[CPU] == (
        "queries are float64, keys or values float32"
    )
    one = {n: t[:, :1] for n, t in inputs.items()}
    assert reasons(apart(), x, **one)[CPU].startswith("with one position")


def test_backward_reads_the_keys_that_are_there():
    """A name with a question mark is read where the op has such an input, and nowhere else."""
    read = {}
    for packing in ("apart", "blocked", ops.Apart(key_value="memory")):
        op = ops.DotProductAttention(2, 4, packing=packing, layout="batch_first", mask="none")
        names = [given.name for given in op.named_inputs().values()]
        sizes = {"memory": 16, "key": 8, "value": 8}
        inputs = {name: tensor(3, 5, sizes[name]) for name in names}
        plan = sequential(op).plan(tensor(3, 5, op.packed.features), **inputs)
        (step,) = plan.backward
        read[str(packing)] = [name for name, _ in step.inputs if name.startswith("-1.") and name != "-1.input"]
    assert list(read.values()) == [["-1.key", "-1.value"], [], ["-1.key_value"]]


CACHES = ("key_cache", "value_cache")


def rows(positions: int, samples: int) -> torch.Tensor:
    return torch.randn(positions, samples, 192, generator=torch.Generator().manual_seed(positions)).bfloat16()


@needs_compiler
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@torch.no_grad()
def test_caches_are_written_where_they_lie(packing: str, played: FakeDriver) -> None:
    """Whole ones, some of their samples, and with steps that the kernel cannot make."""
    model = te_fuser.Sequential(cache(packing=packing), kernels="generated")
    x = rows(3, 2)
    for wider in ((41, 2, 32), (41, 5, 32), (41, 2, 36)):
        ours = {name: t for name, t in decoding.inputs(samples=2).items() if name != "filled"}
        ours |= {name: torch.zeros(wider).bfloat16()[:, :2, :32] for name in CACHES}
        theirs = {name: t.clone() for name, t in ours.items()}
        assert [s.name for s in model.plan(x, **ours).forward] == ["key_value_cache"]
        want = model.reference(x, **theirs)
        versions = [ours[name]._version for name in CACHES]
        assert torch.equal(model(x, **ours), want)
        for name, version in zip(CACHES, versions, strict=True):
            assert torch.equal(ours[name], theirs[name]) and ours[name]._version > version


@needs_compiler
@pytest.mark.parametrize("window", [None, (9, 0)])
@torch.no_grad()
def test_one_query_errs_no_more_than_twice_pytorch(window: Any, played: FakeDriver) -> None:
    mask = ops.AttentionMask(**MASK, window=window)
    model = te_fuser.Sequential(cache(), decoding.attention(mask), kernels="generated")
    x, ours = rows(1, 3), decoding.inputs()
    exact = {name: t.double() if t.is_floating_point() else t for name, t in ours.items()}
    want = model.reference(x.double(), **exact)
    plain = model.reference(x, **{name: t.clone() for name, t in ours.items()})
    assert [s.name for s in model.plan(x, **ours).forward] == ["key_value_cache", "one_query_attention"]
    allowed = 2 * (plain.double() - want).abs().max()
    assert (model(x, **ours).double() - want).abs().max() <= allowed
    for name in CACHES:
        assert torch.equal(ours[name][:-1].double(), exact[name][:-1])


FRONT, FOUR = "attention_cuda_cudnn_frontend", "attention_cuda_flash_attn_4"
FAST: dict[str, Any] = {"conditions": (), "speed": Speed.constant(forward=1e3, backward=1e3)}


@pytest.fixture(params=[FRONT, FOUR])
def by_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fusion]:
    """A fusion with what it needs of a GPU left out, and so fast that it is taken."""
    if request.param == FRONT:
        fake: Any = fake_cudnn
        provider = type("OnCpu", (CudaCudnnFrontend,), FAST)()
        monkeypatch.setattr(provider, "_forward", Played(provider, 0))
    else:
        fake, provider = fake_flash_attn, type("OnCpu", (CudaFlashAttn4,), {**FAST, "launches": 1})()
    package = fake.in_place(monkeypatch)
    yield declare(provider, registered=False)
    assert package.graphs if fake is fake_cudnn else {way for way, _ in package.calls} == {"forward", "backward"}
    fake.forget()


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("rope", [True, False])
def test_attention_by_a_package_is_right_in_values_and_gradients(
    layout: str, packing: str, rope: bool, by_package: Fusion
) -> None:
    """Between projections; left out is where there are no strides for the packed gradient."""
    kinds = [("causal", 4), ("causal", 2), ("causal", 1)]
    for mask, kv_heads in kinds if by_package.name == FRONT else [*kinds, ("none", 4), ("none", 2)]:
        if (layout, packing, kv_heads) == ("batch_first", "interleaved", 2):
            continue
        common: dict[str, Any] = {"heads": 4, "kv_heads": kv_heads, "layout": layout, "packing": packing}
        op = ops.DotProductAttention(head_dim=8, mask=mask, **common)
        rotation = [ops.RotaryEmbedding(8, **common)] if rope else []
        model = sequential(ops.Linear(6, op.packed.features), *rotation, op, ops.Linear(32, 6))
        x = tensor(5, 3, 6)
        with fusions.only(by_package, "stretch"):
            assert by_package.name in [s.name for s in model.plan(x).backward]
            assert_as_meant(model, x, tolerance=1e-10)


def test_problem_is_that_of_a_backward_where_one_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is built for the backward alone."""
    asked: list[Any] = []
    of = AttentionProblem.of
    monkeypatch.setattr(AttentionProblem, "of", lambda *given: asked.append(given[3]) or of(*given))
    for grad in (True, False):
        asked.clear()
        with torch.set_grad_enabled(grad):
            planned_attention(ops.Bias(3072), heads=8, grad=grad)
        assert asked and all(needs is grad for needs in asked)


CASES = {name: (op, tensors) for name, op, tensors in structured.cases() if op.settings().mask.beyond}
SINKS = {name: (op, t) for name, op, t in structured.cases(sink="learned", soft_cap=2.0) if "offsets" in name}


def model_of(
    op: ops.DotProductAttention, tensors: structured.Tensors
) -> tuple[te_fuser.Sequential, structured.Tensors]:
    inputs = {op.hides.names.get(argument, argument): t for argument, t in tensors.items()}
    return sequential(op), inputs


def take(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and for its price."""
    monkeypatch.setattr(type(provider), "conditions", ())
    monkeypatch.setattr(type(provider), "calls", (0.0, 0.0))
    monkeypatch.setattr(type(provider), "speed", Speed.constant(100.0, 100.0))


def check(name: str, model: te_fuser.Sequential, inputs: structured.Tensors) -> None:
    x = inputs.pop("input").requires_grad_()
    with fusions.only(name):
        plan = model.plan(x, **inputs)
        assert [step.name for step in (*plan.forward, *plan.backward)] == [name] * 2
        assert_as_meant(model, x, tolerance=1e-6, **inputs)


@pytest.mark.parametrize("name", CASES)
def test_flash_attention_in_a_model_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(BY_NAME["cuda_flash"], monkeypatch)
    with told.in_place():
        check("attention_cuda_flash", *model_of(*CASES[name]))


@pytest.mark.parametrize("name", SINKS)
def test_flash_attention_4_in_a_model_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(BY_NAME["cuda_flash_attn_4"], monkeypatch)
    model, inputs = model_of(*SINKS[name])
    assert any(isinstance(p, torch.nn.Parameter) for p in model.parameters())
    with told.in_place():
        check("attention_cuda_flash_attn_4", model, inputs)


@pytest.mark.parametrize("kind", ["end", "anywhere"])
@pytest.mark.parametrize("name", padded.MASKS)
def test_padding_by_a_boolean_tensor_in_a_model_is_told(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both providers, which are told lengths and offsets."""
    with told.in_place(all_rows=False):
        for provider in (BY_NAME["cuda_flash"], BY_NAME["cuda_flash_attn_4"]):
            take(provider, monkeypatch)
            for layout in padded.LAYOUTS:
                check(f"attention_{provider.name}", *model_of(*padded.case(name, layout, kind)))
