"""Kernels that store outputs over what dies: which inputs a plan says, and that nobody ever sees a tensor change.

Models run on the CPU by emulated CUDA kernels. PyTorch's products stand for cuBLASLt's here, which are ours alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from te_fuser import Residual, Sequential, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.refs import VALUE
from te_fuser.fuser.plan import overwriting, segmenting
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.plan.prices import Prices
from te_fuser.fuser.plan.problem import Options, Problem
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.op_tasks import FusionTask, OpTask
from te_fuser.fuser.steps.step import Step
from te_fuser.ops.base import Gradient, OpCall
from te_fuser.ops.operations import UnfusedOperation
from tests.fake_cuda import Emulation, FakeDriver
from tests.fuser.run.test_segment import Memory
from tests.needs import needs_compiler
from tests.twins import randomize, results_and_gradients, tensor

pytestmark = needs_compiler
WIDTH, HIDDEN, ROWS = 24, 40, 32


@pytest.fixture
def emulated(driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans run emulated CUDA kernels, and every tensor is large."""
    monkeypatch.setattr(overwriting, "LEAST_BYTES", 1)
    with emulation.in_plans():
        yield


@pytest.fixture
def ours(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's products count as ours."""
    monkeypatch.setattr(OpTask, "own_memory", property(lambda task: task.node.traits.role == "mat_mul"))
    monkeypatch.setattr(FusionTask, "own_memory", property(lambda task: "mat" in task.fusion.name))


def mlp(*parts: Any, **options: Any) -> Sequential:
    """A norm, a product, GELU, a product, and more if asked for."""
    model = Sequential(
        ops.LayerNorm(WIDTH), ops.Linear(WIDTH, HIDDEN), ops.GELU("tanh"), ops.Linear(HIDDEN, WIDTH), *parts, **options
    )
    return randomize(model).float()


def x_of(*shape: int) -> torch.Tensor:
    return tensor(*(shape or (ROWS, WIDTH)), dtype=torch.float32)


def run(model: Sequential, x: torch.Tensor | None = None, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of x and of every parameter."""
    x = x_of() if x is None else x
    torch.manual_seed(3)
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy_of(y), **options)]


def dy_of(y: torch.Tensor) -> torch.Tensor:
    return tensor(*y.shape, dtype=y.dtype, grad=False, seed=1)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def pairs(plan_steps: tuple[Step, ...]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Kernel -> what it may store over what, where it may."""
    found = {s.name: s.task.description.overwrites for s in plan_steps if isinstance(s.task, KernelTask)}
    return {name: over for name, over in found.items() if over}


def without(model: Sequential, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Results of `run` by plans that overwrite nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "PLAN_PASSES", {n: p for n, p in pipeline.PLAN_PASSES.items() if n != "overwrite"})
        other = mlp(*list(model)[4:])
        other.load_state_dict(model.state_dict())
        assert not pairs(other.plan(x_of()).backward)
        return run(other)


def made_in(work: Callable[[], object]) -> int:
    """Number of tensors that some work allocates."""
    with Memory(failing=-1) as memory:
        work()
    return memory.count


def spared(model: Sequential) -> int:
    """Number of tensors fewer that backward makes where the graph is not kept."""
    x = x_of()

    def count(**options: Any) -> int:
        y = model(x)
        return made_in(lambda: torch.autograd.grad(y, [x, *model.parameters()], dy_of(y), **options))

    return count(retain_graph=True) - count()


# ------------------------------------------------------------------------------------------------- what plans say


def test_without_gradients_forward_stores_over_what_dies(ours: None) -> None:
    model, x = mlp(), x_of()
    with torch.no_grad():
        plan = model.plan(x)
        assert list(pairs(plan.forward)) == ["gelu_fwd"] or list(pairs(plan.forward)) == ["bias_gelu_fwd"]
        before = x.clone()
        y = model(x)
    assert torch.equal(y, run(model)[0]) and torch.equal(x, before)


def test_what_other_code_makes_or_reads_is_left_alone(emulated: None) -> None:
    """Products that are not cuBLASLt's may be anybody's functions."""
    found = pairs(mlp().plan(x_of()).backward)
    assert "bias_gelu_bwd" not in found


class Holds(UnfusedOperation):
    """Hands its input through, and its gradient."""

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return x

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), (), "input_gradient"),)

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"input": dy}


