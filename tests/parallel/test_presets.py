"""Presets that two ranks share, against the same presets in one process, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_fuser
from tests.parallel.cutting import assert_as_whole, fill
from tests.parallel.ranks import on_ranks
from tests.twins import randomize, tensor

F, FFN, HEADS, S, B = 16, 12, 4, 6, 4


@dataclass(frozen=True)
class Case:
    """A preset, what it is made with, and where its ends are cut."""

    kind: str
    sizes: tuple[int, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("x",)
    mode: str = ""  # of a Linear


GATED = {"activation": "swiglu"}
GATES = {"fc1": (FFN, FFN)}
MASKED = {"attention_dropout": 0.0}
LAYER = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GQA = {"num_gqa_groups": 2}
QKV = {"qkv.": (F, F // 2, F // 2)}

CASES: dict[str, Case] = {
    "Linear column": Case("Linear", (F, 12), mode="column"),
    "Linear row": Case("Linear", (F, 12), mode="row"),
    "Linear in parts": Case(
        "Linear", (F, 12), {"parameters_split": {"query": 8, "key": 4}}, {"output": (8, 4)}, mode="column"
    ),
    "LayerNormLinear": Case("LayerNormLinear", (F, 12), mode="column"),
    "LayerNormMLP": Case("LayerNormMLP", (F, FFN)),
    "LayerNormMLP swiglu": Case("LayerNormMLP", (F, FFN), {**GATED, "normalization": "RMSNorm"}, GATES),
    "LayerNormMLP checkpoint": Case("LayerNormMLP", (F, FFN), {"checkpoint": True}),
    "LayerNormMLP main_grad": Case("LayerNormMLP", (F, FFN), {"fuse_wgrad_accumulation": True}),
    "MultiheadAttention": Case("MultiheadAttention", (F, HEADS), MASKED),
    "MultiheadAttention GQA": Case("MultiheadAttention", (F, HEADS), {**MASKED, **GQA, "input_layernorm": True}),
    "MultiheadAttention packed": Case("MultiheadAttention", (F, HEADS), {**MASKED, **GQA, "fuse_qkv_params": True}),
    "MultiheadAttention blocked": Case(
        "MultiheadAttention",
        (F, HEADS),
        {**MASKED, **GQA, "fuse_qkv_params": True, "qkv_weight_interleaved": False},
        QKV,
    ),
    "MultiheadAttention sinks": Case("MultiheadAttention", (F, HEADS), {**MASKED, "softmax_type": "learnable"}),
    "MultiheadAttention cross": Case(
        "MultiheadAttention",
        (F, HEADS),
        {**MASKED, **GQA, "attention_type": "cross", "attn_mask_type": "no_mask"},
        inputs=("x", "encoder_output"),
    ),
    **{
        f"MultiheadAttention {norm}": Case("MultiheadAttention", (F, HEADS), {**MASKED, **GQA, "qk_norm_type": norm})
        for norm in ("RMSNorm", "LayerNorm", "L2Normalization")
    },
    "MultiheadAttention cross RMSNorm": Case(
        "MultiheadAttention",
        (F, HEADS),
        {**MASKED, "attention_type": "cross", "attn_mask_type": "no_mask", "qk_norm_type": "RMSNorm"},
        inputs=("x", "encoder_output"),
    ),
    "TransformerLayer": Case("TransformerLayer", (F, FFN, HEADS), LAYER),
    "TransformerLayer llama": Case(
        "TransformerLayer",
        (F, FFN, HEADS),
        {**LAYER, **GATED, **GQA, "normalization": "RMSNorm", "bias": False},
        GATES,
    ),
    "TransformerLayer dropout": Case("TransformerLayer", (F, FFN, HEADS), {"hidden_dropout": 0.3, **MASKED}),
    "TransformerLayer attention dropout": Case(
        "TransformerLayer", (F, FFN, HEADS), {"hidden_dropout": 0.3, "attention_dropout": 0.3, "drop_path_rate": 0.3}
    ),
    "TransformerLayer parallel": Case("TransformerLayer", (F, FFN, HEADS), {**LAYER, "parallel_attention_mlp": True}),
    "TransformerLayer post norm": Case(
        "TransformerLayer", (F, FFN, HEADS), {**LAYER, "apply_residual_connection_post_layernorm": True}
    ),
    "TransformerLayer output norm": Case("TransformerLayer", (F, FFN, HEADS), {**LAYER, "output_layernorm": True}),
    "TransformerLayer decoder": Case(
        "TransformerLayer", (F, FFN, HEADS), {**LAYER, "layer_type": "decoder"}, inputs=("x", "encoder_output")
    ),
    "TransformerLayer main_grad": Case(
        "TransformerLayer", (F, FFN, HEADS), {**LAYER, "fuse_wgrad_accumulation": True, "fuse_qkv_params": True}
    ),
}


def make(case: Case, **keywords: Any) -> Any:
    given = {"params_dtype": torch.float64, "kernels": "reference", "device": "cpu", **case.keywords, **keywords}
    made = getattr(te_fuser, case.kind)(*case.sizes, **given)
    for p in made.parameters():
        if p.dim() == 2 and given.get("fuse_wgrad_accumulation"):
            p.main_grad = torch.zeros_like(p)
    return made


def pair(case: Case, sequence_parallel: bool, **keywords: Any) -> tuple[Any, Any]:
    """The preset that the ranks share, and the whole one."""
    whole = randomize(make(case, **keywords))
    mode = {"parallel_mode": case.mode} if case.mode else {"set_parallel_mode": True}
    cut = make(case, tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **mode, **keywords)
    fill(cut, whole, case.blocks)
    return cut, whole


def ends(case: Case, rows: int | None) -> tuple[int | None, int | None]:
    """Along which dimension input and output are cut."""
    return {"column": (rows, -1), "row": (-1, rows)}.get(case.mode, (rows, rows))


def inputs(case: Case) -> dict[str, torch.Tensor]:
    return {name: tensor(S, B, F, grad=False, seed=k) for k, name in enumerate(case.inputs)}


@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_as_the_whole(name: str) -> None:
    case = CASES[name]
    cut, whole = pair(case, False)
    assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, None))


@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_with_a_sequence_that_ranks_cut(name: str) -> None:
    case = CASES[name]
    cut, whole = pair(case, True)
    assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, 0))


DROPPING = {
    "MultiheadAttention": Case("MultiheadAttention", (F, HEADS), {"attention_dropout": 0.3}),
    "MultiheadAttention GQA": Case("MultiheadAttention", (F, HEADS), {"attention_dropout": 0.3, **GQA}),
    "TransformerLayer": Case(
        "TransformerLayer",
        (F, FFN, HEADS),
        {"attention_dropout": 0.2, "hidden_dropout": 0.3, "drop_path_rate": 0.2, **GATED, **GQA},
        GATES,
    ),
}


@pytest.mark.parametrize("way", ["whole", "sbhd", "bshd"])
@pytest.mark.parametrize("name", DROPPING)
@on_ranks
def test_dropout(name: str, way: str) -> None:
    """Ranks drop what one process drops: of their rows, and of their heads."""
    case, first = DROPPING[name], way == "bshd"
    layout = {FORMATS.get(name, "qkv_format"): "bshd"} if first else {}
    cut, whole = pair(case, way != "whole", **layout)
    assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, {"whole": None, "sbhd": 0, "bshd": 1}[way]))


FORMATS = {"MultiheadAttention GQA": "qkv_format", "TransformerLayer": "attn_input_format"}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@on_ranks
def test_batch_first(name: str, sequence_parallel: bool) -> None:
    """The sequence is the second dimension."""
    case = CASES[name]
    cut, whole = pair(case, sequence_parallel, **{FORMATS[name]: "bshd"})
    assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, 1 if sequence_parallel else None))
