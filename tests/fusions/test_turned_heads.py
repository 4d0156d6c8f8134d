"""Norms and rotations of heads in plans for a GPU: where the kernel is taken, what it gives, what is said where not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions.match import Match
from tests.fake_cuda import Emulation, FakeDriver
from tests.fusions.products import autocast_on_cuda
from tests.needs import needs_compiler
from tests.twins import results_and_gradients, tensor

HEADS, GROUPS, DIM = 4, 2, 16
FEATURES = (HEADS + 2 * GROUPS) * DIM
ARE: dict[str, Any] = {"heads": HEADS, "kv_heads": GROUPS}
NAMES = (
    "turned_heads_forward",
    "turned_heads_backward",
    "turned_heads_norm_backward",
    "turned_heads_bias_norm_backward",
)
ANGLES = "rotary_pos_emb"


def rotary(**options: Any) -> ops.RotaryByAngles:
    return ops.RotaryByAngles(DIM, **{**ARE, **options})


def norm(**options: Any) -> ops.HeadNorm:
    return ops.HeadNorm(DIM, **{**ARE, **options})


def angles(length: int = 1024, samples: int = 1, features: int = DIM, **options: Any) -> torch.Tensor:
    return 20 * tensor(length, samples, 1, features, dtype=torch.float32, grad=False, **options)


def plan(*parts: torch.nn.Module, given: Any = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Plan:
    x = tensor(1024, 4, FEATURES, dtype=dtype).requires_grad_()
    model = te_fuser.Sequential(ops.Bias(FEATURES), *parts, **options).to(dtype)
    return model.plan(x, device="h200", **({ANGLES: angles()} if given is None else given))


def covered(p: Plan, direction: str) -> dict[str, tuple[int, int]]:
    steps = p.forward if direction == "forward" else p.backward
    return {s.name: (s.start, s.stop) for s in steps if s.name in NAMES}


def test_under_autocast_a_norm_behind_a_product_is_in_its_dtype() -> None:
    x = tensor(1024, 4, FEATURES, dtype=torch.float32)
    model = te_fuser.Sequential(
        ops.MatMul(FEATURES, FEATURES, dtype=torch.float32), norm(dtype=torch.float32), rotary()
    )
    with autocast_on_cuda():
        p = model.plan(x, device="h200", **{ANGLES: angles()})
    assert "turned_heads_forward" in covered(p, "forward") and "turned_heads_norm_backward" in covered(p, "backward")
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, **{ANGLES: angles()})
    grads = torch.autograd.grad(y.float().sum(), [x, *model.parameters()])
    assert y.dtype == torch.bfloat16 and {g.dtype for g in grads} == {torch.float32}


@pytest.mark.parametrize("before", [True, False])
def test_a_norm_and_a_rotation_are_one_pass_each_way(before: bool) -> None:
    p = plan(*((norm(), rotary()) if before else (rotary(), norm())))
    assert covered(p, "forward") == {"turned_heads_forward": (1, 3)}
    assert covered(p, "backward") == {"turned_heads_bias_norm_backward": (0, 3)}
    (step,) = (s for s in p.backward if s.name in NAMES)
    n = 1 if before else 2
    assert {name for name, _ in step.outputs} == {"input", "0.bias", f"{n}.weight", f"{n}.key_weight"}
    size = 1024 * 4 * FEATURES * 2
    assert (step.cost.read, step.cost.written, step.cost.launches) == (2 * size, size, 1)
    assert [k.name for k in p.kept if k.owner == "activation"] == ["bias.output"]


def test_a_rotation_alone_keeps_nothing() -> None:
    p = plan(ops.SiLU(), rotary())
    assert covered(p, "forward") == {"turned_heads_forward": (2, 3)}
    assert covered(p, "backward") == {"turned_heads_backward": (2, 3)}
    assert not [k for k in p.kept if k.owner == "activation" and "rotary" in k.name]
    assert covered(plan(rotary()), "backward") == {"turned_heads_backward": (0, 2)}


def test_no_angles_and_a_norm() -> None:
    p = plan(norm(), rotary(), given={})
    assert covered(p, "forward") == {"turned_heads_forward": (1, 2)}
    assert covered(p, "backward") == {"turned_heads_bias_norm_backward": (0, 2)}


def test_a_transformer_layer() -> None:
    layer = te_fuser.TransformerLayer(
        64, 128, 4, num_gqa_groups=2, qk_norm_type="RMSNorm", params_dtype=torch.bfloat16, device="cpu"
    )
    attention = layer.self_attention
    x = tensor(128, 2, 64, dtype=torch.bfloat16).requires_grad_()
    names = [s.name for s in attention.plan(x, device="h200", **{ANGLES: angles(128)}).steps]
    assert "turned_heads_forward" in names and "turned_heads_bias_norm_backward" in names


# ---------------------------------------------------------------------------------------------- refusals


def reasons(p: Plan, name: str) -> set[str]:
    return {r.reason for r in p.refusals if r.name == name and "predicted" not in r.reason}


@pytest.mark.parametrize(
    ("parts", "given", "reason"),
    [
        ((norm(), rotary(packing="blocked")), None, "heads are normed and turned as they lie differently: Groups("),
        ((norm(), rotary(), norm()), None, "it norms once and turns once, and here one of them is done twice"),
        (
            (rotary(angles=("a", "b")),),
            {"a": angles(), "b": angles(features=8)},
            "it takes two tables of one dtype and size, there are float32 [.., 16] and float32 [.., 8]",
        ),
        (
            (rotary(starts="s"),),
            {ANGLES: angles(), "s": torch.zeros(4, dtype=torch.int16)},
            "starts and offsets are int32 or int64, both alike, got int16",
        ),
    ],
)
def test_what_it_does_not_take(parts: Any, given: Any, reason: str) -> None:
    assert any(found.startswith(reason) for found in reasons(plan(*parts, given=given), "turned_heads_forward"))


def test_wide_heads() -> None:
    op = ops.HeadNorm(1024, heads=2)
    p = te_fuser.Sequential(op).plan(tensor(8, 2048, dtype=torch.float32), device="h200")
    assert reasons(p, "turned_heads_forward") == {"its kernel takes heads of at most 512 features"}


@pytest.mark.parametrize("options", [{"kernels": "reference"}, {"dtype": torch.float64}])
def test_plans_without_generated_kernels(options: dict[str, Any]) -> None:
    (reason,) = reasons(plan(rotary(), **options), "turned_heads_forward")
    assert reason.endswith("this plan is one without generated kernels")


def test_on_a_cpu_the_op_runs_itself() -> None:
    p = te_fuser.Sequential(norm()).plan(tensor(5, 2, FEATURES, dtype=torch.float32))
    assert reasons(p, "turned_heads_forward") == {"it runs on cuda, the input is on cpu"}


# ------------------------------------------------------------------------------------- values, emulated


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, emulation: Emulation) -> Iterator[FakeDriver]:
    """Plans take the kernel, and an emulated driver runs it."""
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    with emulation.in_plans():
        yield driver


def assert_as_meant(model: te_fuser.Sequential, x: torch.Tensor, steps: int, **given: torch.Tensor) -> None:
    """Values and all gradients against float64, by so many steps of this kernel."""
    for p in model.parameters():
        p.data += 0.3 * tensor(*p.shape, dtype=p.dtype, grad=False, seed=3)
    leaves = {"x": x, **dict(model.named_parameters())}
    assert sum(s.name in NAMES for s in model.plan(x, **given).steps) == steps
    y, found = results_and_gradients(lambda x: model(x, **given), leaves, x)
    exact = copy.deepcopy(model).double()
    wide = x.detach().double().requires_grad_()
    leaves = {"x": wide, **dict(exact.named_parameters())}
    want, wanted = results_and_gradients(lambda x: exact.reference(x, **given), leaves, wide)
    torch.testing.assert_close(y[0].double(), want[0], rtol=1e-5, atol=1e-5)
    for name, gradient in found.items():
        assert gradient is not None and wanted[name] is not None
        scale = wanted[name].abs().max().item()  # type: ignore[union-attr]
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=0, atol=1e-5 * scale, msg=name)


@needs_compiler
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("before", [True, False])
def test_values_in_plans(before: bool, kind: str, played: FakeDriver) -> None:
    heads = [norm(norm=kind), rotary(starts="s")] if before else [rotary(starts="s"), norm(norm=kind)]
    model = te_fuser.Sequential(ops.Bias(FEATURES), *heads, ops.SiLU(), kernels="generated")
    x = tensor(5, 3, FEATURES, dtype=torch.float32)
    starts = torch.tensor([0, 4, 2])
    assert_as_meant(model, x, 2, **{ANGLES: angles(9, samples=3), "s": starts})


@needs_compiler
def test_strided_inputs_and_frozen_parameters(played: FakeDriver) -> None:
    model = te_fuser.Sequential(norm(), rotary(layout="batch_first", cos_sin=("c", "s")), kernels="generated")
    tables = {name: angles(7, 2, seed=k).transpose(0, 1).contiguous().transpose(0, 1) for k, name in enumerate("cs")}
    wider = tensor(2, 7, 2 * FEATURES, dtype=torch.float32)
    x = wider[..., FEATURES:].detach().requires_grad_()
    assert not x.is_contiguous()
    assert_as_meant(model, x, 2, **tables)
    model[0].weight.requires_grad_(False)
    y = model(x, **tables)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    want = torch.autograd.grad(model.reference(x, **tables), x, torch.ones_like(y))[0]
    torch.testing.assert_close(dx, want, rtol=1e-4, atol=1e-4)
    heads = te_fuser.Sequential(ops.HeadNorm(DIM, heads=3, norm="LayerNorm"), ops.SiLU(), kernels="generated")
    assert_as_meant(heads, tensor(2, 3, 5, 3 * DIM, dtype=torch.float32), 2)


@needs_compiler
def test_tokens(played: FakeDriver) -> None:
    model = te_fuser.Sequential(rotary(layout="tokens", offsets="o"), norm(), kernels="generated")
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    assert_as_meant(model, tensor(11, FEATURES, dtype=torch.float32), 2, **{ANGLES: angles(6), "o": offsets})


@needs_compiler
def test_sums_wait_for_one_launch(played: FakeDriver) -> None:
    """Those of the bias and of both weights are added up at the end, by one launch."""
    model = te_fuser.Sequential(ops.Bias(FEATURES), norm(), rotary(), kernels="generated")
    x = tensor(64, 3, FEATURES, dtype=torch.float32)
    y = model(x, **{ANGLES: angles(64)})
    before = played.launches
    y.sum().backward()
    assert played.launches == before + 2 and played.last_symbol == b"column_sums"
