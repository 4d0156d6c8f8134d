"""Conversion.explain: the plans of a converted model's layers, of equal ones once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from tests.convert.models import FAMILY, model_of, tokens

transformers: Any = pytest.importorskip("transformers")


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
    with pytest.raises(ValueError, match="in this call; model.layers.0 is left: it was reverted"):
        conversion.explain(tokens())
