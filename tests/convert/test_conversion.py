"""convert and revert: what becomes of a model, what is said and explained of it, and what goes on working."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.autograd import forward_ad

import te_fuser
from te_fuser.params.concatenated_parameter import lie_together
from tests.convert.models import CACHE, FAMILY, assert_alike, both, model_of, results, tokens, transformers
from tests.refused import raises
from tests.twins import stored

IDS = tokens()


@FAMILY
def test_modules_and_parameters_stay_the_models_own(family: str) -> None:
    model = model_of(family)
    kinds = {name: type(m) for name, m in model.named_modules()}
    parameters = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    states = model.state_dict()
    wanted = results(model, IDS)
    made = te_fuser.convert(model)
    assert made.model is model and made.left == {} and 0 <= made.error < 1e-5
    layers = "transformer.h" if family == "gpt2" else "model.layers"
    assert made.converted == (f"{layers}.0", f"{layers}.1")
    assert {name: id(p) for name, p in model.named_parameters()} == {n: p for n, (p, _) in parameters.items()}
    assert model.state_dict().keys() == states.keys()
    assert dict(model.named_modules()).keys() == kinds.keys()
    assert all(issubclass(type(m), kinds[name]) for name, m in model.named_modules())
    assert_alike(results(model, IDS), wanted)
    assert te_fuser.revert(model) is model
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    again = results(model, IDS)
    assert all(torch.equal(again[name], want) for name, want in wanted.items())
    assert all(torch.equal(p, parameters[name][1]) for name, p in model.named_parameters())
    assert not any("te_fuser" in name or name == "_wholes" for m in model.modules() for name in m.__dict__)
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)


def test_what_is_said() -> None:
    model = model_of("llama", torch.float32)
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    made = te_fuser.convert(model)
    assert made.left == {"model.layers.1.mlp": "no op gates by its activation, Tanh"}
    assert str(made).startswith("LlamaForCausalLM: 2 layers run by te_fuser, ")
    assert str(made).endswith("  model.layers.1.mlp is left: no op gates by its activation, Tanh")
    assert "run by te_fuser" in repr(model.model.layers[0]) and type(model.model.layers[0]).__name__ in str(model)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    assert made.left["model.layers.0.self_attn"] == "it has hooks, which run with the module alone"
    model.model.layers[0].forward = lambda x, **_: x
    assert made.left["model.layers.0"] == "it has a forward of its own"
    again = te_fuser.convert(model, check=False)
    assert again.converted == ("model.layers.1",) and again.error is None and "not checked" in str(again)


def test_layers_of_other_classes_are_left() -> None:
    model = model_of("llama")
    kind = type(model.model.layers[1])
    model.model.layers[1].__class__ = type("Mine", (kind,), {})
    made = te_fuser.convert(model)
    assert made.converted == ("model.layers.0",)
    words = "it is a Mine, which may compute something else than a LlamaDecoderLayer"
    assert made.left == {"model.layers.1": words}
    encoded = model_of("gpt2", add_cross_attention=True)
    made = te_fuser.convert(encoded)
    assert made.converted == () and set(made.left.values()) == {"it attends to an encoder too"}


TENSOR = torch.zeros(64, 64)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: te_fuser.convert([1]), TypeError, "convert takes a model of transformers, got a list"),
    (
        lambda: te_fuser.convert(nn.Linear(2, 2)),
        TypeError,
        r"Linear has none of them: take te_fuser.from_torch\(model\)",
    ),
    (
        lambda: te_fuser.convert(model_of("llama"), memories="lean"),
        TypeError,
        "convert takes check, .* got 'memories'; did you mean 'memory'",
    ),
    (
        lambda: te_fuser.convert(model_of("llama"), check="no"),
        TypeError,
        "convert takes True or False as check, got 'no'",
    ),
    *(
        (lambda call=call, given=given: call(given), TypeError, f"^{what}, got {got}")
        for given, got in ((3, "3"), (None, "None"), (nn.Linear, "the class Linear"), (TENSOR, "a Tensor of shape"))
        for call, what in (
            (te_fuser.revert, "revert takes a model that te_fuser.convert has converted"),
            (te_fuser.convert, "convert takes a model of transformers"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_is_no_model_is_refused(call: Any, error: type[Exception], words: str) -> None:
    raises(error, words, call)


def test_model_that_cannot_be_checked_is_converted_unchecked() -> None:
    layer = model_of("llama").model.layers[0]
    raises(ValueError, "on a model with embeddings, and finds none: give check=False", te_fuser.convert, layer)
    assert type(layer).__module__.startswith("transformers.")
    assert te_fuser.convert(layer, check=False).converted == ("",)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64))
    raises(ValueError, "meta device: give check=False", te_fuser.convert, empty)
    assert te_fuser.convert(empty, check=False).converted == ("model.layers.0",)


def test_what_was_reverted_is_left_and_what_has_another_class_is_not_reverted() -> None:
    model, original = both("llama")
    first, second = model.model.layers
    second.__class__ = type("Sharded", (type(second),), {})
    raises(TypeError, "a converted layer is a Sharded now: revert it before", te_fuser.revert, model)
    assert type(first).__module__ == "te_fuser.convert.llama"
    assert_alike(results(model, IDS), results(original, IDS))
    # A layer, and then all of them; the report is asked after that.
    model = model_of("llama")
    conversion = te_fuser.convert(model, check=False)
    te_fuser.revert(model.get_submodule(conversion.converted[0]))
    assert conversion.left == {conversion.converted[0]: "it was reverted"}
    te_fuser.revert(model)
    assert conversion.left == dict.fromkeys(conversion.converted, "it was reverted") and "reverted" in str(conversion)


def test_a_check_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_fuser.convert.llama import LlamaLike

    model = model_of("llama")
    want = results(model, IDS)
    monkeypatch.setattr(LlamaLike, "norm_op", lambda self, norm: te_fuser.ops.RMSNorm(16, 0.5, device="meta"))
    with pytest.raises(RuntimeError, match="the output of LlamaModel lies .* from the original's, whose largest is"):
        te_fuser.convert(model)
    assert type(model.model.layers[0]).__module__.startswith("transformers.")
    assert torch.equal(results(model, IDS)["logits"], want["logits"])


def test_weights_that_a_product_reads_stay_together() -> None:
    model, original = both("qwen2")
    te_fuser.convert(model)
    for each in (model, model.float().double(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = each.model.layers[0].self_attn
        names = ("q_proj", "k_proj", "v_proj")
        for what in ("weight", "bias"):
            assert lie_together([getattr(attention.get_submodule(name), what) for name in names])
        mlp = each.model.layers[1].mlp
        assert lie_together([mlp.gate_proj.weight, mlp.up_proj.weight])
        assert_alike(results(each, IDS), results(original, IDS), 1e-5)
    wanted = {name: torch.randn_like(t) for name, t in model.state_dict().items()}
    model.load_state_dict(wanted)
    assert_alike(model.state_dict(), wanted)
    assert lie_together([mlp.gate_proj.weight, mlp.up_proj.weight])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_is_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model, original = both(family, torch.float32)
    model.save_pretrained(tmp_path)
    reverted = te_fuser.revert(copy.deepcopy(model)).state_dict()
    alone = {name: t for name, t in reverted.items() if name != "lm_head.weight"}  # gpt2's is that of its embedding
    assert_alike(safetensors.torch.load(safetensors.torch.save(alone)), alone, 0)
    loaded = type(original).from_pretrained(tmp_path)
    assert_alike(loaded.state_dict(), original.state_dict(), 0)
    original.load_state_dict(stored(model.state_dict(), weights_only=True))
    te_fuser.convert(loaded)
    assert_alike(results(loaded, IDS), results(original, IDS), 1e-4)


def test_options_go_to_the_lists() -> None:
    model = model_of("llama", torch.float32)
    te_fuser.convert(model, check=False, memory="lean", kernels="reference", verify=True)
    model(IDS)
    lists: Any = model.model.layers[0].__dict__["_te_fuser"].lists
    assert {(made.memory, made.kernels, made.verify) for made in lists.values()} == {("lean", "reference", True)}


def test_copies_and_reverted_copies_are_apart() -> None:
    model, original = both("gemma")
    model(IDS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert_alike(results(model, IDS), results(original, IDS))
    te_fuser.revert(other)
    assert_alike(results(te_fuser.revert(copy.deepcopy(model)), IDS), results(model, IDS))
    want = results(other, IDS)
    te_fuser.convert(other, check=False)
    assert_alike(results(other, IDS), want)


@pytest.mark.parametrize("check", [True, False])
def test_the_second_call_is_known(check: bool) -> None:
    """By one native look, whether the check made the lists or the first call."""
    model = model_of("llama", torch.float32)
    te_fuser.convert(model, check=check)
    cache = transformers.DynamicCache(config=model.config)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
        model(IDS[:, :1], **{CACHE: cache})
    lists: Any = [made for m in model.model.layers for made in m.__dict__["_te_fuser"].lists.values()]
    assert len(lists) == 6 and all(made._structure.alone._last is not None for made in lists)


def test_under_inference_mode() -> None:
    original = model_of("llama")
    model = copy.deepcopy(original)
    with torch.inference_mode():
        te_fuser.convert(model)
        assert_alike({"y": model(IDS).logits}, {"y": original(IDS).logits})
    assert_alike(results(model, IDS), results(original, IDS))


def test_errors_about_derivatives_name_revert() -> None:
    model = model_of("llama", torch.float32)
    te_fuser.convert(model)
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=x, use_cache=False).logits  # type: ignore[no-any-return]

    def forward_mode() -> None:
        with forward_ad.dual_level():
            run(forward_ad.make_dual(x.detach(), torch.ones_like(x)))

    def batched() -> None:
        y = run(x)
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)

    def twice() -> None:
        torch.autograd.grad(run(x).sum(), x, create_graph=True)

    words = r"model\.reference\(x\) \(of .*; of a converted model, after te_fuser\.revert\(model\), the model\)"
    for call in (forward_mode, batched, twice):
        raises((TypeError, RuntimeError), words, call)
    te_fuser.revert(model)
    batched()
    twice()


@pytest.mark.parametrize("longest", [6, 7, 16])
def test_rotary_embeddings_that_have_grown(longest: int) -> None:
    """transformers' dynamic frequencies follow the longest call so far: the check neither sees nor leaves another."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_of("llama", max_position_embeddings=longest, rope_parameters=rope)
    model(torch.arange(40)[None] % 7)
    original, rotary = copy.deepcopy(model), model.model.rotary_emb
    assert te_fuser.convert(model).error < 1e-5
    assert model.model.rotary_emb is rotary and rotary.max_seq_len_cached == 40
    assert torch.equal(rotary.inv_freq, original.model.rotary_emb.inv_freq)
    for length in (40, 7, 4, 20):
        ids = torch.arange(length)[None] % 7
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


