"""te_fuser.checkpoint in both forms; CudaRNGStatesTracker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import CudaRNGStatesTracker, ops
from tests.twins import tensor

WIDTH = 8


def model() -> te_fuser.Sequential:
    torch.manual_seed(0)
    return te_fuser.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Dropout(0.5), ops.Linear(WIDTH, WIDTH))


def gradients(run: Any, x: torch.Tensor) -> Any:
    torch.manual_seed(1)
    y = run(x)
    torch.manual_seed(2)  # what backward draws again comes from forward's state
    return y, *torch.autograd.grad(y.square().sum(), [x])


FORMS: dict[str, Any] = {
    "plain": lambda f, x: te_fuser.checkpoint(f, x),
    "keywords": lambda f, x: te_fuser.checkpoint(
        f,
        x,
        distribute_saved_activations=True,
        get_rng_state_tracker=None,
        tp_group=None,
        use_reentrant=True,
        preserve_rng_state=True,
    ),
    "positions": lambda f, x: te_fuser.checkpoint(f, False, None, None, x),
    "the older name": lambda f, x: te_fuser.checkpoint(f, x, get_cuda_rng_tracker=CudaRNGStatesTracker),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_function(form: str) -> None:
    m, x = model(), tensor(4, WIDTH, dtype=torch.float32)
    torch.testing.assert_close(gradients(lambda x: FORMS[form](m, x), x), gradients(m, x))


@pytest.mark.parametrize("form", FORMS)
def test_backward_may_run_twice(form: str) -> None:
    """With retain_graph=True, inside of a region and outside; gradients are those of the function."""
    m, x = model(), tensor(4, WIDTH, dtype=torch.float32)
    for enabled in (False, True):
        torch.manual_seed(1)
        with te_fuser.fp8_autocast(enabled=enabled):
            y = FORMS[form](m, x)
        first = torch.autograd.grad(y.square().sum(), [x, *m.parameters()], retain_graph=True)
        second = torch.autograd.grad(y.square().sum(), [x, *m.parameters()])
        for one, other in zip(first, second, strict=True):
            assert one.abs().sum() > 0
            torch.testing.assert_close(one, other)


def test_it_keeps_the_arguments_alone() -> None:
    m, x = model(), tensor(4, WIDTH, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        te_fuser.checkpoint(m, x)
    assert all(t is x or t.numel() == 0 for t in kept)


def test_arguments_of_the_function() -> None:
    x = tensor(4, WIDTH)
    got = te_fuser.checkpoint(lambda a, b=None, *, c: a * c, x, None, c=2.0)
    torch.testing.assert_close(got, 2 * x)
    got = te_fuser.checkpoint(lambda flag, a: a if flag else -a, True, x)
    torch.testing.assert_close(got, x)


@pytest.mark.parametrize("form", ["positions", "keywords"])
def test_states_of_a_tracker_are_those_of_forward(form: str) -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("dropout", 5)
    drawn: list[torch.Tensor] = []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("dropout"):
            noise = torch.rand(4, device="cuda" if torch.cuda.is_available() else "cpu").to(x)
        drawn.append(noise)
        return x * noise

    x = tensor(4)
    if form == "positions":
        y = te_fuser.checkpoint(noisy, False, lambda: tracker, None, x)
    else:
        y = te_fuser.checkpoint(noisy, x, get_rng_state_tracker=lambda: tracker)
    with tracker.fork("dropout"):
        between = torch.rand(1)
    states = tracker.get_states()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert len(drawn) == 2 and torch.equal(drawn[0], drawn[1]) and torch.equal(gradient, drawn[0])
    assert not torch.equal(between, drawn[0][:1])
    assert torch.equal(tracker.get_states()["dropout"], states["dropout"])


def test_refused() -> None:
    with pytest.raises(TypeError, match="checkpoint takes a function first, got 5"):
        te_fuser.checkpoint(5)
    for name, seed in (("a", "b"), (1, 2), ("a", 0.5)):
        with pytest.raises(TypeError, match="CudaRNGStatesTracker.add takes a text and a whole number, got "):
            te_fuser.CudaRNGStatesTracker().add(name, seed)


def rand() -> torch.Tensor:
    return torch.rand(3, device="cuda" if torch.cuda.is_available() else "cpu")


def test_a_tracker_forks() -> None:
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(0)
    alone = rand()
    torch.manual_seed(0)
    tracker.add("model-parallel-rng", 7)
    tracker.add("other", 8)
    with tracker.fork():
        first = rand()
    assert torch.equal(rand(), alone)
    with tracker.fork("other"):
        other = rand()
    with tracker.fork():
        second = rand()
    torch.manual_seed(7)
    assert torch.equal(torch.cat([first, second]), torch.cat([rand(), rand()]))
    torch.manual_seed(8)
    assert torch.equal(other, rand())
    assert sorted(tracker.get_states()) == ["model-parallel-rng", "other"]


def test_states_of_a_tracker() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = rand()
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(rand(), first)
    for name, seed, what in (("a", 2, "name"), ("b", 1, "seed")):
        with pytest.raises(ValueError, match=f"there is a state of this {what} already"):
            tracker.add(name, seed)
    with pytest.raises(KeyError, match="no state 'b'"), tracker.fork("b"):
        pass
    with pytest.raises(TypeError, match="set_states takes a dictionary"):
        tracker.set_states([])
    with pytest.raises(RuntimeError, match="inside"), tracker.fork("a"):
        raise RuntimeError("inside")
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("a", 1)
