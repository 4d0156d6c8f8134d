"""Tracers are refused at every call; profilers, anomaly mode and hooks see steps; ops that lie are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import te_fuser
from te_fuser import Residual, Sequential, autocast, ops, sequential
from te_fuser.formula import sqrt
from te_fuser.fuser import pipeline
from te_fuser.recipe import DelayedScaling
from tests.needs import needs_follower
from tests.twins import tensor


class Reference(torch.nn.Module):
    """A model's reference as a module."""

    def __init__(self, model: Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model.reference(x)


def made(**options: Any) -> Sequential:
    """A model of row ops, products, attention and a branch; nothing is drawn in eval mode."""
    return Sequential(
        ops.LayerNorm(8),
        ops.Linear(8, 24),
        ops.DotProductAttention(2, 4, dropout=0.1, mask="none", layout="sequence_first"),
        Residual(ops.Linear(8, 16), ops.SwiGLU(), ops.Dropout(0.1)),
        **options,
    ).eval()


X = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))


def with_tangent(model: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


def with_parameter_tangent(model: Sequential) -> Any:
    with forward_ad.dual_level():
        weight = model[0].weight
        model[0]._parameters["weight"] = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        try:
            return model(X)
        finally:
            model[0]._parameters["weight"] = weight


def under_fake_tensors(model: Sequential) -> Any:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        return model(X)


REFUSED: dict[str, tuple[Callable[[Sequential], Any], str]] = {
    "make_fx": (lambda m: make_fx(m)(X), "under make_fx.*model.reference"),
    "make_fx before dispatch": (lambda m: make_fx(m, pre_dispatch=True)(X), "under make_fx.*model.reference"),
    "make_fx of fake tensors": (lambda m: make_fx(m, tracing_mode="fake")(X), "got FakeTensor.*model.reference"),
    "fake tensors": (under_fake_tensors, "FakeTensorMode.*model.reference"),
    "jit": (lambda m: torch.jit.trace(m, X), "torch.jit.trace.*model.reference"),
    "export": (lambda m: torch.export.export(m, (X,)), "got FakeTensor.*model.reference"),
    "symbolic_trace": (torch.fx.symbolic_trace, "symbolic_trace.*is_leaf_module"),
    "tangent": (with_tangent, "forward-mode.*model.reference"),
    "parameter's tangent": (with_parameter_tangent, "forward-mode.*model.reference"),
    "jvp": (lambda m: torch.func.jvp(m, (X,), (X,)), "torch.func.*model.reference"),
    "vmap": (lambda m: torch.vmap(m)(torch.stack([X, X])), r"torch\.func transforms or vmap; .* model\.reference"),
    "grad": (lambda m: torch.func.grad(lambda x: m(x).sum())(X), "torch.func.*model.reference"),
    "jacrev": (lambda m: torch.func.jacrev(m)(X), "torch.func.*model.reference"),
}


@pytest.mark.parametrize(
    ("called", "frozen", "verify"),
    [(False, False, True), (False, True, False), (True, False, False), (True, True, True)],
)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_every_call(
    name: str, called: bool, frozen: bool, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, text = REFUSED[name]
    model = made(verify=verify).requires_grad_(not frozen)
    want = model(X) if called else made_alike(model)(X)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "execute", lambda *_: pytest.fail("something runs"))
        with pytest.raises(TypeError, match=text):
            trace(model)
    assert torch.equal(model(X), want)


def made_alike(model: Sequential) -> Sequential:
    return copy.deepcopy(model)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("op", [ops.LayerNorm(8), ops.Linear(8, 8)])
def test_ops_alone_refuse_and_stay_as_they_were(op: ops.FusableOperation, called: bool) -> None:
    op = copy.deepcopy(op)
    want = op(X) if called else copy.deepcopy(op)(X)
    for trace, _ in REFUSED.values():
        if trace is not with_parameter_tangent:
            with pytest.raises(TypeError, match=r"of a single op, te_fuser\.Sequential\(op\)\.reference\(x\)"):
                trace(op)  # type: ignore[arg-type]
    assert torch.equal(op(X), want)


def test_what_a_single_op_advises_for_double_backward_works() -> None:
    op, x = ops.GELU(), X.double().requires_grad_()
    with pytest.raises(RuntimeError, match=r"of a single op, te_fuser\.Sequential\(op\)\.reference\(x\)"):
        torch.autograd.grad(op(x).sum(), x, create_graph=True)
    assert torch.autograd.gradgradcheck(Sequential(op).reference, x)


def test_other_modes_see_the_call() -> None:
    with FlopCounterMode(display=False):
        assert torch.equal(made_alike(model := made())(X), model(X))


def test_a_dual_level_without_tangents_runs() -> None:
    model = made()
    with forward_ad.dual_level():
        assert torch.equal(model(X), model(X))


def compiled(m: torch.nn.Module) -> Any:
    return torch.compile(m, fullgraph=True, backend="eager")


@pytest.mark.parametrize(
    "trace",
    [lambda m: make_fx(m)(X), lambda m: torch.jit.trace(m, X), pytest.param(compiled, marks=needs_follower)],
    ids=["make_fx", "jit", "compile"],
)
def test_the_reference_can_be_traced(trace: Callable[[torch.nn.Module], Any]) -> None:
    """By exports: for any number of rows, below."""
    model = made()
    traced = trace(Reference(model))
    torch.testing.assert_close(traced(X), model(X))
    torch.testing.assert_close(traced(2 * X), model(2 * X))


def test_compilers_that_do_not_follow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "_FOLLOWED", False)
    model = Sequential(ops.GELU())
    torch._dynamo.reset()  # it runs as it is what it did not follow once
    with pytest.raises(Exception, match=r"need PyTorch 2\.13; leave fullgraph away, export with strict=False"):
        compiled(Reference(model))(X)
    in_parts = torch.compile(Reference(model), backend="eager")
    torch.testing.assert_close(in_parts(X), model(X))
    torch._dynamo.reset()


