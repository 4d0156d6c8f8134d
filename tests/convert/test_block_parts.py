"""Converted layers with other parts, hooks and settings; in training loops, regions, threads and transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from tests.convert.models import FAMILIES, FAMILY, assert_alike, both, layer_of, model_of, padded, results, tokens, ways
from tests.threads import in_threads

IDS = tokens()


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
        original = model_of(family, num_hidden_layers=1, **config)
        model = copy.deepcopy(original)
        assert te_fuser.convert(model, check=False).left == {}
        assert_alike(results(model, IDS), results(original, IDS))
    assert te_fuser.convert(model_of("gemma3", hidden_activation=name), check=False).left == {}


def test_computed_parameters() -> None:
    model, original = both("llama")
    for each in (model, original):
        layer = each.model.layers[0]
        nn.utils.parametrizations.weight_norm(layer.self_attn.k_proj)
        nn.utils.parametrizations.weight_norm(layer.mlp.down_proj)
    assert_alike(results(model, IDS), results(original, IDS))
    assert model.model.layers[0].left() == {}


HOOKED = [
    "self_attn", "self_attn.k_proj", "self_attn.q_norm", "mlp", "mlp.act_fn", "mlp.down_proj", "input_layernorm", "",
]  # fmt: skip


@pytest.mark.parametrize(("family", "path"), [*(("qwen3", path) for path in HOOKED), ("gpt2", "mlp.act")])
def test_hooks_run(family: str, path: str) -> None:
    model, original = both(family)
    model(IDS)
    seen = []
    for each in (model, original):
        hooked = layer_of(each, 1).get_submodule(path)
        hooked.register_forward_hook(lambda m, args, y: seen.append(type(m).__name__))
    assert_alike(results(model, IDS), results(original, IDS))
    assert len(seen) == 2 and seen[0] == seen[1]
    call: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(IDS, **call), original.generate(IDS, **call))
    assert len(seen) == 8
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(m))
    model(IDS)
    handle.remove()
    last = layer_of(model).get_submodule("mlp.c_proj" if family == "gpt2" else "mlp.down_proj")
    assert sum(m is last for m in seen) == 1


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
    # transformers' own hooks stay where a call once asked for attentions.
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
    """Replacement of a module's forward, as accelerate's hooks make it: calls the forward that it has kept."""

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


@pytest.mark.parametrize(
    ("first", "removed"),
    [("hook", "before revert"), ("convert", "before revert"), ("convert", "after revert"), ("hook", "never")],
)
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


@pytest.mark.parametrize(("family", "when"), [("llama", "before"), ("qwen3", "after")])
def test_fewer_heads_than_the_config_says(family: str, when: str) -> None:
    """Heads that were pruned: the model's attention reads how many there are from the shapes."""
    original = model_of(family)
    model = copy.deepcopy(original)
    conversion = te_fuser.convert(model) if when == "after" else None
    for each in (original, model):
        attention = each.model.layers[0].self_attn
        bias = attention.q_proj.bias is not None
        for name, inside, outside in (("q_proj", 16, 16), ("k_proj", 16, 8), ("v_proj", 16, 8), ("o_proj", 16, 16)):
            torch.manual_seed(1)
            setattr(attention, name, nn.Linear(inside, outside, bias=bias, dtype=torch.float64))
    conversion = conversion or te_fuser.convert(model)
    assert_alike(results(model, IDS), results(original, IDS))
    words = "its q_proj gives 16 features, and its config says 4 heads of 8"
    assert conversion.left == {"model.layers.0.self_attn": words}


def prune(model: Any, features: int) -> None:
    """Leave features of the MLPs away by their weights alone: attributes say what they were before."""
    for layer in model.model.layers:
        for name, rows in (("gate_proj", True), ("up_proj", True), ("down_proj", False)):
            linear = layer.mlp.get_submodule(name)
            weight = linear.weight.detach()
            linear.weight = nn.Parameter((weight[:features] if rows else weight[:, :features]).clone())
            if rows:
                linear.bias = nn.Parameter(linear.bias.detach()[:features].clone())


def test_weights_of_another_shape_than_attributes_say() -> None:
    model, original = both("llama")
    for features in (17, 11):  # after it was converted, and before it is once more
        prune(model, features)
        prune(original, features)
        assert_alike(results(model, IDS), results(original, IDS))
        te_fuser.revert(model)
        made = te_fuser.convert(model)
        assert made.left == {} and made.error < 1e-5
        assert_alike(results(model, IDS), results(original, IDS))


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
    """Checkpointed calls run the same way again in backward, though nobody records then."""
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


