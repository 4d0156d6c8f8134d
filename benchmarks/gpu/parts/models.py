"""Parts of whole models: the seed layer, MLP blocks, a Llama layer, a stack of layers, and growing sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import te_fuser
from benchmarks import models
from benchmarks.common import SHORT_NAMES
from benchmarks.gpu.contest.bench import Bench, forget
from benchmarks.gpu.contest.entries import OURS, Entry
from benchmarks.gpu.contest.goals import AHEAD, GELU_MLP, SEED_LAYER, Goal, judged, over_floor
from benchmarks.gpu.contest.measure import Effort, no_longer
from benchmarks.gpu.parts.cases import Case, against_floor, measure_case
from benchmarks.models import rivals


def _seed_case(bench: Bench, dtype: torch.dtype, dropout: float, **options: Any) -> Case:
    scale, attention = bench.scale, bench.scale.attention(dropout)
    return Case(
        f"seed layer {SHORT_NAMES[dtype]} dropout {dropout:g}",
        models.gpt(dropout, attention),
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
        ("LayerNorm-GELU MLP", models.mlp, GELU_MLP, ("fast",)),
        ("RMSNorm-SwiGLU MLP", models.gated_mlp, (over_floor(1.05), AHEAD), ("fast",)),
        ("Linear + bias + residual", models.linear_residual, (over_floor(1.02),), ()),
    )
    at = bench.scale.tokens, bench.scale.hidden, torch.bfloat16
    for name, builder, goals, memories in rows:
        yield measure_case(bench, Case(f"{name} bf16", builder, *at, goals, memories, library=name))


def llama(bench: Bench) -> Iterator[Entry]:
    """A layer of Llama with 32 query and 8 key/value heads."""
    scale = bench.scale
    builder = models.llama(scale.attention(sharing=4, rotary=True))
    case = Case("Llama layer bf16", builder, scale.tokens, scale.hidden, torch.bfloat16, goals=(AHEAD,))
    yield measure_case(bench, case)


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
    entry, results = against_floor(bench, f"{STACKED} seed layers bf16 dropout 0.1", found, bench.effort)
    entry["over_separate"] = entry["contenders"][OURS]["over_separate"] = results[OURS].over(results[SEPARATE])
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
    effort = no_longer(bench.effort, Effort(3, 0.5, 0.5))
    entry, _ = against_floor(bench, f"seed layer, {tokens} x {hidden}", found, effort)
    return entry
