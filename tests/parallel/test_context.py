"""Sequences that two ranks cut, which attention alone sees whole: against one process, in float64."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_fuser
from te_fuser import ops
from te_fuser.distributed.group import Group
from te_fuser.fusions.dot_product_attention import _Attention
from te_fuser.fusions.match import FusionCall
from te_fuser.parallel import cut_sequence, parallelize
from tests.parallel.models import backward, gradients
from tests.parallel.ranks import WORLD, on_ranks
from tests.twins import assert_same_gradients, randomize, sequential, tensor

F, INNER, S, B = 8, 12, 8, 2
EXACT = {"rtol": 1e-11, "atol": 1e-11}
Make = Callable[..., Any]


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))["cp"]


def listed(
    packing: str = "interleaved",
    layout: str = "sequence_first",
    heads: int = 4,
    kv_heads: int = 2,
    dropout: float = 0.25,
) -> te_fuser.Sequential:
    """Heads normed and turned, of which fewer are of keys; dropout everywhere."""
    kinds: Any = {"heads": heads, "kv_heads": kv_heads, "packing": packing}
    laid: Any = {"layout": layout}
    width = (heads + 2 * kv_heads) * 4
    branch = (
        ops.LayerNorm(F),
        ops.Linear(F, width),
        ops.HeadNorm(4, **kinds),
        ops.RotaryEmbedding(4, **kinds, **laid, position_offset=3),
        ops.DotProductAttention(head_dim=4, mask="causal", dropout=dropout, **kinds, **laid),
        ops.Linear(4 * heads, F),
        ops.Dropout(dropout),
    )
    mlp = ops.RMSNorm(F), ops.Linear(F, INNER), ops.GELU(), ops.Linear(INNER, F), ops.Dropout(dropout)
    return sequential(te_fuser.Residual(*branch), te_fuser.Residual(*mlp))


def preset(kind: str, *sizes: int, **keywords: Any) -> Any:
    given = {"params_dtype": torch.float64, "kernels": "reference", "device": "cpu", **keywords}
    return randomize(getattr(te_fuser, kind)(*sizes, **given))


CROSS = {"attention_type": "cross", "attn_mask_type": "no_mask"}
LAYER = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "drop_path_rate": 0.2}
attention = functools.partial(preset, "MultiheadAttention", F)
layer = functools.partial(preset, "TransformerLayer", F, INNER, **LAYER)
MODELS: dict[str, tuple[Make, int]] = {  # with the dimension of the sequence
    "list": (listed, 0),
    "blocked": (lambda: listed("blocked"), 0),
    "batch first": (lambda: listed("blocked", "batch_first"), 1),
    "layer": (lambda: layer(2), 0),
    "layer bshd": (lambda: layer(4, attn_input_format="bshd", num_gqa_groups=2), 1),
    "sinks": (lambda: attention(4, num_gqa_groups=2, softmax_type="learnable"), 0),
    "window": (lambda: attention(2, window_size=(2, 0), softmax_type="off-by-one", fuse_qkv_params=True), 0),
}


def run(model: nn.Module, x: torch.Tensor, dy: torch.Tensor, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx; gradients of parameters and named inputs add up."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    y = model(x, **call)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def assert_as_whole(
    model: Any, twin: Any, dim: int = 0, balanced: bool = False, x: torch.Tensor | None = None, **call: Any
) -> None:
    """Output and dx are this rank's part, gradients of parameters terms of those of one process."""
    x = tensor(S, B, F, grad=False).transpose(0, dim) if x is None else x
    cut = functools.partial(cut_sequence, group=dist.group.WORLD, dim=dim, balanced=balanced)
    model.zero_grad()
    twin.zero_grad()
    wide = twin(x.detach(), **call).shape
    dy = tensor(*wide, grad=False, seed=3)
    want = run(twin, x, dy, **call)
    for got, wanted in zip(run(model, cut(x), cut(dy), **call), want, strict=True):
        torch.testing.assert_close(got, cut(wanted), **EXACT)
    found = {name: p.grad for name, p in model.named_parameters()}
    for gradient in found.values():
        dist.all_reduce(gradient)
    assert_same_gradients(found, {name: p.grad for name, p in twin.named_parameters()}, 1e-11)


