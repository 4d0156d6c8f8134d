"""Converted layers in training loops, regions, threads and transforms, and with settings that change."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import te_fuser
from tests.convert.models import FAMILIES, FAMILY, assert_alike, both, model_of, padded, results, tokens

IDS = tokens()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    model, original = both("llama")
    want = results(original.train(), IDS)
    # Releases call it by one of these names, or by both.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()
    assert_alike(results(model, IDS), want)


@pytest.mark.parametrize(
    ("family", "by_config"), [*((family, False) for family in FAMILIES), ("llama", True), ("gpt2", True)]
)
def test_checkpointing_of_a_call_that_records_attention(family: str, by_config: bool) -> None:
    """What runs again in backward is what ran, though nobody records then."""
    model, original = both(family)
    found = []
    for each in (model, original):
        each.gradient_checkpointing_enable({"use_reentrant": False})
        each.set_attn_implementation("eager")
        each.config.output_attentions = by_config
        y = each.train()(IDS, use_cache=False, **({} if by_config else {"output_attentions": True}))
        (y.logits.square().sum() + y.attentions[0].square().sum()).backward()
        each.config.output_attentions = False
        each(IDS, use_cache=False).logits.sum().backward()
        grads = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        found.append({"logits": y.logits.detach(), **grads})
    assert_alike(*found)


def test_dropout() -> None:
    settings = {"attn_pdrop": 0.2, "resid_pdrop": 0.3}
    model, original = both("gpt2", **settings)
    assert_alike(results(model, IDS), results(original, IDS))
    model.train()
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(results(model, IDS))
    assert torch.equal(made[0]["logits"], made[1]["logits"])
    assert not torch.allclose(made[0]["logits"], made[2]["logits"])
    model.transformer.h[0].mlp.dropout.p = model.transformer.h[0].attn.resid_dropout.p = 1.0
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    assert torch.equal(model.transformer.h[0](x), x)
    model.transformer.h[0].eval()
    assert_alike({"y": model.transformer.h[0](x)}, {"y": original.transformer.h[0](x)})


@FAMILY
def test_autocast(family: str) -> None:
    model, original = both(family, torch.float32)
    exact = results(original, IDS)
    with torch.autocast("cpu", torch.bfloat16):
        found = [results(each, IDS) for each in (model, original)]
    for name, want in exact.items():
        assert found[0][name].dtype == found[1][name].dtype
        errors = [(each[name].float() - want).norm().item() for each in found]
        assert errors[0] <= 2 * errors[1] + 1e-3 * want.norm().item(), name


def test_compiled_it_is_the_model_that_it_was() -> None:
    model, original = both("llama", torch.float32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, original(IDS).logits)


def test_threads() -> None:
    model, original = both("mistral")
    want, found = original(IDS, attention_mask=padded()).logits.detach(), []
    work = lambda: found.append(model(IDS, attention_mask=padded()).logits.detach())  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in found:
        torch.testing.assert_close(made[padded() == 1], want[padded() == 1], rtol=0, atol=1e-5)
    assert len(found) == 3


def test_settings_may_change() -> None:
    model, original = both("llama")
    model(IDS)
    for each in (model, original):
        each.model.layers[0].self_attn.scaling = 0.1
    assert_alike(results(model, IDS), results(original, IDS))
    model, original = both("gpt2", reorder_and_upcast_attn=True)
    words = "it computes scores in a way of its own (reorder_and_upcast_attn)"
    assert model.transformer.h[0].left() == {"attn": words}
    assert_alike(results(model, IDS), results(original, IDS))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "qwen3", "gemma3"])
def test_eps_of_norms_may_change(family: str) -> None:
    model, original = both(family)
    model(IDS)
    for each in (model, original):
        layer = (each.transformer.h if family == "gpt2" else each.model.layers)[0]
        for norm in (m for name, m in layer.named_modules() if "norm" in name or "ln" in name):
            setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", 0.5)
    assert_alike(results(model, IDS), results(original, IDS))
    if family in ("qwen3", "gemma3"):
        for each in (model, original):
            setattr(each.model.layers[1].self_attn.k_norm, "variance_epsilon" if family == "qwen3" else "eps", 0.5)
        assert model.model.layers[1].left() == {"self_attn": "its norms of heads differ in eps"}
        assert_alike(results(model, IDS), results(original, IDS))


def test_norms_of_heads_may_be_of_another_class() -> None:
    model, original = both("qwen3")
    for each in (model, original):
        each.model.layers[0].self_attn.q_norm = nn.Identity()
    assert model.model.layers[0].left() == {"self_attn": "of its q_norm: it is a Identity, no Qwen3RMSNorm"}
    assert_alike(results(model, IDS), results(original, IDS))


def test_biases_may_come_and_go() -> None:
    model, original = both("llama")
    model(IDS)
    for value in (0.5, None):
        for each in (model, original):
            for name in ("o_proj", "q_proj"):
                linear = each.model.layers[0].self_attn.get_submodule(name)
                bias = torch.full_like(linear.weight[:, 0], value or 0.0)
                linear.bias = None if value is None else nn.Parameter(bias)
        assert_alike(results(model, IDS), results(original, IDS))


def test_embeddings_of_any_strides() -> None:
    model, original = both("qwen2")
    x = torch.randn(9, 2, 32, dtype=torch.float64)[..., ::2].transpose(0, 1).requires_grad_()
    made = [each(inputs_embeds=x).logits for each in (model, original)]
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in made]
    assert_alike({"y": made[0], "dx": gradients[0]}, {"y": made[1], "dx": gradients[1]}, 1e-5)


def test_transforms_trace_the_original() -> None:
    model, original = both("llama")
    made = [
        torch.func.vmap(lambda x, each=each: each(x[None], use_cache=False).logits)(IDS) for each in (model, original)
    ]
    torch.testing.assert_close(*made)


def test_frozen_parameters_and_inference_mode() -> None:
    model, original = both("gemma3")
    for each in (model, original):
        each.requires_grad_(False)
        each.model.layers[1].self_attn.v_proj.requires_grad_()
        each.model.layers[0].input_layernorm.requires_grad_()
    made = results(model, IDS)
    assert len(made) == 4
    assert_alike(made, results(original, IDS))
    with torch.inference_mode():
        call = {"attention_mask": padded()}
        assert_alike({"y": model(IDS, **call).logits[1]}, {"y": original(IDS, **call).logits[1]})


def test_rows_that_a_mask_in_half_precision_hides_wholly() -> None:
    """What eager attention adds to hide is the lowest number of its dtype, which is not so low in float32."""
    exact = model_of("gemma2", torch.float32)
    original = copy.deepcopy(exact).to(torch.float16)
    model = copy.deepcopy(original)
    te_fuser.convert(model)
    ids, mask = tokens(2, 12), padded(2, 12)
    wanted, theirs, ours = (results(each, ids, attention_mask=mask) for each in (exact, original, model))
    for name, want in wanted.items():
        errors = [(made[name].float() - want).norm() for made in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(torch.float16).eps * want.norm(), name
