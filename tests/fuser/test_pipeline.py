"""The Fuser: when it plans again and when not, ops alone, what nobody needs, and threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.builder import GraphBuilder
from te_fuser.fusions import Details
from te_fuser.kernels.attention import problem
from te_fuser.ops import UnfusedOperation, op_table
from te_fuser.ops.attention.dot_product_attention import KERNEL_SWITCHES
from te_fuser.ops.base import OpCall
from tests.fuser.models import mlp, our_mlp
from tests.threads import in_threads
from tests.twins import assert_as_meant, assert_same_gradients, randomize, results_and_gradients, sequential, tensor

X = tensor(6, 8)


# ---------------------------------------------------------------------------------------------- the plan cache


def step(model, x=X):
    if torch.is_grad_enabled():
        model(x).sum().backward()
        x.grad = None
    else:
        model(x)


def test_modes_alternate_without_planning(planned):
    """Calls in inference mode take the plan of no_grad, where nothing takes a gradient."""
    model = mlp()
    for _ in range(4):
        for training in (True, False):
            step(model.train(training))
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                step(model)
    assert len(planned) == 3


# Change between two calls -> whether it takes another plan.
CHANGES = {
    "nothing": (lambda m: (X,), False),
    "parameter_of_the_same_shape": (
        lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones_like(m[1].weight))),
        False,
    ),
    "parameter_data": (lambda m: m[1].weight.data.fill_(1.0), False),
    "load_state_dict": (lambda m: m.load_state_dict(randomize(mlp(), 3).state_dict()), False),
    "load_state_dict_assign": (lambda m: m.load_state_dict(randomize(mlp(), 3).state_dict(), assign=True), False),
    "frozen": (lambda m: m[1].weight.requires_grad_(False), True),
    "p": (lambda m: setattr(m[3], "p", 0.5), True),
    "eps": (lambda m: setattr(m[0], "eps", 0.5), True),
    "memory": (lambda m: setattr(m, "memory", "lean"), True),
    "no_bias": (lambda m: setattr(m[4], "bias", None), True),
    "eval_of_one": (lambda m: m[3].eval(), True),
    "replaced_op": (lambda m: m.__setitem__(2, ops.ReLU()), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_takes_another_plan(name, planned):
    change, again = CHANGES[name]
    model = mlp()
    step(model)
    change(model)
    step(model)
    assert len(planned) == 1 + again
    assert_as_meant(model, X)


# Two shapes -> whether the second is planned anew, and whether it then runs what the first does.
SHAPES = {
    "rows_of_the_same_power_of_two": ((48, 8), (33, 8), False, True),
    "rows_of_another_power_of_two": ((48, 8), (32, 8), True, True),
    "as_many_rows_otherwise": ((4, 8, 8), (8, 4, 8), True, True),
    "lengths_of_the_same_powers_of_two": ((3, 7, 8), (4, 5, 8), False, True),
    "dimensions": ((32, 8), (4, 8, 8), True, True),
    "empty": ((16, 8), (0, 8), True, True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_which_shapes_share_a_plan(name, planned):
    first, second, again, alike = SHAPES[name]
    model = mlp()
    assert_as_meant(model, tensor(*first))
    assert_as_meant(model, tensor(*second))
    assert len(planned) == 1 + again and len(model.plans_kept()) == 2 - alike
    assert_as_meant(model, tensor(*first))
    assert len(planned) == 1 + again


SWITCHES = {
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_attention_is_planned_again_when_a_switch_is_set(name, planned):
    asked, switch = SWITCHES[name]
    before = asked()
    attending = sequential(
        ops.Linear(8, 24),
        te_fuser.Sequential(ops.DotProductAttention(2, 4, mask="none", layout="sequence_first")),
        dtype=torch.float32,
    )
    without = mlp()
    x = tensor(5, 3, 8, dtype=torch.float32)
    try:
        for _ in range(2):
            for value in (before, not before):
                switch(value)
                step(attending, x)
                step(without)
    finally:
        switch(before)
    assert len(planned) == 3  # twice for attention, whose two plans are kept; nothing else looks at it


def test_the_switches_are_those_that_attention_looks_at():
    assert set(problem.SWITCHES.values()) == set(KERNEL_SWITCHES.values())


@op_table.global_state.row(lambda: Chosen.on)
class Chosen(ops.ReLU):
    """Its fusion is taken where a switch of the user's own says so."""

    on = False


