"""Models whose parameters `fully_shard` spreads: trained, saved and loaded as one process would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from te_fuser.fuser import pipeline
from tests.parallel.models import (
    FEATURES,
    MODELS,
    Layers,
    assert_as_one_process,
    backward,
    gradients,
    own,
    residual_layers,
    spread,
    transformer_layers,
    whole_batch,
)
from tests.parallel.ranks import WORLD, on_ranks
from tests.twins import assert_same_gradients

LEARNING_RATE = 0.05


def adam(model: nn.Module) -> torch.optim.AdamW:
    # Such an eps, as the gradient of a bias of keys is rounding alone: attention does not see it.
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-3, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, alone: bool = False) -> list[torch.Tensor]:
    """The losses; `alone` on the whole batch."""
    losses = []
    for step in steps:
        x = whole_batch(step)
        optimizer.zero_grad()
        losses.append(backward(model, x if alone else own(x)))
        optimizer.step()
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, none of them cut."""
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "reshard"), [*((kind, True) for kind in MODELS), ("residual", False), ("TransformerLayer", False)]
)
@on_ranks
def test_training(kind: str, reshard: bool) -> None:
    """Gradients and parameters after steps of AdamW, of a model and of a copy that was made before it was cut."""
    twin = MODELS[kind]()
    model = spread(copy.deepcopy(twin), reshard_after_forward=reshard)
    optimizers = adam(model), adam(twin)
    for step in range(2):
        ours, theirs = (
            train(model, optimizers[0], range(step, step + 1)),
            train(twin, optimizers[1], range(step, step + 1), alone=True),
        )
        assert_as_one_process(model, twin)
        dist.all_reduce(ours[0])
        torch.testing.assert_close(ours[0] / WORLD, theirs[0])
    assert_same_gradients(whole(model), whole(twin))


class Twice(nn.Module):
    """Layers that each call goes through twice."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.layers(x))  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)


@on_ranks
def test_layers_that_run_twice_of_which_some_parameters_rest() -> None:
    twin = Twice(transformer_layers())
    for name, p in twin.named_parameters():
        p.requires_grad_("query" not in name and "fc1" not in name)
    model = spread(copy.deepcopy(twin))
    for step in range(2):
        backward(model, own(whole_batch(step)))
        backward(twin, whole_batch(step))
    assert_as_one_process(model, twin)


@on_ranks
def test_plans_of_what_is_cut() -> None:
    """Calls that are alike are planned once; a look at a layer takes its parameters whole."""
    model, x = spread(transformer_layers()), own(whole_batch())
    optimizer = adam(model)
    train(model, optimizer, range(1))
    with mock.patch.object(pipeline, "make_plan", side_effect=AssertionError("planned again")):
        train(model, optimizer, range(1, 3))
    layer = next(iter(model))  # type: ignore[call-overload]
    words = rf"on rank {dist.get_rank()}: .*weight is a DTensor.*fully_shard.*after its unshard\(\)"
    with pytest.raises(TypeError, match=words):
        layer.explain(x, details=True)
    layer.unshard()
    assert "attention" in str(layer.explain(x, details=True))


@on_ranks
def test_whole_weights_are_not_held_between_forward_and_backward() -> None:
    """Neither as they are, nor joined."""
    model, held = spread(transformer_layers(), reshard_after_forward=True), list[torch.Tensor]()

    def note(t: torch.Tensor) -> torch.Tensor:
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = model(own(whole_batch())).square().mean()
    weights = [t for t in held if t.dim() == 2 and FEATURES in t.shape]
    assert len(weights) >= 6 * 2 and not any(t.untyped_storage().size() for t in weights)
    loss.backward()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks
def test_gradients_are_summed_by_the_last_micro_batch(reshard: bool) -> None:
    twin = residual_layers()
    model = spread(copy.deepcopy(twin), reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        backward(model, own(whole_batch(micro)))
        backward(twin, whole_batch(micro))
    assert_as_one_process(model, twin)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["looped", "TransformerLayer"])
@on_ranks
def test_mixed_precision(kind: str, reshard: bool) -> None:
    """Each rank computes in bfloat16 what a model in bfloat16 does; gradients are averaged in float32."""
    twin = MODELS[kind]().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = spread(copy.deepcopy(twin), reshard_after_forward=reshard, mp_policy=policy)
    x, low = whole_batch(dtype=torch.float32), twin.bfloat16()
    backward(model, own(x))
    parts = []
    for rank in range(WORLD):
        low.zero_grad()
        backward(low, own(x, rank).bfloat16())
        parts.append({name: None if g is None else g.float() for name, g in gradients(low).items()})
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    assert_same_gradients(gradients(model), mean, 1e-6)


@pytest.mark.parametrize("kind", ["residual", "LayerNormMLP", "TransformerLayer"])
@on_ranks
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    """Saved and loaded bit for bit, and what goes on from there goes on as if nothing had been."""
    model = spread(MODELS[kind]())
    optimizer = adam(model)
    train(model, optimizer, range(2))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=tmp_path)
    want = train(model, optimizer, range(2, 4))
    other = spread(MODELS[kind]())
    for p in other.parameters():
        nn.init.zeros_(p)
    fresh = adam(other)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(other, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    got = train(other, fresh, range(2, 4))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(whole(other), whole(model), rtol=0, atol=0)
    assert list(loaded["model"]) == list(MODELS[kind]().state_dict())
