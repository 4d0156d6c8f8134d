"""Regions in CUDA graphs: replays read the scales of then, and what they record is folded.

A "replay" runs the captured module again as at the capture, on the CPU: it reads and writes the memory of a graph.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.capture import GraphedModel
from te_fuser.quantization import microbatch, states
from te_fuser.quantization.products import products_of
from te_fuser.quantization.state import SCALED, blocks, ensure, state_of
from te_fuser.recipe import DelayedScaling
from tests.fake_cuda import capture_by
from tests.quantization.regions import FFN, F, data, on
from tests.refused import raises

MODELS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: te.Sequential(ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F)),
    "twice": lambda: te.Sequential(shared := ops.Linear(F, F), ops.GELU(), shared),
    "preset": lambda: te.LayerNormMLP(F, FFN),
    "checkpointed": lambda: te.LayerNormMLP(F, FFN, checkpoint=True),
}


class Stream:
    """Stand-in for a stream's capture, and for PyTorch's, which calls its module again at each replay."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.captures = False
        self.runs = 0
        patch.setattr(torch.cuda, "is_initialized", lambda: self.captures)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        capture_by(patch, self.graphed)

    def captured(self, module: Any, *tensors: torch.Tensor) -> Any:
        self.captures = True
        try:
            return module(*tensors)
        finally:
            self.captures = False

    def graphed(self, module: Any, samples: Any, num_warmup_iters: int, **options: Any) -> Any:
        leaves = [p for p in (*samples, *module.parameters()) if p.requires_grad]
        for k in range(num_warmup_iters + 1):
            y = self.captured(module, *samples) if k == num_warmup_iters else module(*samples)
            if torch.is_grad_enabled():
                torch.autograd.grad(y.square().sum(), leaves)

        def replay(*tensors: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return self.captured(module, *tensors)

        return replay


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """No graph was captured before: slots are the test's own."""
    monkeypatch.setattr("te_fuser.quantization.state._blocks", [])
    return Stream(monkeypatch)


def leaf(seed: int) -> torch.Tensor:
    return data(seed).requires_grad_()


def pair(name: str) -> tuple[Any, Any]:
    """A model that has run in a region, and another like it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with on():
        model(data(9)).sum().backward()
    model.zero_grad()
    return model, copy.deepcopy(model)


def graphed(model: Any, **how: Any) -> GraphedModel:
    with on(**how):
        return te.cuda_graph(model, leaf(0))


def step(call: Any, model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), *[p.grad for p in (x, *model.parameters())]]


def assert_alike(
    replayed: Any, model: Any, twin: Any, x: torch.Tensor, first: bool | None = None, saved: Any = None
) -> None:
    """A step by the graph of a model gives what one of its twin gives, in regions of their own."""
    results = []
    for call, m in ((replayed, model), (twin, twin)):
        with on(), microbatch(first):
            if saved is not None:
                m.load_state_dict(saved)
            results.append(step(call, m, x))
    assert_equal(*results)


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", MODELS)
def test_replays_give_what_calls_give(name: str, stream: Stream) -> None:
    """By scales that move from step to step, with the same histories; the warm-up is none of them."""
    model, twin = pair(name)
    with on():
        pass
    before = states(model)
    replayed = graphed(model)
    assert_equal(states(model), before)
    for k in range(4):
        assert_alike(replayed, model, twin, 2.0**k * data(k))
        assert_equal(states(model), states(twin))
    assert stream.runs == 4


def test_a_graph_reads_copies_in_one_memory(stream: Stream) -> None:
    """Not numbers of a call, which others take the place of."""
    model, _ = pair("mlp")
    replayed = graphed(model)
    live = [block.live for block in blocks() if block.live is not None]
    with on():
        replayed(leaf(1)).sum().backward()
    with on():
        assert any(now is then for now in [block.live for block in blocks()] for then in live)
    for weight in products_of(model).values():
        state = state_of(weight)
        assert state.block is not None and state.block.live is not None
        found = state.block.live[state.row, :, 0]
        assert torch.equal(found, torch.cat([state.scale, 1 / state.scale]))
        assert all(t.data_ptr() != state.block.live.data_ptr() for t in map(state.numbers.get, SCALED))


def test_the_first_region_of_a_model_may_be_that_of_its_capture(stream: Stream) -> None:
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    twin = copy.deepcopy(model)
    replayed = graphed(model)
    for k in range(3):
        assert_alike(replayed, model, twin, data(k))
    assert_equal(states(model), states(twin))


def test_without_gradients_nothing_is_recorded(stream: Stream) -> None:
    """Replays and captures record none."""
    model, twin = pair("mlp")
    replayed, before = graphed(model), states(model)
    with on(), torch.no_grad():
        replayed(leaf(1))
    assert_equal(states(model), before)
    with torch.no_grad(), on():
        replayed = te.cuda_graph(model, data(0))
        assert_equal(replayed(data(1)), twin(data(1)))
    assert_equal(states(model), states(twin))


def test_loaded_scales_are_read(stream: Stream) -> None:
    """Loading puts other buffers there; replays read these at once, and later folds go on from them."""
    model, twin = pair("mlp")
    replayed = graphed(model)
    saved = {name: t * 4 if name.endswith("fp8_scale") else t for name, t in model.state_dict().items()}
    for k in range(2):
        assert_alike(replayed, model, twin, data(k), saved=saved)
    assert_equal(states(model), states(twin))


def test_recipes_of_products_are_those_of_the_capture(stream: Stream) -> None:
    """A call by another recipe in between is folded by that, and the replay by its own."""
    model, twin = pair("mlp")
    replayed = graphed(model)
    other = DelayedScaling(amax_history_len=2, margin=2)
    for call, m in ((replayed, model), (twin, twin)):
        for k in range(2):
            with on(other):
                step(m, m, data(k))
            with on():
                step(call, m, data(k + 5))
    assert_equal(states(model), states(twin))
    assert len(states(model)["1.input"][1]) == 3
    with on():
        for weight in products_of(model).values():
            ensure(weight, other, torch.device("cpu"))
        raises(ValueError, "ran by a second recipe in this region", replayed, leaf(0))


OTHER = DelayedScaling(amax_history_len=3, margin=1)
ELSEWHERE: dict[str, tuple[Any, str]] = {
    "recipe": (lambda: on(OTHER), r"captured in a region by DelayedScaling.*margin=0.*called in one by .*margin=1"),
    "calibrating": (lambda: on(enabled=False, calibrating=True), "captured with calibrating=False, and is called with"),
    "off": (lambda: te.autocast(enabled=False), "captured in a region of FP8, and is called outside of all: replay"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_regions_than_that_of_the_capture(name: str, stream: Stream) -> None:
    model, _ = pair("mlp")
    replayed = graphed(model)
    around, words = ELSEWHERE[name]
    with around(), pytest.raises(ValueError, match=words):
        replayed(leaf(0))
    with on(), microbatch(True), pytest.raises(ValueError, match=r"captured outside of quantization\.micro"):
        replayed(leaf(0))
    te.precision(model, {"1": None})
    with on(), pytest.raises(ValueError, match=r"te_fuser.precision was called since the capture"):
        replayed(leaf(0))


def test_what_was_captured_outside_of_regions_and_models_without_products(stream: Stream) -> None:
    model, _ = pair("mlp")
    replayed = te.cuda_graph(model, leaf(0))
    with on():
        raises(ValueError, "captured outside of regions of FP8, and is called in one: capture again", replayed, leaf(0))
        with te.autocast(enabled=False):
            replayed(leaf(0))
    replayed(leaf(0))
    model = te.Sequential(ops.LayerNorm(F), ops.GELU())
    outside, inside = te.cuda_graph(model, data(0)), None
    with on():
        outside(data(0))
        inside = te.cuda_graph(model, data(0))
    assert_equal(inside(data(1)), model(data(1)))


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches(name: str, stream: Stream) -> None:
    """One graph serves the first and the others: a first one quantizes weights where the graph reads them."""
    model, twin = pair(name)
    with on(), microbatch(True):
        replayed = te.cuda_graph(model, leaf(0))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(4):
            assert_alike(replayed, model, twin, data(k), first=k % 2 == 0)
            for optimizer in optimizers:
                optimizer.step()
    assert_equal(states(model), states(twin))
    with on(), pytest.raises(ValueError, match=r"captured in quantization\.microbatch\(True\), and is"):
        replayed(leaf(0))


def test_captures_by_hand_and_what_replays_would_do_again_are_refused(stream: Stream) -> None:
    model, _ = pair("mlp")
    x = data(0)
    for _ in range(2):  # a call that is like the last one, too
        with on():
            model(x)
            with pytest.raises(NotImplementedError, match=r"captured by hand: .*te_fuser.cuda_graph\(model, x\)"):
                stream.captured(model, x)
    raises(RuntimeError, "amaxes are folded while a CUDA graph is captured", stream.captured, lambda: states(model))
    with on(), pytest.raises(RuntimeError, match="scales are read by a first graph while a CUDA graph is captured"):
        te.cuda_graph(model, leaf(0), warmup=0)
    graphed(model)
    with on(), pytest.raises(RuntimeError, match="scales are made or moved while a CUDA graph is captured"):
        te.cuda_graph(MODELS["mlp"](), leaf(0), warmup=0)
