"""Tools around models that ranks share: transforms, anomaly mode, threads, hooks, checkpoints, rules of users."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call, grad, hessian, jvp, vmap

import te_fuser
from te_fuser import ops
from te_fuser.distributed import exchange
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.parallel import Column, Row, parallelize
from tests.parallel.cutting import assert_as_whole, part
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.parallel.test_parallelize import B, S
from tests.parallel.test_parallelize import assert_as_whole as assert_as_one
from tests.parallel.test_parallelize import mlp as listed
from tests.sharding.test_rules import ByRow, InBlocks, Plain
from tests.threads import in_threads
from tests.twins import assert_same_gradients, by_reference, randomize, sequential, tensor

F, ROWS = 8, 4


def mlp() -> te_fuser.Sequential:
    torch.manual_seed(0)
    return te_fuser.Sequential(ops.LayerNorm(F), ops.Linear(F, 16), ops.GELU(), ops.Linear(16, F)).double()


def cut(sequence_parallel: bool = False, mesh: DeviceMesh | None = None) -> Any:
    mesh = mesh or mesh_of()["tp"]
    return te_fuser.parallelize(mlp(), mesh, sequence_parallel)


def data(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, F, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tangent_of(model: Any, x: torch.Tensor, v: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model.reference(forward_ad.make_dual(x, v))).tangent


def twice(model: Any, x: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the squares of a gradient, that of the parameters among them."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(model.reference(x).pow(3).sum(), x, create_graph=True)
    dx.square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.grad, *[g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]]  # type: ignore[list-item]


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda m, x, v: grad(lambda t: m.reference(t).pow(3).sum())(x),
    "vmap": lambda m, x, v: vmap(m.reference, in_dims=1, out_dims=1)(torch.stack([x, v], 1))[:, 1],
    "gradients of each": lambda m, x, v: vmap(grad(lambda t: m.reference(t).pow(3).sum()))(torch.stack([v, x]))[1],
    "jvp": lambda m, x, v: jvp(m.reference, (x,), (v,))[1],
    "forward_ad": tangent_of,
    "of a vjp": lambda m, x, v: jvp(grad(lambda t: m.reference(t).pow(3).sum()), (x,), (v,))[1],
    "twice": twice,
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_transforms_of_the_reference(sequence_parallel: bool) -> None:
    """All as of the whole model, of this rank's rows where ranks cut them."""
    whole, model, given = mlp(), cut(sequence_parallel), (data(), data(2))

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(WORLD)[dist.get_rank()] if sequence_parallel else t

    for name, transform in TRANSFORMS.items():
        wanted, found = transform(whole, *given), transform(model, *map(own, given))
        if isinstance(wanted, list):
            assert len(wanted) == len(found) > 4, name
            torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-9, atol=1e-9, msg=name)
            wanted, found = wanted[0], found[0]
        torch.testing.assert_close(found, own(wanted), rtol=1e-9, atol=1e-9, msg=name)
    if not sequence_parallel:
        wanted, found = (hessian(lambda t, m=m: m.reference(t).pow(3).sum())(given[0]) for m in (whole, model))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@on_ranks
def test_the_model_itself_in_transforms_and_with_other_parameters() -> None:
    model, x = cut(), data()
    for transform in (grad(lambda t: model(t).sum()), vmap(model), lambda t: jvp(model, (t,), (t,))):
        with pytest.raises(TypeError, match=r"does not run inside torch.func .* transform model\.reference"):
            transform(x)
    others = {name: torch.nn.Parameter(2.0 * p.detach()) for name, p in model.named_parameters()}
    y = functional_call(model, others, (x,))
    y.sum().backward()
    whole = mlp()
    wanted = functional_call(whole, {name: 2.0 * p for name, p in whole.named_parameters()}, (x,))
    torch.testing.assert_close(y, wanted)
    assert all(p.grad is not None for p in others.values()) and all(p.grad is None for p in model.parameters())


