"""Notes of plans on a device, its times, and calls of the host beside it. Devices: tests/plans/passes.py."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan.device import DEVICES, Device, _estimated, capturing, cpu_device, device_named, device_of
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Cost, Details
from tests.fake_cuda import capture_by
from tests.plans.passes import at_hand
from tests.settings import CPUS

GPU = torch.device("cuda", 0)


def test_a_plan_says_that_its_device_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand("NVIDIA L20", (8, 9), 92)
    monkeypatch.setattr(pipeline, "device_of", lambda device_at_hand: device)
    model, x = Sequential(ops.LayerNorm(8)), torch.randn(3, 8)
    plan, text = model.plan(x), str(model.explain(x, details=True))
    (note,) = plan.notes
    assert note.startswith("NVIDIA L20 was not measured: its roofline") and "the rates of l4;" in note
    assert "on NVIDIA L20 (estimated), " in text and "Note: NVIDIA L20 was not measured" in " ".join(text.split())
    assert "on l40s (estimated), " in str(model.explain(x, device="l40s", details=True))
    assert model.plan(x, device=device_named("l40s")).notes[0].startswith("l40s was not measured")
    measured = model.explain(x, device="h200", details=True)
    assert "on h200, " in str(measured) and not measured.plans[0].notes


def test_generated_code_is_that_of_the_gpus_capability() -> None:
    device = at_hand("NVIDIA Something", (8, 9))
    model, x = Sequential(ops.LayerNorm(8192)), torch.randn(3, 8192, requires_grad=True)
    with fusions.only("stretch"):
        texts = [
            list(model.explain(x, device=d, source=True, details=True).sources().values())
            for d in (device, "l40s", "h200")
        ]  # type: ignore[arg-type]
    assert texts[0] == texts[1] != texts[2]


def test_a_cpu_follows_from_its_threads_and_vectors() -> None:
    wide, narrow = cpu_device(4, "AVX512", {"bfloat16": 2.5}), cpu_device(2, "AVX2", {})
    assert wide.bandwidth == 2 * narrow.bandwidth and wide.vector_rate == 3 * narrow.vector_rate
    assert wide.matrix_rate["bfloat16"] == 2.5 * wide.matrix_rate["float32"]
    assert narrow.matrix_rate["bfloat16"] == narrow.matrix_rate["float32"] == narrow.matrix_rate["float16"]
    assert narrow.vector_rate > cpu_device(2, "NEON", {}).vector_rate
    assert (wide.converts, narrow.converts) == ({"float16"}, {"bfloat16", "float16"})


def test_products_of_converted_numbers_cost_their_copies() -> None:
    """Of 300 bytes as many again are written and read twice, each time as float32: 1200 more, before and after."""
    native, converting = cpu_device(1, "AVX512", {"bfloat16": 1.0}), cpu_device(1, "AVX512", {})
    product = Cost(200, 100, 1e9)
    more = converting.seconds(product, "bfloat16") - native.seconds(product, "bfloat16")
    assert more == pytest.approx(1200 / native.bandwidth, rel=1e-6)
    for cost, dtype in ((product, "float32"), (Cost(200, 100), "bfloat16")):
        assert converting.seconds(cost, dtype) == native.seconds(cost, dtype)


def test_a_plan_says_that_its_products_are_in_float32() -> None:
    model, x = Sequential(ops.Linear(8, 8), ops.GELU()).half(), torch.randn(3, 8).half()
    (note,) = model.plan(x, device=cpu_device(2, "AVX2", {})).notes
    assert note == "products in float16 are computed in float32 and rounded once: cpu has no instructions for them"
    assert not model.plan(x, device=cpu_device(2, "AVX2", {"float16": 2.0})).notes
    assert not Sequential(ops.GELU()).plan(x, device=cpu_device(2, "AVX2", {})).notes


def test_a_dtype_without_a_rate_is_no_float32() -> None:
    device, cost = DEVICES["h200"], Cost(flops=1e12)
    assert device.seconds(cost, "bfloat16") < device.seconds(cost, "float32")
    with pytest.raises(ValueError, match="h200: the rate of matrix products in int8 is not known, those in float32, "):
        device.seconds(cost, "int8")


def test_tests_see_no_gpu_and_plan_for_the_cpu_that_the_command_names(request: pytest.FixtureRequest) -> None:
    assert torch.cuda.is_available() == (request.config.option.markexpr == "gpu")
    plan = Sequential(ops.LayerNorm(8)).plan(torch.randn(3, 8))
    assert plan.device == CPUS[request.config.getoption("--cpu")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu")
def test_what_pytorch_knows_of_a_gpu_fits_the_table() -> None:
    properties, found = torch.cuda.get_device_properties(GPU), device_of(GPU)
    assert found.capability == torch.cuda.get_device_capability(GPU)
    assert found.multiprocessors == properties.multi_processor_count
    estimate = _estimated(properties.name, properties)
    assert (estimate.capability, estimate.multiprocessors) == (found.capability, found.multiprocessors)
    assert estimate.bandwidth == pytest.approx(found.bandwidth, rel=0.1)


@pytest.mark.parametrize("ranks, seconds", [(2, 164.5e-6), (3, 219.3e-6), (4, 190.7e-6), (8, 222.4e-6)])
def test_collectives_take_what_a_link_takes(ranks: int, seconds: float) -> None:
    """Of 8192 x 4096 in bfloat16 each rank sends all parts but one; few bytes take the latency."""
    h200, size = DEVICES["h200"], 8192 * 4096 * 2
    cost = Cost(size, size, launches=0, sent=size * (ranks - 1) / ranks, ranks=ranks, beside=1.0)
    assert h200.seconds(cost, "bfloat16") == pytest.approx(seconds, rel=1e-3)
    assert h200.limits(cost, "bfloat16")["link"] == h200.seconds(cost, "bfloat16")
    assert h200.seconds(Cost(launches=0, sent=16, ranks=ranks), "bfloat16") == h200.link.latency


# -------------------------------------------------------------------------------- what calls cost the host


H200 = DEVICES["h200"]


def mlp(hidden: int) -> Sequential:
    with torch.device("meta"):
        return Sequential(ops.LayerNorm(hidden), ops.Linear(hidden, hidden), ops.GELU(), ops.Linear(hidden, hidden))


def plan_of(rows: int, hidden: int, device: Device = H200) -> Plan:
    x = torch.empty(rows, hidden, device="meta", dtype=torch.bfloat16, requires_grad=True)
    return mlp(hidden).bfloat16().plan(x, device=device)


def test_a_gpu_works_beside_its_host() -> None:
    small, large = plan_of(16, 256), plan_of(8192, 4096)
    for plan, waits in ((small, True), (large, False)):
        assert plan.waits_for_host is waits
        for direction in ("forward", "backward"):
            device, host = plan.device_seconds(direction), plan.host_seconds(direction)
            assert (host > device) is waits and plan.seconds(direction) == max(device, host)
    node = sum(H200.host.node) + 7 * H200.host.gradient
    assert small.host_seconds() == pytest.approx(node + sum(s.host for s in small.steps))


def test_a_cpu_is_its_own_host() -> None:
    plan = plan_of(16, 256, DEVICES["cpu"])
    assert not plan.waits_for_host and plan.host_seconds() > 0
    assert plan.seconds() == pytest.approx(plan.device_seconds() + plan.host_seconds())


def test_replayed_calls_cost_the_host_nothing() -> None:
    plan = plan_of(16, 256, replace(H200, replayed=True))
    assert plan.host_seconds() == 0.0 and plan.seconds() == pytest.approx(plan.device_seconds(), rel=1e-15)


class Slow(ops.SiLU):
    """Its fusion is faster on a GPU than a kernel, and as long as thirty calls of PyTorch for its host."""


SLOW = fusions.fusion(
    forward=[Slow],
    name="slow",
    cost=lambda m: Cost(m.x.rows * m.x.features, m.x.rows * m.x.features, launches=0, calls=30.0),
    details=Details(registered=False),
)(lambda m, x: x)


@pytest.mark.parametrize("rows, hidden, device, taken", [
    (16, 256, H200, False),
    (32768, 16384, H200, True),
    (16, 256, replace(H200, replayed=True), True),
])  # fmt: skip
def test_what_keeps_the_host_is_taken_where_the_device_takes_longer(
    rows: int, hidden: int, device: Device, taken: bool
) -> None:
    x = torch.empty(rows, hidden, device="meta", dtype=torch.bfloat16)
    with fusions.only("stretch", SLOW):
        plan = Sequential(Slow()).plan(x, device=device)
    assert ("slow" in {s.name for s in plan.forward}) is taken


def test_fusions_and_providers_state_calls_beyond_the_usual() -> None:
    one, two = Cost(1.0, calls=3.0), Cost(2.0)
    assert (one + two).calls == 3.0 and (two + two).calls is None and (one + one).calls == 6.0


def test_plans_made_for_a_capture_are_for_a_free_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Sequential(ops.GELU()), torch.randn(2, 4)
    seen: list[bool] = []

    def capture(called: torch.nn.Module, samples: tuple[torch.Tensor, ...], **options: object) -> torch.nn.Module:
        seen.append(capturing.get())
        with mock.patch("torch.cuda.get_device_name", lambda device: "NVIDIA H200"):
            seen.append(device_of(torch.device("cuda", 0)).replayed)
        called(*samples)
        return called

    model(x)
    capture_by(monkeypatch, capture)
    te_fuser.cuda_graph(model, x)
    assert seen == [True, True] and not capturing.get()
    (group,) = model._prepared()
    assert len(group.fuser._cache._forms.items()) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_runs_in_a_match_is_chosen_once_for_all_shares_of_the_host(direction: str) -> None:
    asked: list[tuple[int, str]] = []

    def choose(m: fusions.Match, method: str) -> None:
        asked.append((m[0].weight.shape[0], method))

    details = Details(registered=False, choose=choose)
    pattern = {direction: [ops.MatMul]}
    entry = te_fuser.fusion(**pattern, name="mine", cost=lambda m: Cost(seconds=1e-9), details=details)(lambda m, x: x)
    with torch.device("meta"):
        model = Sequential(ops.Linear(256, 64), ops.GELU(), ops.Linear(64, 128))
    with fusions.only(entry):
        plan = model.plan(torch.empty(16, 256, device="meta", requires_grad=True), device=H200)
    assert plan.waits_for_host and [s.name for s in plan.steps].count("mine") == 2
    assert sorted(asked) == [(64, direction), (128, direction)]
