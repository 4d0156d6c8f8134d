"""Products that exchange their rows while they run, on two ranks, against the same list in one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.graph.refs import RECOMPUTED
from te_fuser.fuser.plan.plan import Plan
from tests.needs import needs_compiler
from tests.parallel.cutting import own, part
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.peers import emulated
from tests.twins import randomize, tensor

pytestmark = needs_compiler
FEATURES, INNER = 8, 12
SHAPE = (6, 3, FEATURES)
FORWARD = ["gather_matmul", "scatter_matmul"]
BACKWARD = ["gather_matmul_backward", "scatter_matmul_backward"]
NEAR = {"rtol": 2e-5, "atol": 2e-5}  # products in float32, and kernels'


def mlp(layers: int = 2, main_grad: bool = False, features: int = FEATURES, inner: int = INNER, **options: Any) -> Any:
    """A bias behind either product, and a norm and a residual behind what is scattered."""

    def layer() -> te_fuser.Residual:
        given: dict[str, Any] = {"accumulate_into_main_grad": main_grad, "dtype": torch.float32}
        up, down = (ops.Linear(*sizes, **given) for sizes in ((features, inner), (inner, features)))
        return te_fuser.Residual(ops.LayerNorm(features, dtype=torch.float32), up, ops.GELU(), down)

    return randomize(te_fuser.Sequential(*(layer() for _ in range(layers)), **options))


def products(model: torch.nn.Module) -> Iterator[ops.Linear]:
    return (m for m in model.modules() if isinstance(m, ops.Linear))


def shared(whole: te_fuser.Sequential) -> te_fuser.Sequential:
    """Copy of the list as two ranks share it."""
    model = copy.deepcopy(whole)
    group = mesh_of()["tp"]
    for m in products(model):
        m.group, m.sequence_parallel = group, True
        m.parallel_mode = "column" if m.in_features < m.out_features else "row"
        m.weight = torch.nn.Parameter(part(m.weight.detach(), int(m.parallel_mode == "row")).clone())
        if m.parallel_mode == "column":
            assert m.bias is not None
            m.bias = torch.nn.Parameter(part(m.bias.detach(), 0).clone())
    return model


def given(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(*shape, grad=False, seed=seed).float()


def assert_as_in_float64(model: Any, whole: Any, *shape: int) -> None:
    """Output and gradients are this rank's part of those of the whole list in float64."""
    exact = copy.deepcopy(whole).double()
    for m in products(exact):
        m.accumulate_into_main_grad = False
    x, dy = given(*shape), given(*shape, seed=9)
    mine = part(x, 0).clone().requires_grad_()
    y = model(mine)
    y.backward(part(dy, 0))
    wanted_x = x.double().requires_grad_()
    wanted = exact.reference(wanted_x)
    wanted.backward(dy.double())
    torch.testing.assert_close(y.double(), part(wanted.detach(), 0), **NEAR)
    assert mine.grad is not None and wanted_x.grad is not None
    torch.testing.assert_close(mine.grad.double(), part(wanted_x.grad, 0), **NEAR)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        if not p.requires_grad:
            continue
        gradient = p.grad if getattr(p, "main_grad", None) is None else p.main_grad
        assert gradient is not None and q.grad is not None
        found, want = gradient.double(), own(q.grad, gradient)
        torch.testing.assert_close(found, want, **NEAR, msg=lambda m, name=name: f"{name}: {m}")


def exchanges(plan: Plan) -> tuple[list[str], list[str]]:
    """The steps of products and of exchanges, of either direction, but for what is gathered again, and sums."""
    forward, backward = ([s.name for s in steps if _is_one(s.name)] for steps in (plan.forward, plan.backward))
    return forward, backward


def _is_one(name: str) -> bool:
    return any(part in name for part in ("gather", "scatter")) and not name.endswith(
        (".again.start", ".again.wait", ".close")
    )