REGION = DelayedScaling(amax_history_len=2)


@pytest.fixture
def in_8_bits() -> Sequential:
    """A model that has scales."""
    model, x = Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16)), torch.randn(3, 16)
    for _ in range(2):
        with autocast(recipe=REGION):
            model(x).sum().backward()
    return model.eval()


def test_the_reference_is_exported_in_8_bits(in_8_bits: Sequential) -> None:
    x = torch.randn(3, 16)
    with torch.no_grad(), autocast(recipe=REGION):
        exported = torch.export.export(Reference(in_8_bits), (x,), strict=False).module()
        for given in (x, 3 * x):
            torch.testing.assert_close(exported(given), in_8_bits(given))


@needs_follower
def test_the_reference_is_not_compiled_in_a_region(in_8_bits: Sequential) -> None:
    x = torch.randn(3, 16)
    run = torch.compile(Reference(in_8_bits), fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(run(x), in_8_bits(x))
        with autocast(recipe=REGION), pytest.raises(Exception, match="torch.compile cannot follow regions of FP8"):
            run(x)
        torch.testing.assert_close(run(x), in_8_bits(x))


@pytest.mark.parametrize(("gradients", "strict"), [(False, False), pytest.param(True, True, marks=needs_follower)])
def test_the_reference_is_exported_for_any_number_of_rows(gradients: bool, strict: bool) -> None:
    model = Sequential(ops.LayerNorm(8), ops.Linear(8, 24), ops.GELU()) if strict else made()
    rows = {0: torch.export.Dim("rows")}
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(Reference(model), (X,), dynamic_shapes=(rows,), strict=strict)
        x = torch.randn(5, 2, 8)
        torch.testing.assert_close(program.module()(x), model(x))


def test_the_reference_has_forward_mode_derivatives() -> None:
    model = made().double()
    x, dx = X.double(), torch.randn_like(X).double()
    _, tangent = torch.func.jvp(model.reference, (x,), (dx,))
    eps = 1e-6
    torch.testing.assert_close(tangent, (model(x + eps * dx) - model(x - eps * dx)) / (2 * eps), rtol=1e-5, atol=1e-7)


def test_a_model_may_be_a_leaf() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return isinstance(module, Sequential) or super().is_leaf_module(module, name)

    whole = torch.nn.Sequential(made(), torch.nn.Tanh())
    graphed = torch.fx.GraphModule(whole, Tracer().trace(whole))
    assert torch.equal(graphed(X), whole(X))


@pytest.mark.parametrize("change", ["hook", "list", "option", "inner option"])
def test_changes_are_seen_after_refused_traces(change: str) -> None:
    """torch.export leaves copies of the lists and dicts that are attributes of modules."""
    model, seen = made(), list[str]()
    model(X)
    with pytest.raises(TypeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(model, X)
    with pytest.raises(TypeError, match="FakeTensor"):
        torch.export.export(model, (X,), strict=False)
    if change == "hook":
        hook = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
        try:
            model(X)
        finally:
            hook.remove()
        assert seen[:3] == ["LayerNorm", "Linear", "DotProductAttention"]
    elif change == "list":
        want = 2.0 * model(X)
        model.append(ops.Scale(value=2.0))
        torch.testing.assert_close(model(X), want)
    else:
        (model[-1] if change == "inner option" else model).memory = "lean"
        assert model.plans(X)[-1].memory == "lean"


class Root(ops.RowOp):
    """y = sqrt(x)."""

    def compute(self, x: Any) -> Any:
        return sqrt(x)


def watched() -> Sequential:
    return Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 4))


def test_the_profiler_sees_steps_and_their_ops() -> None:
    model, x = watched(), torch.randn(3, 8)
    want = model(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, want)
    names = [e.key for e in seen.key_averages()]
    plan = model.plan(x)
    for step in (*plan.forward, *plan.backward):
        covered = [plan.graph.nodes[k].label for k in range(step.start, step.stop)]
        assert f"{step.name}: {', '.join(covered)}" in names, step.name


