"""Hooks on all modules of a preset, as statistics of activations and summaries put them there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets.layers import HEADS, F, layer
from tests.twins import tensor

KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "norms of heads": {"qk_norm_type": "RMSNorm"},
    "sinks": {"softmax_type": "learnable", "fuse_qkv_params": True},
    "decoder": {"layer_type": "decoder"},
    "bert": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
}


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_all_modules(kind: str, leaves: bool) -> None:
    """Also on leaf modules alone: the layer gives what it gave, and each of its ops what the hook sees."""
    made, x = layer(**KINDS[kind]), tensor(5, 2, F)
    call = {"encoder_output": tensor(4, 2, F, grad=False, seed=2)} if kind == "decoder" else {}
    seen: list[Any] = []
    for change in ({}, {"self_attn_mask_type": "no_mask"}):
        parameters = [x, *made.parameters()]
        y = made(x, **call, **change)
        want = torch.autograd.grad(y.sum(), parameters)
        hooked = [m for m in made.modules() if not (leaves and [*m.children()])]
        hooks = [m.register_forward_hook(lambda m, args, y: seen.append(m)) for m in hooked]
        again = made(x, **call, **change)
        torch.testing.assert_close(again, y)
        torch.testing.assert_close(torch.autograd.grad(again.sum(), parameters), want)
        for hook in hooks:
            hook.remove()
    assert Counter(type(m) for m in seen)[ops.Bound] >= 6


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("part", ["core_attention", "proj", "layernorm_qkv"])
def test_a_hook_between_sequences_one_behind_the_other(part: str, turned: bool) -> None:
    """The parts on both sides of it read where sequences begin, also where the rotation does nothing."""
    made, x = layer(attn_input_format="thd"), tensor(8, F)
    call = {"cu_seqlens_q": torch.tensor([0, 3, 8])}
    if turned:
        call["rotary_pos_emb"] = tensor(5, 1, 1, F // HEADS, grad=False)
    parameters = [x, *made.parameters()]
    y = made(x, **call)
    want = torch.autograd.grad(y.sum(), parameters)
    seen: list[Any] = []
    made.self_attention.get_submodule(part).register_forward_hook(lambda *args: seen.append(1))
    again = made(x, **call)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), parameters), want)
    assert seen


def test_a_hook_on_a_bound_op_sees_what_it_gives() -> None:
    made, x = te_fuser.Linear(F, 5, params_dtype=torch.float64, device="cpu"), tensor(3, F)
    seen: list[Any] = []
    for m in made.modules():
        if not [*m.children()]:
            m.register_forward_hook(lambda m, args, y: seen.append((*args, y)))
    y = made(x)
    (x_seen, product), (product_seen, y_seen) = seen
    torch.testing.assert_close(product, x @ made.weight.t())
    assert x_seen is x and product_seen is product and y_seen is y


def test_the_mode_of_a_bound_op_is_that_of_its_op() -> None:
    made, x = layer(softmax_type="learnable", attention_dropout=0.5), tensor(5, 2, F)
    assert not torch.equal(made(x), made(x))
    made.eval()
    torch.testing.assert_close(made(x), made(x), rtol=0.0, atol=0.0)
