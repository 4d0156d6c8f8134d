"""Weight gradients in buckets of DistributedDataParallel: those of PyTorch's own averages, written where they stay."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from te_fuser.parallel import write_into_buckets
from tests.parallel.models import (
    FEATURES,
    MODELS,
    assert_as_one_process,
    assert_step_as_one_process,
    backward,
    own,
    plain_list,
    whole_batch,
)
from tests.parallel.ranks import on_ranks


def _shared_weight() -> te_fuser.Sequential:
    torch.manual_seed(3)
    first = ops.Linear(FEATURES, FEATURES, dtype=torch.float64)
    return te_fuser.Sequential(
        first, ops.GELU(), ops.Bound(ops.MatMul(FEATURES, FEATURES, device="meta"), first, weight="weight")
    )


KINDS: dict[str, Callable[[], nn.Module]] = {**MODELS, "shared weight": _shared_weight}


def _in_buckets(model: nn.Module) -> tuple[DistributedDataParallel, list[str]]:
    made = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return made, write_into_buckets(made)


def _written_in_place(model: DistributedDataParallel, names: list[str]) -> list[str]:
    """Names of weights whose gradients lie in a bucket before DistributedDataParallel sees them, as backwards run."""
    found: list[str] = []
    for name in names:
        weight = model.module.get_parameter(name)

        def note(p: torch.Tensor, name: str = name) -> None:
            place = p._te_fuser_bucket.place()  # type: ignore[attr-defined]
            if place.view is not None and p.grad is not None and place.view.data_ptr() == p.grad.data_ptr():
                found.append(name)

        weight.register_post_accumulate_grad_hook(note)
    return found


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_gradients(kind: str) -> None:
    model, twin = KINDS[kind](), KINDS[kind]()
    parallel, names = _in_buckets(model)
    found = _written_in_place(parallel, names)
    for step in range(3):
        found.clear()
        assert_step_as_one_process(parallel, twin, step)
    if kind != "shared weight":  # whose two terms autograd adds up where it likes
        assert sorted(found) == sorted(names)


@pytest.mark.parametrize("to_none", [True, False])
@on_ranks
def test_micro_batches(to_none: bool) -> None:
    """A gradient that is there is added to, wherever it lies."""
    parallel, _ = _in_buckets(plain_list())
    twin = plain_list()
    for step in range(3):
        for m in (parallel, twin):
            m.zero_grad(set_to_none=to_none)
        with parallel.no_sync():
            backward(parallel, own(whole_batch(step)))
        backward(parallel, own(whole_batch(step + 10)))
        for k in (step, step + 10):
            backward(twin, whole_batch(k))
        assert_as_one_process(parallel, twin)


@on_ranks
def test_a_gradient_that_autograd_does_not_keep() -> None:
    """Gradients from torch.autograd.grad stay as they are when the next backward writes into buckets."""
    parallel, names = _in_buckets(plain_list())
    weights = [parallel.module.get_parameter(name) for name in names]
    for step in range(3):
        parallel.zero_grad()
        backward(parallel, own(whole_batch(step)))
    parallel.zero_grad()
    with parallel.no_sync():
        given = torch.autograd.grad(parallel(own(whole_batch(7))).square().sum(), weights)
        before = [g.clone() for g in given]
        y = parallel(own(whole_batch(8)))
        y.square().sum().backward(retain_graph=True)
        once = [p.grad.clone() for p in weights if p.grad is not None]
        y.square().sum().backward()
    assert all(map(torch.equal, given, before))
    for p, g in zip(weights, once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


@on_ranks
def test_copies_and_what_is_left() -> None:
    parallel, names = _in_buckets(plain_list())
    for step in range(2):
        backward(parallel, own(whole_batch(step)))
    module, kept = parallel.module, weakref.ref(parallel)
    copied = copy.deepcopy(module)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    del parallel
    gc.collect()
    assert kept() is None
    twin = plain_list()
    for m in (module, copied, loaded, twin):
        m.zero_grad()
        backward(m, own(whole_batch(5)))
    for name in names:
        for m in (module, copied, loaded):
            torch.testing.assert_close(m.get_parameter(name).grad, twin.get_parameter(name).grad, rtol=0, atol=0)
    for m in (module, copied, loaded):  # each may have buckets again
        parallel, again = _in_buckets(m)
        assert again == names
        found = _written_in_place(parallel, names)
        for step in range(3):
            found.clear()
            assert_step_as_one_process(parallel, twin, step)
        assert sorted(found) == sorted(names)


@on_ranks
def test_copies_of_the_wrapper() -> None:
    parallel, _ = _in_buckets(plain_list())
    assert_step_as_one_process(copy.deepcopy(parallel), plain_list())


@on_ranks
def test_weights_in_the_place_of_others() -> None:
    """They have no place in a bucket: gradients are theirs, and nobody averages them, as of any model."""
    parallel, names = _in_buckets(plain_list())
    module, twin = parallel.module, plain_list()
    for step in range(2):
        parallel.zero_grad()
        backward(parallel, own(whole_batch(step)))
    given = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    torch.func.functional_call(module, given, (own(whole_batch(3)),)).square().sum().backward()
    module.load_state_dict({n: t.clone() for n, t in module.state_dict().items()}, assign=True)
    for m in (module, twin):
        m.zero_grad()
        m(own(whole_batch(3))).square().sum().backward()
    for name in names:
        for p in (given[name], module.get_parameter(name)):
            torch.testing.assert_close(p.grad, twin.get_parameter(name).grad)


@on_ranks
def test_hooks_keep_what_they_get() -> None:
    parallel, names = _in_buckets(plain_list())
    kept: list[torch.Tensor] = []
    weight = parallel.module.get_parameter(names[0])
    for step in range(3):
        if step == 1:
            weight.register_hook(kept.append)
        parallel.zero_grad()
        backward(parallel, own(whole_batch(step)))
    twin = plain_list()
    for step, gradient in enumerate(kept, 1):
        twin.zero_grad()
        backward(twin, own(whole_batch(step)))
        torch.testing.assert_close(gradient, twin.get_parameter(names[0]).grad)


class _Thrice(nn.Module):
    """Weights whose gradient waits in a backward while another one runs within that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = plain_list()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(checkpoint(self.layer, self.layer(x), use_reentrant=True))  # type: ignore[no-any-return]


@on_ranks
def test_a_backward_within_another() -> None:
    made = DistributedDataParallel(_Thrice(), gradient_as_bucket_view=True, static_graph=True)
    write_into_buckets(made)
    twin = _Thrice()
    for step in range(4):
        assert_step_as_one_process(made, twin, step)


@on_ranks
def test_refusals() -> None:
    def parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, **options)

    with pytest.raises(TypeError, match="takes a DistributedDataParallel, got Sequential"):
        write_into_buckets(plain_list())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"DistributedDataParallel\(..., gradient_as_bucket_view=True\)"):
        write_into_buckets(parallel(plain_list()))
    with pytest.raises(ValueError, match="no op of the model multiplies with a parameter of its own"):
        write_into_buckets(parallel(nn.Linear(3, 4), gradient_as_bucket_view=True))