def test_a_plan_follows_the_state_that_an_op_names():
    entry = fusions.fusion(
        forward=[Chosen],
        name="chosen",
        when=lambda m: Chosen.on,
        cost=lambda m: fusions.Cost(seconds=1e-9),
        details=Details(registered=False),
    )(lambda m, x: x.relu())
    model = sequential(ops.Linear(8, 8), Chosen())
    fuser = te_fuser.Fuser(list(model), kernels="reference")
    with fusions.only(entry), torch.no_grad():
        taken = []
        for Chosen.on in (False, True, False):
            taken.append("chosen" in [s.name for s in fuser.prepare(X, {})[0].plan.forward])
            torch.testing.assert_close(fuser(X), model.reference(X))
    assert taken == [False, True, False]


def test_input_that_needs_no_gradient(planned):
    model = mlp()
    for x in (X, X.detach(), X, X.detach()):
        assert_as_meant(model, x)
    assert len(planned) == 2


def test_what_was_used_longest_ago_is_forgotten(monkeypatch, planned):
    monkeypatch.setattr(te_fuser.config, "plans_kept", 2)
    monkeypatch.setattr(te_fuser.config, "shapes_kept", 3)
    model = our_mlp()
    made = []
    for rows in (4, 8, 7, 4, 16, 3, 5):  # 16 rows take the place of 8, not of 4
        model(tensor(rows, 8, grad=False))
        made.append(len(planned))
    assert made == [1, 2, 2, 2, 3, 3, 4]
    (kept,) = model.plans_kept()  # both plans run the same
    assert [tuple(shape) for (shape,) in kept.shapes] == [(5, 8), (3, 8)]
    for rows in range(1, 20):
        model(tensor(rows, 8, grad=False))
    fuser = model._prepared()[0].fuser
    assert len(fuser._cache._plans.items()) == 2 and len(fuser._cache._shapes.items()) == 3
    assert_as_meant(model, tensor(3, 8))


def test_a_plan_in_the_making_holds_up_no_known_shape():
    begun, going_on = threading.Event(), threading.Event()

    def when(m):
        if m.x.rows > 40:
            begun.set()
            assert going_on.wait(60)
        return "never"

    te_fuser.fusion(forward=[ops.SiLU], name="slowly_planned", when=when)(lambda m, x: x)
    try:
        model, made = sequential(ops.SiLU()), []
        model(tensor(8, 8, grad=False))
        planning = threading.Thread(target=lambda: made.append(model(tensor(48, 8, grad=False))))
        planning.start()
        assert begun.wait(60)
        known = threading.Thread(target=lambda: made.append(model(tensor(8, 8, grad=False))))
        known.start()
        known.join(60)
        assert [y.shape[0] for y in made] == [8]
        going_on.set()
        planning.join(60)
        assert [y.shape[0] for y in made] == [8, 48]
    finally:
        going_on.set()
        fusions.unregister("slowly_planned")


# ---------------------------------------------------------------------------------------------- ops alone


ALONE = {
    "linear": lambda: ops.Linear(8, 8),
    "layer_norm": lambda: ops.LayerNorm(8),
    "swiglu": ops.SwiGLU,
    "matmul": lambda: ops.MatMul(8, 8),
    "fork": lambda: ops.Fork("a"),
    "output": lambda: ops.Output("a"),
    "reshape": lambda: ops.Reshape(3, 16),
}


@pytest.mark.parametrize("name", ALONE)
def test_ops_alone_plan_once(name, planned):
    op = randomize(ALONE[name]().double())
    leaves = {"input": X, **dict(op.named_parameters())}
    made, grads = results_and_gradients(op, leaves, X)
    for _ in range(2):
        op(X)
    assert len(planned) == 1
    whole = te_fuser.Sequential(op, kernels="reference")
    want, want_grads = results_and_gradients(whole.reference, leaves, X)
    torch.testing.assert_close(made, want)
    assert_same_gradients(grads, want_grads)


def test_an_op_alone_plans_again_when_it_changes(planned):
    op = ops.Linear(8, 8).double()
    op(X)
    op.bias = None
    torch.testing.assert_close(op(X), F.linear(X, op.weight))
    op.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))
    torch.testing.assert_close(op(X), F.linear(X, op.weight))
    assert len(planned) == 2


def test_a_fuser_of_ops():
    up, down = ops.Linear(8, 16).double(), ops.Linear(16, 8).double()
    fuser = te_fuser.Fuser([ops.Fork("a"), up, ops.Output("mid"), ops.GELU(), down, ops.Add("a")], kernels="reference")
    y, mid = fuser(X, outputs=("mid",))
    torch.testing.assert_close(mid, F.linear(X, up.weight, up.bias))
    torch.testing.assert_close(y, X + F.linear(F.gelu(mid, approximate="tanh"), down.weight, down.bias))
    down.bias = None
    torch.testing.assert_close(fuser(X), X + F.linear(F.gelu(mid, approximate="tanh"), down.weight))


