"""Converted layers: values, gradients and tokens of every family's model, however it is called."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from tests.convert.models import (
    FAMILY,
    assert_alike,
    both,
    model_of,
    padded,
    results,
    tokens,
    transformers,
    ways,
)

IDS = tokens()


@FAMILY
def test_values_and_gradients(family: str) -> None:
    model, original = both(family)
    for training in (True, False):
        model.train(training), original.train(training)
        for call in ({}, {"use_cache": False}):
            with ways(model) as found:
                assert_alike(results(model, IDS, **call), results(original, IDS, **call))
            assert set(found) <= {"causal", "given", "added"}
    assert_alike(*({"logits": each(IDS[:1, :1], use_cache=False).logits} for each in (model, original)))
    assert model(IDS[:0]).logits.shape[:2] == (0, 9)


@FAMILY
def test_padding(family: str) -> None:
    # Of what eager attention adds in float64, float32 makes infinities.
    exact = family != "gemma2"
    model, original = both(family, torch.float64 if exact else torch.float32)
    call = {"attention_mask": padded()}
    assert_alike(results(model, IDS, **call), results(original, IDS, **call), 2e-6 if exact else 1e-4)


@FAMILY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(family: str, dtype: torch.dtype) -> None:
    """As near to float64 as the original is."""
    model, original = both(family, dtype)
    exact = results(copy.deepcopy(original).double(), IDS)
    ours, theirs = results(model, IDS), results(original, IDS)
    shares = {}
    for name, want in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        errors = [(made[name].double() - want).norm().item() for made in (ours, theirs)]
        shares[name] = errors[0] / (errors[1] + torch.finfo(dtype).eps * want.norm().item())
    assert max(shares.values()) < 3 and sum(shares.values()) / len(shares) < 1.1  # one tensor's error may be luck


@FAMILY
def test_it_is_trained_as_it_was(family: str) -> None:
    pair = both(family)
    for model in pair:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            ids = tokens(seed=step)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    assert_alike(pair[0].state_dict(), pair[1].state_dict(), 1e-5)


@FAMILY
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(family: str, cache: str | None) -> None:
    model, original = both(family, torch.float32)
    call: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    for mask in (None, padded()):
        mask = torch.ones_like(IDS) if mask is None else mask
        want = original.generate(IDS, attention_mask=mask, **call)
        assert torch.equal(model.generate(IDS, attention_mask=mask, **call), want)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_several_positions_behind_a_cache(family: str) -> None:
    model, original = both(family)
    found = []
    for each in (model, original):
        cache = transformers.DynamicCache(config=each.config)
        with ways(model) as how:
            pieces = [each(piece, past_key_values=cache, use_cache=True).logits for piece in IDS.split([4, 3, 2], 1)]
        found.append({"logits": torch.cat(pieces, 1), **{f"key {k}": c.keys for k, c in enumerate(cache.layers)}})
    assert_alike(*found)
    assert not how and set(ways_of(model)) == {"function"}


def ways_of(model: Any) -> list[str]:
    """How attention of two positions behind others is run."""
    cache = transformers.DynamicCache(config=model.config)
    model(IDS, past_key_values=cache)
    with ways(model) as how:
        model(IDS[:, :2], past_key_values=cache)
    return how


def test_other_caches() -> None:
    model, original = both("mistral", torch.float32)
    for make in (
        lambda c: transformers.DynamicCache(),
        lambda c: transformers.StaticCache(c, max_cache_len=20),
    ):
        call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "attention_mask": padded()}
        want = original.generate(IDS, past_key_values=make(original.config), **call)
        assert torch.equal(model.generate(IDS, past_key_values=make(model.config), **call), want)
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(IDS, **beams), original.generate(IDS, **beams))


def test_eager_attention_and_masks_of_the_caller() -> None:
    model, original = both("llama")
    for each in (model, original):
        each.set_attn_implementation("eager")
    with ways(model) as found:
        assert_alike(results(model, IDS), results(original, IDS))
        assert set(found) == {"added"}
    seen = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()  # eager attention adds booleans too
    for mask in (torch.randn(2, 1, 9, 9, dtype=torch.float64), seen):
        wanted = original(IDS, attention_mask=mask).logits
        torch.testing.assert_close(model(IDS, attention_mask=mask).logits, wanted, rtol=0, atol=1e-5)
    model.config.is_causal = original.config.is_causal = False
    assert_alike(results(model, IDS), results(original, IDS))


def test_attention_by_another_function() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    calls = []

    def another(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return sdpa_attention_forward(*args, **options)

    transformers.AttentionInterface.register("another", another)
    ALL_MASK_ATTENTION_FUNCTIONS.register("another", sdpa_mask)
    original = model_of("qwen3")
    model = copy.deepcopy(original)
    model.set_attn_implementation("another")
    made = te_fuser.convert(model)
    calls.clear()
    assert_alike(results(model, IDS), results(original, IDS))
    assert len(calls) == 2
    assert made.left == {
        f"model.layers.{k}.self_attn": "attention is computed by its function, 'another'" for k in range(2)
    }


# ------------------------------------------------------------------------------------------- parts that run alone


class Adapted(nn.Module):
    """A Linear with a product of low rank beside it, as adapters have it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        rows, columns = base.weight.shape if isinstance(base, nn.Linear) else base.weight.t().shape
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(columns, 2, bias=False)
        self.up = nn.Linear(2, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


ADAPTED = {
    "llama": ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"],
    "gpt2": ["attn.c_attn", "mlp.c_proj"],
}


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters(family: str) -> None:
    original = model_of(family)
    for layer in original.base_model.get_submodule("h" if family == "gpt2" else "layers"):
        for path in ADAPTED[family]:
            parent, _, name = path.rpartition(".")
            setattr(layer.get_submodule(parent), name, Adapted(layer.get_submodule(path)).double())
    model = copy.deepcopy(original)
    made = te_fuser.convert(model)
    assert {path.split(".", 3)[3] for path in made.left} == set(ADAPTED[family]) if family == "llama" else made.left
    assert all("it is a Adapted, no " in why for why in made.left.values())
    assert_alike(results(model, IDS), results(original, IDS))
    call: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(IDS, **call), original.generate(IDS, **call))


