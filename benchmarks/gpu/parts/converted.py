"""The part `converted`: a Llama of transformers as it is, by torch.compile, and converted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import te_fuser
from benchmarks.gpu.contest.bench import Bench, forget
from benchmarks.gpu.contest.entries import MIB, OURS, Entry, attempt, compared, why
from benchmarks.gpu.contest.goals import AHEAD, judged
from benchmarks.gpu.contest.measure import Effort, Step, contest, no_longer, peak_bytes

LLAMA_LAYERS = 4
_SAMPLES, _WORDS = 2, 1024
_EAGER, _COMPILED = "eager", "torch.compile"
_EFFORT = Effort(5, 0.5, 1.0)  # three models in three cases, within two and a half minutes


@dataclass(frozen=True)
class Case:
    """A way of calling a model.

    Attributes:
        step: the call, of a model and some tokens, [samples, positions].
        samples: how many.
        rounds: in so many times as many, shorter blocks; more where the host decides.
    """

    name: str
    step: Callable[[Any, torch.Tensor], Step]
    samples: int = _SAMPLES
    rounds: int = 1


def _training(model: Any, ids: torch.Tensor) -> Step:
    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _forward(model: Any, ids: torch.Tensor) -> Step:
    return torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1))


def _decoding(model: Any, ids: torch.Tensor) -> Step:
    """A token behind the others; what it leaves in the cache is taken out again."""
    from transformers import DynamicCache

    cache, last = DynamicCache(config=model.config), ids[:, -1:]

    @torch.no_grad()
    def step() -> None:
        model(last, past_key_values=cache)
        cache.crop(-1)

    with torch.no_grad():
        getattr(model, "_orig_mod", model)(ids, past_key_values=cache, logits_to_keep=1)
    return step


CASES = (
    Case("forward+backward", _training),
    Case("forward", _forward),
    Case("step of decoding", _decoding, 1, 5),
)


def converted(bench: Bench) -> Iterator[Entry]:
    """Training, forward alone, and a token behind others in a cache."""
    original = _llama(bench)
    models, left_out = {_EAGER: original}, dict[str, str]()
    try:
        models[OURS] = _converted(original, bench)
    except Exception as error:
        left_out[OURS] = why(error)
    for case in CASES:
        yield _entry(bench, case, models, left_out)
        forget()


def _llama(bench: Bench) -> Any:
    """Some layers of a Llama with random weights, with Llama 3's proportions, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = bench.scale.hidden
    heads = max(4, hidden // 128)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=LLAMA_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=2 * bench.scale.positions,
    )
    torch.manual_seed(0)
    with bench.device:
        return LlamaForCausalLM(config).to(torch.bfloat16)


def _converted(original: Any, bench: Bench) -> Any:
    model = copy.deepcopy(original)
    conversion = te_fuser.convert(model, **bench.options)
    if conversion.left:
        raise RuntimeError(str(conversion))
    return model


def _entry(bench: Bench, case: Case, models: Mapping[str, Any], left_out: Mapping[str, str]) -> Entry:
    """Contenders of a case, side by side; those that fail are left out."""
    torch.manual_seed(0)
    ids = torch.randint(_WORDS, (case.samples, bench.scale.positions), device=bench.device)
    steps, left_out = dict[str, Step](), dict(left_out)

    def enter(name: str, make: Callable[[], Any]) -> None:
        try:
            step = case.step(make(), ids)
            step()
            bench.card.synchronize()
        except Exception as error:
            left_out[name] = why(error)
        else:
            steps[name] = step

    for name, model in models.items():
        enter(name, lambda model=model: model)  # type: ignore[misc]
    if bench.with_compile:
        enter(_COMPILED, lambda: bench.compiled(models[_EAGER]))
    effort = no_longer(bench.effort, _EFFORT).in_shorter_blocks(case.rounds)
    layers = f"Llama, {LLAMA_LAYERS} layers of {bench.scale.hidden}"
    results = contest(steps, effort, bench.card)
    entry = compared(f"{layers}, {case.name}, {case.samples} x {bench.scale.positions}", results)
    attempt(entry, "memory", lambda: _add_peaks(entry, bench, steps))
    if left_out:
        entry["left_out"] = {**left_out, **entry.get("left_out", {})}
    return entry | {"goals": judged((AHEAD,), entry)}


def _add_peaks(entry: Entry, bench: Bench, steps: Mapping[str, Step]) -> None:
    for name, step in steps.items():
        peak = peak_bytes(step, bench.card)
        entry["contenders"][name] |= {} if peak is None else {"peak_mib": peak / MIB}