@on_ranks
def test_anomaly_mode() -> None:
    """Errors name the step that gave NaN; PyTorch's own look at DTensors is refused in words."""
    model, x = cut(), data().requires_grad_()
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Error detected in SegmentFunction"):
        with pytest.raises(RuntimeError, match="step '.*' of te_fuser's backward gave NaN"):
            model(x).backward(torch.full_like(x, float("nan")))
        with pytest.raises(NotImplementedError, match=r"NaN in .* DTensors: no step .* check_nan=False"):
            model(x).sum().backward()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        model(x).sum().backward()
    frozen = cut().requires_grad_(False)
    with torch.autograd.set_detect_anomaly(True):
        frozen(x).sum().backward()


@on_ranks
def test_threads_with_groups_of_their_own() -> None:
    x = data()
    meshes = [DeviceMesh.from_group(dist.new_group(range(WORLD)), "cpu") for _ in range(2)]
    models, whole = [cut(mesh=mesh) for mesh in meshes], mlp()
    for model in models:
        model(x.clone().requires_grad_()).sum().backward()

    def run(model: Any, factor: float) -> None:
        for k in range(10):
            t, u = ((factor + k) * x).requires_grad_(), ((factor + k) * x).requires_grad_()
            y, wanted = model(t), whole.reference(u)
            y.sum().backward()
            (dx,) = torch.autograd.grad(wanted.sum(), u)
            assert float((y - wanted).abs().max() + (t.grad - dx).abs().max()) < 1e-9

    in_threads(partial(run, models[0], 1.0), partial(run, models[1], 100.0))


@on_ranks
def test_threads_that_share_a_group_are_refused_at_once() -> None:
    """The one that is there already goes on, and so does who comes behind it."""
    group = dist.new_group(range(WORLD))
    model, x, words = cut(mesh=DeviceMesh.from_group(group, "cpu")), data(), list[str]()
    wanted = model(x).detach()
    wait, both = exchange.Exchange.wait, threading.Barrier(2, timeout=30.0)

    def waits(*given: Any, **how: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            both.wait()  # the other thread comes
            both.wait()  # and was refused
        return wait(*given, **how)

    def other() -> None:
        words.append(str(float((model(x) - wanted).abs().max())))

    thread = threading.Thread(target=other)
    with mock.patch.object(exchange.Exchange, "wait", waits):
        thread.start()
        both.wait()
        with pytest.raises(
            RankMismatchError, match="two threads .* that the ranks of this group share.* a group of its own"
        ):
            model(x)
        both.wait()
        thread.join(30.0)
    assert words == ["0.0"] and torch.equal(model(x), wanted)


# ---- hooks


HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2}
KINDS: dict[str, Callable[..., Any]] = {
    "forward": nn.Module.register_forward_hook,
    "forward-pre": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward-pre": nn.Module.register_full_backward_pre_hook,
}


def model() -> te_fuser.Sequential:
    """All ops on heads, a list among them, in a residual: its sum reads what is named before the hooks."""
    turned = te_fuser.Sequential(ops.HeadNorm(4, **HEADS), ops.RotaryEmbedding(4, **HEADS))
    core = ops.DotProductAttention(head_dim=4, mask="causal", layout="sequence_first", dropout=0.1, **HEADS)
    return sequential(
        te_fuser.Residual(ops.RMSNorm(F), ops.Linear(F, 32), turned, core, ops.Linear(16, F), ops.Dropout(0.1))
    )


PLACES = {
    "HeadNorm": ["0.2.0"],
    "RotaryEmbedding": ["0.2.1"],
    "DotProductAttention": ["0.3"],
    "both products": ["0.1", "0.4"],
    "a list": ["0.2"],
    "the residual": ["0"],
    "a list and an op in it": ["0.2", "0.2.1"],
    "all": ["0", "0.0", "0.1", "0.2", "0.2.0", "0.2.1", "0.3", "0.4", "0.5"],
}


