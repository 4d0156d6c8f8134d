"""Segments as autograd nodes by PyTorch's rules; memory of a call, also when it runs out in the middle."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.fuser.plan import segmenting
from tests.fake_cuda import CXX, Emulation, compile_driver, in_place
from tests.twins import assert_as_meant, assert_same_gradients, randomize, results_and_gradients, sequential, tensor

X = tensor(6, 8)


def block(**options):
    """Something of everything: a norm, products, a residual, draws, a named input and an output in the middle."""
    return sequential(
        ops.LayerNorm(8),
        ops.Linear(8, 16),
        ops.SwiGLU(),
        te_fuser.Residual(ops.Linear(8, 8), ops.GELU(), ops.Output("middle"), ops.Dropout(0.25), ops.Linear(8, 8)),
        ops.Add("extra"),
        ops.RMSNorm(8),
        **options,
    )


EXTRA = {"extra": tensor(6, 8, seed=5)}


def leaves(model, x=X):
    return {"input": x, **EXTRA, **dict(model.named_parameters())}


def wanted(model, x=X):
    return results_and_gradients(model.reference, leaves(model, x), x, (), EXTRA)


def run(model, x=X, seed=0):
    torch.manual_seed(seed)
    return model(x, **EXTRA)


def dy_for(y):
    return tensor(*y.shape, dtype=y.dtype, grad=False, seed=1)


def gradients(model, y, x=X, **options):
    found = leaves(model, x)
    return dict(zip(found, torch.autograd.grad(y, list(found.values()), dy_for(y), **options), strict=True))


# ------------------------------------------------------------------------------------ when backward runs


def test_backward_again_where_the_graph_is_kept():
    model = block()
    _, want = wanted(model)
    y = run(model)
    for keep in (True, True, False):
        assert_same_gradients(gradients(model, y, retain_graph=keep), want)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(model, y)


def test_some_of_the_gradients():
    model = block()
    _, want = wanted(model)
    for names in (["input"], ["1.weight", "5.weight"], ["extra"]):
        y = run(model)
        got = torch.autograd.grad(y, [leaves(model)[n] for n in names], dy_for(y))
        assert_same_gradients(dict(zip(names, got, strict=True)), {n: want[n] for n in names})


class Nothing(torch.autograd.Function):
    """Takes a value and gives its maker no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_no_gradient_at_all_arrives():
    model = block()
    grads = torch.autograd.grad(Nothing.apply(run(model)).sum(), [X, *model.parameters()], allow_unused=True)
    assert all(g is None for g in grads)


@pytest.mark.parametrize("segment_bytes", [1, segmenting.SEGMENT_BYTES])
def test_an_output_whose_gradient_is_missing(segment_bytes, monkeypatch):
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = block()
    every = leaves(model)
    for chosen in (0, 1):
        torch.manual_seed(0)
        got = torch.autograd.grad(
            model(X, outputs=("middle",), **EXTRA)[chosen].square().sum(), list(every.values()), allow_unused=True
        )
        torch.manual_seed(0)
        want = torch.autograd.grad(
            model.reference(X, outputs=("middle",), **EXTRA)[chosen].square().sum(),
            list(every.values()),
            allow_unused=True,
        )
        for name, g, w in zip(every, got, want, strict=True):
            zero = torch.zeros_like(every[name])  # a whole segment gives zeros where eager gives none
            torch.testing.assert_close(
                zero if g is None else g, zero if w is None else w, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_an_output_before_any_parameter_takes_no_gradient():
    model = sequential(ops.Output("raw"), ops.GELU(), ops.Output("act"), ops.Linear(8, 8))
    y, raw, act = model(X.detach(), outputs=("raw", "act"))
    assert [t.requires_grad for t in (y, raw, act)] == [True, False, False]
    y.square().sum().backward()
    assert_as_meant(model, X.detach(), ("raw", "act"))
    assert_as_meant(model, X, ("raw", "act"))


# ------------------------------------------------------------------------------------ what is kept


def test_hooks_on_saved_tensors_see_everything():
    """Backward computes with the hooks' results, and nothing else survives the forward pass."""
    model = block()
    _, want = wanted(model)
    packed: list[torch.Tensor] = []
    made = []

    def pack(t):
        packed.append(t.detach().clone())
        made.append(weakref.ref(t)) if not isinstance(t, nn.Parameter) and t is not X and t is not EXTRA[
            "extra"
        ] else None
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: packed[k]):
        y = run(model)
    assert len(packed) == len(model.plan(X, **EXTRA).kept)
    assert made and not any(ref() is not None for ref in made)
    assert_same_gradients(gradients(model, y, retain_graph=True), want)
    for t in packed:
        if t.is_floating_point():
            t.zero_()
    assert gradients(model, y)["input"].abs().max() == 0.0