def test_an_op_that_returns_what_it_was_given(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is the tensor that it got: neither is ours from then on."""
    model = mlp(Holds(), ops.GELU("tanh"), Holds(), ops.GELU("tanh"))
    found = pairs(model.plan(x_of()).backward)
    assert "gelu_bwd" not in found
    assert same(run(model), without(model, monkeypatch))


def test_small_tensors_are_not_overwritten(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overwriting, "LEAST_BYTES", ROWS * HIDDEN * 4)
    model = mlp(ops.LayerNorm(WIDTH))
    assert list(pairs(model.plan(x_of()).backward)) == ["bias_gelu_bwd"]
    monkeypatch.setattr(overwriting, "LEAST_BYTES", ROWS * HIDDEN * 4 + 1)
    plan = mlp(ops.LayerNorm(WIDTH)).plan(x_of())
    again = overwriting.mark_overwrites(plan, Prices(Problem(plan.graph, Options(plan.device))))
    assert not pairs(plan.backward) and again.backward == plan.backward


def test_only_cuda_kernels_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overwriting, "LEAST_BYTES", 1)
    monkeypatch.setattr(OpTask, "own_memory", True)
    for kernels in ("generated", "reference"):
        plan = mlp(kernels=kernels).plan(x_of())
        assert plan.target != "cuda" and not pairs(plan.backward)


def test_a_result_is_not_overwritten(ours: None) -> None:
    """The value before GELU goes to the caller as well."""
    model = randomize(
        Sequential(ops.Linear(WIDTH, HIDDEN), ops.Output("middle"), ops.GELU("tanh"), ops.Linear(HIDDEN, WIDTH))
    ).float()
    x = x_of()
    y, middle = model(x, outputs=("middle",))
    before = middle.detach().clone()
    plan: Plan = model.plan(x, outputs=("middle",))
    assert all("output" not in load for over in pairs(plan.backward).values() for _, load in over if "d_" not in load)
    y.sum().backward()
    assert torch.equal(middle, before)
    with torch.no_grad():
        y, middle = model(x, outputs=("middle",))
    assert torch.equal(middle, before)


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (4, 8, WIDTH), (2, 2, 8, WIDTH)])
def test_rows_of_several_dimensions(shape: tuple[int, ...], ours: None) -> None:
    """PyTorch's products give views there, which are not overwritten."""
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of(*shape)
    leaves = {"x": x, **dict(model.named_parameters())}
    got, gradients = results_and_gradients(model, leaves, x)
    want, wanted = results_and_gradients(model.reference, leaves, x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(list(gradients.values()), list(wanted.values()), rtol=1e-3, atol=1e-3)


def test_an_input_of_another_shape_is_left_alone(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its elements would fit, but the output would have the wrong sizes."""
    known = overwriting.shape_of

    def shape_of(plan: Plan, ref: tuple[Any, ...]) -> tuple[int, ...] | None:
        found = known(plan, ref)
        return (ROWS, 1, found[-1]) if ref.kind is VALUE and found is not None else found

    assert len(pairs(mlp().plan(x_of()).backward)["bias_gelu_bwd"]) == 2
    monkeypatch.setattr(overwriting, "shape_of", shape_of)
    assert len(pairs(mlp().plan(x_of()).backward)["bias_gelu_bwd"]) == 1


# ------------------------------------------------------------------------------------------------------ values

MODELS: dict[str, Callable[[], list[Any]]] = {
    "norm": lambda: [ops.LayerNorm(WIDTH)],
    "residuals": lambda: [
        Residual(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, HIDDEN), ops.GELU(), ops.Linear(HIDDEN, WIDTH)),
        Residual(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 2 * HIDDEN), ops.SwiGLU(), ops.Linear(HIDDEN, WIDTH)),
        ops.RMSNorm(WIDTH),
    ],
    "dropout": lambda: [ops.Dropout(0.25), ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.ReLU()],
    "twice": lambda: [ops.Fork("a"), ops.GELU(), ops.Add("a"), ops.Linear(WIDTH, WIDTH), ops.Fork("b"), ops.Add("b")],
}


@pytest.mark.parametrize("memory", ["balanced", "lean"])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str, memory: str, ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(*MODELS[name](), memory=memory)
    exact = mlp(*MODELS[name](), kernels="reference").double()
    exact.load_state_dict({n: t.double() for n, t in model.state_dict().items()})
    assert pairs(model.plan(x_of()).backward)
    x, wide = x_of(), tensor(ROWS, WIDTH)
    got, gradients = results_and_gradients(model, {"x": x, **dict(model.named_parameters())}, x)
    want, wanted = results_and_gradients(exact.reference, {"x": wide, **dict(exact.named_parameters())}, wide)
    for a, b in ((got[0], want[0]), *((gradients[n], wanted[n]) for n in gradients)):
        assert a is not None and b is not None
        assert (a.double() - b).abs().max() <= 5e-5 * b.abs().max().clamp_min(1)
    if memory == "balanced":
        assert same(run(model), without(model, monkeypatch))


def test_fewer_tensors_are_made(ours: None) -> None:
    model = mlp(ops.LayerNorm(WIDTH))
    assert spared(model) == sum(map(len, pairs(model.plan(x_of()).backward).values())) >= 3


# ------------------------------------------------------------------------------------------- who else may look


def hooks(name: str, seen: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """Hooks for saved tensors, which keep what they see in `seen`: what they hold and how it was."""

    def note(held: Any, t: torch.Tensor) -> Any:
        seen.append((held, t.clone()))
        return held

    if name == "the tensor":
        return torch.autograd.graph.saved_tensors_hooks(lambda t: note(t, t), lambda t: t)
    if name == "an array":  # whose memory no count of PyTorch's shows
        return torch.autograd.graph.saved_tensors_hooks(lambda t: note(t.detach().numpy().copy(), t), torch.from_numpy)
    if name == "its storage":
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: (note(t.untyped_storage(), t), t)[1],
            lambda t: t,  # type: ignore[arg-type]
        )
    return torch.autograd.graph.save_on_cpu()


@pytest.mark.parametrize("name", ["the tensor", "an array", "its storage", "save_on_cpu"])
def test_hooks_for_saved_tensors_see_none_change(name: str, ours: None) -> None:
    model, seen = mlp(ops.LayerNorm(WIDTH)), []  # type: ignore[var-annotated]
    once = run(model)
    with hooks(name, seen):
        y = model(x := x_of())
    grads = torch.autograd.grad(y, [x, *model.parameters()], dy_of(y))
    assert same([y.detach(), *grads], once)
    assert seen or name == "save_on_cpu"
    for held, before in seen:
        now = torch.empty(0).set_(held) if name == "its storage" else torch.as_tensor(held)
        assert torch.equal(now.reshape(-1)[: before.numel()], before.reshape(-1))


def test_hooks_of_single_saved_tensors_see_none_change(ours: None) -> None:
    """Hooks come after forward, which knows nothing of them; their results may be another library's memory."""
    model, x, seen = mlp(ops.LayerNorm(WIDTH)), x_of(), []  # type: ignore[var-annotated]
    once = run(model)
    y = model(x)

    def pack(t: torch.Tensor) -> Any:
        seen.append((t.detach().numpy().copy(), t.detach().clone()))
        return seen[-1][0]

    for saved in y.grad_fn._raw_saved_tensors:
        saved.register_hooks(pack, torch.from_numpy)
    assert same([y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy_of(y))], once)
    assert seen and all(torch.equal(torch.from_numpy(now), before) for now, before in seen)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda t: t,
    "a view": lambda t: t.view(-1),
    "a detached one": lambda t: t.detach(),
    "its storage": lambda t: t.untyped_storage(),
    "a DLPack capsule": torch.utils.dlpack.to_dlpack,
    "an array": lambda t: t.numpy(),
}


@pytest.mark.parametrize("name", ["the tensor", "a detached one", "an array"])
def test_who_took_a_saved_tensor_out_of_the_graph_sees_no_change(name: str, ours: None) -> None:
    """Held in any of HOLDERS a step leaves it as it is; these three say that a plan's steps see who holds it."""
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of()
    once = run(model)
    y = model(x)
    saved = y.grad_fn.saved_tensors
    held = [(HOLDERS[name](t), t.clone()) for t in saved if t.dim() == 2 and not t.requires_grad]
    del saved
    assert len(held) >= 3
    assert same([y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy_of(y))], once)
    assert all(torch.equal(torch.as_tensor(kept), before) for kept, before in held)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, ours: None) -> None:
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of()
    once = run(model)
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.backward(dy_of(y))
    assert same([y.detach(), x.grad, *(p.grad for p in model.parameters())], once)  # type: ignore[list-item]