@pytest.mark.parametrize(
    ("shape", "memory"), [(SHAPE, "fast"), (SHAPE, "lean"), ((4, FEATURES), "lean"), ((2, 1, FEATURES), "fast")]
)
@on_ranks
def test_layers(shape: tuple[int, ...], memory: str) -> None:
    """Gradients of weights wait for what is computed, or gathered, again; else what was gathered is there for them."""
    whole = mlp(memory=memory)
    with emulated():
        model = shared(whole)
        plan = model.plan(given(shape[0] // WORLD, *shape[1:]).requires_grad_())
        assert exchanges(plan) == (2 * FORWARD, 2 * BACKWARD)
        again = {s.name for s in plan.backward if any(r.kind is RECOMPUTED for r in (*s.reads(), *s.writes()))}
        assert ("all_gather.again.wait" in again) == (memory == "lean")
        closed = [s.name for s in plan.steps if s.name.endswith(".close")]
        assert closed == ["scatter_matmul.close"] * 2 + ["scatter_matmul_backward.close"] * 2
        for _ in range(2):  # buffers are taken in turn
            model.zero_grad()
            assert_as_in_float64(model, whole, *shape)


@on_ranks
def test_sums_that_kernels_take_are_those_of_steps_of_their_own() -> None:
    """In float32 with one rounding less; both ways in turns, by the same buffers."""
    whole = mlp()
    with emulated():
        model = shared(whole)
        for _ in range(2):
            found = []
            for left_out in ((), (fusions.PEER_SUMS,)):
                with fusions.disabled(*left_out):
                    x = part(given(*SHAPE), 0).clone().requires_grad_()
                    assert any(s.name.endswith(".close") for s in model.plan(x).steps) != bool(left_out)
                    model.zero_grad()
                    y = model(x)
                    y.backward(part(given(*SHAPE, seed=9), 0))
                    found.append([y.detach(), x.grad, *[p.grad for p in model.parameters()]])
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@on_ranks
def test_products_with_epilogues_and_what_they_give_beside() -> None:
    """The bias in the epilogue of what is gathered, and GELU with the value before it."""
    whole = randomize(
        te_fuser.Sequential(
            ops.LayerNorm(FEATURES, dtype=torch.float32),
            ops.Linear(FEATURES, 16, dtype=torch.float32),
            ops.Tanh(),
            ops.Linear(16, FEATURES, dtype=torch.float32),
        )
    )
    with emulated(), fusions.disabled("stretch"):
        model = shared(whole)
        plan = model.plan(given(3, FEATURES).requires_grad_())
        assert any(s.name == "gather_matmul_bias" for s in plan.forward)
        assert_as_in_float64(model, whole, 6, FEATURES)


@on_ranks
def test_main_grad() -> None:
    whole = mlp(main_grad=True)
    with emulated():
        model = shared(whole)
        for m in (*products(whole), *products(model)):
            m.weight.main_grad = torch.zeros_like(m.weight)
        assert exchanges(model.plan(given(3, 3, FEATURES).requires_grad_()))[0] == 2 * FORWARD
        assert_as_in_float64(model, whole, *SHAPE)


@on_ranks
def test_a_frozen_weight() -> None:
    """Its step for dx runs, that for dW does not."""
    whole = mlp(1)
    with emulated():
        model = shared(whole)
        for m in (whole, model):
            for name, p in m.named_parameters():
                p.requires_grad_("1.weight" not in name)
        assert exchanges(model.plan(given(3, 3, FEATURES).requires_grad_()))[1] == BACKWARD
        assert_as_in_float64(model, whole, *SHAPE)
        with torch.no_grad():
            x = given(*SHAPE)
            torch.testing.assert_close(model(part(x, 0)), part(whole.reference(x), 0), **NEAR)


@on_ranks
def test_each_step_keeps_its_promises() -> None:
    whole = mlp(1, verify=True)
    with emulated():
        assert_as_in_float64(shared(whole), whole, *SHAPE)


@on_ranks
def test_nothing_to_multiply() -> None:
    whole = mlp(1)
    with emulated():
        model = shared(whole)
        x = given(0, 3, FEATURES).requires_grad_()
        y = model(x)
        y.sum().backward()
        assert y.shape == (0, 3, FEATURES) and x.grad is not None and x.grad.shape == x.shape
        assert all(bool((p.grad == 0).all()) for p in products(model) for p in (p.weight,))


@on_ranks
def test_lists_without_copies_are_as_before() -> None:
    """Left out by name, and where ranks cut another dimension than the first."""
    whole = mlp(1)
    with emulated():
        model, x = shared(whole), given(3, 3, FEATURES)
        with fusions.disabled(fusions.PEER_COPIES):
            names = exchanges(model.plan(x))[0]
            assert names == ["all_gather.start", "all_gather.wait", "reduce_scatter.start", "reduce_scatter.wait"]
            assert_as_in_float64(model, whole, *SHAPE)
        group = ops.Group.of("a test", dist.group.WORLD)
        list_ = te_fuser.Sequential(ops.AllGather(group, 1), ops.MatMul(FEATURES, 4, dtype=torch.float32))
        plan = list_.plan(x)
        assert exchanges(plan)[0] == ["all_gather.start", "all_gather.wait"]
        words = "it is no step with a product: the blocks of ranks lie along dimension 1, not one behind the other"
        assert words in {r.reason for r in plan.refusals if r.name == fusions.PEER_COPIES}
        both = torch.cat([given(3, 3, FEATURES, seed=r) for r in range(WORLD)], 1)
        y = list_(given(3, 3, FEATURES, seed=group.rank))
        torch.testing.assert_close(y, both @ list_[1].weight.t(), **NEAR)


@on_ranks
def test_products_of_8_bits() -> None:
    """Gathered in 8 bits; against the list whose exchanges are steps of their own. Both add up two numbers."""
    whole = mlp(1, features=32, inner=64)
    recipe = te_fuser.recipe.DelayedScaling(amax_history_len=2)
    with emulated():
        found = []
        for left_out in ((fusions.PEER_COPIES,), ()):
            model = shared(whole)
            with fusions.disabled(*left_out):
                for step in range(3):
                    x = part(given(32, 32, seed=step), 0).clone().requires_grad_()
                    model.zero_grad()
                    with te_fuser.autocast(recipe=recipe):
                        names = exchanges(model.plan(x))[0]
                        y = model(x)
                    y.backward(part(given(32, 32, seed=step + 9), 0))
            found.append([y.detach(), x.grad, *[p.grad for p in model.parameters()]])
            assert ("gather_float8_matmul" in names) == (not left_out), names
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