def test_kept_tensors_are_free_after_backward():
    made = []

    def pack(t):
        made.append(weakref.ref(t))
        return t

    model = block()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(model)
    alive = [t for t in made if t() is not None]
    assert len(alive) > 5
    gradients(model, y)
    left = [t() for t in made if t() is not None]
    assert all(any(t is leaf for leaf in leaves(model).values()) for t in left)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_masks(reentrant):
    model = block()
    _, want = wanted(model)
    torch.manual_seed(0)
    y = torch.utils.checkpoint.checkpoint(lambda x: model(x, **EXTRA), X, use_reentrant=reentrant)
    torch.manual_seed(123)  # whatever is drawn in between
    if not reentrant:
        assert_same_gradients(gradients(model, y), want)
        return
    y.backward(dy_for(y))
    got = {name: leaf.grad for name, leaf in leaves(model).items()}
    assert_same_gradients(got, want)
    X.grad = EXTRA["extra"].grad = None


# ------------------------------------------------------------------------------------ what changes in between


@pytest.mark.parametrize("changed", ["input", "weight"])
def test_what_changes_before_backward_is_noticed(changed):
    model, x = block(), tensor(6, 8, grad=False)
    y = run(model, x)
    with torch.no_grad():
        (x if changed == "input" else model[1].weight).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -------------------------------------------------------------------------------- several segments


def nodes_of(y):
    """The autograd nodes of this package below a result."""
    found, stack = set(), [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [n for n, _ in node.next_functions]
    return [n for n in found if "SegmentFunction" in n.name()]


def test_each_segment_is_one_autograd_node(monkeypatch):
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = block()
    y = model(X, **EXTRA)
    assert len(nodes_of(y)) == len(model.plan(X, **EXTRA).segments) > 3
    with torch.no_grad():
        assert len(model.plan(X, **EXTRA).segments) == 1
    monkeypatch.undo()
    whole = block()
    assert len(nodes_of(whole(X, **EXTRA))) == 1


def test_a_short_end_is_part_of_the_segment_before(monkeypatch):
    """A norm behind the last product: a node of its own would add up its gradients in a launch of its own."""
    parts = [ops.Linear(8, 32), ops.GELU(), ops.Linear(32, 8, bias=False), ops.RMSNorm(8)]
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 8 * 8 * 32)  # a weight in float64
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = sequential(*parts)
    plan = model.plan(X)
    assert [len(plan.graph.nodes), *(s.start for s in plan.segments)] == [5, 0, 3]
    assert_as_meant(model, X)


@pytest.mark.parametrize(("tokens", "segments"), [(256, 1), (65_536, 2)])
def test_what_takes_little_time_is_no_segment_of_its_own(tokens: int, segments: int) -> None:
    """Its autograd node would take the host longer than what it computes is worth."""
    with torch.device("meta"):
        layers = [ops.Linear(4096, 4096, bias=False) for _ in range(2)]
        x = torch.empty(tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
    model = te_fuser.Sequential(*layers).to(torch.bfloat16)
    assert len(model.plan(x, device="h200").segments) == segments


def test_segments_with_shared_weights_under_autocast(monkeypatch):
    """Each segment casts the parameters that it reads."""
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    shared = ops.Linear(8, 8)
    model = sequential(shared, ops.GELU(), ops.Linear(8, 8), ops.GELU(), shared, dtype=torch.float32)
    x = tensor(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(model.plan(x).segments) == 2
        y = model(x)
    grads = torch.autograd.grad(y.float().sum(), [x, *model.parameters()])
    double = sequential(*model).double()
    want = torch.autograd.grad(double(x.double()).sum(), [*double.parameters()])
    for g, w in zip(grads[1:], want, strict=True):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g.double(), w, rtol=0.05, atol=0.05 * w.abs().max().item())


_ALLOCATES = re.compile(r"aten\.(empty|mm|clone|addmm)")


class Memory(TorchDispatchMode):
    """Counts allocations, and lets one of them fail."""

    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.failing, self.count = failing, 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += bool(_ALLOCATES.match(str(function)))
        if self.count == self.failing:
            self.failing = 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=["generated", "reference", "emulated"])
