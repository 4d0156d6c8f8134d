"""Models that two ranks share by `parallelize`, against the whole ones in one process, in float64."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import te_fuser
from te_fuser import ops
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.distributed.dtensor import how_laid
from te_fuser.fuser import pipeline
from te_fuser.parallel import Column, Heads, Row, parallelize
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.twins import assert_same_gradients, randomize, sequential, tensor

F, INNER, S, B, HEADS = 8, 12, 6, 2, 2
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def mlp() -> te_fuser.Sequential:
    made = (
        te_fuser.Residual(ops.LayerNorm(F), ops.Linear(F, INNER), ops.GELU(), ops.Linear(INNER, F)) for _ in range(2)
    )
    return sequential(*made, ops.RMSNorm(F))


def gated() -> te_fuser.Sequential:
    made = (
        te_fuser.Residual(ops.RMSNorm(F), ops.Linear(F, 2 * INNER), ops.SwiGLU(), ops.Linear(INNER, F, bias=False))
        for _ in range(2)
    )
    return sequential(*made)


def apart() -> te_fuser.Sequential:
    """Products and biases by themselves, and a product that is left over."""
    return sequential(
        ops.MatMul(F, 2 * INNER),
        ops.Bias(2 * INNER),
        ops.GEGLU(),
        ops.MatMul(INNER, F),
        ops.Bias(F),
        ops.LayerNorm(F),
        ops.MatMul(F, F),
    )


def attention(packing: str = "interleaved", layout: str = "sequence_first") -> te_fuser.Sequential:
    kinds = {"mask": "causal", "packing": packing, "layout": layout}
    core = ops.DotProductAttention(HEADS, F // HEADS, dropout=0.1, **kinds)  # type: ignore[arg-type]
    return sequential(
        te_fuser.Residual(ops.LayerNorm(F), ops.Linear(F, 3 * F), core, ops.Linear(F, F), ops.Dropout(0.1))
    )


def grouped() -> te_fuser.Sequential:
    """Fewer heads of keys than of queries, normed and turned."""
    heads = {"heads": 4, "kv_heads": 2}
    turned = ops.HeadNorm(4, **heads), ops.RotaryEmbedding(4, **heads)
    core = ops.DotProductAttention(4, 4, kv_heads=2, mask="causal", layout="sequence_first")
    return sequential(te_fuser.Residual(ops.RMSNorm(F), ops.Linear(F, 32), *turned, core, ops.Linear(16, F)))


def layer(**keywords: Any) -> te_fuser.Sequential:
    given = {"params_dtype": torch.float64, "kernels": "reference", "self_attn_mask_type": "causal", **keywords}
    return randomize(te_fuser.Sequential(*(te_fuser.TransformerLayer(F, INNER, HEADS, **given) for _ in range(2))))


def llama() -> te_fuser.Sequential:
    """A preset whose queries, keys and values have weights of their own, and a gate."""
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False}
    return layer(activation="swiglu", normalization="RMSNorm", num_gqa_groups=HEADS, **plain)


def turns() -> te_fuser.Sequential:
    """Queries, fewer keys and values one behind the other in one weight, and learned sinks: in a list, and a preset."""
    heads: Any = {"heads": 4, "kv_heads": 2, "packing": "blocked"}
    core = ops.DotProductAttention(
        head_dim=2, mask="causal", scores=ops.AttentionScores(sink="learned"), **heads, layout="sequence_first"
    )
    turned = ops.RotaryEmbedding(2, **heads)
    alone = te_fuser.Residual(ops.RMSNorm(F), ops.MatMul(F, 16), ops.Bias(16), turned, core, ops.Linear(8, F))
    given: Any = {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "softmax_type": "learnable"}
    given |= {"kv_channels": 2, "num_gqa_groups": 2, "attn_mask_type": "causal", "params_dtype": torch.float64}
    return sequential(alone, te_fuser.MultiheadAttention(F, 4, attention_dropout=0.0, **given))


def groups() -> te_fuser.Sequential:
    """A preset whose queries, keys and values of two groups lie head by head in one weight, with learned sinks."""
    given: Any = {"fuse_qkv_params": True, "num_gqa_groups": 2, "softmax_type": "learnable", "hidden_dropout": 0.0}
    given |= {"attention_dropout": 0.0, "activation": "swiglu", "params_dtype": torch.float64}
    return sequential(te_fuser.TransformerLayer(F, INNER, 4, self_attn_mask_type="causal", **given))


def two_weights() -> te_fuser.Sequential:
    """A gate and what it gates, which one product computes of a weight each."""
    model = te_fuser.Residual(ops.SwiGLU(), ops.Linear(INNER, F), kernels="reference")
    model.gate, model.up = (nn.Parameter(torch.empty(INNER, F)) for _ in range(2))
    model.insert(0, ops.Bound(ops.MatMul(F, 2 * INNER, device="meta"), model, weight=("gate", "up")))
    return randomize(model.double())


MODELS: dict[str, Callable[[], te_fuser.Sequential]] = {
    "mlp": mlp,
    "gated": gated,
    "apart": apart,
    "attention": attention,
    "blocked": functools.partial(attention, "blocked"),
    "batch first": functools.partial(attention, layout="batch_first"),
    "grouped": grouped,
    "llama": llama,
    "packed": functools.partial(layer, fuse_qkv_params=True),
    "turns": turns,
    "groups": groups,
    "two weights": two_weights,
}
DIMS = {"batch first": 1}  # of sequences


def whole(t: torch.Tensor, like: torch.Tensor, laid: Any = None) -> torch.Tensor:
    full = t.full_tensor() if isinstance(t, DTensor) else t
    return (full if laid is None else laid.whole(full)).reshape(like.shape)


def laid_in(model: nn.Module) -> dict[str, Any]:
    """Parameter -> how it lies, where that is by parts."""
    owners = ((f"{path}." if path else "", how_laid(m)) for path, m in model.named_modules())
    return {prefix + name: laid for prefix, known in owners for name, laid in known.items()}


def backward(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def assert_as_whole(model: nn.Module, twin: nn.Module, step: int = 0, dim: int | None = None) -> None:
    """Output, dx and all gradients; the first two cut along a dimension."""
    x = tensor(S, B, F, seed=step)

    def own(t: torch.Tensor) -> torch.Tensor:
        return t if dim is None else t.chunk(WORLD, dim)[dist.get_rank()]

    torch.manual_seed(step)
    mine = backward(model, own(x))
    torch.manual_seed(step)
    for got, want in zip(mine, backward(twin, x), strict=True):
        assert want is not None
        torch.testing.assert_close(got, own(want), **EXACT)
    want = {name: p.grad for name, p in twin.named_parameters()}
    laid = laid_in(model)
    found = {name: whole(p.grad, want[name], laid.get(name)) for name, p in model.named_parameters()}
    assert_same_gradients(found, want, 1e-11)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel"),
    [*((kind, True) for kind in MODELS), *((kind, False) for kind in ("mlp", "apart", "grouped", "llama", "turns"))],
)
@on_ranks
def test_training(kind: str, sequence_parallel: bool) -> None:
    """Also of a copy, with gradients that add up, and without planning again; draws are those of one process."""
    twin, dim = MODELS[kind](), DIMS.get(kind, 0) if sequence_parallel else None
    model = parallelize(copy.deepcopy(twin), mesh_of(), sequence_parallel)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-3) for m in (model, twin)]
    for step in range(2):
        if step == 1:
            with mock.patch.object(pipeline, "make_plan", side_effect=AssertionError("planned again")):
                assert_as_whole(model, twin, 7, dim)
        assert_as_whole(model, twin, step, dim)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model = copy.deepcopy(model)
    twin.zero_grad()
    assert_as_whole(model, twin, 4, dim)
    if dim is None:
        x = tensor(S, B, F)
        for m in (model.eval(), twin.eval()):
            m.zero_grad()
        torch.testing.assert_close(model.reference(x), twin(x), **EXACT)
        with torch.no_grad():
            torch.testing.assert_close(model(x), twin(x), **EXACT)


@on_ranks
def test_what_is_derived() -> None:
    model = parallelize(mlp(), mesh_of())
    lie = {name: p.placements for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert lie["0.1.weight"] == lie["0.1.bias"] == (Shard(0),) and lie["0.3.weight"] == (Shard(1),)
    assert lie["0.0.weight"] == lie["0.3.bias"] == lie["2.weight"] == (Replicate(),)
    cut = parallelize(gated(), mesh_of())
    weight, bias = cut[0][1].weight, cut[0][1].bias
    assert weight.shape == (2 * INNER, F) and bias.shape == (2 * INNER,) and weight.placements == (Shard(0),)
    parts = parallelize(apart(), mesh_of())
    assert parts[0].parallel_mode == parts[1].parallel_mode == "column" and parts[3].parallel_mode == "row"
    assert parts[6].parallel_mode is None and parts[0].weight.shape == (2 * INNER, F)
    for between in (ops.Scale(INNER), ops.Fork("skip"), ops.Softmax(), ops.Reshape(-1, INNER)):
        kept = parallelize(te_fuser.Sequential(ops.Linear(F, INNER), between, ops.Linear(INNER, F)), mesh_of())
        assert all(p.placements == (Replicate(),) for p in kept.parameters())  # type: ignore[attr-defined]


@on_ranks
def test_plans_of_ones_own() -> None:
    """By patterns, and by PyTorch's `parallelize_module`, which leaves what no style names as it is."""
    twin = mlp()
    model = parallelize(copy.deepcopy(twin), mesh_of(), plan={"*.1": Column(), "*.3": Row()})
    assert_as_whole(model, twin)
    other = copy.deepcopy(twin)
    other.zero_grad()
    theirs = parallelize_module(copy.deepcopy(other), mesh_of(), {"*.1": Column(), "*.3": Row()})
    assert type(theirs[0][0].weight) is nn.Parameter and isinstance(theirs[0][1].weight, DTensor)
    assert_as_whole(theirs, other)