def test_an_adapter_may_come_later_and_go() -> None:
    model, original = both("llama")
    model(IDS)
    plain = model.model.layers[0].self_attn.q_proj
    adapter = Adapted(plain).double()
    for each in (model, original):
        each.model.layers[0].self_attn.q_proj = adapter
    assert_alike(results(model, IDS), results(original, IDS))
    assert model.model.layers[0].left() == {"self_attn.q_proj": "it is a Adapted, no Linear"}
    for each in (model, original):
        each.model.layers[0].self_attn.q_proj = plain.requires_grad_()
    assert_alike(results(model, IDS), results(original, IDS))
    assert model.model.layers[0].left() == {}


ACTIVATIONS = ["silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "sigmoid"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    for family, config in (("llama", {"hidden_act": name}), ("gpt2", {"activation_function": name})):
        original = model_of(family, **config)
        model = copy.deepcopy(original)
        made = te_fuser.convert(model)
        assert made.left == {}
        assert_alike(results(model, IDS), results(original, IDS))
    gemma = model_of("gemma3", hidden_activation=name)
    assert te_fuser.convert(gemma).left == {}


def test_computed_parameters() -> None:
    model, original = both("llama")
    for each in (model, original):
        layer = each.model.layers[0]
        nn.utils.parametrizations.weight_norm(layer.self_attn.k_proj)
        nn.utils.parametrizations.weight_norm(layer.mlp.down_proj)
    assert_alike(results(model, IDS), results(original, IDS))
    assert model.model.layers[0].left() == {}


HOOKED = [
    "self_attn",
    "self_attn.k_proj",
    "self_attn.q_norm",
    "mlp",
    "mlp.act_fn",
    "mlp.down_proj",
    "input_layernorm",
    "",
]


@pytest.mark.parametrize("path", HOOKED)
def test_hooks_run(path: str) -> None:
    model, original = both("qwen3")
    model(IDS)
    seen = []
    for each in (model, original):
        hooked = each.model.layers[1].get_submodule(path)
        hooked.register_forward_hook(lambda m, args, y: seen.append(type(m).__name__))
    assert_alike(results(model, IDS), results(original, IDS))
    assert len(seen) == 2 and seen[0] == seen[1]
    call: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(IDS, **call), original.generate(IDS, **call))
    assert len(seen) == 8
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(m))
    model(IDS)
    handle.remove()
    assert sum(m is model.model.layers[0].mlp.down_proj for m in seen) == 1


def test_recorded_attention_and_hidden_states() -> None:
    model, original = both("gpt2")
    for each in (model, original):
        each.set_attn_implementation("eager")
    asked = {"output_attentions": True, "output_hidden_states": True}
    ours, theirs = model(IDS, **asked), original(IDS, **asked)
    for name in ("attentions", "hidden_states"):
        pairs = list(zip(getattr(ours, name), getattr(theirs, name), strict=True))
        assert len(pairs) >= 2
        for mine, want in pairs:
            torch.testing.assert_close(mine, want, rtol=0, atol=1e-5)
    with ways(model) as found:
        model(IDS, output_hidden_states=True)
        model(IDS)
    assert set(found) == {"added"}