def test_keys_that_are_cached_under_autocast() -> None:
    """As docs/how-to/convert.md says it; the original's values have their keys' dtype in transformers' older caches."""
    model = model_of("llama", torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(IDS, use_cache=True)[1].layers[0].keys.dtype == torch.float32
        te_fuser.convert(model, check=False)
        layer = model(IDS, use_cache=True)[1].layers[0]
        assert layer.keys.dtype == layer.values.dtype == torch.bfloat16


def _converted(family: str, **config: Any) -> tuple[Any, te_fuser.Conversion]:
    model = model_of(family, torch.float32, **config)
    return model, te_fuser.convert(model, check=False)


@FAMILY
def test_equal_layers_are_shown_once(family: str) -> None:
    model, conversion = _converted(family, num_hidden_layers=4)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    explanation = conversion.explain(tokens())
    named = [text for _, text in explanation.borders if text.startswith("In ")]
    assert sum(1 + (int(t.split(" and ")[1].split()[0]) if " and " in t else 0) for t in named) in (4, 8)
    assert len(explanation.plans) < 4 and all(plan.forward and plan.backward for plan in explanation.plans)
    assert all(text in str(explanation) for text in named)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any("_list" in vars(m) for m in model.modules())


def test_what_it_takes_and_leaves() -> None:
    model, conversion = _converted("llama")
    assert "on h200" in str(conversion.explain(tokens(), device="h200"))
    text = str(conversion.explain(input_ids=tokens(), attention_mask=torch.ones(2, 9), details=True))
    assert "Considered and not taken" in text and "In model.layers.0 and 1 other like it:" in text
    assert "Considered and not taken" not in str(conversion.explain(tokens()))
    with torch.no_grad():
        assert "No backward" in str(conversion.explain(tokens()))
        cache = transformers.DynamicCache(config=model.config)
        model(tokens(), past_key_values=cache)
        conversion.explain(tokens(2, 1), past_key_values=cache)
        assert cache.get_seq_length() == 9  # the call that was explained put nothing there
    filled = transformers.DynamicCache(config=model.config)
    model(tokens(), past_key_values=filled)  # keys that autograd made
    assert conversion.explain(tokens(2, 1), past_key_values=filled).plans and filled.get_seq_length() == 9
    with pytest.raises(TypeError, match="takes no measure, passes; te_fuser.profile"):
        conversion.explain(tokens(), measure=True, passes=True)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="in this call; model.layers.0 .* with detials"):
        conversion.explain(tokens(), detials=True)
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *given: None)
    assert "(Theirs): it is not converted: see `left` of the" in " ".join(str(conversion.explain(tokens())).split())
    te_fuser.revert(model)
    raises(ValueError, "in this call; model.layers.0 is left: it was reverted", conversion.explain, tokens())
