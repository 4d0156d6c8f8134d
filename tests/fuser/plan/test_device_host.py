"""What calls cost the host: beside a GPU the larger of two sums counts, on a CPU both, nothing where it replays."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan.device import DEVICES, Device, capturing, device_of
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Cost, Details

H200 = DEVICES["h200"]


def mlp(hidden: int) -> Sequential:
    with torch.device("meta"):
        return Sequential(ops.LayerNorm(hidden), ops.Linear(hidden, hidden), ops.GELU(), ops.Linear(hidden, hidden))


def plan_of(rows: int, hidden: int, device: Device = H200) -> Plan:
    x = torch.empty(rows, hidden, device="meta", dtype=torch.bfloat16, requires_grad=True)
    return mlp(hidden).bfloat16().plan(x, device=device)


def test_each_step_says_what_its_call_costs() -> None:
    plan = plan_of(16, 256)
    calls, cost = plan.device.host.calls, {s.name: s.host for s in plan.steps}
    assert cost["layer_norm_fwd"] == cost["layer_norm_bwd"] == calls["kernel"]
    assert cost["matmul_bias"] == cost["matmul_bias_backward"] == calls["product"]
    on_cpu = plan_of(16, 256, DEVICES["cpu"])
    cost = {s.name: s.host for s in on_cpu.steps}
    assert cost["matmul_bias"] == cost["mat_mul.weight_gradient"] == on_cpu.device.host.calls["function"]
    interpreted = (
        mlp(256).double().plan(torch.randn(16, 256, dtype=torch.float64, device="meta"), device=DEVICES["cpu"])
    )
    first = interpreted.forward[0]
    assert first.host == first.cost.launches * on_cpu.device.host.calls["torch"] > 0


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
    assert plan.host_seconds() == 0.0 and plan.seconds() == plan.device_seconds()


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


def test_plans_made_for_a_capture_are_for_a_free_host() -> None:
    model, x = Sequential(ops.GELU()), torch.randn(2, 4)
    seen: list[bool] = []

    def capture(called: torch.nn.Module, samples: tuple[torch.Tensor, ...], **options: object) -> torch.nn.Module:
        seen.append(capturing.get())
        with mock.patch("torch.cuda.get_device_name", lambda device: "NVIDIA H200"):
            seen.append(device_of(torch.device("cuda", 0)).replayed)
        called(*samples)
        return called

    model(x)
    with (
        mock.patch("torch.cuda.make_graphed_callables", capture),
        mock.patch("te_fuser.capture._check_devices", lambda *_: None),
    ):
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