def test_compilers_and_transforms_have_the_model_that_it_was() -> None:
    model, original = both("llama", torch.float32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, original(IDS).logits)
    model, original = both("llama")
    made = [
        torch.func.vmap(lambda x, each=each: each(x[None], use_cache=False).logits)(IDS) for each in (model, original)
    ]
    torch.testing.assert_close(*made)


def test_threads() -> None:
    model, original = both("mistral")
    want = original(IDS, attention_mask=padded()).logits.detach()
    for made in in_threads(*[lambda: model(IDS, attention_mask=padded()).logits.detach()] * 3):
        torch.testing.assert_close(made[padded() == 1], want[padded() == 1], rtol=0, atol=1e-5)


def set_eps(layer: Any, *names: str) -> None:
    """Another eps of norms whose names hold one of these."""
    for norm in (m for path, m in layer.named_modules() if any(name in path for name in names)):
        setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", 0.5)


def set_biases(model: Any, value: float | None) -> None:
    for name in ("o_proj", "q_proj"):
        linear = layer_of(model).self_attn.get_submodule(name)
        bias = torch.full_like(linear.weight[:, 0], value or 0.0)
        linear.bias = None if value is None else nn.Parameter(bias)


NO_BIAS = {"self_attn.q_proj": "its dtype, device or bias is not that of self_attn.k_proj, self_attn.v_proj"}
NO_NORM = {"self_attn": "of its q_norm: it is a Identity, no Qwen3RMSNorm"}
DIFFER = {"self_attn": "its norms of heads differ in eps"}
Change = Callable[[Any], Any]
# A family, what changes in turn, and what is left then of the layer that it names.
CHANGES: dict[str, tuple[str, list[Change], int, dict[str, str]]] = {
    "scaling": ("llama", [lambda m: setattr(layer_of(m).self_attn, "scaling", 0.1)], 0, {}),
    "no norm": ("qwen3", [lambda m: setattr(layer_of(m).self_attn, "q_norm", nn.Identity())], 0, NO_NORM),
    "biases": ("llama", [lambda m: set_biases(m, 0.5), lambda m: set_biases(m, None)], 0, NO_BIAS),
    **{f"eps, {family}": (family, [lambda m: set_eps(layer_of(m), "norm", "ln")], 0, {}) for family in ("gpt2", "llama",
     "gemma2", "qwen3", "gemma3")},
    **{f"eps of some heads, {family}": (family, [lambda m: set_eps(layer_of(m, 1), "k_norm")], 1,
     DIFFER) for family in ("qwen3", "gemma3")},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_settings_may_change(name: str) -> None:
    family, changes, number, left = CHANGES[name]
    model, original = both(family)
    model(IDS)
    for change in changes:
        for each in (model, original):
            change(each)
        assert_alike(results(model, IDS), results(original, IDS))
    assert layer_of(model, number).left() == left


def test_an_attention_that_computes_in_a_way_of_its_own() -> None:
    model, original = both("gpt2", reorder_and_upcast_attn=True)
    words = "it computes scores in a way of its own (reorder_and_upcast_attn)"
    assert layer_of(model).left() == {"attn": words}
    assert_alike(results(model, IDS), results(original, IDS))


def test_embeddings_of_any_strides() -> None:
    model, original = both("qwen2")
    x = torch.randn(9, 2, 32, dtype=torch.float64)[..., ::2].transpose(0, 1).requires_grad_()
    made = [each(inputs_embeds=x).logits for each in (model, original)]
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in made]
    assert_alike({"y": made[0], "dx": gradients[0]}, {"y": made[1], "dx": gradients[1]}, 1e-5)


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
    """Hidden scores get the lowest number of eager attention's dtype, which is not so low in float32."""
    exact = model_of("gemma2", torch.float32)
    original = copy.deepcopy(exact).to(torch.float16)
    model = copy.deepcopy(original)
    te_fuser.convert(model)
    ids, mask = tokens(2, 12), padded(2, 12)
    wanted, theirs, ours = (results(each, ids, attention_mask=mask) for each in (exact, original, model))
    for name, want in wanted.items():
        errors = [(made[name].float() - want).norm() for made in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(torch.float16).eps * want.norm(), name
