"""te_fuser.LayerNormMLP: checkpoints of both kinds, micro batches, changed lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets.layers import OWN, assert_same, leaves_of
from tests.presets.plain import activated, linear, normalized
from tests.twins import randomize, tensor

HIDDEN, FFN = 7, 11


def mlp(**keywords: Any) -> Any:
    return randomize(te_fuser.LayerNormMLP(HIDDEN, FFN, **{**OWN, **keywords}))


def meaning(m: Any, x: torch.Tensor, activation: str = "gelu") -> tuple[torch.Tensor, torch.Tensor]:
    norm = normalized(x, m.layer_norm_weight, m.layer_norm_bias)
    return linear(activated(activation, linear(norm, m.fc1_weight, m.fc1_bias)), m.fc2_weight, m.fc2_bias), norm


def test_checkpoints_with_and_without_fc1_bias() -> None:
    """Whether FC1 had a bias beside an FC2 without one, a strict load gives the function that was saved."""
    x = tensor(3, HIDDEN)
    with_it, without = mlp(bias=False, fc1_bias=True), mlp(bias=False)
    fresh = mlp(bias=False)
    fresh(x)
    fresh.load_state_dict(with_it.state_dict())
    assert torch.equal(fresh(x), with_it(x)) and fresh.fc1_bias.requires_grad
    assert fresh.fc1_bias.partition_dim == -1
    fresh = mlp(bias=False, fc1_bias=True)
    state = without.state_dict()
    fresh.load_state_dict(state)
    assert (fresh.fc1_bias == 0).all() and "fc1_bias" not in state
    torch.testing.assert_close(fresh(x), without(x))
    with pytest.raises(RuntimeError, match="Unexpected key.*fc1_bias"):
        mlp(bias=False, fc1_bias=False).load_state_dict(with_it.state_dict())
    with pytest.raises(RuntimeError, match="Missing key.*fc1_bias"):
        mlp().load_state_dict(without.state_dict())
    outer = torch.nn.Sequential(mlp(bias=False))
    outer.load_state_dict({f"0.{name}": t for name, t in with_it.state_dict().items()})
    assert torch.equal(outer(x), with_it(x))


KINDS = [{}, {"activation": "swiglu"}, {"return_bias": True, "return_layernorm_output": True}]


@pytest.mark.parametrize("keywords", KINDS, ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_checkpoint_keeps_the_input_alone(again: bool, keywords: dict[str, Any]) -> None:
    """Beside the parameters and what is returned: what autograd holds, and what Python does."""
    m, x = mlp(checkpoint=again, **keywords), tensor(3, 5, HIDDEN)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = m(x)
    own = {t.untyped_storage().data_ptr() for t in m.parameters()}
    held = {s.data_ptr(): s.nbytes() for t in kept if (s := t.untyped_storage()).data_ptr() not in own}
    assert (sum(held.values()) == x.nbytes) is again
    if again:
        assert list(held) == [x.data_ptr()]
    want, norm = meaning(m, x, keywords.get("activation", "gelu"))
    if isinstance(y, tuple):
        y = y[0] + y[1], y[2]
        want = want, norm
    assert_same(y, want, leaves_of(m, x))


def test_two_micro_batches_in_flight() -> None:
    """The forward says whether main_grad is written over, not the parameter when backward runs."""
    m = mlp(fuse_wgrad_accumulation=True, params_dtype=torch.float32)
    xs = [tensor(3, HIDDEN, dtype=torch.float32, seed=k) for k in range(2)]
    for weight in (m.fc1_weight, m.fc2_weight):
        weight.main_grad = torch.full_like(weight, torch.nan)
    ys = [m(x, is_first_microbatch=k == 0) for k, x in enumerate(xs)]
    for y in ys:
        y.sum().backward()
    plain = mlp(params_dtype=torch.float32)
    for x in xs:
        plain(x).sum().backward()
    torch.testing.assert_close(m.fc2_weight.main_grad, plain.fc2_weight.grad)


def test_a_changed_list_is_changed_in_every_call() -> None:
    m, x = mlp(fuse_wgrad_accumulation=True), tensor(3, HIDDEN)
    m(x, is_first_microbatch=True)
    m[3] = ops.ReLU()
    for first in (None, True):
        torch.testing.assert_close(m(x, is_first_microbatch=first), meaning(m, x, "relu")[0])