# --------------------------------------------------------------------------------------------- how it is called


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    model, original = both("llama")
    want = results(original.train(), IDS)
    # Releases call it by one of these names, or by both.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()
    assert_alike(results(model, IDS), want)


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


def test_a_hook_that_comes_after_those_that_record() -> None:
    """transformers' own hooks stay where a call once asked for attentions."""
    model, original = both("llama")
    seen = []
    for each in (model, original):
        each.set_attn_implementation("eager")
        each(IDS, output_attentions=True)
        each.model.layers[0].self_attn.register_forward_hook(lambda m, args, y: seen.append(m))
        each(IDS)
    assert seen == [model.model.layers[0].self_attn, original.model.layers[0].self_attn]


def test_an_eager_attention_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model, original = both("llama")
    for each in (model, original):
        each.set_attn_implementation("eager")
    model(IDS)
    real, calls = modeling_llama.eager_attention_forward, []

    def another(*args: Any, **options: Any) -> Any:
        calls.append(1)
        y, shares = real(*args, **options)
        return 2 * y, shares

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", another)
    assert_alike(results(model, IDS), results(original, IDS))
    assert len(calls) == 4
    assert model.model.layers[0].left() == {"self_attn": "attention is computed by its function, 'eager'"}


class Mean(nn.Module):
    """In place of attention or of an MLP: nothing of what these have."""

    def forward(self, *args: Any, hidden_states: torch.Tensor | None = None, **others: Any) -> Any:
        x = args[0] if hidden_states is None else hidden_states
        y = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return y if self.alone else (y, None)

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_attention_and_mlp_of_other_classes(family: str) -> None:
    original = model_of(family)
    layers = original.transformer.h if family == "gpt2" else original.model.layers
    attention = "attn" if family == "gpt2" else "self_attn"
    setattr(layers[0], attention, Mean(alone=False))
    layers[1].mlp = Mean(alone=True)
    model = copy.deepcopy(original)
    made = te_fuser.convert(model)
    assert {path.partition(".")[2].split(".", 1)[1]: why.split(",")[0] for path, why in made.left.items()} == {
        f"0.{attention}": "it is a Mean",
        "1.mlp": "it is a Mean",
    }
    for training in (True, False):
        model.train(training), original.train(training)
        assert_alike(results(model, IDS), results(original, IDS))


class Keeping:
    """What runs in place of a module's forward, as accelerate's hooks do: it calls the one that it has kept."""

    def __init__(self, module: Any, seen: list[Any]) -> None:
        self.seen = seen
        module._hf_hook, module._old_forward, module.forward = self, module.forward, lambda *a, **k: self(module, a, k)

    def __call__(self, module: Any, args: Any, options: Any) -> Any:
        self.seen.append(module)
        return module._old_forward(*args, **options)

    @staticmethod
    def remove(module: Any) -> None:
        module.forward = module._old_forward
        del module._hf_hook, module._old_forward


@pytest.mark.parametrize("first", ["hook", "convert"])
@pytest.mark.parametrize("removed", ["before revert", "after revert", "never"])
def test_hooks_that_keep_the_forward(first: str, removed: str) -> None:
    original, seen = model_of("llama"), list[Any]()
    model = copy.deepcopy(original)
    if first == "convert":
        te_fuser.convert(model)
    for layer in model.model.layers:
        Keeping(layer, seen)
    inner = model.model.layers[1].mlp.down_proj
    Keeping(inner, seen)
    made = te_fuser.convert(model, check=False)
    assert made.converted == ("model.layers.0", "model.layers.1")
    assert made.left == {"model.layers.1.mlp.down_proj": "it has a forward of its own"}
    with ways(model) as found:
        assert_alike(results(model, IDS), results(original, IDS))
    assert len(found) == 2 and seen == [*model.model.layers, inner]
    if removed == "before revert":
        for module in (*model.model.layers, inner):
            Keeping.remove(module)
        assert made.left == {}
        with ways(model) as found:
            assert_alike(results(model, IDS), results(original, IDS))
        assert len(found) == 2 and len(seen) == 3
    te_fuser.revert(model)
    assert type(model.model.layers[0]).__module__.startswith("transformers.")
    assert_alike(results(model, IDS), results(original, IDS))
    if removed == "after revert":
        for module in (*model.model.layers, inner):
            Keeping.remove(module)
    te_fuser.convert(model)
    assert_alike(results(model, IDS), results(original, IDS))
