"""Norms and rotations of heads in plans, on a GPU that a CPU stands for: values and all gradients."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.verify import VerificationError
from tests.fake_cuda import FakeDriver
from tests.fusions.plans import angles, by_angles, norm
from tests.needs import needs_compiler
from tests.twins import results_and_gradients, tensor

FEATURES, DIM = 128, 16
NAMES = (
    "turned_heads_forward",
    "turned_heads_backward",
    "turned_heads_norm_backward",
    "turned_heads_bias_norm_backward",
)
ANGLES = "rotary_pos_emb"


def test_norm_under_autocast_is_in_the_dtype_of_the_product_before() -> None:
    x = tensor(64, 4, FEATURES, dtype=torch.float32)
    model = te_fuser.Sequential(ops.MatMul(FEATURES, FEATURES), norm(), by_angles())
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, **{ANGLES: angles(64)})
    grads = torch.autograd.grad(y.float().sum(), [x, *model.parameters()])
    assert y.dtype == torch.bfloat16 and {g.dtype for g in grads} == {torch.float32}


@pytest.mark.usefixtures("few_rows")
def test_fusion_verified_where_there_is_no_gpu_says_so() -> None:
    with pytest.raises(VerificationError, match="it runs on cuda, the input is on cpu"):
        te_fuser.verify(te_fuser.fusions.get("turned_heads_forward"), dtypes=[torch.float32])


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
@pytest.mark.parametrize(
    ("before", "kind"), [(True, "RMSNorm"), (True, "LayerNorm"), (False, "LayerNorm"), (False, "L2Normalization")]
)
def test_values_in_plans(before: bool, kind: str, played: FakeDriver) -> None:
    heads = [norm(norm=kind), by_angles(starts="s")] if before else [by_angles(starts="s"), norm(norm=kind)]
    model = te_fuser.Sequential(ops.Bias(FEATURES), *heads, ops.SiLU(), kernels="generated")
    x = tensor(5, 3, FEATURES, dtype=torch.float32)
    starts = torch.tensor([0, 4, 2])
    assert_as_meant(model, x, 2, **{ANGLES: angles(9, samples=3), "s": starts})


@needs_compiler
def test_strided_inputs_and_frozen_parameters(played: FakeDriver) -> None:
    model = te_fuser.Sequential(norm(), by_angles(layout="batch_first", cos_sin=("c", "s")), kernels="generated")
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
@pytest.mark.parametrize("names", ["ab", "a", "b"])
def test_angles_of_queries_and_of_keys(names: str, played: FakeDriver) -> None:
    model = te_fuser.Sequential(by_angles(angles=("a", "b")), ops.SiLU(), kernels="generated")
    tables = {name: angles(7, seed=ord(name)) for name in names}
    assert_as_meant(model, tensor(7, 3, FEATURES, dtype=torch.float32), 2, **tables)


@needs_compiler
def test_tokens(played: FakeDriver) -> None:
    model = te_fuser.Sequential(by_angles(layout="tokens", offsets="o"), norm(), kernels="generated")
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    assert_as_meant(model, tensor(11, FEATURES, dtype=torch.float32), 2, **{ANGLES: angles(6), "o": offsets})


@needs_compiler
def test_sums_of_bias_and_weights_take_one_more_launch(played: FakeDriver) -> None:
    model = te_fuser.Sequential(ops.Bias(FEATURES), norm(), by_angles(), kernels="generated")
    x = tensor(64, 3, FEATURES, dtype=torch.float32)
    y = model(x, **{ANGLES: angles(64)})
    before = played.launches
    y.sum().backward()
    assert played.launches == before + 2 and played.last_symbol.endswith(b"_finish")
