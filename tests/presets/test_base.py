"""Preset: checkpoints, files, parameters that move, and lists around."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from tests.presets.layers import assert_same, leaves_of
from tests.twins import randomize, tensor

WIDTH = 6


def model(**keywords: Any) -> Any:
    given = {"device": "cpu", "params_dtype": torch.float64, **keywords}
    return randomize(
        te_fuser.Sequential(
            te_fuser.LayerNormLinear(WIDTH, WIDTH, parameters_split=("a", "b"), **given),
            te_fuser.RMSNorm(WIDTH, **given),
            te_fuser.Residual(te_fuser.LayerNormMLP(WIDTH, 10, activation="swiglu", **given)),
            te_fuser.Linear(WIDTH, 3, **given),
        )
    )


def test_checkpoints_with_extra_state() -> None:
    """Transformer Engine's have one in each module: skipped, and said once for the whole model."""
    saved, x = model(), tensor(3, WIDTH)
    state = saved.state_dict()
    extra = {f"{path}_extra_state": torch.zeros(0) for path in ("0.", "1.", "2.0.", "3.")}
    for given in ({**state, **extra}, {**state, **dict.fromkeys(extra)}):
        fresh = model()
        with pytest.warns(UserWarning, match="_extra_state is skipped") as seen:
            keys = fresh.load_state_dict(given)
        assert len(seen) == 1 and not keys.missing_keys and not keys.unexpected_keys
        assert len(given) == len(state) + 4
        assert torch.equal(fresh(x), saved(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*1\._extra"):
        model().load_state_dict({**state, "1._extra": torch.zeros(0)})


def test_checkpoints_of_layers_with_extra_state() -> None:
    """In each of its modules, as Transformer Engine saves them: none is a part that this layer does not have."""
    given: dict[str, Any] = {"device": "cpu", "output_layernorm": True, "qk_norm_type": "RMSNorm"}
    saved, fresh = (randomize(te_fuser.TransformerLayer(8, 12, 2, **given), seed=k).eval() for k in range(2))
    paths = [
        *(f"self_attention.{name}" for name in ("qkv", "q_norm", "k_norm", "core_attention", "proj")),
        *("layernorm_mlp", "layernorm"),
    ]
    state = {**saved.state_dict(), **{f"{path}._extra_state": torch.zeros(3) for path in paths}}
    with pytest.warns(UserWarning, match="_extra_state is skipped") as seen:
        fresh.load_state_dict(state)
    x = torch.randn(3, 2, 8)
    assert len(seen) == 1 and torch.equal(fresh(x), saved(x))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*inter_attention\.proj\._extra_state"):
        fresh.load_state_dict({**state, "inter_attention.proj._extra_state": None})


def test_the_model_around_is_a_plain_one() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = te_fuser.LayerNormMLP(WIDTH, 10, device="cpu", params_dtype=torch.float64)
            self.head = te_fuser.Linear(WIDTH, 3, device="cpu", params_dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x + self.mlp(x))

    net, x = randomize(Net()), tensor(3, WIDTH)
    kept = checkpoint(net, x, use_reentrant=False)
    assert_same(kept, net(x), leaves_of(net, x), tolerance=1e-12)
    again = te_fuser.checkpoint(net, x)
    assert_same(again, net(x), leaves_of(net, x), tolerance=1e-12)


def test_a_named_output_of_a_preset_in_a_list() -> None:
    """Named outputs that ops put into a preset are asked of it as of any list."""
    preset = te_fuser.Linear(WIDTH, WIDTH, device="cpu")
    preset.insert(1, ops.Output("product"))
    x = torch.randn(3, WIDTH)
    y, product = preset(x, outputs=("product",))
    torch.testing.assert_close(product, x @ preset.weight.T)
    outer = te_fuser.Sequential(preset, ops.GELU())
    torch.testing.assert_close(outer(x, outputs=("product",))[1], product)
    preset.register_forward_hook(lambda *args: None)
    torch.testing.assert_close(outer(x, outputs=("product",))[1], product)
    assert torch.equal(preset(x), y)


def test_a_subclass_with_modules_of_its_own() -> None:
    class Adapted(te_fuser.LayerNormMLP):
        def __init__(self) -> None:
            super().__init__(WIDTH, 10, device="cpu", params_dtype=torch.float64)
            self.adapter = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, inp: torch.Tensor, *given: Any, **call: Any) -> Any:
            return super().forward(self.adapter(inp), *given, **call)

    adapted, x = Adapted(), tensor(4, WIDTH)
    plain = te_fuser.LayerNormMLP(WIDTH, 10, device="cpu", params_dtype=torch.float64)
    plain.load_state_dict(adapted.state_dict(), strict=False)

    def both(run: Any, mlp: Any) -> tuple[torch.Tensor, ...]:
        y = run(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, mlp.fc1_weight, *adapted.adapter.parameters()])

    want = both(lambda x: plain(adapted.adapter(x)), plain)
    for run in (adapted, te_fuser.Sequential(adapted)):
        torch.testing.assert_close(both(run, adapted), want, rtol=1e-12, atol=1e-12)


CORE = "softmax_scale attention_dropout qkv_format attention_type bottom_right_diagonal"
LAYER = """hidden_dropout attention_dropout drop_path_rate self_attn_mask_type enc_dec_attn_mask_type window_size
    softmax_type"""


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: te_fuser.DotProductAttention(2, 4), CORE),
        (lambda: te_fuser.MultiheadAttention(8, 2, device="cpu"), "qkv_format attention_type bottom_right_diagonal"),
        *((lambda k=kind: k(8, device="cpu"), "eps") for kind in (te_fuser.LayerNorm, te_fuser.RMSNorm)),
        *((lambda k=k: k(8, 4, device="cpu"), "eps") for k in (te_fuser.LayerNormLinear, te_fuser.LayerNormMLP)),
        (lambda: te_fuser.TransformerLayer(8, 4, 2, device="cpu"), LAYER),
    ],
)
def test_what_its_ops_have_or_calls_may_say_is_settled(make: Any, names: str) -> None:
    """A later one would hold for those variants alone that are made after it; the same one is taken."""
    preset = make()
    for name in names.split():
        before = getattr(preset, name, getattr(preset.common, name, None))
        setattr(preset, name, before)
        with pytest.raises(AttributeError, match=f"{name} is settled when it is made"):
            setattr(preset, name, 0.25)
        assert getattr(preset, name) == before


def test_ops_that_are_listed_anew_are_in_the_mode_of_those_before() -> None:
    layer = te_fuser.TransformerLayer(16, 32, 2, hidden_dropout=0.5, attention_dropout=0.5).eval()
    x = torch.randn(5, 2, 16)
    expected = layer(x)
    before = {name: m.training for name, m in layer.named_modules()}
    layer.relist()
    layer.self_attention.relist()
    assert {name: m.training for name, m in layer.named_modules()} == before and not any(before.values())
    assert torch.equal(layer(x), expected)
    layer.self_attention.train()
    layer.relist()
    assert not layer.training and layer.self_attention.training
