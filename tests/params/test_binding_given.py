"""Weights that a call gives: values, gradients to them, and what stays apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from tests.ops.check import normal
from tests.refused import raises
from tests.threads import in_threads
from tests.twins import assert_same

IN, OUT = 6, 5


class Affine(te_fuser.Variants):
    """y = gelu(x W^T + b) with parameters of its own, or those of the call."""

    flattens = True

    def __init__(self) -> None:
        given = ops.Given()
        super().__init__(*self._ops(self))
        self.given = (given,)  # a tuple, so that it is no op of the list
        self.weight = torch.nn.Parameter(normal(OUT, IN).float())
        self.bias = torch.nn.Parameter(normal(OUT).float())

    def _ops(self, owner: torch.nn.Module) -> Iterable[torch.nn.Module]:
        yield ops.Bound(ops.MatMul(IN, OUT, device="meta"), owner, weight="weight")
        yield ops.Bound(ops.Bias(OUT, device="meta"), owner, bias="bias")
        yield ops.GELU()

    def variant_ops(self, given: bool) -> Iterable[torch.nn.Module]:  # type: ignore[override]
        return self._ops(self.given[0])

    def forward(self, x: torch.Tensor, weight: Any = None, bias: Any = None) -> Any:  # type: ignore[override]
        """y with these, where they are given."""
        if weight is None and bias is None:
            return super().forward(x)
        held = {"weight": self.weight if weight is None else weight, "bias": self.bias if bias is None else bias}
        with self.given[0].holding(**held):
            return self.variant(given=True)(x)


def meaning(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    model = Affine().to(dtype)
    for seed in range(2):
        x, weight = (normal(*s, seed=seed + 3).to(dtype).requires_grad_() for s in ((3, IN), (OUT, IN)))
        for run in (model, lambda *args: checkpoint(model, *args, use_reentrant=False)):
            want = meaning(x, weight * 2, model.bias)
            assert_same(run(x, weight * 2), want, [x, weight, model.bias], tolerance=None)
        torch.testing.assert_close(model(x), meaning(x, model.weight, model.bias))
    assert list(model.state_dict()) == ["weight", "bias"]


def test_copies_and_threads() -> None:
    model, x = Affine(), normal(3, IN).float()
    weights = [normal(OUT, IN, seed=k).float() for k in range(4)]

    found = in_threads(*(lambda w=w: [model(x, w) for _ in range(20)][-1] for w in weights))
    for y, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(y, meaning(x, weight, model.bias))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x, weights[1]), found[1])


def test_what_nobody_gives() -> None:
    model, x = Affine(), normal(3, IN).float()
    model(x, model.weight)
    words = r"an op reads 'weight' of the call: call the model with \*\*\{'weight': tensor"
    raises(TypeError, words, lambda: model.variant(given=True)(x))
    with pytest.raises(ValueError, match=r"parameter weight has shape \[6, 5\], the op was made for \[5, 6\]"):
        model(x, torch.zeros(IN, OUT))


class Projection(te_fuser.Sequential):
    """y = x W^T with the weight of the call."""

    flattens = True

    def __init__(self) -> None:
        given = ops.Given()
        super().__init__(ops.Bound(ops.MatMul(IN, IN, device="meta"), given, weight="weight"))
        self.given = (given,)

    def forward(self, x: torch.Tensor, weight: Any = None, **call: Any) -> Any:  # type: ignore[override]
        """y."""
        return super().forward(x, weight=weight, **call)


def leave(module: torch.nn.Module, *args: Any) -> None:
    return None


@pytest.mark.parametrize("hooked", [False, True])
def test_in_lists(hooked: bool) -> None:
    """A list around takes the ops, and its call names the weights by path; also where hooks make a border."""
    inner = te_fuser.Sequential(Projection(), ops.GELU())
    model = te_fuser.Sequential(Projection(), ops.GELU(), inner, kernels="reference").double()
    if hooked:
        inner[0].register_forward_pre_hook(leave)
        inner.register_forward_pre_hook(leave)
    x, *weights = (normal(*shape, seed=k).requires_grad_() for k, shape in enumerate(((3, IN), (IN, IN), (IN, IN))))
    named = dict(zip(("0.weight", "2.0.weight"), weights, strict=True))
    want = x
    for weight in weights:
        want = torch.nn.functional.gelu(torch.nn.functional.linear(want, weight), approximate="tanh")
    for run in (model, model.reference):
        assert_same(run(x, **named), want, [x, *weights])
    assert sum(len(plan.graph.nodes) for plan in model.plans(x, **named)) == (2 if hooked else 4)
    torch.testing.assert_close(inner[0](x, weights[0]), x @ weights[0].T)
    with pytest.raises(TypeError, match=r"call the model with \*\*\{'2.0.weight': tensor" if not hooked else "tensor"):
        model(x, **{"0.weight": weights[0]})
    raises(TypeError, "unknown input 'weight'", model, x, weight=weights[0], **named)