@on_ranks
def test_all_ranks_get_the_values_of_the_first() -> None:
    torch.manual_seed(dist.get_rank())
    model = parallelize(te_fuser.Sequential(ops.Linear(F, INNER), ops.GELU(), ops.Linear(INNER, F)), mesh_of())
    torch.manual_seed(0)
    twin = te_fuser.Sequential(ops.Linear(F, INNER), ops.GELU(), ops.Linear(INNER, F))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(p, q), q)


def initialize(*models: nn.Module) -> None:
    """All parameters anew, of each model from the same seed."""
    for m in models:
        torch.manual_seed(3)
        for part in m.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()


@pytest.mark.parametrize("kind", ["mlp", "gated", "llama", "turns"])
@on_ranks
def test_initialization(kind: str) -> None:
    """Draws what the whole model draws, made on the meta device too."""
    twin = MODELS[kind]()
    with torch.device("meta"):
        model = parallelize(MODELS[kind](), mesh_of())
    initialize(model.to_empty(device="cpu"), twin)
    laid = laid_in(model)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(p, q, laid.get(name)), q)
    assert_as_whole(model, twin)


@pytest.mark.parametrize("kind", ["gated", "turns"])
@on_ranks
def test_whole_tensors_are_loaded(kind: str) -> None:
    twin, model = MODELS[kind](), parallelize(MODELS[kind](), mesh_of())
    state, laid = {name: 2 * t for name, t in twin.state_dict().items()}, laid_in(model)
    model.load_state_dict(state)
    for name, p in model.named_parameters():
        assert torch.equal(whole(p, state[name], laid.get(name)), state[name])
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in state.items()}
    model.load_state_dict(model.state_dict())
    for name, p in model.named_parameters():
        assert torch.equal(whole(p, state[name], laid.get(name)), state[name])
    with pytest.raises(RuntimeError, match="size mismatch for 0.1.weight"):
        model.load_state_dict({**state, "0.1.weight": torch.zeros(3, F)})