@pytest.mark.parametrize("place", PLACES)
@on_ranks
def test_hooks_of_all_kinds(place: str) -> None:
    """Values and gradients of the whole model, those that ranks add up among them, and each hook runs."""
    at = [*PLACES].index(place)
    some = [*KINDS.items(), *KINDS.items()][at % 4 : at % 4 + 2]  # so each kind is in four places
    for number, (kind, register) in enumerate(some, at // 4):
        sequence_parallel = number % 2 == 1
        whole, ran = model(), list[str]()
        shared = parallelize(copy.deepcopy(whole), mesh_of(), sequence_parallel)
        for path in PLACES[place]:
            register(whole.get_submodule(path), lambda *_: None)
            register(shared.get_submodule(path), lambda *_, path=path, ran=ran: ran.append(path))
        assert_as_one(shared, whole, dim=0 if sequence_parallel else None)
        assert {*ran} == {*PLACES[place]}, kind


@on_ranks
def test_hooks_that_come_and_go() -> None:
    """Hooks of all modules, and a list with options of its own; an op that is called alone takes all heads."""
    whole = model().eval()
    whole[0][2].memory = "lean"
    shared = parallelize(copy.deepcopy(whole), mesh_of())
    assert_as_one(shared, whole)
    for register in (nn.modules.module.register_module_forward_hook, shared[0][3].register_forward_hook):
        hook = register(lambda *_: None)
        assert_as_one(shared, whole)
        packed = tensor(S, B, 32)
        torch.testing.assert_close(shared[0][3](packed), whole[0][3](packed))
        hook.remove()
        assert_as_one(shared, whole)


@on_ranks
def test_an_op_that_takes_whole_rows_is_refused() -> None:
    """Between hooks too it would see the features of its rank alone."""
    cut = sequential(ops.Linear(F, 16), ops.LayerNorm(16), ops.Linear(16, F))
    parallelize(cut, mesh_of(), plan={"0": Column(), "2": Row()})
    for op in cut[:2]:
        op.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"op 2 \(LayerNorm '1'\): LayerNorm goes over all features of a row"):
        cut(tensor(S, B, F))


# ---- te_fuser.checkpoint


