"""Parts of whole models: the seed layer, MLP blocks, a Llama layer, a stack of layers, and growing sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import te_fuser
from benchmarks import models
from benchmarks.gpu.contest.bench import Bench, forget
from benchmarks.gpu.contest.entries import OURS, Entry, add_details, compared
from benchmarks.gpu.contest.goals import AHEAD, GELU_MLP, SEED_LAYER, Goal, judged, over_floor
from benchmarks.gpu.contest.measure import Effort, Step, contest, no_longer
from benchmarks.gpu.parts.cases import Case, measure_case
from benchmarks.gpu.parts.floor import gated_work, layer_work, linear_residual_work, make_floor, mlp_work
from benchmarks.models import rivals

_SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _seed_case(bench: Bench, dtype: torch.dtype, dropout: float, **options: Any) -> Case:
    scale, attention = bench.scale, bench.scale.attention(dropout)
    return Case(
        f"seed layer {_SHORT_NAMES[dtype]} dropout {dropout:g}",
        models.gpt(dropout, attention),
        [layer_work(attention, mlp_work)(scale.tokens, scale.hidden)],
        scale.tokens,
        scale.hidden,
        dtype,
        library="seed layer",
        dropout=dropout,
        **options,
    )


def layer(bench: Bench) -> Iterator[Entry]:
    """The seed layer in bfloat16."""
    options: dict[str, Any] = {"goals": SEED_LAYER}
    more: dict[str, Any] = {"memories": ("fast", "lean"), "with_plan": True}
    yield measure_case(bench, _seed_case(bench, torch.bfloat16, 0.1, **options, **more))
    yield measure_case(bench, _seed_case(bench, torch.bfloat16, 0.0, **options))


def layer_fp16(bench: Bench) -> Iterator[Entry]:
    """The seed layer in float16."""
    for dropout in (0.1, 0.0):
        yield measure_case(bench, _seed_case(bench, torch.float16, dropout, goals=(AHEAD,)))


def mlp(bench: Bench) -> Iterator[Entry]:
    """MLP blocks, and a product with bias and residual."""
    rows = (
        ("LayerNorm-GELU MLP", models.mlp, mlp_work, GELU_MLP),
        ("RMSNorm-SwiGLU MLP", models.gated_mlp, gated_work, (over_floor(1.05), AHEAD)),
        ("Linear + bias + residual", models.linear_residual, linear_residual_work, (over_floor(1.02),)),
    )
    tokens, hidden = bench.scale.tokens, bench.scale.hidden
    for name, builder, work, goals in rows:
        works = [work(tokens, hidden)]
        case = Case(f"{name} bf16", builder, works, tokens, hidden, torch.bfloat16, goals=goals, library=name)
        yield measure_case(bench, replace(case, memories=("fast",) if name.endswith("MLP") else ()))


def llama(bench: Bench) -> Iterator[Entry]:
    """A layer of Llama with 32 query and 8 key/value heads."""
    scale = bench.scale
    attention = scale.attention(sharing=4, rotary=True)
    works = [layer_work(attention, gated_work)(scale.tokens, scale.hidden)]
    builder = models.llama(attention)
    yield measure_case(
        bench, Case("Llama layer bf16", builder, works, scale.tokens, scale.hidden, torch.bfloat16, goals=(AHEAD,))
    )


STACKED = 4
SEPARATE = f"{OURS}, separate layers"


def stack(bench: Bench) -> Iterator[Entry]:
    """Four seed layers in one Sequential, and as four Sequentials."""
    scale, attention = bench.scale, bench.scale.attention(0.1)
    torch.manual_seed(0)
    build = models.gpt(0.1, attention)
    pairs = [bench.build(build, scale.tokens, scale.hidden) for _ in range(STACKED)]
    eager = torch.nn.Sequential(*(p.eager for p in pairs))
    one = te_fuser.Sequential(*(p.fused for p in pairs), **bench.options)
    found = rivals(models.Pair(eager, one, pairs[0].shape, exact=False), torch.bfloat16, bench.device)
    found[SEPARATE] = found[OURS].like(torch.nn.Sequential(*(p.fused for p in pairs)))
    works = layer_work(attention, mlp_work)(scale.tokens, scale.hidden).times(STACKED)
    floor = make_floor(works, torch.bfloat16, bench.card)
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in found.items()}}
    results = contest(steps, bench.effort, bench.card)
    entry = compared(f"{STACKED} seed layers bf16 dropout 0.1", results)
    contenders = entry["contenders"]
    entry["over_separate"] = contenders[OURS]["over_separate"] = results[OURS].over(results[SEPARATE])
    add_details(entry, steps, found, bench.card)
    entry["goals"] = judged((Goal("over_separate", 1.0), AHEAD), entry)
    yield entry


def growth(bench: Bench) -> Iterator[Entry]:
    """Time and memory of the seed layer with more tokens, and with more features."""
    scale = bench.scale
    sizes = [("tokens", t, scale.hidden) for t in scale.growing_tokens]
    sizes += [("hidden", scale.tokens, h) for h in scale.growing_hidden]
    for grows, tokens, hidden in sizes:
        yield {**_of_size(bench, tokens, hidden), "grows": grows, "tokens": tokens, "hidden": hidden}
        forget()


def _of_size(bench: Bench, tokens: int, hidden: int) -> Entry:
    """The seed layer of a size: floor, eager and te_fuser."""
    torch.manual_seed(0)
    attention = bench.scale.attention(0.1)
    found = rivals(bench.build(models.gpt(0.1, attention), tokens, hidden), torch.bfloat16, bench.device)
    floor = make_floor([layer_work(attention, mlp_work)(tokens, hidden)], torch.bfloat16, bench.card)
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in found.items()}}
    effort = no_longer(bench.effort, Effort(3, 0.5, 0.5))
    entry = compared(f"seed layer, {tokens} x {hidden}", contest(steps, effort, bench.card))
    entry["floor_products"] = floor.taken
    add_details(entry, steps, found, bench.card)
    return entry