FULL = StateDictOptions(full_state_dict=True)


COPIES: dict[str, Callable[[Any], Any]] = {
    "no copy": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize(
    ("kind", "first", "copied"),
    [("gated", True, "deepcopy"), ("gated", False, "pickle"), ("gated", False, "no copy")]
    + [("apart", True, "no copy"), ("turns", False, "no copy"), ("packed", True, "no copy")],
)
@on_ranks
def test_whole_states_by_torch(kind: str, first: bool, copied: str) -> None:
    """`torch.distributed.checkpoint.state_dict` gives and takes those of the model in one process, strictly.

    So it does of copies of models that are cut.
    """
    rank, twin = dist.get_rank(), MODELS[kind]()
    given = StateDictOptions(full_state_dict=True, broadcast_from_rank0=first)
    model, other = (COPIES[copied](parallelize(copy.deepcopy(twin), mesh_of())) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-3) for m in (twin, model, other)]
    for m, optimizer in zip((twin, model), optimizers, strict=False):
        torch.manual_seed(0)
        backward(m, tensor(S, B, F))
        optimizer.step()
    want, state = dict(get_model_state_dict(twin)), get_optimizer_state_dict(twin, optimizers[0])
    torch.testing.assert_close(dict(get_model_state_dict(model, options=FULL)), want, rtol=1e-8, atol=1e-8)
    found = get_optimizer_state_dict(model, optimizers[1], options=FULL)["state"]
    torch.testing.assert_close(found, state["state"], rtol=1e-8, atol=1e-8)
    offered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert [*offered] == [*(want if rank == 0 else ())]

    tells = rank == 0 or not first
    set_model_state_dict(other, copy.deepcopy(want) if tells else {}, options=given)
    set_optimizer_state_dict(other, optimizers[2], copy.deepcopy(state) if tells else {}, options=given)
    torch.testing.assert_close(dict(get_model_state_dict(other, options=FULL)), want, rtol=0, atol=0)
    found = get_optimizer_state_dict(other, optimizers[2], options=FULL)["state"]
    torch.testing.assert_close(found, state["state"], rtol=0, atol=0)


