"""Ops of a user's that give a value in two forms, start in one step what another waits for, and presets of a user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.formula import keep_mask, split
from te_fuser.fuser.plan.overlap import waiting_late
from te_fuser.fusions import Cost, fusion, unregister
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.operations import UnfusedOperation
from tests.forms import HalfProduct, TwoForms
from tests.needs import needs_compiler
from tests.twins import assert_same_gradients, randomize, results_and_gradients, tensor

WIDTH = 24


def model(kernels: str) -> Sequential:
    """A norm, the value in two forms, a product that reads one of them, a bias."""
    torch.manual_seed(0)
    made = Sequential(ops.LayerNorm(WIDTH), TwoForms(), HalfProduct(WIDTH), ops.Bias(WIDTH), kernels=kernels)
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.3, 0.5)
    made[2].to(torch.bfloat16)
    made[3].to(torch.bfloat16)
    return made


def results(run: Any, leaves: list[torch.Tensor], x: torch.Tensor, *outputs: str) -> list[torch.Tensor]:
    """Outputs of a call, and the gradients of everything for normally distributed ones of its own."""
    made = run(x, outputs=outputs) if outputs else (run(x),)
    torch.manual_seed(1)
    dys = [torch.randn(y.shape, dtype=torch.float64).to(y.dtype) for y in made]
    return [*(y.detach() for y in made), *torch.autograd.grad(made, leaves, dys)]


def assert_as_reference(ours: Sequential, x: torch.Tensor, *outputs: str, tolerance: float = 2e-2) -> None:
    """Values and all gradients."""
    leaves = [x, *ours.parameters()]
    for a, b in zip(*(results(run, leaves, x, *outputs) for run in (ours, ours.reference)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@needs_compiler
def test_a_value_in_two_forms_whose_gradient_comes_in_a_third_dtype() -> None:
    ours = model("generated")
    x = torch.randn(7, 3, WIDTH, requires_grad=True)
    plan = ours.plan(x, outputs=("wide",))
    first = plan.forward[0]
    assert (first.start, first.stop) == (0, 2) and first.name == "layer_norm_two_forms_fwd"
    made = {str(r.spec(plan.graph).dtype) for name, r in first.outputs if name.startswith("two_forms")}
    assert made == {"torch.bfloat16", "torch.float32"}
    (last,) = (s for s in plan.backward if s.name == "layer_norm_two_forms_bwd")
    arriving = {name: str(t.dtype) for name, t in zip(dict(last.inputs), last.task.description.loads, strict=False)}
    assert {v for name, v in arriving.items() if name.startswith("d_")} == {"float16", "float32"}

    leaves = [x, *ours.parameters()]
    got = results(ours, leaves, x, "wide")
    assert [t.dtype for t in got[:2]] == [torch.bfloat16, torch.float32]
    plain = results(ours.reference, leaves, x, "wide")  # rounds where plain PyTorch would, op by op
    exact = _exact(ours, x)
    for a, usual, right in zip(got, plain, exact, strict=True):
        least = 4 * torch.finfo(a.dtype if a.dtype != torch.float32 else torch.bfloat16).eps * right.abs().max()
        assert (a.double() - right).abs().max() <= 2 * (usual.double() - right).abs().max() + least
    # The wide form is rounded once, from what the formula gives: not by way of the narrow one.
    assert (got[1].double() - exact[1]).abs().max() < 1e-6


def _exact(ours: Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().double().requires_grad_()
    norm, _, product, bias = ours
    given = [p.detach().double().requires_grad_() for p in (norm.weight, norm.bias, product.weight, bias.bias)]

    def run(x: torch.Tensor, outputs: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        wide = torch.nn.functional.layer_norm(x, (WIDTH,), given[0], given[1], norm.eps).tanh()
        return wide @ given[2].mT + given[3], wide

    torch.manual_seed(1)
    made = run(leaf, ())
    dys = [torch.randn(y.shape, dtype=torch.float64).to(d).double() for y, d in zip(made, DTYPES, strict=True)]
    return [*(y.detach() for y in made), *torch.autograd.grad(made, [leaf, *given], dys)]


DTYPES = (torch.bfloat16, torch.float32)


@needs_compiler
def test_steps_of_forms_are_verified() -> None:
    ours = model("generated")
    ours.verify = True
    x = torch.randn(7, 3, WIDTH, requires_grad=True)
    results(ours, [x, *ours.parameters()], x, "wide")


class Halves(ops.RowOp):
    """y = the first half times 2; the second half and all squares are values of their own."""

    values = ("rest", "squares")

    def named_outputs(self) -> tuple[str, ...]:
        return ("rest", "squares")

    def named_output(self, name: str, out: Spec) -> Spec:
        return Spec((*out.shape[:-1], out.features * (2 if name == "squares" else 1)), out.dtype, out.device)

    def compute(self, x: Any) -> Mapping[str, Any]:
        first, second = split(x, 2)
        return {"output": first * 2.0, "rest": second + 1.0, "squares": x * x}


class Product(ops.RowOp):
    """y = x * rest."""

    def compute(self, x: Any, rest: Any) -> Any:
        return x * rest


@pytest.mark.parametrize("kernels", ["generated", "reference"])
@pytest.mark.parametrize("between", [True, False])
def test_an_op_of_several_values(kernels: str, between: bool) -> None:
    """Each with features and a gradient of its own, read by a later op or by the caller, within a kernel or across."""
    parts = [ops.Linear(WIDTH // 2, WIDTH // 2)] if between else []
    torch.manual_seed(0)
    ours = Sequential(ops.LayerNorm(WIDTH), Halves(), *parts, Product(), ops.GELU(), kernels=kernels).double()
    if kernels == "generated":
        ours = ours.float()
    dtype = ours[0].weight.dtype
    for p in ours.parameters():
        torch.nn.init.normal_(p, 0.3, 0.5)
    x = torch.randn(7, 3, WIDTH, dtype=dtype, requires_grad=True)

    assert_as_reference(ours, x, "squares", tolerance=1e-5 if dtype == torch.float32 else 1e-12)
    norm = torch.nn.functional.layer_norm(x, (WIDTH,), ours[0].weight, ours[0].bias, ours[0].eps)
    torch.testing.assert_close(ours(x, outputs=("squares",))[1], norm * norm, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", [[ops.MatMul(WIDTH, WIDTH)], [ops.LayerNorm(WIDTH), ops.Reshape(7, WIDTH)]])
def test_an_opaque_op_gets_its_gradient_in_its_own_dtype(before: list[torch.nn.Module]) -> None:
    assert_as_reference(
        Sequential(*before, HalfProduct(WIDTH)).bfloat16(), torch.randn(7, WIDTH).bfloat16().requires_grad_()
    )


@pytest.mark.parametrize("taken", [True, False])
def test_a_fusion_is_not_taken_where_its_gradient_has_another_dtype(taken: bool) -> None:
    dtypes = []

    @fusion(backward=[ops.SiLU], reads=["input"], cost=lambda m: Cost(seconds=1e-12))
    def own_dtype(m: Any, dy: torch.Tensor) -> torch.Tensor:
        dtypes.append((dy.dtype, m["input"].dtype))
        s = torch.sigmoid(m["input"])
        return dy * (s + m["input"] * s * (1 - s))

    after = ops.MatMul(WIDTH, WIDTH) if taken else HalfProduct(WIDTH)
    ours = Sequential(ops.MatMul(WIDTH, WIDTH), ops.SiLU(), after).bfloat16()
    try:
        x = torch.randn(7, WIDTH).bfloat16().requires_grad_()
        assert_as_reference(ours, x)
        assert taken or "arrives in float16, not in its own dtype" in " ".join(
            str(ours.explain(x, details=True)).split()
        )
    finally:
        unregister("own_dtype")
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * taken


@needs_compiler
def test_a_form_in_float64_is_computed_by_pytorch() -> None:
    """Kernels that are generated know no float64: then the whole plan runs without them, and says so."""
    ours = Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Cast(torch.float64), ops.GELU())
    assert_as_reference(ours, x := torch.randn(7, WIDTH, requires_grad=True))
    assert "row kernels are not generated: torch.float64 runs the reference" in " ".join(
        str(ours.explain(x, details=True)).split()
    )


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("gives output, but by `values` it is to give output, b", {"compute": lambda self, x: x * 2.0}),
        ("gives b, but by `values` it is to give output, b", {"compute": lambda self, x: {"b": x}}),
        ("gives output, b, c, but", {"compute": lambda self, x: {"output": x, "b": x, "c": x}}),
        ("gives output, b, but by `values` it is to give output:", {"values": (), "named_outputs": lambda self: ()}),
        ("named_outputs.. leaves out 'b' of its `values`", {"named_outputs": lambda self: ()}),
        ("named_output.'b'. gives int32", {"named_output": lambda self, name, out: replace(out, dtype=torch.int32)}),
        ("named_output.'b'. gives a dtype; return a Spec", {"named_output": lambda self, name, out: torch.float32}),
        ("shape .3, 24., it needs .7, 24.", {"named_output": lambda self, name, out: replace(out, shape=(3, WIDTH))}),
        ("named_output.. says 48", {"named_output": lambda self, name, out: out.with_features(2 * WIDTH)}),
        ("output_dtype.. gives int32", {"output_dtype": lambda self, dtype: torch.int32}),
        ("gradient_dtype gives int32", {"gives_gradient_in": torch.int32}),
        ("draws by keep_mask; define draws", {"compute": lambda self, x: {"output": keep_mask(x, 0.5), "b": x}}),
    ],
)
def test_an_op_that_is_said_wrong(words: str, changed: dict[str, Any]) -> None:
    own = {
        "values": ("b",),
        "named_outputs": lambda self: ("b",),
        "compute": lambda self, x: {"output": x * 2.0, "b": x * 3.0},
    }
    kind = op_table.exports.row(True)(type("Wrong", (ops.RowOp,), own | changed))
    if (given := changed.get("gives_gradient_in")) is not None:
        op_table.gradient_dtype.add(lambda op, dtype: given, kind)
    model = Sequential(ops.GELU(), kind())
    with pytest.raises((TypeError, ValueError), match=rf"op 1 \(Wrong '1'\): .*{words}"):
        model.plan(torch.randn(7, WIDTH))


class One(ops.RowOp):
    """y = 1."""

    def compute(self, x: Any) -> Any:
        return 1.0


def test_a_formula_that_is_a_number() -> None:
    ours = Sequential(ops.LayerNorm(WIDTH), One(), ops.GELU(), ops.LayerNorm(WIDTH), kernels="reference")
    x = torch.randn(7, WIDTH, requires_grad=True)
    (y := ours(x)).sum().backward()
    torch.testing.assert_close(y, ours.reference(x))
    assert x.grad is not None and not x.grad.any() and ours[3].bias.grad.tolist() == [7.0] * WIDTH


# ---- steps that wait


Way = tuple[Any, torch.Tensor]


def gather(call: OpCall, x: torch.Tensor) -> Way:
    """Transfer under way, and the tensor for the rows of all processes."""
    whole = torch.empty_like(x)
    return dist.all_gather_into_tensor(whole, x.contiguous(), async_op=True), whole


def arrived(call: OpCall, way: Way) -> torch.Tensor:
    work, whole = way
    work.wait()
    return whole


class Later(UnfusedOperation):
    """y = the rows of all processes; its gradient is gathered too, and started before that of the weights behind it."""

    reads = ()

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        return gather(call, x)

    def op_wait(self, call: OpCall, way: Way) -> torch.Tensor:
        return arrived(call, way)

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), (), "start", wait="wait"),)

    def start(self, call: OpCall, dy: torch.Tensor) -> Way:
        return gather(call, dy)

    def wait(self, call: OpCall, way: Way) -> dict[str, torch.Tensor | None]:
        return {"input": arrived(call, way)}


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_under_way_is_waited_for_late(alone: None) -> None:
    """Steps that do not need it run in between, and nothing that it reads or writes is dropped or stored over."""
    model = te_fuser.Sequential(ops.GELU(), Later(), ops.MatMul(WIDTH, WIDTH), kernels="reference").double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    plan = model.plan(x)
    started, waiting = (next(s for s in plan.forward if s.name == f"later.{phase}") for phase in ("start", "wait"))
    assert set(started.reads()) < set(waiting.reads()) and not started.task.own_memory and not waiting.task.own_memory
    y = model(x)
    dx, dw = torch.autograd.grad(y.square().sum(), [x, model[2].weight])
    leaf = x.detach().requires_grad_()
    want = torch.nn.functional.gelu(leaf, approximate="tanh") @ model[2].weight.mT
    torch.testing.assert_close((dx, dw), torch.autograd.grad(want.square().sum(), [leaf, model[2].weight]))


def test_a_step_that_waits_stands_before_its_first_reader() -> None:
    model = te_fuser.Sequential(Later(), ops.MatMul(WIDTH, WIDTH), ops.GELU(), kernels="reference")
    start, wait, product, gelu = model.plan(torch.randn(4, WIDTH)).forward
    assert waiting_late([start, wait, product, gelu]) == [start, wait, product, gelu]
    between = replace(gelu, inputs=(), outputs=())
    assert waiting_late([start, wait, between, between, product]) == [start, between, between, wait, product]
    assert waiting_late([start, wait, between]) == [start, between, wait]


class Doubled(UnfusedOperation):
    """y = 2 x, and what backward reads is given in either phase."""

    reads = emits = ("early", "late")

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        call.emit("early", x + 1)
        return 2 * x

    def op_wait(self, call: OpCall, started: torch.Tensor) -> torch.Tensor:
        call.emit("late", started + 2)
        return started

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        assert torch.equal(2 * call["early"], call["late"])
        return 2 * dy


def test_what_is_emitted_when_it_starts_is_there_when_it_ends() -> None:
    model = te_fuser.Sequential(ops.GELU(), Doubled(), kernels="reference", verify=True).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(model.reference(x).sum(), x)[0])


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("forward must return a tensor, got NoneType", {"op_wait": lambda self, call, way: None}),
        ("backward must return a dict of gradients by name, got int", {"wait": lambda self, call, way: 1}),
        ("backward gave no gradient for .input.", {"wait": lambda self, call, way: {}}),
    ],
)
def test_a_phase_that_gives_nothing(words: str, changed: dict[str, Any]) -> None:
    own = {
        "gradients": lambda self, names: (Gradient(("input",), (), "start", wait="wait"),),
        "op_forward": lambda self, call, x: x,
        "op_wait": lambda self, call, way: way,
        "start": lambda self, call, dy: dy,
        "wait": lambda self, call, way: {"input": way},
    }
    model = te_fuser.Sequential(ops.GELU(), type("Bad", (UnfusedOperation,), own | changed)(), kernels="reference")
    with pytest.raises((TypeError, RuntimeError), match=rf"op 1 \(Bad '1'\): its {words}"):
        model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()


# ---- presets


class LayerNormMLP(te_fuser.Sequential):
    """y = W2 gelu(W1 norm(x) + b1) + b2, under the names that checkpoints of other libraries have.

    Args:
        hidden: features of x and y.
        ffn: features between the two products.
    """

    flattens = True

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__(
            self._bound(ops.LayerNorm(hidden, device="meta"), weight="layer_norm_weight", bias="layer_norm_bias"),
            ops.Output("layer_norm_output"),
            self._bound(ops.MatMul(hidden, ffn, device="meta"), weight="fc1_weight"),
            self._bound(ops.Bias(ffn, device="meta"), bias="fc1_bias"),
            ops.GELU(),
            self._bound(ops.MatMul(ffn, hidden, device="meta"), weight="fc2_weight"),
            self._bound(ops.Bias(hidden, device="meta"), bias="fc2_bias"),
        )
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(hidden))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(hidden))
        self.fc1_weight = torch.nn.Parameter(torch.randn(ffn, hidden) * hidden**-0.5)
        self.fc1_bias = torch.nn.Parameter(torch.zeros(ffn))
        self.fc2_weight = torch.nn.Parameter(torch.randn(hidden, ffn) * ffn**-0.5)
        self.fc2_bias = torch.nn.Parameter(torch.zeros(hidden))

    def _bound(self, op: ops.FusableOperation, **names: str) -> ops.Bound:
        return ops.Bound(op, self, **names)

    def forward(self, x: torch.Tensor, return_layer_norm_output: bool = False) -> Any:  # type: ignore[override]
        """y, or (y, what the norm gives)."""
        return super().forward(x, outputs=("layer_norm_output",) if return_layer_norm_output else ())


NAMES = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
HIDDEN, FFN = 32, 64
X = tensor(3, 5, HIDDEN)


def around(middle: te_fuser.Sequential, **options: Any) -> te_fuser.Sequential:
    """A list in which something stands before and behind the preset that can be fused with it."""
    return te_fuser.Sequential(ops.Linear(HIDDEN, HIDDEN), ops.GELU(), middle, ops.Scale(HIDDEN), **options)


def bare() -> te_fuser.Sequential:
    """The ops of the preset, each with parameters of its own."""
    return te_fuser.Sequential(
        ops.LayerNorm(HIDDEN),
        ops.Output("layer_norm_output"),
        ops.MatMul(HIDDEN, FFN),
        ops.Bias(FFN),
        ops.GELU(),
        ops.MatMul(FFN, HIDDEN),
        ops.Bias(HIDDEN),
    )


def meaning(model: te_fuser.Sequential, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of `around(LayerNormMLP(...))`, in torch.nn's functions."""
    mlp = model[2]
    norm = F.layer_norm(
        F.gelu(F.linear(x, model[0].weight, model[0].bias), approximate="tanh"),
        (HIDDEN,),
        mlp.layer_norm_weight,
        mlp.layer_norm_bias,
    )
    between = F.gelu(F.linear(norm, mlp.fc1_weight, mlp.fc1_bias), approximate="tanh")
    return F.linear(between, mlp.fc2_weight, mlp.fc2_bias) * model[3].weight, norm


