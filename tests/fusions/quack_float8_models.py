"""What the tests of quack's fusions of 8 bits share: the package as if installed, an MLP in a region, its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.kernels.packages import quack_float8, quack_matmul
from te_fuser.recipe import DelayedScaling, MMParams
from tests.fusions.products import free
from tests.kernels.packages import fake_quack_float8

BIASED, ALONE, AUX = "float8_matmul_bias_quack", "float8_matmul_gelu_quack", "float8_matmul_gelu_quack_aux"
NAMES = (BIASED, ALONE, AUX)
F, FFN, ROWS = 4096, 16384, 8192
BF16 = torch.bfloat16
RECIPE = DelayedScaling(amax_history_len=3)
SPLIT = DelayedScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float16}, "it was written for bfloat16, and this is float16"),
    (
        {"recipe": SPLIT},
        "it sums in fewer bits than float32 has, and the recipe says use_split_accumulator for forward",
    ),
    ({"bias_dtype": torch.float32}, "the bias is in float32, the product in bfloat16"),
    ({"device": "b200"}, "it was measured on compute capability 9 alone, this GPU has 10.0"),
    ({"device": "l4"}, "it was measured on compute capability 9 alone, this GPU has 8.9"),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as if it were there, for plans of a GPU that is not."""
    monkeypatch.setattr(quack_matmul.PACKAGE, "version", lambda: fake_quack_float8.VERSION)
    monkeypatch.setattr(quack_float8, "unusable", lambda: None)


def as_installed(patch: pytest.MonkeyPatch) -> fake_quack_float8.Package:
    """A package that computes, where a CPU stands for the GPU."""
    patch.setattr("te_fuser.fusions.float8_matmul_bias_quack.why_not_here", lambda *_: None)
    return fake_quack_float8.in_place(patch)


def planned(
    device: str | None = "h200",
    dtype: torch.dtype = BF16,
    recipe: DelayedScaling = RECIPE,
    grad: bool = True,
    gelu: str = "tanh",
    inner: int = FFN,
    bias_dtype: torch.dtype | None = None,
) -> Plan:
    """LayerNorm, 4096 -> inner, GELU, -> 4096, without memory; without a name, for the CPU."""
    where = "meta" if device else "cpu"
    f, rows = (F, ROWS) if device else (64, 8)
    layers = ops.LayerNorm(f), ops.Linear(f, inner), ops.GELU(gelu), ops.Linear(inner, f)
    with torch.device("meta"):
        model = te.Sequential(*layers).to(dtype)
    model = model.to_empty(device=where)
    if bias_dtype is not None:
        model[1].get_parameter("bias").data = torch.empty(inner, dtype=bias_dtype, device=where)
    x = torch.empty(rows, f, dtype=dtype, device=where, requires_grad=grad)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe), torch.set_grad_enabled(grad):
        return model.plan(x, device=device)


def step_of(p: Plan, name: str) -> Step:
    """The one step of the forward that is this fusion's."""
    (found,) = [s for s in p.forward if s.name == name]
    return found


def cheap(*names: str) -> tuple[Any, ...]:
    """These fusions at no cost."""
    return tuple(free(fusions.get(name)) for name in names)


def trained(model: Any, seed: int, rows: int = 21) -> dict[str, torch.Tensor]:
    """Output and gradients of one call in a region."""
    x = torch.randn(3, rows, 32, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y, [x, *parameters], torch.cos(y.detach()))
    return {"output": y.detach(), **dict(zip(("x", *names), gradients, strict=True))}


def small_mlps() -> list[Any]:
    """An MLP and another like it."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = ops.LayerNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)
        made.append(te.Sequential(*layers).to(BF16))
    return made


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """How far, as a share of the root of the mean square."""
    return float((found - exact).double().square().mean().sqrt() / exact.double().square().mean().sqrt())