@on_ranks
def test_whole_states_that_do_not_fit() -> None:
    model = parallelize(gated(), mesh_of())
    want = dict(get_model_state_dict(gated()))
    name = next(iter(want))
    less = {key: t for key, t in want.items() if key != name}
    by_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match=f"(?s)Missing key.*{name}"):  # which PyTorch asks of the first rank's alone
        set_model_state_dict(model, {} if dist.get_rank() else dict(less), options=by_first)
    with pytest.raises(RuntimeError, match="(?s)Unexpected key.*more"):
        set_model_state_dict(model, {**want, "more": want[name]}, options=FULL)
    loose = StateDictOptions(full_state_dict=True, strict=False)
    assert set_model_state_dict(model, {**want, "more": want[name]}, options=loose).unexpected_keys == ["more"]
    wide = {**want, name: torch.zeros(3, *want[name].shape, dtype=torch.float64)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        set_model_state_dict(model, wide, options=FULL)


@on_ranks
def test_what_cannot_be_is_said_on_all_ranks() -> None:
    mesh, rank = mesh_of(), rf"rank {dist.get_rank()} of {WORLD} \(tp\)"
    odd = te_fuser.Sequential(ops.Linear(F, 7), ops.GELU(), ops.Linear(7, F))
    with pytest.raises(ValueError, match=rf"Linear on {rank}: out_features=7 cannot be cut into 2 equal parts: change"):
        parallelize(odd, mesh)
    with pytest.raises(ValueError, match="each of 2 parts by itself"):
        parallelize(te_fuser.Sequential(ops.Linear(F, 6), ops.SwiGLU(), ops.Linear(3, F)), mesh)
    heads = ops.Linear(F, 3 * F), ops.DotProductAttention(1, F, mask="none", layout="sequence_first"), ops.Linear(F, F)
    with pytest.raises(ValueError, match=rf"DotProductAttention '1' on {rank}: kv_heads=1 cannot be cut into 2"):
        parallelize(te_fuser.Sequential(*heads), mesh)
    with pytest.raises(ValueError, match=rf"on {rank}: num_gqa_groups=1 cannot be cut into 2 equal parts: take fewer"):
        parallelize(layer(num_gqa_groups=1), mesh)
    two = te_fuser.Sequential(attention(), attention(layout="batch_first"))
    with pytest.raises(ValueError, match="this model have the layouts batch_first, sequence_first: parallelize its"):
        parallelize(two, mesh, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"no module has a name like '\*.fc1'; there are 0, 0.0"):
        parallelize(mlp(), mesh, plan={"*.fc1": Column()})
    for plan in ({"0.1": "column"}, [Column()], Column()):
        with pytest.raises(TypeError, match="parallelize takes a plan as .*, got "):
            parallelize(mlp(), mesh, plan=plan)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parallelize takes True or False as sequence_parallel, got 'yes'"):
        parallelize(mlp(), mesh, sequence_parallel="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Column takes a whole number from 1 on as parts, got 0"):
        Column(parts=(2, 0))
    with pytest.raises(TypeError, match="Column takes a whole number as parts, got '2'"):
        Column(parts="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Column takes a MatMul, a Bias, a Linear, or a Bound one of these, got GELU"):
        parallelize(mlp(), mesh, plan={"0.2": Column()})
    with pytest.raises(TypeError, match="Heads takes a DotProductAttention, got GELU"):
        parallelize(mlp(), mesh, plan={"0.2": Heads()})
    with pytest.raises(TypeError, match="parallelize takes a group of ranks"):
        parallelize(mlp(), "tp")  # type: ignore[arg-type]
    model = parallelize(mlp(), mesh)
    with pytest.raises(ValueError, match="is a DTensor already.*parallelize a model once"):
        parallelize(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("other",)), plan={"*.1": Row()})
    model[0][1].parallel_mode = "row"
    with pytest.raises(
        TypeError, match=rf"on rank {dist.get_rank()}: parameter weight is a DTensor.*cut along dimension 1"
    ):
        model(tensor(S, B, F))


