"""Presets whose parts are changed after they were made, by other modules, modes, forwards, none, or by hooks."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.looking import Apply
from tests.presets.layers import HEADS, LENGTHS, PAD, B, F, K, S, attention, layer
from tests.refused import raises
from tests.twins import tensor

CALLS: dict[str, dict[str, Any]] = {"as it was made": {}, "of another kind": {"self_attn_mask_type": "no_mask"}}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_mode_of_a_part_is_its_own(call: dict[str, Any]) -> None:
    """Also where a variant of the layer runs."""
    made, x = layer(hidden_dropout=0.0, attention_dropout=0.5), tensor(5, 2, F)

    def draws() -> bool:
        return not torch.equal(made(x, **call), made(x, **call))

    assert draws()
    made.self_attention.eval()
    assert not draws()
    made.train()
    assert draws()
    made.eval()
    assert not draws()
    made.self_attention.train()
    assert draws()


@pytest.mark.parametrize("part", ["self_attention", "self_attention.core_attention"])
def test_a_forward_of_its_own_is_not_passed_over(part: str) -> None:
    """A call whose variant would not run it is refused."""
    made, x, seen = layer(), tensor(5, 2, F), []
    module = made.get_submodule(part)
    run = module.forward

    def forward(*given: Any, **named: Any) -> Any:
        seen.append(part)
        return run(*given, **named)

    y = made(x)
    module.forward = forward
    torch.testing.assert_close(made(x), y)
    assert seen == [part]
    with pytest.raises(TypeError, match=r"Attention has a forward of its own, which the list around does not run"):
        made(x, self_attn_mask_type="no_mask")
    del module.forward
    made(x, self_attn_mask_type="no_mask")
    assert seen == [part]


def test_another_module_in_place_of_one_that_adds_to_main_grad() -> None:
    """The module cannot be told to write over main_grad."""
    made, x = layer(fuse_wgrad_accumulation=True, fuse_qkv_params=True), tensor(5, 2, F)
    for p in made.parameters():
        p.main_grad = torch.zeros_like(p)
    made.layernorm_mlp = torch.nn.Sequential(made.layernorm_mlp)
    made(x).sum().backward()
    with pytest.raises(TypeError, match="Sequential stands in place of a preset, and cannot be told is_first_microb"):
        made(x, is_first_microbatch=True)


def test_an_adapter_around_a_projection() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.more = base, torch.nn.Linear(F, F, bias=False, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.more(x)

    made, x, dy = layer(), tensor(5, 2, F), tensor(5, 2, F, grad=False, seed=3)
    made.self_attention.proj = Adapted(made.self_attention.proj)
    joined = layer()
    proj = joined.self_attention.proj
    with torch.no_grad():
        proj.weight.add_(made.self_attention.proj.more.weight)
    for call in CALLS.values():
        y, want = made(x, **call), joined(x, **call)
        torch.testing.assert_close(y, want)
        of = made.self_attention.proj
        found = torch.autograd.grad(y, [x, of.base.weight, of.more.weight], dy)
        wanted = torch.autograd.grad(want, [x, proj.weight, proj.weight], dy)
        torch.testing.assert_close(found, wanted)
    assert isinstance(made.layernorm_mlp, te_fuser.LayerNormMLP)


def test_another_module_in_place_of_attention_or_its_core() -> None:
    made, x = layer(), tensor(5, 2, F)
    for core, name in ((torch.nn.Identity(), "Identity"), (None, "None")):
        made.self_attention.core_attention = core
        for call in (made, made.self_attention):
            words = f"core_attention is {name}, and calls tell it their mask .* put a DotProductAttention there"
            raises(TypeError, words, call, x)
    made, x = layer(), tensor(5, 2, F)
    made.self_attention = ops.Identity()
    torch.testing.assert_close(made(x), 2 * x + made.layernorm_mlp(2 * x))
    raises(TypeError, "Identity stands in place of a MultiheadAttention", made, x, self_attn_mask_type="no_mask")


def test_a_part_or_a_parameter_that_is_gone() -> None:
    made, x = layer(), tensor(5, 2, F)
    made(x)
    made.layernorm_mlp.fc1_weight = None
    words = r"Bound\(MatMul\) reads 'fc1_weight' of LayerNormMLP, which has no parameter of that name: give it one"
    raises(AttributeError, words, made, x)
    op = ops.Linear(F, F)
    op.weight = None  # type: ignore[assignment]
    op.reset_parameters()
    raises(AttributeError, "reads 'weight' of Linear, which has no parameter of that name", op, x)
    made, x = layer(), tensor(5, 2, F)
    made.layernorm_mlp = None
    raises(AttributeError, r"TransformerLayer has no 'layernorm_mlp' any more: put te_fuser.ops.Id", made, x)
    del made.layernorm_mlp
    raises(AttributeError, "no 'layernorm_mlp' any more", made, x)


@pytest.mark.parametrize("op", [ops.Scale(value=2.0), Apply(lambda x: 2 * x)])
def test_what_is_appended_acts_in_every_kind_of_call(op: torch.nn.Module) -> None:
    made, usual, x = layer(), layer(), tensor(5, 2, F)
    made.append(op)
    for call in CALLS.values():
        torch.testing.assert_close(made(x, **call), 2 * usual(x, **call))
    part, alone = made.self_attention, usual.self_attention
    part.append(op)
    for kind in ("causal", "no_mask"):
        torch.testing.assert_close(part(x, attn_mask_type=kind), 2 * alone(x, attn_mask_type=kind))


@pytest.mark.parametrize("make", [te_fuser.Linear, te_fuser.LayerNormLinear, te_fuser.LayerNormMLP])
def test_what_is_appended_acts_in_each_micro_batch(make: Any) -> None:
    given = {"fuse_wgrad_accumulation": True, "params_dtype": torch.float64, "device": "cpu"}
    made, x = make(F, F, **given), tensor(5, F)
    for p in made.parameters():
        p.main_grad = torch.zeros_like(p)
    want = made(x)
    made.append(ops.Scale(value=2.0))
    made.probe = torch.nn.Identity()
    for first in (None, True):
        torch.testing.assert_close(made(x, is_first_microbatch=first), 2 * want)
    if make is not te_fuser.LayerNormMLP:
        bias = torch.zeros(F, dtype=torch.float64)
        torch.testing.assert_close(made(x, bias=bias), 2 * (want - made.bias))
    made.relist()
    torch.testing.assert_close(made(x), 2 * want)


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


BOTH, ARBITRARY = ("self_attention", "inter_attention"), PAD.expand(B, 1, S, S)
CORE, PARTS = ("core_attention",), ("self_attention", "layernorm_mlp")
MEMORY, ANGLES = tensor(K, B, F, grad=False, seed=2), tensor(S, 1, 1, F // HEADS, grad=False)
DECODED: dict[str, Any] = {"attention_mask": PAD, "self_attn_mask_type": "padding", "encoder_output": MEMORY}
CROSSED = {**DECODED, "enc_dec_window_size": (1, 0), "enc_dec_attn_mask_type": "causal"}
SPLIT = {"cu_seqlens_q": torch.tensor([0, 3, 8])}
KEPT: dict[str, Any] = {"fuse_wgrad_accumulation": True, "fuse_qkv_params": True}
NORMED = {"apply_residual_connection_post_layernorm": True}
LENGTHY = {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": torch.tensor([0, 7, 9, 12]), "attn_mask_type": "padding"}
TOKENS = {"attn_input_format": "thd"}
# A maker and its arguments, a call, and the parts that have hooks, in the order in which they end.
HOOKED: list[tuple[Any, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (layer, {}, {"window_size": (1, 0)}, ("self_attention.proj", "layernorm_mlp")),
    (layer, {"layer_type": "decoder"}, {"encoder_output": MEMORY}, BOTH),
    (layer, {"layer_type": "decoder"}, CROSSED, BOTH),
    (layer, {"layer_type": "decoder"}, {**CROSSED, "rotary_pos_emb": ANGLES}, BOTH),
    *((layer, KEPT, call, PARTS) for call in ({}, {"window_size": (1, 0)}, {"is_first_microbatch": True})),
    (layer, {**NORMED, "output_layernorm": True}, {}, PARTS),
    (layer, {**NORMED, "output_layernorm": True}, {}, ("self_attention.qkv", "self_attention")),
    *((layer, NORMED, {}, paths) for paths in (PARTS, PARTS[:1], PARTS[1:])),
    (layer, NORMED, {}, ("self_attention.layernorm_qkv", "self_attention")),
    *(
        (layer, TOKENS, {**SPLIT, **call}, (f"self_attention.{part}",))
        for part in ("core_attention", "proj", "layernorm_qkv")
        for call in ({}, {"rotary_pos_emb": ANGLES})  # which the other parts do not read
    ),
    *((attention, {}, call, CORE) for call in ({}, {"attn_mask_type": "no_mask"}, LENGTHY)),
    (attention, {"fuse_qkv_params": True, "softmax_type": "learnable"}, {}, CORE),
    (attention, {"attn_mask_type": "padding"}, {"attention_mask": PAD}, CORE),
    (attention, {"attn_mask_type": "arbitrary"}, {"attention_mask": ARBITRARY}, CORE),
    (attention, {"attention_type": "cross", "attn_mask_type": "no_mask"}, {"encoder_output": MEMORY}, CORE),
]


@pytest.mark.parametrize(("make", "keywords", "call", "paths"), HOOKED)
def test_hooks_of_parts_run_and_change_nothing(
    make: Any, keywords: dict[str, Any], call: dict[str, Any], paths: tuple[str, ...]
) -> None:
    """Put there before the first call, and after it; a part that runs by itself still gives what others read."""
    made, x = make(**keywords), tensor(8, F) if keywords is TOKENS else tensor(S, B, F)
    early = copy.deepcopy(made)
    for p in (*made.parameters(), *early.parameters()):
        p.main_grad = torch.zeros_like(p)
    want = made(x, **call)
    dy = tensor(*want.shape, grad=False, seed=3)

    def gradients(model: Any, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x, *(p for p in model.parameters() if p.dim() < 2 or keywords is not KEPT)]
        return torch.autograd.grad(y, leaves, dy)

    wanted = gradients(made, want)
    for hooked in (made, early):
        seen: list[str] = []
        hooks = [hooked.get_submodule(n).register_forward_hook(lambda *_, n=n, s=seen: s.append(n)) for n in paths]
        y = hooked(x, **call)
        assert seen == list(paths)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(gradients(hooked, y), wanted)
        for hook in hooks:
            hook.remove()


def test_hooks_and_modes_of_bound_ops() -> None:
    made, x = te_fuser.Linear(F, 5, params_dtype=torch.float64, device="cpu"), tensor(3, F)
    seen: list[Any] = []
    for m in made.modules():
        if not [*m.children()]:
            m.register_forward_hook(lambda m, args, y: seen.append((*args, y)))
    y = made(x)
    (x_seen, product), (product_seen, y_seen) = seen
    torch.testing.assert_close(product, x @ made.weight.t())
    assert x_seen is x and product_seen is product and y_seen is y
    made, x = layer(softmax_type="learnable", attention_dropout=0.5), tensor(5, 2, F)
    assert not torch.equal(made(x), made(x))
    made.eval()
    torch.testing.assert_close(made(x), made(x), rtol=0.0, atol=0.0)
