"""Tools around models that ranks share: transforms of their reference, anomaly mode, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call, grad, hessian, jvp, vmap

import te_fuser as te
from te_fuser import ops
from te_fuser.distributed import exchange
from te_fuser.distributed.consistency import RankMismatchError
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.threads import in_threads

F, ROWS = 8, 4


def mlp() -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(ops.LayerNorm(F), ops.Linear(F, 16), ops.GELU(), ops.Linear(16, F)).double()


def cut(sequence_parallel: bool = False, mesh: DeviceMesh | None = None) -> Any:
    mesh = mesh or mesh_of()["tp"]
    return te.parallelize(mlp(), mesh, sequence_parallel)


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
