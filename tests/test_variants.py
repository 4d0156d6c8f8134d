"""Lists with variants: one set of parameters, one plan for each variant, and the mode and options of the whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser import pipeline
from tests.ops.check import normal

WIDTH = 8


class Block(te_fuser.Variants):
    """y = dropout(act(x W^T + b)), where a call may choose another activation, or none."""

    flattens = True

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(*self._ops("gelu", p))
        self.p = p
        self.weight = torch.nn.Parameter(normal(WIDTH, WIDTH).float())
        self.bias = torch.nn.Parameter(normal(WIDTH, seed=1).float())

    def _ops(self, activation: str, p: float) -> Iterable[torch.nn.Module]:
        yield ops.Bound(ops.MatMul(WIDTH, WIDTH, device="meta"), self, weight="weight")
        yield ops.Bound(ops.Bias(WIDTH, device="meta"), self, bias="bias")
        if activation != "none":
            yield {"gelu": ops.GELU, "relu": ops.ReLU}[activation]()
        yield ops.Dropout(p)

    def variant_ops(self, activation: str) -> Iterable[torch.nn.Module]:  # type: ignore[override]
        return [self[0], self[1], *list(self._ops(activation, self.p))[2:]]

    def forward(self, x: torch.Tensor, activation: str = "gelu", **call: Any) -> Any:  # type: ignore[override]
        """y with that activation."""
        if activation == "gelu":
            return super().forward(x, **call)
        return self.variant(activation=activation)(x, **call)


def meaning(block: Block, x: torch.Tensor, activation: str) -> torch.Tensor:
    h = torch.nn.functional.linear(x, block.weight, block.bias)
    return {"gelu": lambda h: torch.nn.functional.gelu(h, approximate="tanh"), "relu": torch.relu, "none": lambda h: h}[
        activation
    ](h)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    block, x = Block().to(dtype), normal(3, 5, WIDTH).to(dtype).requires_grad_()
    for activation in ("relu", "gelu", "none", "relu"):
        y, want = block(x, activation), meaning(block, x, activation)
        torch.testing.assert_close(y, want)
        dy = torch.randn_like(y)
        leaves = [x, block.weight, block.bias]
        torch.testing.assert_close(*[torch.autograd.grad(t, leaves, dy) for t in (y, want)])
    assert list(block.state_dict()) == ["weight", "bias"]
    assert len(list(block.parameters())) == 2


def test_each_keeps_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x, planned = Block(), normal(3, WIDTH).float(), []
    make_plan = pipeline.make_plan
    monkeypatch.setattr(pipeline, "make_plan", lambda *args: planned.append(1) or make_plan(*args))
    for _ in range(3):
        for activation in ("gelu", "relu", "none"):
            block(x, activation)
    assert len(planned) == 3
    assert block.variant(activation="relu") is block.variant(activation="relu")
    assert "ReLU" in str(block.variant(activation="relu").explain(x, details=True))


def test_mode_and_options_are_those_of_the_list() -> None:
    block, x = Block(p=0.5), normal(64, WIDTH).float()
    block(x, "relu")
    block.eval()
    torch.testing.assert_close(block(x, "relu"), meaning(block, x, "relu"))
    block.train()
    assert (block(x, "none") == 0).any() and (block(x, "relu") == 0).float().mean() > 0.5
    block.memory = "lean"
    assert block.variant(activation="relu").memory == "lean"
    block.memory = None
    assert block.variant(activation="relu").memory == "balanced"


def test_copies_and_changes() -> None:
    block, x = Block(), normal(3, WIDTH).float()
    block(x, "relu")
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        with torch.no_grad():
            twin.weight.mul_(2.0)
        torch.testing.assert_close(twin(x, "relu"), meaning(twin, x, "relu"))
    torch.testing.assert_close(block(x, "relu"), meaning(block, x, "relu"))
    block.weight = torch.nn.Parameter(block.weight.detach() + 1)
    torch.testing.assert_close(block(x, "relu"), meaning(block, x, "relu"))
    torch.testing.assert_close(block.double()(x.double(), "relu"), meaning(block, x.double(), "relu"))
    block[1] = ops.Scale(value=2.0)
    assert not torch.equal(block(x.double(), "none"), meaning(block, x.double(), "none"))


def test_in_a_list() -> None:
    """A list around it takes the ops of the call that changes nothing."""
    block = Block()
    model, x = te_fuser.Sequential(ops.Bias(WIDTH), block, ops.SiLU()), normal(3, WIDTH).float()
    assert len(model.plan(x).graph.nodes) == 6
    block(x, "relu")
    torch.testing.assert_close(model(x), torch.nn.functional.silu(meaning(block, x + model[0].bias, "gelu")))


class Outer(te_fuser.Variants):
    """A block between two ops, and the same with a variant of the block."""

    flattens = True

    def __init__(self) -> None:
        super().__init__(ops.SiLU(), Block(), ops.SiLU())

    def variant_ops(self, activation: str) -> Iterable[torch.nn.Module]:  # type: ignore[override]
        return [self[0], self[1].within(activation=activation), self[2]]

    def forward(self, x: torch.Tensor, activation: str = "gelu", **call: Any) -> Any:  # type: ignore[override]
        """Run the ops with that activation."""
        return (super().forward if activation == "gelu" else self.variant(activation=activation))(x, **call)


def test_hooks_of_a_list_are_for_its_variants_within_others() -> None:
    model, x, seen = Outer(), normal(3, WIDTH).float().requires_grad_(), list[str]()
    silu = torch.nn.functional.silu
    want = silu(meaning(model[1], silu(x), "relu"))
    torch.testing.assert_close(model(x, "relu"), want)
    assert len(model.variant(activation="relu").plans(x)) == 1
    hooks = [
        model[1].register_forward_hook(lambda *args: seen.append("forward")),
        model[1].register_forward_pre_hook(lambda *args, **kwargs: seen.append("pre"), with_kwargs=True),
        model[1].register_full_backward_hook(lambda *args: seen.append("backward")),
    ]
    for activation in ("relu", "gelu", "relu"):
        y = model(x, activation)
        y.sum().backward()
        assert seen == ["pre", "forward", "backward"]
        seen.clear()
    torch.testing.assert_close(y, want)
    for hook in hooks:
        hook.remove()
    model(x, "relu")
    assert not seen and len(model.variant(activation="relu").plans(x)) == 1


def test_options_and_mode_of_a_list_are_for_its_variants_within_others() -> None:
    model, x = Outer(), normal(64, WIDTH).float()
    model(x, "relu")
    model[1].memory = "lean"
    assert "planned by itself" in str(model.variant(activation="relu").explain(x, details=True))
    model[1].p, model[1][3].p = 0.5, 0.5
    model = copy.deepcopy(model)
    noisy = model(x, "relu")
    model.eval()
    calm = model(x, "relu")
    silu = torch.nn.functional.silu
    torch.testing.assert_close(calm, silu(meaning(model[1], silu(x), "relu")))
    assert not torch.equal(noisy, calm)


def test_what_is_not_said() -> None:
    with pytest.raises(NotImplementedError, match=r"Variants must define variant_ops"):
        te_fuser.Variants(ops.GELU()).variant(mask="none")
