"""Models in regions of FP8: a step of training, and how near two of them are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import microbatch
from te_fuser.recipe import Recipe

F, FFN = 32, 64
PRODUCTS = ("float8_matmul", "float8_matmul_bias", "float8_matmul_backward", "float8_matmul_main_grad")


def mlp(residual: bool = False, dtype: torch.dtype = torch.float32, **how: Any) -> te.Sequential:
    """LayerNorm, 32 -> 64, GELU, -> 32, always the same."""
    torch.manual_seed(0)
    parts = ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F)
    return te.Sequential(*([te.Residual(*parts)] if residual else parts), **how).to(dtype)


def joined() -> te.Linear:
    """A weight in three parts, apart from each other, so that each call copies them."""
    torch.manual_seed(0)
    made = te.Linear(F, 3 * FFN, parameters_split=("query", "key", "value"))
    for p in made.parameters():
        p.data = p.data.clone()
    return made


def data(seed: int, *rows: int) -> torch.Tensor:
    return torch.randn(*(rows or (3, 21)), F, generator=torch.Generator().manual_seed(seed))


def step(
    model: Any,
    recipe: Recipe,
    seed: int,
    x: torch.Tensor | None = None,
    first: bool | None = None,
    dtype: torch.dtype = torch.float32,
    backwards: int = 1,
) -> dict[str, torch.Tensor]:
    """Output and gradients of one call in a region; of several backwards those of the last, whose dy is that often."""
    x = (data(seed) if x is None else x).to(dtype).requires_grad_()
    with te.autocast(recipe=recipe), microbatch(first):
        y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for k in range(backwards):
        dy, again = (k + 1.0) * torch.cos(y.detach()), k < backwards - 1
        gradients = torch.autograd.grad(y, [x, *parameters], dy, retain_graph=again)
    return {"output": y.detach(), **dict(zip(("x", *names), gradients, strict=True))}


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, as a share of that of `exact`."""
    return float((found.double() - exact.double()).square().mean().sqrt() / exact.double().square().mean().sqrt())


def near(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], share: float = 0.02) -> None:
    """All within that share; of none the same bits."""
    for name, exact in wanted.items():
        if share == 0.0:
            assert torch.equal(found[name], exact), name
        else:
            assert apart(found[name], exact) <= share, (name, apart(found[name], exact))


def states_near(found: Mapping[str, Any], wanted: Mapping[str, Any], share: float) -> None:
    """Scales and histories."""
    for (scale, history), other in zip(found.values(), wanted.values(), strict=True):
        torch.testing.assert_close(scale, other[0], rtol=share, atol=0.0)
        torch.testing.assert_close(history, other[1], rtol=share, atol=0.0)