def disagreement(make: Callable[[], object]) -> str:
    """Words of the error that all ranks raise; then they go on together."""
    with pytest.raises(RankMismatchError) as caught:
        make()
    dist.barrier()
    return str(caught.value)


@on_ranks
def test_ranks_that_give_other_models_or_arguments() -> None:
    """Nothing is sent before they are found to be alike."""
    rank, mesh = dist.get_rank(), mesh_of()
    text = disagreement(lambda: parallelize(mlp() if rank else gated(), mesh))
    assert (
        "rank 0 has 0.0: RMSNorm(" in text
        and "rank 1 has 0.0: LayerNorm(" in text
        and "Give parallelize the same" in text
    )
    wide = (te_fuser.Sequential(ops.Linear(F, INNER + 2 * rank), ops.GELU(), ops.Linear(INNER + 2 * rank, F)), mesh)
    assert "weight [12, 8] torch.float32 with a gradient on cpu" in disagreement(lambda: parallelize(*wide))
    text = disagreement(lambda: parallelize(mlp(), mesh, sequence_parallel=rank == 1))
    assert (
        "rank 0 has parallelize(model, mesh, sequence_parallel=False); rank 1 has par" in text and "equal arg" in text
    )
    plan = {"0.1": Column(), "0.3": Row() if rank else Column()}
    assert "rank 1 has a plan with '0.3': Row(" in disagreement(lambda: parallelize(mlp(), mesh, plan=plan))
    if rank:
        with pytest.raises(ValueError, match="no module has a name like"):
            parallelize(mlp(), mesh, plan={"*.fc1": Column()})
        dist.barrier()
    else:
        assert "rank 1 of group 'tp' cannot run this call" in disagreement(lambda: parallelize(mlp(), mesh))
    plain = parallelize_module
    text = disagreement(lambda: plain(mlp(), mesh, {"0.1": Column(parts=1 + rank)}))
    assert "rank 0 has Column(" in text and "parts=2" in text
    assert_as_whole(parallelize(mlp(), mesh), mlp())


@on_ranks
def test_a_group_in_place_of_a_mesh() -> None:
    with pytest.raises(TypeError, match=r"parallelize takes a DeviceMesh, got a ProcessGroup.*DeviceMesh.from_group\("):
        parallelize(mlp(), dist.group.WORLD)  # type: ignore[arg-type]
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert_as_whole(parallelize(mlp(), mesh), mlp())


class Owner(te_fuser.Sequential):
    """Owns what its Linears read."""

    def __init__(self) -> None:
        super().__init__(
            ops.Bound(ops.Linear(F, INNER, device="meta"), self, weight="up", bias="shift"),
            ops.GELU(),
            ops.Bound(ops.Linear(INNER, F, device="meta"), self, weight="down", bias="last"),
        )
        torch.manual_seed(0)
        for name, shape in {"up": (INNER, F), "shift": INNER, "down": (F, INNER), "last": F}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))


@on_ranks
def test_linears_that_are_bound_are_cut() -> None:
    model = parallelize(Owner(), mesh_of())
    assert [p.to_local().shape[-1] for p in model.parameters()] == [F, INNER // 2, INNER // 2, F]  # type: ignore[attr-defined]
    assert_as_whole(model, Owner())


@on_ranks
def test_modules_that_are_no_ops_are_named() -> None:
    mesh = mesh_of()
    model = te_fuser.Sequential(ops.LayerNorm(F), nn.Sequential(nn.Linear(F, F), nn.GELU()), nn.Tanh())
    with pytest.warns(UserWarning, match=r"parallelize leaves 1.0 \(Linear\) as they are: no ops.*te_fuser.from_torch"):
        parallelize(copy.deepcopy(model), mesh)
    with pytest.warns(UserWarning, match=r"leaves 0 \(Embedding\) as they are: .*Every rank runs them whole$"):
        parallelize(te_fuser.Sequential(nn.Embedding(3, F), ops.Linear(F, F)), mesh)
    with pytest.warns(UserWarning, match="of which each has a term, are not added up; te_fuser"):
        parallelize(copy.deepcopy(model), mesh, sequence_parallel=True)
    styled = te_fuser.Sequential(nn.Linear(F, F))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(nn.ModuleDict({"embedding": nn.Embedding(3, F), "layer": layer(), "list": mlp()}), mesh)
        parallelize(styled, mesh, plan={"0": ColwiseParallel()})


@on_ranks
def test_pickles_of_ops_keep_their_shares() -> None:
    op = ops.MatMul(F, INNER)
    op.parallel_mode, op.group = "column", mesh_of()
    assert pickle.loads(pickle.dumps(op)).group == op.group