@pytest.mark.parametrize("kind", MODELS)
@on_ranks
def test_as_one_process(kind: str) -> None:
    """Values, gradients and draws; also of copies, of the reference, and when dropout is off."""
    make, dim = MODELS[kind]
    twin = make()
    model = parallelize(copy.deepcopy(twin), context=mesh_of())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for m in (model, pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert_as_whole(m, twin, dim)
    assert_as_whole(model.eval(), twin.eval(), dim)
    x = tensor(S, B, F).transpose(0, dim)
    mine = cut_sequence(x, dist.group.WORLD, dim)
    torch.testing.assert_close(model.reference(mine), cut_sequence(twin(x), dist.group.WORLD, dim), **EXACT)
    names = [node.op.kind.__name__ for node in model.plan(mine).graph.nodes]
    at = names.index("DotProductAttention")
    assert names[at - 1] == names[at + 1] == "AllToAll" and names.count("AllToAll") == 2


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@on_ranks
def test_the_order_of_transformer_engine(layout: str) -> None:
    """Two blocks for each rank; angles are those of whole sequences, of which each takes its part."""
    dim = {"sbhd": 0, "bshd": 1}[layout]
    given = {"qk_norm_type": "RMSNorm", "num_gqa_groups": 2, "attention_dropout": 0.3}
    twin = attention(4, 4, qkv_format=layout, **given)
    angles = te_fuser.RotaryPositionEmbedding(4, device="cpu")(S + 1).double()
    model = copy.deepcopy(twin)
    for way in ("a2a", "p2p"):
        with pytest.warns(UserWarning, match="runs as 'a2a'") if way == "p2p" else contextlib.nullcontext():
            model.set_context_parallel_group(dist.group.WORLD, list(range(WORLD)), None, way)
        assert_as_whole(model, twin, dim, balanced=True, rotary_pos_emb=angles)
    hooked = copy.deepcopy(model)
    hooked.core_attention.register_forward_hook(lambda module, given, y: None)  # it is not in one list with the rest
    assert_as_whole(hooked.eval(), twin.eval(), dim, balanced=True, rotary_pos_emb=angles)
    shorter = cut_sequence(tensor(S, B, F).transpose(0, dim), dist.group.WORLD, dim, balanced=True)
    with pytest.raises(ValueError, match=rf"angles must be \[{S} or more"):
        model(shorter, rotary_pos_emb=angles[: S // 2])
    model.set_context_parallel_group(None)
    torch.testing.assert_close(model.eval()(shorter), twin.eval()(shorter), **EXACT)


@pytest.mark.parametrize("mask", ["causal", "padding", "arbitrary"])
@on_ranks
def test_attention_alone(mask: str) -> None:
    """Keys and values come with the call; masks are those of whole sequences."""
    kinds = {"num_gqa_groups": 2, "attn_mask_type": mask, "attention_dropout": 0.2}
    twin = preset("DotProductAttention", 4, (4, 6), **kinds)
    model = preset("DotProductAttention", 4, (4, 6), **kinds, cp_group=dist.group.WORLD, cp_comm_type="a2a")
    hidden = {
        "causal": {},
        "padding": {"attention_mask": torch.arange(S).expand(B, 1, 1, S) >= torch.tensor([5, 8])[:, None, None, None]},
        "arbitrary": {"attention_mask": tensor(B, 1, S, S, grad=False) > 0.5},
    }[mask]
    cut = functools.partial(cut_sequence, group=dist.group.WORLD, balanced=True)
    whole = [tensor(S, B, *heads, grad=False, seed=k) for k, heads in enumerate(((4, 4), (2, 4), (2, 6)))]
    dy, found = tensor(S, B, 24, grad=False, seed=7), []
    for m, mine in ((twin, [t.clone() for t in whole]), (model, [cut(t) for t in whole])):
        leaves = [t.requires_grad_() for t in mine]
        torch.manual_seed(5)
        y = m(*leaves, **hidden)
        y.backward(dy if m is twin else cut(dy))
        found.append([y.detach(), *[t.grad for t in leaves]])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, cut(want), **EXACT)


@on_ranks
def test_keys_of_another_sequence() -> None:
    """Cut by the same ranks, of another length; a decoder has both attentions."""
    for kind, sizes, said in (
        ("MultiheadAttention", (F, 2), CROSS),
        ("MultiheadAttention", (F, 2), {**CROSS, "fuse_qkv_params": True, "qkv_weight_interleaved": False}),
        ("TransformerLayer", (F, INNER, 2), {"layer_type": "decoder", **LAYER}),
    ):
        twin = preset(kind, *sizes, **said)
        model = parallelize(copy.deepcopy(twin), context=mesh_of())
        other = tensor(S + 4, B, F, grad=False, seed=4)
        memory = {twin: other.clone().requires_grad_(), model: cut_sequence(other, dist.group.WORLD).requires_grad_()}
        x, dy, found = tensor(S, B, F, grad=False), tensor(S, B, F, grad=False, seed=3), []
        cut = functools.partial(cut_sequence, group=dist.group.WORLD)
        for m, part in ((twin, lambda t: t), (model, cut)):
            m.zero_grad()
            found.append([*run(m, part(x), part(dy), encoder_output=memory[m]), memory[m].grad])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, cut(want), **EXACT)


@on_ranks
def test_sequences_one_behind_the_other() -> None:
    """Tokens are cut, wherever sequences begin."""
    twin = attention(2, attn_mask_type="padding_causal", qkv_format="thd")
    model = parallelize(copy.deepcopy(twin), context=mesh_of())
    call = {"cu_seqlens_q": torch.tensor([0, 5, 7, 11, 14], dtype=torch.int32)}
    call["rotary_pos_emb"] = te_fuser.RotaryPositionEmbedding(4, device="cpu")(16).double()
    assert_as_whole(model, twin, x=tensor(16, F, grad=False), **call)


@on_ranks
def test_keys_of_other_lengths() -> None:
    """Lengths are those of whole sequences, of keys that are projected with the queries, too."""
    twin = attention(2, attn_mask_type="padding_causal")
    model = parallelize(copy.deepcopy(twin), context=mesh_of())
    ends = [torch.tensor(t, dtype=torch.int32) for t in ([0, S, 2 * S], [0, 3, 3 + S])]
    assert_as_whole(model, twin, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1])