@pytest.mark.parametrize("group", ["default", "positions", "mesh"])
@pytest.mark.parametrize("rows", [4, 3])
@on_ranks
def test_each_rank_keeps_its_part(rows: int, group: str) -> None:
    """Of the first argument, also where parts are not equal; gradients are those of the model that shares nothing."""
    twin = te_fuser.Sequential(*listed(), ops.Dropout(0.3), kernels="reference")
    model = parallelize(copy.deepcopy(twin), mesh_of())
    x, scale = tensor(rows, 1, F + 1, grad=False)[..., :F].requires_grad_(), tensor(1, seed=4)
    kept: list[torch.Tensor] = []
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        if group == "positions":
            y = te_fuser.checkpoint(lambda x, s: model(x) * s, True, None, dist.group.WORLD, x, scale)
        else:
            given = {} if group == "default" else {"tp_group": mesh_of()}
            y = te_fuser.checkpoint(lambda x, s: model(x) * s, x, scale, distribute_saved_activations=True, **given)
    assert sum(t.numel() for t in kept if t is not scale) == -(-x.numel() // 2)
    memory = {t.untyped_storage().nbytes() for t in kept if t.numel() > 1}
    assert memory == {8 * -(-x.numel() // 2)}
    found = torch.autograd.grad(y.square().sum(), [x, scale])
    torch.manual_seed(3)
    wanted = torch.autograd.grad((twin(x) * scale).square().sum(), [x, scale])
    assert_same_gradients(dict(enumerate(found)), dict(enumerate(wanted)), 1e-11)  # type: ignore[arg-type]


@on_ranks
def test_what_ranks_have_apart_is_refused() -> None:
    model = parallelize(listed(), mesh_of(), sequence_parallel=True)
    with pytest.raises(ValueError, match="by sequence_parallel each has its own part already"):
        te_fuser.checkpoint(model, tensor(4, 1, F), distribute_saved_activations=True)
    with pytest.raises(TypeError, match="shares the first argument, got NoneType: give a plain tensor first"):
        te_fuser.checkpoint(lambda x: x, None, distribute_saved_activations=True)
    with torch.no_grad():
        te_fuser.checkpoint(lambda x: x, None, distribute_saved_activations=True)


@on_ranks
def test_ranks_that_keep_parts_of_others_or_do_not_come() -> None:
    """Said in words on both: what is kept is compared, and who waits for parts in backward says it."""
    rank, x = dist.get_rank(), tensor(4, 1, F)
    given = {"distribute_saved_activations": True, "tp_group": dist.new_group(range(2), timedelta(seconds=1.0))}
    with pytest.raises(RankMismatchError, match=r"rank 0 has checkpoint .* x \[4, 1, .* rank 1 has .* x \[5, 1, "):
        te_fuser.checkpoint(torch.sin, tensor(4 + rank, 1, F), **given)
    y = te_fuser.checkpoint(torch.sin, x, **given)
    if rank:
        with pytest.raises(RankMismatchError, match=r"rank 0 .* did not come .* ready with checkpoint .* x \[6, 1, "):
            te_fuser.checkpoint(torch.sin, tensor(6, 1, F), **given)
    else:
        words = r"in the backward pass of a checkpoint, which gathers x \[4, 1, \d+\]: rank 0 .* waited in all_gather"
        with pytest.raises(RankMismatchError, match=words):
            y.sum().backward()


# ---- rules of users


SHAPE = (4, 6, 8)


def layer(first: ops.FusableOperation, between: ops.FusableOperation | None = None) -> te_fuser.Sequential:
    """A feed-forward layer with ops of users."""
    middle = [] if between is None else [between]
    parts = [first, ops.Linear(F, 2 * F), ops.GELU(), *middle, ops.Linear(2 * F, F), ops.RMSNorm(F)]
    return randomize(te_fuser.Sequential(*parts, kernels="reference").double())


def assert_as_one_process(whole: te_fuser.Sequential, cut: te_fuser.Sequential, rows: int | None) -> None:
    """Output and all gradients, called, as the reference, and of a copy."""
    for model, twin in ((cut, whole), (copy.deepcopy(cut), whole), (by_reference(cut), by_reference(whole))):
        assert_as_whole(model, twin, {"x": tensor(*SHAPE, grad=False)}, {}, (rows, rows))


@on_ranks
def test_a_rule_by_rows() -> None:
    """The gradient of its weight is added up, by default."""
    whole = layer(ByRow(F))
    cut = te_fuser.parallelize(copy.deepcopy(whole), mesh_of(), sequence_parallel=True)
    assert_as_one_process(whole, cut, 0)


@on_ranks
def test_an_op_without_a_rule() -> None:
    """The op runs where values are whole, and is refused elsewhere before anything is sent."""
    whole = layer(Plain(F))
    assert_as_one_process(whole, te_fuser.parallelize(copy.deepcopy(whole), mesh_of()), None)
    cut = te_fuser.parallelize(copy.deepcopy(whole), mesh_of(), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"op 0 \(Plain '0'\): Plain does not say .*@te_fuser.parallel.sharding_rule"):
        cut(part(tensor(*SHAPE), 0))


@pytest.mark.parametrize("rows", [None, 0])
@on_ranks
def test_a_rule_by_features(rows: int | None) -> None:
    """Each rank has its block of the features, and of the weight."""
    whole = layer(ByRow(F), InBlocks(2 * F))
    cut: Any = te_fuser.parallelize(
        copy.deepcopy(whole),
        mesh_of(),
        sequence_parallel=rows is not None,
        plan={"1": te_fuser.parallel.Column(), "4": te_fuser.parallel.Row()},
    )
    cut[3].weight = torch.nn.Parameter(part(whole[3].weight.detach(), 0).clone())
    assert_as_one_process(whole, cut, rows)
