"""Presets that ranks share, against the whole ones on one GPU, in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import te_fuser
from tests.gpu.ranks.models import SIZES, assert_near, batch, device, own, random
from tests.parallel.ranks import on_ranks

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GATED = {"activation": "swiglu", "normalization": "RMSNorm"}
# Name -> preset, keywords, the parameters that have two parts, each cut by itself.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "MLP": ("LayerNormMLP", {}, ()),
    "gated MLP": ("LayerNormMLP", GATED, ("fc1",)),
    "attention": ("MultiheadAttention", {"attention_dropout": 0.0, "input_layernorm": True}, ()),
    "layer": ("TransformerLayer", NO_DROPOUT, ()),
    "layer, grouped queries": ("TransformerLayer", {**NO_DROPOUT, "num_gqa_groups": 4, "qk_norm_type": "RMSNorm"}, ()),
    "layer, dropout": ("TransformerLayer", {**NO_DROPOUT, "hidden_dropout": 0.2}, ()),
    "layer, batch first": ("TransformerLayer", {**NO_DROPOUT, "attn_input_format": "bshd"}, ()),
}


def make(kind: str, **keywords: Any) -> Any:
    hidden, inner, heads, _, _ = SIZES[device()]
    sizes = {
        "LayerNormMLP": (hidden, inner),
        "MultiheadAttention": (hidden, heads),
        "TransformerLayer": (hidden, inner, heads),
    }
    return getattr(te_fuser, kind)(*sizes[kind], params_dtype=torch.bfloat16, device=device(), **keywords)


def numbered(name: str, *shape: int) -> torch.Tensor:
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
    return scale * random(*shape, seed=sum(map(ord, name))) + (len(shape) == 1)


def mine(whole: torch.Tensor, like: torch.Tensor, parts: int, ranks: DeviceMesh | None = None) -> torch.Tensor:
    """The part of this rank, among all or these, of a whole tensor: along the dimension in which its own is smaller."""
    smaller = [d for d, size in enumerate(like.shape) if size != whole.shape[d]]
    if not smaller:
        return whole
    (dim,) = smaller
    return torch.cat([own(part, dim, ranks) for part in whole.chunk(parts if dim == 0 else 1, dim)], dim)


def step(model: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(7)
    y = model(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in model.named_parameters()}}  # type: ignore[dict-item]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_presets(name: str, sequence_parallel: bool) -> None:
    kind, keywords, in_parts = CASES[name]
    whole = make(kind, **keywords)
    cut = make(kind, tp_group=dist.group.WORLD, set_parallel_mode=True, sequence_parallel=sequence_parallel, **keywords)
    wholes = dict(whole.named_parameters())
    parts = {n: 2 if any(part in n for part in in_parts) else 1 for n in wholes}
    with torch.no_grad():
        for n, p in whole.named_parameters():
            p.copy_(numbered(n, *p.shape))
        for n, p in cut.named_parameters():
            p.copy_(mine(wholes[n], p, parts[n]))
    dim = int(keywords.get("attn_input_format") == "bshd")  # of the sequence
    x, dy = (batch(seed).transpose(0, dim).contiguous() for seed in (1, 2))
    want = step(whole, x, dy)
    for _ in range(3):
        got = step(cut, *((own(x, dim).contiguous(), own(dy, dim).contiguous()) if sequence_parallel else (x, dy)))
        for n, g in got.items():
            if "key_bias" not in n:  # which attention does not see: its gradient is rounding
                assert_near(g, mine(want[n], g, parts.get(n, 1)), n)
