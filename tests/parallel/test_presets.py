"""Presets that two ranks share, and gradients of which each has a term, against one process, in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.steps import function_tasks
from te_fuser.parallel import ShardingRule, leave_sums_to_engine
from te_fuser.sharding.rules import RowRule
from tests.parallel.cutting import EXACT, assert_as_whole, fill, own, part, run
from tests.parallel.models import BY_TORCH
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.twins import Around, randomize, sequential, tensor

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


TWO = ("x", "encoder_output")
GATED: Any = {"activation": "swiglu"}
GATES = {"fc1": (FFN, FFN)}
GQA: Any = {"num_gqa_groups": 2}
QKV = {"qkv.": (F, F // 2, F // 2)}
CROSS: Any = {"attention_type": "cross", "attn_mask_type": "no_mask"}


def mlp(blocks: Any = None, **keywords: Any) -> Case:
    return Case("LayerNormMLP", (F, FFN), keywords, blocks or {})


def attention(blocks: Any = None, **keywords: Any) -> Case:
    given = TWO if "attention_type" in keywords else TWO[:1]
    return Case("MultiheadAttention", (F, HEADS), {"attention_dropout": 0.0, **keywords}, blocks or {}, given)


def layer(blocks: Any = None, **keywords: Any) -> Case:
    given = TWO if "layer_type" in keywords else TWO[:1]
    keywords = {"attention_dropout": 0.0, "hidden_dropout": 0.0, **keywords}
    return Case("TransformerLayer", (F, FFN, HEADS), keywords, blocks or {}, given)


CASES: dict[str, Case] = {
    "Linear column": Case("Linear", (F, 12), mode="column"),
    "Linear row": Case("Linear", (F, 12), mode="row"),
    "Linear in parts": Case(
        "Linear", (F, 12), {"parameters_split": {"query": 8, "key": 4}}, {"output": (8, 4)}, mode="column"
    ),
    "LayerNormLinear": Case("LayerNormLinear", (F, 12), mode="column"),
    "LayerNormMLP": mlp(),
    "LayerNormMLP swiglu": mlp(GATES, **GATED, normalization="RMSNorm"),
    "LayerNormMLP checkpoint": mlp(checkpoint=True),
    "LayerNormMLP main_grad": mlp(fuse_wgrad_accumulation=True),
    "MultiheadAttention": attention(),
    "MultiheadAttention GQA": attention(**GQA, input_layernorm=True),
    "MultiheadAttention packed": attention(**GQA, fuse_qkv_params=True),
    "MultiheadAttention blocked": attention(QKV, **GQA, fuse_qkv_params=True, qkv_weight_interleaved=False),
    "MultiheadAttention sinks": attention(softmax_type="learnable"),
    "MultiheadAttention cross": attention(**GQA, **CROSS),
    "MultiheadAttention RMSNorm": attention(**GQA, qk_norm_type="RMSNorm"),
    "MultiheadAttention LayerNorm": attention(**GQA, qk_norm_type="LayerNorm"),
    "MultiheadAttention L2Normalization": attention(**GQA, qk_norm_type="L2Normalization"),
    "MultiheadAttention cross RMSNorm": attention(**CROSS, qk_norm_type="RMSNorm"),
    "TransformerLayer": layer(),
    "TransformerLayer llama": layer(GATES, **GATED, **GQA, normalization="RMSNorm", bias=False),
    "TransformerLayer dropout": layer(hidden_dropout=0.3),
    "TransformerLayer attention dropout": layer(hidden_dropout=0.3, attention_dropout=0.3, drop_path_rate=0.3),
    "TransformerLayer parallel": layer(parallel_attention_mlp=True),
    "TransformerLayer post norm": layer(apply_residual_connection_post_layernorm=True),
    "TransformerLayer output norm": layer(output_layernorm=True),
    "TransformerLayer decoder": layer(layer_type="decoder"),
    "TransformerLayer main_grad": layer(fuse_wgrad_accumulation=True, fuse_qkv_params=True),
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


WITHOUT_CUT_ROWS = [
    *("Linear column", "Linear row", "LayerNormMLP swiglu", "MultiheadAttention packed", "MultiheadAttention RMSNorm"),
    *("TransformerLayer", "TransformerLayer dropout", "TransformerLayer parallel", "TransformerLayer decoder"),
]


@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [*((name, True) for name in CASES), *((name, False) for name in WITHOUT_CUT_ROWS)]
)
@on_ranks
def test_as_the_whole(name: str, sequence_parallel: bool) -> None:
    case = CASES[name]
    cut, whole = pair(case, sequence_parallel)
    assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, 0 if sequence_parallel else None))


DROPPING = {
    "MultiheadAttention": attention(attention_dropout=0.3),
    "MultiheadAttention GQA": attention(attention_dropout=0.3, **GQA),
    "TransformerLayer": layer(GATES, attention_dropout=0.2, hidden_dropout=0.3, drop_path_rate=0.2, **GATED, **GQA),
}


@pytest.mark.parametrize(("layout", "rows"), [("sbhd", None), ("sbhd", 0), ("bshd", None), ("bshd", 1)])
@pytest.mark.parametrize("name", DROPPING)
@on_ranks
def test_dropout(name: str, layout: str, rows: int | None) -> None:
    """Ranks drop what one process drops: of their rows, and of their heads, in each layout."""
    case = DROPPING[name]
    keyword = "attn_input_format" if name == "TransformerLayer" else "qkv_format"
    cut, whole = pair(case, rows is not None, **{keyword: layout})
    assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, rows))


@on_ranks
def test_attention_alone() -> None:
    """Its heads are those of this rank."""
    case = Case("DotProductAttention", (HEADS, 4), {"num_gqa_groups": 2, "softmax_type": "learnable"})
    whole = randomize(make(case))
    cut = make(case, tp_group=dist.group.WORLD)
    fill(cut, whole, {})
    names = ("x", "key_layer", "value_layer")
    given = {name: tensor(S, B, n * 4, grad=False, seed=n) for name, n in zip(names, (HEADS, 2, 2), strict=True)}
    assert_as_whole(cut, whole, given, {}, (-1, -1))


@on_ranks
def test_a_group_that_comes_later() -> None:
    """All parts get it; lists around and variants follow."""
    case = CASES["TransformerLayer"]
    _, whole = pair(case, True)
    cut = make(case, tp_size=WORLD, sequence_parallel=True, set_parallel_mode=True)
    fill(cut, whole, case.blocks)
    around = te_fuser.Sequential(cut, kernels="reference")
    for model in (cut, around):
        with pytest.raises(RuntimeError, match="tp_size=2 takes a group"):
            model(tensor(S // WORLD, B, F))
    cut.set_tensor_parallel_group(mesh_of()["tp"])
    for model in (cut, around, pickle.loads(pickle.dumps(cut)), copy.deepcopy(cut)):
        assert_as_whole(model, whole if model is not around else te_fuser.Sequential(whole), inputs(case), {}, (0, 0))
    assert "tp" in repr(cut) and cut.tp_group.size() == WORLD


def joined(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Both results of a call, side by side."""
    return torch.cat(m(x), -1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_what_a_norm_gives_is_returned(sequence_parallel: bool) -> None:
    """As this rank has it."""
    case = CASES["LayerNormMLP"]
    cut, whole = pair(case, sequence_parallel, return_layernorm_output=True)
    rows = 0 if sequence_parallel else None
    assert_as_whole(*(Around(m, joined) for m in (cut, whole)), inputs(case), case.blocks, (rows, rows))


@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
@on_ranks
def test_what_a_norm_gives_is_returned_gathered(name: str) -> None:
    """The rows of all ranks, which the product behind it gathers once; of its gradient each rank has a term."""
    case, given = CASES[name], {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
    cut, whole = pair(case, True, **given)
    mine, x = tensor(S, B, F, grad=False, seed=dist.get_rank()), tensor(S, B, F, grad=False)
    terms = mine.clone()
    dist.all_reduce(terms)
    other = copy.deepcopy(cut) if case.mode else te_fuser.parallelize(copy.deepcopy(whole), mesh_of(), True)
    for model in (cut, other):
        rows, found = [], []
        for m, dy in ((whole, terms), (model, mine)):
            leaf = (x if m is whole else part(x, 0)).clone().requires_grad_()
            y, normed = m(leaf)
            wide = tensor(*whole(x)[0].shape, grad=False, seed=6)
            ((normed * dy).sum() + (y * (wide if m is whole else part(wide, ends(case, 0)[1] or 0))).sum()).backward()
            found += [normed.detach()]
            rows += [leaf.grad]
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(part(rows[0], 0), rows[1], rtol=1e-11, atol=1e-11)
    names = [node.op.kind.__name__ for node in cut.plan(part(x, 0)).graph.nodes]
    assert names.count("AllGather") == 1


@pytest.mark.parametrize("name", ["LayerNormMLP", "MultiheadAttention GQA", "TransformerLayer"])
@on_ranks
def test_plans_ahead(name: str) -> None:
    """For the rows of this rank, of seq_length those of all."""
    ahead = {"seq_length": S, "micro_batch_size": B}
    cut, _ = pair(CASES[name], True, **ahead)
    assert len(cut.plans_kept()) == 1
    with mock.patch.object(pipeline, "make_plan", side_effect=AssertionError("planned again")):
        cut(tensor(S // WORLD, B, F))
    with pytest.raises(ValueError, match="seq_length=5 cannot be cut into 2 equal parts"):
        pair(CASES[name], True, **{**ahead, "seq_length": 5})


@on_ranks
def test_refusals() -> None:
    """On all ranks, before anything is sent."""
    group = dist.group.WORLD
    for kind, sizes, words in (
        ("LayerNormMLP", (F, 5), "ffn_hidden_size=5 cannot be cut into 2 equal parts"),
        ("MultiheadAttention", (F * 3, 3), "num_attention_heads=3 cannot be cut into 2"),
    ):
        with pytest.raises(ValueError, match=words):
            make(Case(kind, sizes), tp_group=group, set_parallel_mode=True)
    with pytest.raises(ValueError, match="num_gqa_groups=1 cannot be cut into 2"):
        make(attention(num_gqa_groups=1), tp_group=group, set_parallel_mode=True)
    with pytest.raises(ValueError, match="tp_size=4, but tp_group has 2 ranks"):
        make(CASES["LayerNormMLP"], tp_group=group, tp_size=4)
    product, _ = pair(CASES["Linear row"], True)
    with pytest.raises(ValueError, match=r"dimension 0 of an input of shape \[3, 4, 12\] cannot be cut into 2 equal"):
        product(tensor(3, B, F // 2))
    preset = make(CASES["MultiheadAttention"], tp_group=group, set_parallel_mode=True)
    with pytest.raises(ValueError, match="slopes are those of all heads"):
        preset(tensor(S, B, F), core_attention_bias_type="alibi")


@on_ranks
def test_under_autocast() -> None:
    """Gathered values are cast before."""
    case = CASES["LayerNormMLP"]
    cut, whole = (m.float() for m in pair(case, True))
    x = tensor(S, B, F, dtype=torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        names = [n.op.kind.__name__ for n in cut.plan(part(x, 0)).graph.nodes]
        torch.testing.assert_close(cut(part(x, 0)), part(whole(x), 0), rtol=0.05, atol=0.05)
    assert names.index("Cast") < names.index("AllGather")


# ---- gradients of which each rank has a term


WHOLE_LAYER = "TransformerLayer"
TERMS = {
    "self_attention.layernorm_qkv.layer_norm_weight",
    "self_attention.layernorm_qkv.layer_norm_bias",
    "self_attention.proj.bias",
    "layernorm_mlp.layer_norm_weight",
    "layernorm_mlp.layer_norm_bias",
    "layernorm_mlp.fc2_bias",
}


@pytest.mark.parametrize("way", ["call", "reference"])
@on_ranks
def test_left_to_the_engine(way: str) -> None:
    """Marked parameters have their terms, whose sum is the gradient; all others are as before. So are copies."""
    case = CASES[WHOLE_LAYER]
    cut, whole = pair(case, True)
    assert not any(getattr(p, "sequence_parallel", False) for p in cut.parameters())
    assert set(leave_sums_to_engine(cut)) == TERMS
    twin = copy.deepcopy(cut).to(torch.float32).to(torch.float64)
    for model in (cut, twin):
        assert {name for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)} == TERMS
    dy = tensor(S, B, F, grad=False, seed=9)
    _, want = run(whole, inputs(case), lambda _: dy)
    called = cut if way == "call" else mock.Mock(side_effect=cut.reference, zero_grad=cut.zero_grad)
    called.named_parameters = cut.named_parameters
    _, got = run(called, {"x": part(inputs(case)["x"], 0)}, lambda _: part(dy, 0))
    for name, gradient in got.items():
        if name in TERMS:
            assert not torch.allclose(gradient, want[name])
            dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, own(want[name], gradient), **EXACT)


@on_ranks
def test_norms_of_heads_are_terms_without_a_cut_sequence() -> None:
    cut, _ = pair(CASES["MultiheadAttention RMSNorm"], False)
    assert set(leave_sums_to_engine(cut)) == {"q_norm.weight", "k_norm.weight"}
    assert leave_sums_to_engine(pair(CASES[WHOLE_LAYER], False)[0]) == []


@on_ranks
def test_one_collective_for_all_of_a_segment() -> None:
    calls: list[int] = []

    def counted(gradients: Any, group: Any) -> Any:
        calls.append(len(gradients))
        return start_sums(gradients, group)

    start_sums = function_tasks.start_sums
    cut, whole = pair(CASES[WHOLE_LAYER], True)
    with mock.patch.object(function_tasks, "start_sums", counted):
        assert_as_whole(cut, whole, inputs(CASES[WHOLE_LAYER]), {}, ends(CASES[WHOLE_LAYER], 0))
    assert calls == [len(TERMS)]
    shown = str(cut.explain(part(inputs(CASES[WHOLE_LAYER])["x"], 0), details=True))
    assert "fc2_bias are added up over 2 ranks" in " ".join(shown.split())


@pytest.mark.parametrize("name", ["Linear row", "LayerNormMLP", "MultiheadAttention"])
@on_ranks
def test_a_bias_that_is_returned(name: str) -> None:
    """A caller that adds it to rows that ranks cut gets the sum of the terms, too."""
    case = CASES[name]
    cut, whole = pair(case, True, return_bias=True)

    cut, whole = (Around(m, lambda m, x: sum(m(x))) for m in (cut, whole))
    assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, 0))
    left = leave_sums_to_engine(cut)
    assert any(found.endswith("bias") and "layer_norm" not in found for found in left)


def in_micro_batches(layer: torch.nn.Module, call: Callable[..., Any] = lambda layer, x: layer(x)) -> torch.nn.Module:
    """Micro-batches, one after the other."""
    return Around(layer, lambda m, x: torch.cat([call(m, part) for part in x.split(B // 2, 1)], 1))


AROUND: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "micro-batches": in_micro_batches,
    "checkpoint": lambda layer: in_micro_batches(layer, te_fuser.checkpoint),
    "checkpoint of torch": lambda layer: in_micro_batches(layer, BY_TORCH),
    "twice": lambda layer: Around(layer, lambda m, x: m(m(x))),
    "a list": lambda layer: te_fuser.Sequential(layer, kernels="reference"),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("around", AROUND)
@on_ranks
def test_called_in_other_ways(around: str, sequence_parallel: bool) -> None:
    case = CASES["TransformerLayer main_grad" if around == "micro-batches" else WHOLE_LAYER]
    cut, whole = pair(case, sequence_parallel)
    wrap = AROUND[around]
    assert_as_whole(wrap(cut), wrap(whole), inputs(case), case.blocks, ends(case, 0 if sequence_parallel else None))


@pytest.mark.parametrize("rule", [RowRule, ShardingRule])
@on_ranks
def test_a_sum_left_out_is_seen(rule: type) -> None:
    """Comparisons fail without the sum: of norms and biases, and of norms of heads."""
    rows = rule is RowRule
    case = CASES[WHOLE_LAYER if rows else "MultiheadAttention RMSNorm"]
    cut, whole = pair(case, rows)
    with mock.patch.object(rule, "partial_gradients", lambda *_: ()), pytest.raises(AssertionError, match="not close"):
        assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, 0 if rows else None))


@on_ranks
def test_a_whole_weight_beside_cut_rows_and_main_grad() -> None:
    """Its terms would be added to those of earlier calls: refused, unless the engine adds up main_grad."""
    group = ops.Group.of("a test", dist.group.WORLD)
    product = ops.MatMul(F, F, accumulate_into_main_grad=True)
    product.group, product.sequence_parallel = group, True
    model, x = sequential(product), tensor(S // WORLD, B, F)
    weight = model[0].weight
    weight.main_grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match=r"gradient goes to main_grad: call te_fuser.parallel.leave_sums_to_engine"):
        model(x)
    assert leave_sums_to_engine(model) == ["0.weight"]
    model(x).sum().backward()
    torch.testing.assert_close(weight.main_grad, x.detach().sum((0, 1)).expand(F, F), **EXACT)


@on_ranks
def test_verify_where_gradients_alone_are_added_up() -> None:
    group = ops.Group.of("a test", dist.group.WORLD)
    norm = ops.LayerNorm(F)
    norm.group, norm.sequence_parallel = group, True
    for model in (sequential(norm), pair(CASES["LayerNormMLP"], True)[0]):
        assert te_fuser.verify(model, tensor(S // WORLD, B, F)).passed
