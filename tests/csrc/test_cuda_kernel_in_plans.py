"""Plans and ops that run emulated CUDA kernels, on machines without a GPU."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.verify.examples import Case
from te_fuser.verify.models import Subject, example_call
from tests.fake_cuda import Emulation, FakeDriver
from tests.formula.test_row_ops import row_op
from tests.needs import needs_compiler
from tests.twins import randomize, results_and_gradients, tensor

pytestmark = needs_compiler


def block(width: int, dtype: torch.dtype, dropout: float = 0.0) -> te_fuser.Sequential:
    """A small MLP block with everything that a stretch may have."""
    model = te_fuser.Sequential(
        te_fuser.Residual(
            ops.LayerNorm(width), ops.Linear(width, 2 * width), ops.GELU("tanh"), ops.Linear(2 * width, width),
            ops.Dropout(dropout),
        ),
        ops.RMSNorm(width), ops.Linear(width, 2 * width), ops.SwiGLU(), ops.Scale(width),
    )  # fmt: skip
    return randomize(model).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_plans_run_generated_kernels(
    dtype: torch.dtype, tolerance: float, driver: FakeDriver, emulation: Emulation
) -> None:
    model = block(24, dtype, dropout=0.25)
    exact = block(24, torch.float64, dropout=0.25)
    exact.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    x = tensor(3, 7, 24, dtype=dtype)
    leaves = {"x": x, **dict(model.named_parameters())}
    with emulation.in_plans():
        y, gradients = results_and_gradients(model, leaves, x)
        again, gradients_again = results_and_gradients(model, leaves, x)
    assert driver.launches > 4
    assert torch.equal(y[0], again[0])
    assert all(torch.equal(g, gradients_again[n]) for n, g in gradients.items())  # type: ignore[arg-type]
    x = x.detach().double().requires_grad_()
    want, wanted = results_and_gradients(exact.reference, {"x": x, **dict(exact.named_parameters())}, x)
    pairs = [(y[0], want[0]), *((g, wanted[n]) for n, g in gradients.items())]
    for got, right in pairs:
        assert got is not None and right is not None
        assert (got.double() - right).abs().max() <= tolerance * right.abs().max()


# Everything that ops have of their own: parameters, scalars, named inputs by row and by sample, draws, two halves.
IN_PLANS = (
    "bias", "scale_scalar", "scale_constant", "swiglu", "layer_norm", "adaptive_per_row", "adaptive_per_sample_0",
    "adaptive_per_sample_1", "dropout", "drop_path_0",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_PLANS)
def test_ops_alone(name: str, driver: FakeDriver, emulation: Emulation) -> None:
    op = row_op(name, 24)
    subject = Subject(te_fuser.Sequential(op, kernels="generated"), torch.bfloat16, torch.device("cpu"))
    with emulation.in_plans():
        for leading, layout in (((5, 7), "contiguous"), ((0, 4), "contiguous"), ((3, 11), "misaligned")):
            case = Case(f"{leading} {layout}", torch.bfloat16, leading, layout)
            rng = torch.Generator().manual_seed(3)
            call = example_call(subject.fused, (*leading, 24), torch.bfloat16, torch.device("cpu"), rng)
            assert not [str(row) for row in subject.check(case, call) if not row.passed]
    assert driver.launches and driver.pushes == driver.pops


def test_plans_without_rows(driver: FakeDriver, emulation: Emulation) -> None:
    model = block(24, torch.float32)
    x = torch.zeros(0, 24, requires_grad=True)
    with emulation.in_plans():
        model(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 24)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