def test_autocast(ours: None) -> None:
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of()
    found = []
    for keep in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        found.append([y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy_of(y), retain_graph=keep)])
    assert same(*found)


def test_what_comes_from_outside_or_hooks_saw_is_left_as_it_was(ours: None) -> None:
    """The input, the output, the gradient that is handed in, parameters; and gradients that hooks may hold, those of
    parameters too, which run in the middle of backward, as data-parallel training does."""
    model, x = mlp(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU("tanh")), x_of()
    once, parameters = run(model), [*model.parameters()]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    y = model(x)
    for t in (x, y, *parameters):
        t.register_hook(lambda g: seen.append((g, g.clone())))
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad, p.grad.clone())))
    outside = [x, y, dy_of(y), *parameters]
    before = [t.detach().clone() for t in outside]
    y.backward(outside[2])
    assert same(outside, before)
    assert same([y.detach(), x.grad, *(p.grad for p in parameters)], once)  # type: ignore[list-item]
    assert len(seen) == 2 + 2 * len(parameters) and all(torch.equal(now, then) for now, then in seen)


def test_two_segments(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of one segment that the next alone keeps is overwritten; one that both keep, or a caller gets, is not."""
    gated = ops.Linear(WIDTH, 2 * HIDDEN, bias=False)
    parts = [gated, ops.SwiGLU(), ops.Linear(HIDDEN, WIDTH, bias=False), ops.LayerNorm(WIDTH)]
    model = mlp(*parts)
    whole = run(model)
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    cut = mlp(*parts)
    cut.load_state_dict(model.state_dict())
    plan, x = cut.plan(x_of()), x_of()
    assert len(plan.segments) > 2
    first = next(s for s in plan.backward if "swiglu" in s.name)
    start = next(s.start for s in plan.segments if s.start <= first.start < s.stop)
    kept = {ref for _, ref in first.inputs if ref.kind is VALUE}
    makers = [s for s in plan.forward if kept & set(s.writes())]
    assert [s.start < start for s in makers] == [True]
    assert ("d_x", "x") in pairs(plan.backward)[first.name]
    assert same(run(cut), whole)
    assert spared(cut) == sum(map(len, pairs(plan.backward).values()))
    y = cut(x)
    for keep in (True, False):
        grads = torch.autograd.grad(y, [x, *cut.parameters()], dy_of(y), retain_graph=keep)
        assert same([y.detach(), *grads], whole) and not any(g.requires_grad for g in grads)


def test_what_two_segments_keep_is_not_overwritten(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a product read the value between them."""
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    parts = [
        ops.Fork("a"),
        ops.GELU("tanh"),
        ops.Linear(WIDTH, WIDTH),
        ops.GELU("tanh"),
        ops.Add("a"),
        ops.GELU("tanh"),
    ]
    model = mlp(*parts)
    assert len(model.plan(x_of()).segments) > 1
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 2**30)
    whole = mlp(*parts)
    whole.load_state_dict(model.state_dict())
    assert len(whole.plan(x_of()).segments) == 1
    assert same(run(model), run(whole))


def test_steps_that_are_checked_or_measured_find_their_inputs_as_they_were(
    ours: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(ops.LayerNorm(WIDTH))
    plain = run(model)
    checked = mlp(ops.LayerNorm(WIDTH), verify=True)
    checked.load_state_dict(model.state_dict())
    assert same(run(checked), plain)  # a step that changed its input would raise
    x = x_of()
    model.explain(x, measure=True, details=True)
    assert same(run(model), plain)


def test_memory_that_runs_out_leaves_the_model_usable(ours: None) -> None:
    model = mlp(ops.LayerNorm(WIDTH))
    right, x = run(model), x_of()
    for failing in range(1, made_in(lambda: run(model, x)) + 1):
        with pytest.raises((torch.OutOfMemoryError, MemoryError)), Memory(failing):
            run(model, x)
    assert same(run(model), right)
