"""te_fuser.Linear, LayerNormLinear and LayerNormMLP: parts of a weight, weights of calls, checkpoints, other lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets.layers import OWN, forward_hook, leaves_of
from tests.presets.plain import activated, linear, normalized
from tests.refused import raises
from tests.twins import assert_same, randomize, tensor

IN, OUT = 7, 12
SPLIT = ("query_", "key", "value")


def made(*args: Any, **keywords: Any) -> Any:
    sizes = args or (IN, OUT)
    return randomize(te_fuser.Linear(*sizes, **{**OWN, **keywords}))


def test_split_linear_given_a_whole_weight_reads_it() -> None:
    layer, x = made(parameters_split=SPLIT), tensor(3, IN)
    assert len({p.untyped_storage().data_ptr() for n, p in layer.named_parameters() if n.endswith("weight")}) == 1
    layer(x)
    outer = te_fuser.Sequential(layer, ops.GELU())
    outer(x)
    plain = torch.nn.Linear(IN, OUT).double()
    layer.weight, layer.bias = plain.weight, plain.bias
    assert layer.weight is plain.weight and list(layer.state_dict()) == ["weight", "bias"]
    assert layer.weight.tensor_model_parallel is False
    for one in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(one(x), plain(x))
    torch.testing.assert_close(outer(x), torch.nn.functional.gelu(plain(x), approximate="tanh"))
    layer(x).sum().backward()
    assert plain.weight.grad is not None
    layer.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("norm", [False, True])
def test_linear_without_a_weight_takes_those_of_the_call(norm: bool) -> None:
    apart = {**OWN, "skip_weight_param_allocation": True}
    layer = te_fuser.LayerNormLinear(IN, OUT, **apart) if norm else te_fuser.Linear(IN, OUT, **apart)
    x, w, b = tensor(3, IN), tensor(OUT, IN), tensor(OUT)
    randomize(layer)
    assert list(layer.state_dict()) == (["layer_norm_weight", "layer_norm_bias"] if norm else [])

    def h() -> torch.Tensor:
        return normalized(x, layer.layer_norm_weight, layer.layer_norm_bias) if norm else x

    for _ in range(2):
        assert_same(layer(x, w, bias=b), linear(h(), w, b), leaves_of(layer, x, w=w, b=b))
    assert torch.equal(copy.deepcopy(layer)(x, w, b), layer(x, w, b))
    raises(TypeError, "has no weight, by skip_weight_param_allocation", layer.to_torch)
    y, bias = made(skip_weight_param_allocation=True, return_bias=True)(x, weight=w, bias=b)
    assert bias is b
    torch.testing.assert_close(y, linear(x, w))
    torch.testing.assert_close(made(skip_weight_param_allocation=True, bias=False)(x, w), linear(x, w))


def test_weights_of_the_call_in_a_list() -> None:
    """A list around takes them by path, also where a hook makes a border."""
    layer, x, w, b = made(skip_weight_param_allocation=True), tensor(3, IN), tensor(OUT, IN), tensor(OUT)
    model = te_fuser.Sequential(layer, ops.GELU())
    for _ in range(2):
        got = model(x, **{"0.weight": w, "0.bias": b})
        want = torch.nn.functional.gelu(linear(x, w, b), approximate="tanh")
        assert_same(got, want, {"x": x, "w": w, "b": b})
        raises(TypeError, "weight", model, x)
        forward_hook(layer)


@pytest.mark.parametrize("kind", [te_fuser.Linear, te_fuser.LayerNormLinear])
def test_weights_of_the_call_in_lists_in_lists(kind: Any) -> None:
    """Each by the path of its Linear, however deep; looks and the reference take them as calls do."""
    apart = {"skip_weight_param_allocation": True, "device": "cpu", "params_dtype": torch.float64}
    first, second = kind(IN, IN, **apart), kind(IN, IN, bias=False, **apart)
    model = te_fuser.Sequential(te_fuser.Residual(first, ops.GELU()), te_fuser.Sequential(ops.SiLU(), second))
    x, w, v, b = tensor(3, IN), tensor(IN, IN, seed=1), tensor(IN, IN, seed=2), tensor(IN, seed=3)
    given = {"0.0.weight": w, "0.0.bias": b, "1.1.weight": v}
    (plan,) = model.plans(x, **given)
    assert plan.backward

    def meant() -> torch.Tensor:
        return second(torch.nn.functional.silu(x + torch.nn.functional.gelu(first(x, w, b), approximate="tanh")), v)

    leaves = {"x": x, "w": w, "v": v, "b": b, **dict(model.named_parameters())}
    assert_same(model(x, **given), meant(), leaves)
    assert_same(model.reference(x, **given), meant(), leaves)
    raises(TypeError, r"call the model with \*\*\{'1.1.weight': tensor\}", model, x, **{"0.0.weight": w, "0.0.bias": b})
    with pytest.raises(TypeError, match=r"unknown input '0.weight'.*0.0.bias, 0.0.weight, 1.1.weight"):
        model(x, **given, **{"0.weight": w})


def test_tensors_in_place_of_parameters_and_micro_batches() -> None:
    layer, x, w, b = made(), tensor(3, IN), tensor(OUT, IN), tensor(OUT)
    assert_same(layer(x, w), linear(x, w, layer.bias), {"x": x, "w": w, "bias": layer.bias})
    assert_same(layer(x, bias=b), linear(x, layer.weight, b), {"x": x, "weight": layer.weight, "b": b})
    torch.testing.assert_close(layer(x), linear(x, layer.weight, layer.bias))
    layer, x = made(), tensor(3, IN)
    for first in (None, True, False):
        assert_same(layer(x, is_first_microbatch=first), linear(x, layer.weight, layer.bias), leaves_of(layer, x))
    assert len(layer.plans_kept()) == 1


def test_main_grad_of_a_weight_of_the_call() -> None:
    layer, x = made(fuse_wgrad_accumulation=True, skip_weight_param_allocation=True, bias=False), tensor(3, IN)
    own = made(fuse_wgrad_accumulation=True, bias=False)
    want = torch.ones(3, OUT, dtype=torch.float64).T @ x.detach()
    for one in (layer, own):
        w = torch.nn.Parameter(tensor(OUT, IN, grad=False))
        w.main_grad = torch.ones_like(w)
        for first, expected in ((None, want + 1), (True, want), (False, 2 * want)):
            y = one(x, w, is_first_microbatch=first)
            torch.testing.assert_close(y, linear(x, w))
            y.sum().backward()
            torch.testing.assert_close(w.main_grad, expected)


def test_a_group_of_another_size_is_noticed_by_lists_around() -> None:
    layer, x = made(), tensor(3, IN)
    outer = te_fuser.Sequential(layer, ops.GELU())
    outer(x)
    layer.set_tensor_parallel_group(ops.Group("others", 2))
    for model in (layer, outer):
        raises(RuntimeError, "made for tp_size=1, its tp_group has 2 ranks: make it with tp_size=2", model, x)


HIDDEN, FFN = 7, 11


def mlp(**keywords: Any) -> Any:
    return randomize(te_fuser.LayerNormMLP(HIDDEN, FFN, **{**OWN, **keywords}))


def meaning(m: Any, x: torch.Tensor, activation: str = "gelu") -> tuple[torch.Tensor, torch.Tensor]:
    norm = normalized(x, m.layer_norm_weight, m.layer_norm_bias)
    return linear(activated(activation, linear(norm, m.fc1_weight, m.fc1_bias)), m.fc2_weight, m.fc2_bias), norm


def test_checkpoints_with_and_without_fc1_bias() -> None:
    """Strict loads give the function that was saved, with or without a bias of FC1 beside an FC2 that has none."""
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
    raises(RuntimeError, "Missing key.*fc1_bias", lambda: mlp().load_state_dict(without.state_dict()))
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


def test_a_changed_list_is_changed_in_every_call() -> None:
    m, x = mlp(fuse_wgrad_accumulation=True), tensor(3, HIDDEN)
    m(x, is_first_microbatch=True)
    m[3] = ops.ReLU()
    for first in (None, True):
        torch.testing.assert_close(m(x, is_first_microbatch=first), meaning(m, x, "relu")[0])
