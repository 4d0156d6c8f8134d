"""A model beside its twin: the same results and gradients from the meaning of its ops, or from torch.nn."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import te_fuser


def tensor(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers, the same for the same seed."""
    rng = torch.Generator().manual_seed(seed + 17 * len(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_(grad)


def randomize(model: torch.nn.Module, seed: int = 0) -> Any:
    """The model with normally distributed parameters: no zeros and ones that would hide a mistake."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * 0.5 + 0.25)
    return model


class Around(torch.nn.Module):
    """A module that is called in another way: `call(module, ...)`."""

    def __init__(self, inner: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.call(self.inner, *given, **named)


def by_reference(model: Any) -> torch.nn.Module:
    """The model, which runs op by op."""
    return Around(model, lambda m, x: m.reference(x))


def sequential(*parts: Any, dtype: torch.dtype = torch.float64, **options: Any) -> te_fuser.Sequential:
    """A Sequential with random parameters that compiles nothing."""
    model = te_fuser.Sequential(*parts, **{"kernels": "reference", **options}).to(dtype)
    return randomize(model)


def results_and_gradients(
    run: Callable[..., Any],
    leaves: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    outputs: tuple[str, ...] = (),
    inputs: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor | None]]:
    """Outputs of a call, and the gradient of everything in `leaves` that takes one, for random output gradients."""
    torch.manual_seed(seed)
    made = run(x, outputs=outputs, **(inputs or {})) if outputs or inputs else run(x)
    made = made if isinstance(made, tuple) else (made,)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    live = [y for y in made if y.requires_grad]
    if not wanted or not live:
        return tuple(y.detach() for y in made), dict.fromkeys(wanted)
    dys = [tensor(*y.shape, dtype=y.dtype, grad=False, seed=seed + 1 + k) for k, y in enumerate(live)]
    grads = torch.autograd.grad(live, list(wanted.values()), dys, allow_unused=True)
    return tuple(y.detach() for y in made), dict(zip(wanted, grads, strict=True))


def assert_as_meant(
    model: te_fuser.Sequential,
    x: torch.Tensor,
    outputs: tuple[str, ...] = (),
    tolerance: float = 1e-11,
    **inputs: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Values and all gradients of a float64 model are those of its ops one by one; gives the values."""
    leaves = {"input": x, **inputs, **dict(model.named_parameters())}
    got, grads = results_and_gradients(model, leaves, x, outputs, inputs)
    want, want_grads = results_and_gradients(model.reference, leaves, x, outputs, inputs)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert_same_gradients(grads, want_grads, tolerance)
    return got


def stored(what: Any, weights_only: bool = False) -> Any:
    """Read by torch.load from what torch.save has written."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def assert_same_gradients(
    got: Mapping[str, torch.Tensor | None], want: Mapping[str, torch.Tensor | None], tolerance: float = 1e-11
) -> None:
    """Equal names with equal gradients, none missing."""
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] is None) == (gradient is None), f"{name}: got {got[name]}, want {gradient}"
        if gradient is not None:
            torch.testing.assert_close(
                got[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )


def _tensors(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def assert_same(
    got: Any, want: Any, leaves: Mapping[str, torch.Tensor] | Iterable[torch.Tensor], tolerance: float | None = 1e-10
) -> None:
    """Values and the gradients of all leaves, for random output gradients; 0: bit for bit, None: as PyTorch."""
    ours, theirs = _tensors(got), _tensors(want)
    assert len(ours) == len(theirs)
    named = leaves if isinstance(leaves, Mapping) else {f"leaf {k}": leaf for k, leaf in enumerate(leaves)}
    dys = [tensor(*y.shape, dtype=y.dtype, grad=False, seed=7 + k) for k, y in enumerate(ours)]
    grads = [torch.autograd.grad(ys, list(named.values()), dys, retain_graph=True) for ys in (ours, theirs)]
    names = [*(f"output {k}" for k in range(len(ours))), *named]
    for name, mine, other in zip(names, (*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
