"""te_fuser.LayerNormMLP: each argument, against plain PyTorch in float64 and against its list."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets.cases import (
    ACTIVATIONS,
    activated,
    assert_same,
    bare_list,
    forward_hook,
    leaves_of,
    linear,
    normalized,
)
from tests.twins import randomize, tensor

HIDDEN, FFN = 7, 11
NAMES = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]


def mlp(*args: Any, **keywords: Any) -> Any:
    sizes = args or (HIDDEN, FFN)
    return randomize(te_fuser.LayerNormMLP(*sizes, **{"device": "cpu", "params_dtype": torch.float64, **keywords}))


def meaning(m: Any, x: torch.Tensor, activation: str = "gelu", eps: float = 1e-5, **params: float) -> Any:
    held = dict(m.named_parameters())
    norm = normalized(x, held["layer_norm_weight"], held.get("layer_norm_bias"), eps)
    between = activated(activation, linear(norm, held["fc1_weight"], held.get("fc1_bias")), **params)
    return linear(between, held["fc2_weight"], held.get("fc2_bias")), norm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients(activation: str, normalization: str) -> None:
    m, x = mlp(activation=activation, normalization=normalization), tensor(3, 5, HIDDEN)
    assert_same(m(x), meaning(m, x, activation)[0], leaves_of(m, x))
    assert list(m.state_dict()) == [n for n in NAMES if normalization == "LayerNorm" or n != "layer_norm_bias"]


def test_sizes_and_defaults() -> None:
    torch.manual_seed(0)
    m = te_fuser.LayerNormMLP(64, 256, 1e-3, False, device="cpu")
    assert list(m.state_dict()) == ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc2_weight"]
    assert m.eps == 1e-3 and m.fc1_weight.shape == (256, 64) and m.fc2_weight.shape == (64, 256)
    assert all(abs(w.std() - 0.023) < 1e-3 and abs(w.mean()) < 1e-3 for w in (m.fc1_weight, m.fc2_weight))
    assert (m.layer_norm_weight == 1).all() and (m.layer_norm_bias == 0).all()
    x = tensor(5, 64, dtype=torch.float64)
    assert_same(m.double()(x), meaning(m, x, eps=1e-3)[0], leaves_of(m, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_its_list_bit_for_bit(dtype: torch.dtype) -> None:
    m, x = mlp(params_dtype=dtype), tensor(3, 5, HIDDEN, dtype=dtype)
    parts = ops.LayerNorm(HIDDEN), ops.MatMul(HIDDEN, FFN), ops.Bias(FFN), ops.GELU(), ops.MatMul(FFN, HIDDEN)
    assert_same(m(x), bare_list(m, *parts, ops.Bias(HIDDEN))(x), leaves_of(m, x), tolerance=0)


def test_activation_params() -> None:
    params = {"limit": 0.5, "alpha": 1.1, "glu_linear_offset": 0.25}
    m, x = mlp(activation="clamped_swiglu", activation_params=params), tensor(3, HIDDEN)
    assert_same(m(x), meaning(m, x, "clamped_swiglu", limit=0.5, alpha=1.1, offset=0.25)[0], leaves_of(m, x))
    with pytest.raises(ValueError, match=r"'gelu' takes none, got limit"):
        mlp(activation_params={"limit": 1.0})
    with pytest.raises(ValueError, match=r"takes limit, alpha, glu_linear_offset, got offset"):
        mlp(activation="clamped_swiglu", activation_params={"offset": 1.0})
    with pytest.raises(TypeError, match="activation_params is a mapping"):
        mlp(activation="clamped_swiglu", activation_params=7.0)
    with pytest.raises(ValueError, match="activation='swish' is unknown; use one of 'gelu'"):
        mlp(activation="swish")


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centered_gamma(normalization: str) -> None:
    m, x = mlp(zero_centered_gamma=True, normalization=normalization), tensor(3, HIDDEN)
    assert (te_fuser.LayerNormMLP(4, 4, zero_centered_gamma=True, device="cpu").layer_norm_weight == 0).all()
    y = m(x)
    with torch.no_grad():
        m.layer_norm_weight += 1
    torch.testing.assert_close(y, meaning(m, x)[0])


def test_what_is_returned() -> None:
    x = tensor(3, HIDDEN)
    m = mlp(return_bias=True, return_layernorm_output=True, return_layernorm_output_gathered=True)
    y, bias, norm = m(x)
    want, want_norm = meaning(m, x)
    assert bias is m.fc2_bias
    assert_same((y + bias, norm), (want, want_norm), leaves_of(m, x))
    m = mlp(return_layernorm_output=True)
    assert_same(m(x), meaning(m, x), leaves_of(m, x))
    m = mlp(return_bias=True)
    assert_same(sum(m(x)), meaning(m, x)[0], leaves_of(m, x))
    y, bias = mlp(bias=False, return_bias=True)(x)
    assert bias is None and y.shape == x.shape
    for argument in ("return_bias", "return_layernorm_output"):
        with pytest.raises(TypeError, match=argument):
            te_fuser.Sequential(ops.GELU(), mlp(**{argument: True}))(x)
        with pytest.raises(TypeError, match=argument):
            mlp(**{argument: True}).to_torch()


def test_fc1_bias() -> None:
    x = tensor(3, HIDDEN)
    m = mlp(bias=False, fc1_bias=True)
    assert "fc1_bias" in m.state_dict() and "fc2_bias" not in m.state_dict()
    assert_same(m(x), meaning(m, x)[0], leaves_of(m, x))
    m = mlp(fc1_bias=False)
    assert "fc1_bias" not in m.state_dict() and "fc2_bias" in m.state_dict()
    assert_same(m(x), meaning(m, x)[0], leaves_of(m, x))


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


def test_fill_methods() -> None:
    m = te_fuser.LayerNormMLP(
        4,
        8,
        device="cpu",
        init_method=lambda w: w.fill_(2.0),
        output_layer_init_method=torch.nn.init.ones_,
    )
    assert (m.fc1_weight == 2).all() and (m.fc2_weight == 1).all() and (m.fc1_bias == 0).all()
    with torch.no_grad():
        m.fc1_weight.zero_()
    m.reset_parameters()
    assert (m.fc1_weight == 2).all()


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


def test_checkpoint_in_a_list() -> None:
    m, x = mlp(checkpoint=True), tensor(3, HIDDEN)
    seen = forward_hook(m)
    y = te_fuser.Sequential(m, ops.GELU())(x)
    assert seen
    model = te_fuser.Sequential(mlp(checkpoint=True), ops.GELU())
    assert len(model.plans(x)) == 1 and len(te_fuser.Sequential(mlp(), ops.GELU()).plan(x).graph.nodes) == 7
    assert_same(y, activated("gelu", meaning(m, x)[0]), leaves_of(m, x))


def test_sizes_that_are_planned_ahead() -> None:
    m = te_fuser.LayerNormMLP(8, 16, seq_length=3, micro_batch_size=2, device="cpu")
    assert len(m.plans_kept()) == 1
    m(torch.randn(3, 2, 8, requires_grad=True))
    assert len(m.plans_kept()) == 1
    assert te_fuser.LayerNormMLP(8, 16, seq_length=3, device="cpu").plans_kept() == []
    te_fuser.LayerNormMLP(8, 16, seq_length=3, micro_batch_size=2, device="meta")
    with pytest.raises(ValueError, match="seq_length is a whole number from 1 on, got 0"):
        te_fuser.LayerNormMLP(8, 16, seq_length=0, micro_batch_size=2)


def test_main_grad() -> None:
    m, x = mlp(fuse_wgrad_accumulation=True, params_dtype=torch.float32), tensor(3, HIDDEN, dtype=torch.float32)
    plain = mlp(params_dtype=torch.float32)
    plain(x).sum().backward()
    for weight in (m.fc1_weight, m.fc2_weight):
        weight.main_grad = torch.full_like(weight, 5.0)
    for first, times, offset in ((None, 1, 5), (True, 1, 0), (False, 2, 0)):
        m(x, is_first_microbatch=first).sum().backward()
        for name in ("fc1_weight", "fc2_weight"):
            want = times * plain.get_parameter(name).grad + offset
            torch.testing.assert_close(m.get_parameter(name).main_grad, want)
    assert m.fc1_weight.grad is None and m.fc1_bias.grad is not None
    with pytest.raises(TypeError, match="is_first_microbatch is True or False, got 'padding'"):
        m(x, "padding")


def test_a_loop_that_copies_gradients_to_main_grad() -> None:
    """Weights have none to copy, so what was added to their main_grad stays."""
    m, plain = (mlp(fuse_wgrad_accumulation=fused, params_dtype=torch.bfloat16) for fused in (True, False))
    x = tensor(3, HIDDEN, dtype=torch.bfloat16)
    for p in m.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    m(x).sum().backward()
    for p in m.parameters():
        if p.grad is not None:
            p.main_grad.copy_(p.grad)
            p.grad = None
    plain(x).sum().backward()
    for p, want in zip(m.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.main_grad, want.grad.float(), rtol=0.02, atol=0.02)


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


@pytest.mark.parametrize("first", [True, False])
def test_main_grad_where_the_rest_is_computed_again(first: bool) -> None:
    m = mlp(fuse_wgrad_accumulation=True, params_dtype=torch.float32, checkpoint=True)
    x, plain = tensor(3, HIDDEN, dtype=torch.float32), mlp(params_dtype=torch.float32)
    plain(x).sum().backward()
    for weight in (m.fc1_weight, m.fc2_weight):
        weight.main_grad = torch.full_like(weight, 5.0)
    m(x, is_first_microbatch=first).sum().backward()
    want = plain.fc1_weight.grad + (0 if first else 5)
    torch.testing.assert_close(m.fc1_weight.main_grad, want)


def test_a_changed_list_is_changed_in_every_call() -> None:
    m, x = mlp(fuse_wgrad_accumulation=True), tensor(3, HIDDEN)
    m(x, is_first_microbatch=True)
    m[3] = ops.ReLU()
    for first in (None, True):
        torch.testing.assert_close(m(x, is_first_microbatch=first), meaning(m, x, "relu")[0])


def test_words_in_any_case() -> None:
    m, x = mlp(activation="SwiGLU", normalization="rmsnorm"), tensor(3, HIDDEN)
    torch.testing.assert_close(m(x), meaning(m, x, "swiglu")[0])


def test_parallel_marks() -> None:
    m = mlp(set_parallel_mode=True, sequence_parallel=True)
    marks = {n: (getattr(p, "partition_dim", None), getattr(p, "sequence_parallel", None)) for n, p in named(m)}
    assert marks == {
        "layer_norm_weight": (-1, False),
        "layer_norm_bias": (-1, False),
        "fc1_weight": (0, None),
        "fc1_bias": (0, None),
        "fc2_weight": (1, None),
        "fc2_bias": (-1, False),
    }
    whole = m.layer_norm_weight, m.fc2_bias
    assert [(p.tensor_model_parallel, p.partition_stride) for p in whole] == [(False, 1)] * 2
    cut = te_fuser.LayerNormMLP(8, 12, set_parallel_mode=True, tp_size=2, activation="swiglu", device="cpu")
    assert cut.fc1_weight.shape == (12, 8) and cut.fc2_weight.shape == (8, 6)
    with pytest.raises(RuntimeError, match=r"tp_size=2 takes a group: call set_tensor_parallel_group"):
        cut(torch.randn(3, 8))
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        te_fuser.Sequential(cut)(torch.randn(3, 8))
    with pytest.raises(ValueError, match="ffn_hidden_size=11 cannot be cut into 2"):
        mlp(set_parallel_mode=True, tp_size=2)


def named(m: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return list(m.named_parameters())


def test_in_stacks_it_is_one_plan() -> None:
    stack, x = te_fuser.Sequential(*(mlp() for _ in range(3))), tensor(3, HIDDEN)
    assert len(stack.plans(x)) == 1
    want = x
    for m in stack:
        want = meaning(m, want)[0]
    assert_same(stack(x), want, leaves_of(stack, x), tolerance=1e-8)
    residual = te_fuser.Residual(mlp())
    assert_same(residual(x), x + meaning(residual[0], x)[0], leaves_of(residual, x))
    hooked = te_fuser.Sequential(mlp(), ops.GELU())
    seen = forward_hook(hooked[0])
    torch.testing.assert_close(hooked(x), activated("gelu", meaning(hooked[0], x)[0]))
    assert seen == [1]


def test_copies_are_trained_by_themselves() -> None:
    m, x = mlp(), tensor(3, HIDDEN)
    m(x)
    before = m(x).detach()
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        with torch.no_grad():
            twin.fc1_weight.mul_(2.0)
        assert twin.fc1_weight.partition_stride == 1
        torch.testing.assert_close(twin(x), meaning(twin, x)[0])
    torch.testing.assert_close(m(x), before, rtol=0, atol=0)


def test_meta_then_to_empty() -> None:
    m = te_fuser.LayerNormMLP(8, 16, device="meta")
    assert m.fc1_weight.is_meta
    m.to_empty(device="cpu")
    m.reset_parameters()
    assert (m.layer_norm_weight == 1).all() and m.fc1_weight.partition_dim == -1
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(m.double()(x), meaning(m, x)[0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("extra", [{}, {"normalization": "RMSNorm", "bias": False, "zero_centered_gamma": True}])
def test_to_torch_and_back(activation: str, extra: dict[str, Any]) -> None:
    m, x = mlp(activation=activation, **extra), tensor(3, HIDDEN)
    plain = m.to_torch()
    torch.testing.assert_close(plain(x), m(x))
    assert not any(isinstance(part, (te_fuser.FusableOperation, te_fuser.Sequential)) for part in plain.modules())
    back = te_fuser.from_torch(plain, torch.randn(3, HIDDEN, dtype=torch.float64))
    torch.testing.assert_close(back(x), m(x))


def test_bad_input() -> None:
    m = mlp()
    with pytest.raises(ValueError, match=r"LayerNorm was made for 7 features, got 5"):
        m(tensor(3, 5))
    with pytest.raises(TypeError, match="did you mean 'activation_params'"):
        mlp(activation_param={})
    with pytest.raises(ValueError, match="normalization='BatchNorm' is unknown; use one of 'LayerNorm', 'RMSNorm'"):
        mlp(normalization="BatchNorm")
    with pytest.raises(TypeError, match="hidden_size is a whole number, got 7.0"):
        te_fuser.LayerNormMLP(7.0, 8)
    with pytest.raises(ValueError, match="eps is a number from 0 on"):
        mlp(7, 8, -1.0)
    with pytest.raises(TypeError, match="return_bias is True or False, got 'yes'"):
        mlp(return_bias="yes")


@pytest.mark.parametrize("rows", [0, 1, 13])
def test_any_number_of_rows(rows: int) -> None:
    m, x = mlp(), tensor(rows, HIDDEN)
    assert_same(m(x), meaning(m, x)[0], leaves_of(m, x))
    wide = tensor(3, rows, 2 * HIDDEN)[..., ::2]
    torch.testing.assert_close(m(wide), meaning(m, wide)[0])


def test_autocast() -> None:
    m, x = mlp(params_dtype=torch.float32, return_bias=True), tensor(3, HIDDEN, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, bias = m(x)
    assert y.dtype == bias.dtype == torch.bfloat16
    torch.testing.assert_close(y.float() + m.fc2_bias, meaning(m, x)[0], rtol=0.1, atol=0.1)


def test_verify() -> None:
    assert te_fuser.verify(mlp(params_dtype=torch.float32), torch.randn(4, HIDDEN)).passed