@pytest.mark.parametrize("device", ["h200", "b200", None])
@pytest.mark.parametrize("outputs", [(), ("layer_norm_output",)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_fused_as_the_bare_list_is(device: str | None, outputs: tuple[str, ...], dtype: torch.dtype) -> None:
    x = torch.empty(64, HIDDEN, dtype=dtype, requires_grad=True)
    ours, theirs = (around(middle).to(dtype) for middle in (LayerNormMLP(HIDDEN, FFN), bare()))
    mine, want = (m.explain(x, device=device, source=True, outputs=outputs, details=True) for m in (ours, theirs))
    assert str(mine) == str(want)
    plan = ours.plan(x, device=device, outputs=outputs)
    inside = [k for k, node in enumerate(plan.graph.nodes) if node.path.startswith("2.")]
    crossing = [
        s for s in (*plan.forward, *plan.backward) if s.start < inside[0] < s.stop or s.start <= inside[-1] < s.stop - 1
    ]
    assert {(s.start < inside[0], s.stop > inside[-1] + 1) for s in crossing} == {(True, False), (False, True)}


def test_values_and_all_gradients() -> None:
    model = randomize(around(LayerNormMLP(HIDDEN, FFN), kernels="reference").double())
    leaves = {"input": X, **dict(model.named_parameters())}
    assert [name for name in model.state_dict() if name.startswith("2.")] == [f"2.{name}" for name in NAMES]
    asked = ("layer_norm_output",)
    got, grads = results_and_gradients(model, leaves, X, asked)
    want, want_grads = results_and_gradients(lambda x, outputs: meaning(model, x), leaves, X, asked)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    assert_same_gradients(grads, want_grads)
    assert all(gradient is not None for gradient in grads.values()) and len(grads) == 10
    y, norm = model[2](X, return_layer_norm_output=True)
    torch.testing.assert_close(norm, F.layer_norm(X, (HIDDEN,), model[2].layer_norm_weight, model[2].layer_norm_bias))
    torch.testing.assert_close(model[2](X), y)


def test_user_preset_is_verified_in_a_list_and_alone() -> None:
    """Alone by its ops: its forward takes other arguments than a list's."""
    model = randomize(around(LayerNormMLP(HIDDEN, FFN)))
    for subject, x in ((model, X.detach().bfloat16()), (model[2], X.detach().float())):
        report = te_fuser.verify(subject, x, outputs=("layer_norm_output",), dtypes=(x.dtype,))
        assert report.passed and any("layer_norm_output" in row.tensor for row in report.rows)