def test_anomaly_mode_names_the_step_and_its_ops() -> None:
    model = Sequential(ops.Linear(8, 8), Root(), ops.Scale(8))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Error detected in SegmentFunction"):
        y = model(x)
        with pytest.raises(RuntimeError, match=r"step '.*root.*Root.*' of te_fuser's backward gave NaN in d_x"):
            y.backward(torch.zeros_like(y))
    model(x).backward(torch.zeros(3, 8))
    assert x.grad.isnan().all()


def test_anomaly_mode_is_quiet_where_nothing_is_wrong() -> None:
    model, x = watched(), torch.randn(3, 8)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        model(x).sum().backward()


def test_global_hooks_run_for_every_op() -> None:
    model = Sequential(ops.LayerNorm(8), Residual(ops.Linear(8, 8), ops.GELU()), ops.Dropout(0.0))
    x = torch.randn(3, 8)
    want, planned = model(x), model.plan(x)
    forward: list[str] = []
    backward: list[str] = []
    handles = [
        register_module_forward_hook(lambda m, *_: forward.append(type(m).__name__)),
        register_module_full_backward_hook(lambda m, *_: backward.append(type(m).__name__)),
    ]
    try:
        y = model(x.clone().requires_grad_())
        y.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(y, want)
    assert forward == ["LayerNorm", "Linear", "GELU", "Residual", "Dropout", "Sequential"]
    assert sorted(backward) == sorted(forward)
    assert torch.equal(model(x), want) and len(model.plan(x).forward) == len(planned.forward)


def test_a_global_hook_may_change_what_an_op_gives() -> None:
    model, x = Sequential(ops.Scale(value=2.0), ops.Scale(value=3.0)), torch.randn(3, 8)
    handle = register_module_forward_hook(lambda m, _, y: y + 1.0 if isinstance(m, ops.Scale) else None)
    try:
        torch.testing.assert_close(model(x), (2.0 * x + 1.0) * 3.0 + 1.0)
    finally:
        handle.remove()
    torch.testing.assert_close(model(x), 6.0 * x)


# ------------------------------------------------------------------- ops that give what they do not declare


FIVE = tensor(5, 8)


class Lying(ops.UnfusedOperation):
    """Says that it keeps the shape and the dtype, and does not: in one direction, from a call on."""

    reads = ()

    def __init__(self, forward, dtype=None, honest=0):
        super().__init__()
        self.is_forward, self.dtype, self.honest = forward, dtype, [honest]

    def lie(self, x):
        if self.honest[0]:
            self.honest[0] -= 1
            return x.clone()
        return x[:, :4] if self.dtype is None else x.to(self.dtype)

    def op_forward(self, call, x):
        return self.lie(x) if self.is_forward else x.clone()

    def op_backward(self, call, dy):
        return dy if self.is_forward else self.lie(dy)


def called(model, x):
    return lambda: model(x.detach().float().requires_grad_()).sum().backward()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_an_op_that_gives_another_shape_than_it_declares(forward, last, kernels):
    """In a plan's first call its name is known, also where nothing of ours reads what it gives."""
    lying = Lying(forward)
    model = te_fuser.Sequential(*((ops.GELU(), lying) if last else (lying, ops.GELU())), kernels=kernels)
    made = "lying.output" if forward else "gradient of .*"
    words = (
        rf"^op {int(last)} \(Lying '{int(last)}'\): {made} is float32 \[5, 4\] cpu, the plan says float32 \[5, 8\] cpu"
    )
    with pytest.raises(ValueError, match=words):
        called(model, FIVE)()
    assert_other_steps_are_not_looked_at(model)


def assert_other_steps_are_not_looked_at(model):
    """Later calls are not watched: an honest op runs by the plan that the lie was found in."""
    lying = next(op for op in model if isinstance(op, Lying))
    lying.honest[0] = 2
    called(model, FIVE)()
    assert len(model.plans_kept()) == 1


@pytest.mark.parametrize("forward", [True, False])
def test_an_op_that_gives_another_dtype_than_it_declares(forward):
    model = te_fuser.Sequential(Lying(forward, torch.float64), ops.GELU())
    words = r"^op 0 \(Lying '0'\): .* is float64 \[5, 8\] cpu, the plan says float32 \[5, 8\] cpu; that is what infer"
    with pytest.raises(TypeError, match=words):
        called(model, FIVE)()


@pytest.mark.parametrize("forward", [True, False])
def test_an_op_that_lies_in_later_calls(forward):
    """Generated kernels go by the shapes that ops declare: they would read and write beyond the tensor."""
    model = te_fuser.Sequential(ops.GELU(), Lying(forward, honest=1), ops.GELU())
    called(model, FIVE)()
    with pytest.raises(ValueError, match=r"has 20 elements, planned were 40 \(5 x 8\).*another shape than it declares"):
        called(model, FIVE)()
