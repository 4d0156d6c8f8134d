"""Scales that somebody gives in place of a model's own: calls go by them, or refuse them in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import te_fuser as te
from te_fuser import ops
from te_fuser.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
Tensors = dict[str, torch.Tensor]


def on() -> Any:
    return te.autocast(recipe=RECIPE)


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def made() -> Any:
    """An op and a preset that have scales."""
    torch.manual_seed(0)
    return te.Sequential(ops.LayerNorm(16), ops.Linear(16, 16), ops.GELU(), te.Linear(16, 16))


def trained() -> Any:
    model = made()
    for seed in range(2):
        with on():
            y = model(data(seed))
        y.square().sum().backward()
    model.zero_grad()
    return model


def state(model: Any) -> Tensors:
    return {name: t.clone() for name, t in model.state_dict().items() if "fp8" in name}


def coarse(model: Any) -> tuple[Any, Tensors]:
    """A twin with other scales, and these."""
    twin = copy.deepcopy(model)
    for name, t in twin.named_buffers():
        if name.endswith("fp8_scale"):
            t.mul_(0.03)
    return twin, {name: t.clone() for name, t in twin.named_buffers()}


class Reference(nn.Module):
    """A model's reference as the forward of a module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.reference(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_functional_call_goes_by_what_is_given(called: bool, reference: bool, grad: bool) -> None:
    """Forward and backward, and records for the model's own; what is given stays as it is."""
    model = trained()
    twin, given = coarse(model)
    like, before = copy.deepcopy(model), {name: t.clone() for name, t in given.items()}
    with on(), torch.set_grad_enabled(grad):
        if called:  # a call before that is like it
            model(data(5)), like(data(5))
        if reference:
            y = functional_call(Reference(model), {f"model.{name}": t for name, t in given.items()}, (data(5),))
            wanted, own = twin.reference(data(5)), model.reference(data(5))
        else:
            y, wanted = functional_call(model, given, (data(5),)), twin(data(5))
            own = model(data(5))
        assert torch.equal(y, wanted) and not torch.equal(y, own) and torch.equal(own, like(data(5)))
    if grad:
        found, right = (
            torch.autograd.grad(t.square().sum(), [*m.parameters()]) for t, m in ((y, model), (wanted, twin))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in given.items())
    with on():
        pass
    assert model[1].fp8_scale[0] == like[1].fp8_scale[0] != given["1.fp8_scale"][0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_models_without_scales_are_given_none(called: bool, grad: bool) -> None:
    wanted, model = trained(), made()
    given = state(wanted)
    with on(), torch.set_grad_enabled(grad):
        if called:
            with torch.no_grad():
                model(data())
        with pytest.raises(
            ValueError, match=r"fp8_scale was given to a Linear that has no such buffer yet, as torch\.fu"
        ):
            functional_call(model, given, (data(),))
        assert torch.equal(model(data()), made()(data()))
    model.load_state_dict({**model.state_dict(), **given})
    with on(), torch.no_grad():
        assert torch.equal(model(data()), wanted(data()))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("scale", (2,)), ("scale", ()), ("amax_history", (0, 3)), ("amax_history", (4, 2)), ("amax_history", ())],
)
def test_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    model = trained()
    with on(), pytest.raises(ValueError, match=r"scales are \[3\], and the amaxes that they are made of \[calls, 3\]"):
        functional_call(model, {f"3.fp8_{name}": torch.ones(shape)}, (data(),))


def test_other_dtypes() -> None:
    """What a conversion has rounded is taken from before it; what somebody gives in 16 bits is meant so."""
    model = trained()
    twin, given = coarse(model)
    rounded = {name: t.bfloat16() for name, t in given.items()}
    for name, t in twin.named_buffers():
        t.copy_(rounded[name])
    with on(), torch.no_grad():
        assert torch.equal(functional_call(model, rounded, (data(),)), twin(data()))
    before = state(model)
    model.bfloat16()
    with on(), torch.no_grad():
        model(data().bfloat16())
    after = state(model)
    assert all(torch.equal(t, after[name]) for name, t in before.items())