# ---------------------------------------------------------------------------------------------- threads


def test_threads_call_one_model():
    model = mlp()
    model.eval()
    inputs = [tensor(1 + k % 5, 8, seed=k) for k in range(24)]
    want = [results_and_gradients(model.reference, {"input": x}, x) for x in inputs]
    fresh = mlp().eval()

    def work(first):
        for k in range(first, len(inputs), 4):
            made, grads = results_and_gradients(fresh, {"input": inputs[k]}, inputs[k])
            torch.testing.assert_close(made, want[k][0])
            assert_same_gradients(grads, want[k][1])

    in_threads(*(functools.partial(work, k) for k in range(4)))


# -------------------------------------------------------------------------------- what nobody needs


class Products(TorchDispatchMode):
    """Counts matrix products by the shapes of what they multiply."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
        return func(*args, **(kwargs or {}))


def count_products(run):
    with Products() as mode:
        run()
    return mode.count


# what is frozen -> products in backward, of three Linears
FROZEN = {
    "nothing": ((), True, 6),
    "input": ((), False, 5),
    "first_weight": (("0.weight",), True, 5),
    "first_weight_and_input": (("0.weight",), False, 4),  # the first bias still needs what the second hands down
    "first_layer_and_input": (("0.weight", "0.bias"), False, 3),
    "two_layers_and_input": (("0.weight", "0.bias", "2.weight", "2.bias"), False, 1),
    "all_weights": (("0.weight", "2.weight", "4.weight"), True, 3),
    "all_but_the_last_bias": (("0.weight", "0.bias", "2.weight", "2.bias", "4.weight"), False, 0),
}


@pytest.mark.parametrize("name", FROZEN)
def test_no_product_is_computed_that_nobody_needs(name):
    frozen, input_needs, want = FROZEN[name]
    model = sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
    for parameter in frozen:
        model.get_parameter(parameter).requires_grad_(False)
    x = X if input_needs else X.detach()
    held = []
    assert count_products(lambda: held.append(model(x))) == 3
    assert count_products(lambda: held[0].sum().backward()) == want
    assert {n for n, p in model.named_parameters() if p.grad is None} == set(frozen)
    X.grad = None
    assert_as_meant(model, x)


def test_inference_tensors_take_part():
    model = our_mlp()
    with torch.inference_mode():
        x = tensor(6, 8, grad=False) + 1.0
        y = model(x)
        assert y.is_inference()
    torch.testing.assert_close(y.clone(), model(x.clone()))


# -------------------------------------------------------------------------------- modes that change meanwhile


def meanwhile(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], Any]) -> None:
    """Let another thread `act`, once, just before the function runs."""
    function, acts = getattr(owner, name), [act]

    def later(*args: Any, **kwargs: Any) -> Any:
        if acts:
            thread = threading.Thread(target=acts.pop())
            thread.start()
            thread.join()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, later)


PLACES = {"graph": (GraphBuilder, "build"), "plan": (pipeline, "make_plan"), "kernels": (pipeline, "load")}
PLACES["run"] = (pipeline, "execute")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["dropout", "attention"])
def test_a_mode_that_changes_during_a_call(
    kind: str, place: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is of the mode in which it began, and so is each later one."""
    drop = (
        [ops.Dropout(1.0)]
        if kind == "dropout"
        else [ops.DotProductAttention(2, 4, dropout=1.0, mask="none", layout="sequence_first")]
    )
    model, x = Sequential(ops.Linear(8, 24), *drop).train(training), torch.randn(3, 2, 8)
    meanwhile(monkeypatch, *PLACES[place], lambda: model.train(not training))
    y = model(x)
    y.sum().backward()
    assert bool((y == 0).all()) is training
    for mode in (training, not training):
        assert bool((model.train(mode)(x) == 0).all()) is mode


def test_a_mode_that_changes_between_forward_and_backward() -> None:
    """An opaque op's backward is of forward's mode, too."""

    class Doubled(UnfusedOperation):
        reads = ()

        def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
            return 2 * x if self.training else x.clone()

        def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
            return 2 * dy if self.training else dy

    model, x = Sequential(Doubled(), ops.Bias(4)), torch.randn(3, 4, requires_grad=True)
    y = model(x)
    model.eval()
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
