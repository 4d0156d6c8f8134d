"""Small models of transformers, of every family that can be converted, with random parameters and nothing to load."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import te_fuser

transformers: Any = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

WORDS = 48
_SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GATED: dict[str, Any] = {**_SMALL, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_CAPPED: dict[str, Any] = {"sliding_window": 5, "query_pre_attn_scalar": 24, "attn_implementation": "eager"}
# Family -> the name of its configuration and of its model, and what the configuration says.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_GATED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GATED, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_GATED, **_WINDOW}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GATED, **_WINDOW}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_SMALL, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _GATED),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GATED, **_CAPPED}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GATED, "sliding_window": 5, "sliding_window_pattern": 2}),
}
FAMILY = pytest.mark.parametrize("family", FAMILIES)
_LAYER = inspect.signature(transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward)
CACHE = next(name for name in ("cache", "past_key_values") if name in _LAYER.parameters)  # another name before 5.24


def model_of(family: str, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A model of the family in eval mode."""
    configuration, kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, configuration)(**{**settings, **config}))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.to(dtype).eval()


def both(family: str, dtype: torch.dtype = torch.float64, **config: Any) -> tuple[Any, Any]:
    """A converted model, and the same as it was."""
    original = model_of(family, dtype, **config)
    model = copy.deepcopy(original)
    te_fuser.convert(model, check=False, kernels="reference")
    return model, original


def layer_of(model: Any, number: int = 0) -> Any:
    return (model.transformer.h if hasattr(model, "transformer") else model.model.layers)[number]


def tokens(samples: int = 2, positions: int = 9, seed: int = 0) -> torch.Tensor:
    """[samples, positions], none of them padding."""
    return torch.randint(1, WORDS, (samples, positions), generator=torch.Generator().manual_seed(seed))


def padded(samples: int = 2, positions: int = 9) -> torch.Tensor:
    """The attention mask of samples that are padded in front, but for the last."""
    mask = torch.ones(samples, positions, dtype=torch.long)
    for k in range(samples - 1):
        mask[k, : 3 - k] = 0
    return mask


def results(model: Any, ids: torch.Tensor, **call: Any) -> dict[str, torch.Tensor]:
    """Logits where there is something to see, the loss, and the gradients of all parameters."""
    mask = call.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    made = model(ids, labels=labels, **call)
    model.zero_grad()
    made.loss.backward()
    seen = made.logits if mask is None else made.logits[mask == 1]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": seen.detach(), "loss": made.loss.detach(), **gradients}


def assert_alike(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    """Tensors by name, each within a share of its largest number: transformers' norms round to float32 in between."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(
            found[name], want, rtol=0, atol=tolerance * (1e-3 + want.abs().max().item()), msg=name
        )


@contextmanager
def ways(model: Any) -> Iterator[list[str]]:
    """The ways in which attention is run in there, one for each layer's call."""
    from te_fuser.convert.block import DecoderBlock

    found: list[str] = []
    real = DecoderBlock._how

    def noted(self: Any, *args: Any) -> str:
        found.append(real(self, *args))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderBlock, "_how", noted)
        yield found