class Reading:
    """A library's attention that gives the sinks that it was given."""

    by_structure, draws, emits = False, False, ()

    def forward(self, settings: object, tensors: dict[str, torch.Tensor], blank: object, random: object) -> Any:
        return tensors["sink"], {}

    def backward(self, settings: object, tensors: dict[str, torch.Tensor], dy: object, blank: object) -> Any:
        return {"input": dy, "sink": 2 * tensors["sink"]}


def test_a_library_reads_the_sinks_of_its_heads() -> None:
    op = ops.DotProductAttention(2, 4, scores=ops.AttentionScores(sink="learned"), mask="none", layout="sequence_first")
    sinks, x, two = torch.arange(4.0), torch.ones(2), Group("two", 2)
    attention = _Attention(Reading(), op.settings(), ("sink",), False, two)  # type: ignore[arg-type]
    tensors = {"0.sink": sinks, "-1.input": x, "output": x}
    for rank in range(2):
        call = FusionCall([op.eval()], tensors, frozenset(), {})
        with mock.patch.object(Group, "rank", rank):
            assert torch.equal(attention.forward(call, x), sinks[2 * rank : 2 * rank + 2])
            made = attention.backward(call, x)[1]["0.sink"]
        assert torch.equal(made, 2 * sinks * (torch.arange(4) // 2 == rank))


@on_ranks
def test_engines_average_over_the_ranks() -> None:
    """DDP and fully_shard over the ranks that cut the sequence give what one process has of the mean."""
    mesh, x = mesh_of(), tensor(S, B, F, grad=False)
    for wrap in (nn.parallel.DistributedDataParallel, functools.partial(fully_shard, mesh=mesh)):
        twin = listed()
        model: Any = wrap(parallelize(copy.deepcopy(twin), context=mesh))
        torch.manual_seed(5)
        backward(twin, x)
        torch.manual_seed(5)
        backward(model, cut_sequence(x, mesh))
        assert_same_gradients(gradients(model), gradients(twin), 1e-11)


@on_ranks
def test_what_cannot_be_is_said_on_all_ranks() -> None:
    mesh, x = mesh_of(), tensor(S // WORLD, B, F)
    with pytest.raises(ValueError, match="this model has no DotProductAttention"):
        parallelize(sequential(ops.Linear(F, F)), context=mesh)
    with pytest.raises(ValueError, match="'cp' is mesh and context: give a dimension"):
        parallelize(listed(), mesh, context=mesh)
    with pytest.raises(TypeError, match="parallelize takes a group of ranks, got None"):
        parallelize(listed())
    with pytest.raises(ValueError, match=r"kv_heads=1 cannot be cut into 2 equal parts, one for each rank that cuts"):
        parallelize(preset("TransformerLayer", F, INNER, 2, num_gqa_groups=1), context=mesh)(x)
    for said, call, words in (
        ("post_scale_bias", {"core_attention_bias": torch.zeros(1)}, "a bias is of all heads"),
        ("alibi", {}, "ALiBi is of all heads"),
    ):
        core = parallelize(attention(2), context=mesh)
        with pytest.raises(ValueError, match=words):
            core(x, core_attention_bias_type=said, **call)
    model = attention(2)
    model.set_context_parallel_group(mesh, cp_comm_type="a2a")
    with pytest.raises(ValueError, match=r"shape \[3, 2, .* are no 2 equal blocks, which each rank has"):
        model(tensor(3, B, F))
    with pytest.raises(ValueError, match="inference_params hold whole sequences"):
        model(x, inference_params=te_fuser.InferenceParams(B, S))
    with pytest.raises(ValueError, match=r"cut_sequence: an input of shape \[6, 2\] has no dimension 2"):
        cut_sequence(tensor(6, 2), mesh, dim=2)
    with pytest.raises(ValueError, match="sequence of 6 positions cannot be cut into 4 equal blocks"):
        cut_sequence(tensor(6, B), mesh, balanced=True)
    with pytest.raises(ValueError, match=r"cp_global_ranks=\[0, 3\], but cp_group has \[0, 1\]"):
        model.set_context_parallel_group(mesh, [0, 3])
    with pytest.raises(ValueError, match="cp_group is 2 groups, a hierarchy"):
        model.set_context_parallel_group([mesh, mesh], cp_comm_type="a2a+p2p")
    tokens = preset("DotProductAttention", 2, 4, qkv_format="thd", cp_group=mesh.get_group(), cp_comm_type="a2a")
    heads, ends = tensor(S // WORLD, 2, 4), torch.tensor([0, S], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"which cp_group says, .* take te_fuser.parallel.parallelize\(model, context=gr"
    ):
        tokens(heads, heads, heads, cu_seqlens_q=ends)
    tokens.set_context_parallel_group(None)
    assert parallelize(tokens, context=mesh)(heads, heads, heads, cu_seqlens_q=ends).shape == (S // WORLD, 8)
    with pytest.raises(ValueError, match="cp_comm_type='ring' is unknown"):
        model.set_context_parallel_group(mesh, cp_comm_type="ring")
    apart = sequential(
        ops.Linear(F, 3 * F), ops.DotProductAttention(2, 4, mask="none", layout="sequence_first"), ops.Linear(F, 3 * F)
    )
    apart.append(ops.DotProductAttention(2, 4, mask="none", layout="sequence_first"))
    parallelize(apart, context=mesh)[3].context = ops.Group()
    with pytest.raises(ValueError, match=r"takes whole sequences.*give it that group as its context"):
        apart(x)
