"""Models that ranks share, made of whole ones: each rank's part of parameters, inputs and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from te_fuser.distributed.dtensor import own_part
from tests.parallel.ranks import WORLD
from tests.twins import tensor

Tensors = dict[str, torch.Tensor]
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def part(t: torch.Tensor, dim: int, sizes: Sequence[int] = ()) -> torch.Tensor:
    """Block of this rank along a dimension; of several parts of these sizes that of each."""
    return torch.cat([one.chunk(WORLD, dim)[dist.get_rank()] for one in t.split(list(sizes) or t.shape[dim], dim)], dim)


def own(t: torch.Tensor, like: torch.Tensor, sizes: Sequence[int] = ()) -> torch.Tensor:
    """Part of a whole tensor that a rank has, along the dimension in which its own is smaller."""
    smaller = [dim for dim, size in enumerate(like.shape) if size != t.shape[dim]]
    return part(t, smaller[0], sizes) if smaller else t


def fill(cut: nn.Module, whole: nn.Module, sizes: Mapping[str, Sequence[int]]) -> None:
    """Give a model that ranks share the parameters of the whole one.

    Args:
        sizes: of the parts that are cut each by itself, by what a parameter's name contains.
    """
    named = dict(whole.named_parameters())
    with torch.no_grad():
        for name, p in cut.named_parameters():
            p.copy_(own(named[name], p, sizes_of(name, sizes)))


def sizes_of(name: str, sizes: Mapping[str, Sequence[int]]) -> Sequence[int]:
    return next((found for key, found in sizes.items() if key in name), ())


def run(model: Any, inputs: Tensors, dy: Any, **call: Any) -> tuple[torch.Tensor, Tensors]:
    """The output, and the gradients of inputs and parameters; `dy` makes that of the output, of the output."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    model.zero_grad()
    torch.manual_seed(5)
    x, *others = leaves.values()
    torch.manual_seed(7)  # all ranks draw from one seed
    y = model(x, **dict(zip(list(leaves)[1:], others, strict=True)), **call)
    y.backward(dy(y))
    found = {**leaves, **dict(model.named_parameters())}
    gradients = {
        name: t.main_grad if getattr(t, "main_grad", None) is not None else t.grad for name, t in found.items()
    }
    return y.detach(), gradients  # type: ignore[return-value]


def assert_as_whole(
    cut: Any,
    whole: Any,
    inputs: Tensors,
    sizes: Mapping[str, Sequence[int]],
    ends: tuple[int | None, int | None] = (None, None),
    within: Mapping[str, float] = EXACT,
    **call: Any,
) -> None:
    """Output and all gradients are this rank's part of those of the whole model, of DTensors what lies here.

    Args:
        sizes: see `fill`; those of the "output", too.
        ends: the dimensions along which inputs, and the output, are cut.
        within: how far they may be apart.
    """
    (start, end), out = ends, sizes.get("output", ())
    y, want = run(whole, inputs, lambda y: tensor(*y.shape, grad=False, seed=9).to(y.dtype), **call)
    dy = tensor(*y.shape, grad=False, seed=9).to(y.dtype)
    mine = {name: t if start is None else part(t, start) for name, t in inputs.items()}
    got, gradients = run(cut, mine, lambda _: dy if end is None else part(dy, end, out), **call)
    torch.testing.assert_close(got, y if end is None else part(y, end, out), **within)
    assert gradients.keys() == want.keys()
    for name, gradient in gradients.items():
        assert gradient is not None, name
        local = own_part(gradient)
        expected = own(want[name], local, sizes_of(name, sizes))
        torch.testing.assert_close(local, expected, **within, msg=lambda m, name=name: f"{name}: {m}")