def kernels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Ways to run the model: generated C++, PyTorch's operations, CUDA kernels on the CPU."""
    with contextlib.ExitStack() as stack:
        if request.param != "reference" and CXX is None:
            pytest.skip("needs a C++ compiler")
        if request.param == "emulated":
            stack.enter_context(in_place(compile_driver()))
            stack.enter_context(Emulation(tmp_path).in_plans())
        yield "reference" if request.param == "reference" else "generated"


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_a_call_that_runs_out_of_memory_leaves_the_model_usable(kernels: str) -> None:
    branch = Residual(ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8), ops.Dropout(0.25))
    model = randomize(Sequential(branch, ops.RMSNorm(8), kernels=kernels)).float()
    x = torch.randn(300, 8, requires_grad=True)  # rows enough for partial sums
    leaves = [x, *model.parameters()]

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    right, memory = run(), Memory()
    plan, before = model.plan(x), tensors()
    with memory:
        run()
    assert memory.count > 15
    for failing in range(1, memory.count + 1):
        # A mode's own error comes through the native runtime's allocator as a MemoryError.
        with pytest.raises((torch.OutOfMemoryError, MemoryError)), Memory(failing):
            run()
    assert tensors() == before
    assert all(torch.equal(a, b) for a, b in zip(run(), right, strict=True))
    assert [s.name for s in model.plan(x).backward] == [s.name for s in plan.backward]


# -------------------------------------------------------------------------------- what a call holds


def allocations(run):
    """The sizes of what is allocated (+) and freed (-) while `run` runs, in order.

    `run` must not free what was there before: the profiler counts that or not, as it happens to know the address.
    """
    gc.collect()
    with torch.autograd.profiler.profile(use_device=None, profile_memory=True) as profile:
        run()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def peak(run):
    level = highest = 0
    for size in allocations(run):
        level += size
        highest = max(highest, level)
    return highest


def deep(kinds, size, depth):
    return [kind for _ in range(depth) for kind in (kinds["norm"](size), kinds["linear"](size, size), kinds["act"]())]


@pytest.mark.parametrize("frozen", [False, True])
def test_backward_frees_as_it_goes_like_eager(frozen):
    """One segment of many layers: its peak grows with depth as eager's does.

    What an interpreted kernel holds of one op comes on top of that, and is the same for every depth.
    """
    size = 64
    x = tensor(size, size, dtype=torch.float32)

    def activations(model):
        def step():
            model(x).square().mean().backward()

        step()  # plans are made
        x.grad = None
        model.zero_grad()
        return peak(step) / (x.numel() * x.itemsize)

    def growth(kinds, make):
        shallow, large = (activations(make(*deep(kinds, size, depth)).requires_grad_(not frozen)) for depth in (2, 7))
        return large - shallow

    def ours(*parts):
        model = te_fuser.Sequential(*parts, kernels="reference")
        assert len(model.plan(x).segments) == 1
        return model

    eager = growth({"norm": nn.LayerNorm, "linear": nn.Linear, "act": lambda: nn.GELU("tanh")}, nn.Sequential)
    assert growth({"norm": ops.LayerNorm, "linear": ops.Linear, "act": ops.GELU}, ours) <= eager + 0.1


def test_the_price_of_a_call_is_what_the_plan_says():
    """After forward, what is held is what the plan lists as kept, and the result."""
    model = sequential(ops.LayerNorm(64), ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64), ops.GELU())
    x = tensor(64, 64)
    model(x)
    held = []
    level = sum(allocations(lambda: held.append(model(x))))
    plan = model.plan(x)
    expected = sum(k.bytes for k in plan.kept if k.owner in ("activation", "statistic")) + 8 * 64 * 64
    assert level == pytest.approx(expected, rel=0.02)
