"""The plans that a model shows are those that run, whatever stands between its groups of ops."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from tests.looking import Apply, assert_unchanged, plans_that_run, state_of, text_of, x_of


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that ran, in order."""
    return plans_that_run(monkeypatch)


def hooked(m: nn.Module) -> nn.Module:
    m.register_forward_hook(lambda *call: None)
    return m


def old_weight_norm(m: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(m)


PLAIN: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Dropout(0.5),
    lambda: nn.Linear(8, 8),
    lambda: nn.Linear(8, 8).requires_grad_(False),
    lambda: nn.BatchNorm1d(8),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    lambda: old_weight_norm(nn.Linear(8, 8)),
    lambda: nn.GRU(8, 8),
    lambda: nn.MultiheadAttention(8, 2),
    lambda: nn.TransformerEncoderLayer(8, 2, 16),
    lambda: Apply(torch.Tensor.detach),
    lambda: Apply(lambda x: x.to(torch.bfloat16).float()),
    lambda: Apply(lambda x: x.reshape(-1, 2, 8)),
    lambda: Apply(lambda x: x.t().contiguous().t()),
    lambda: hooked(ops.GELU()),
    lambda: hooked(ops.Linear(8, 8)),
    lambda: hooked(nn.Linear(8, 8)),
    lambda: hooked(te_fuser.Sequential(ops.Linear(8, 8), nn.Tanh(), ops.ReLU())),
    lambda: te_fuser.Sequential(ops.Linear(8, 8), ops.GELU(), memory="lean"),
    lambda: hooked(te_fuser.Residual(ops.Linear(8, 8), nn.Dropout(), ops.Dropout(0.1), verify=True)),
)
TAKEN_APART = (nn.GRU, nn.MultiheadAttention)


class First(nn.Module):
    """The first of what a module gives, called in whatever way it takes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.module, nn.GRU):
            return self.module(x)[0]
        return self.module(x, x, x)[0]


def random_list(rng: random.Random, first: Callable[[], nn.Module]) -> list[nn.Module]:
    fusable: tuple[Callable[[], nn.Module], ...] = (
        lambda: ops.Linear(8, 8),
        lambda: ops.Linear(8, 8, bias=False).requires_grad_(False),
        lambda: ops.LayerNorm(8),
        ops.GELU,
        lambda: ops.Dropout(0.1),
        lambda: te_fuser.Residual(ops.Scale(8), ops.SiLU()),
        lambda: nn.utils.parametrizations.weight_norm(ops.Linear(8, 8)),
    )
    found: list[nn.Module] = []
    for k in range(rng.randint(2, 5)):
        found += [rng.choice(fusable)() for _ in range(rng.randint(0, 3))]
        plain = (rng.choice(PLAIN) if k else first)()
        found.append(First(plain) if isinstance(plain, TAKEN_APART) else plain)
    return [*found, ops.ReLU()]


@pytest.mark.parametrize("seed", range(len(PLAIN)))
def test_the_plans_shown_are_those_that_run(seed: int, ran: list[Plan]) -> None:
    """Lists split by each plain module, and at random by others: shown before the first call, and after it.

    Plans are shown for the sizes of the call and made for these rounded up to a grid: 8 rows are on it.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = te_fuser.Sequential(
        *random_list(rng, PLAIN[seed]), kernels="reference", memory=rng.choice(["fast", "balanced"])
    )
    model.train(rng.random() < 0.7)
    x = x_of(8, 8, grad=rng.random() < 0.5)
    with torch.set_grad_enabled(rng.random() < 0.8), torch.autocast("cpu", enabled=rng.random() < 0.3):
        before = state_of(model)
        shown = model.plans(x)
        assert_unchanged(model, before)
        ran.clear()
        model(x)
        own = {id(kept.plan) for kept in model.plans_kept()}  # not those of modules that run by themselves
        outer = [plan for plan in ran if id(plan) in own]
        assert text_of(shown) == (text := text_of(outer))
        assert text_of(model.plans(x)) == text


def test_an_embedding_first_and_a_branch_across(ran: list[Plan]) -> None:
    model = te_fuser.Sequential(
        nn.Embedding(10, 8),
        ops.Fork("r"),
        ops.Linear(8, 8),
        nn.Tanh(),
        ops.Add("r"),
        ops.Output("y"),
        ops.GELU(),
        kernels="reference",
    )
    tokens = torch.randint(0, 10, (8,))
    shown = model.plans(tokens, outputs=("y",))
    model(tokens, outputs=("y",))
    assert text_of(shown) == text_of(ran) and all(p.backward for p in shown)


def test_a_model_that_has_no_memory_of_its_own() -> None:
    """On the meta device, for another one."""
    with torch.device("meta"):
        model = te_fuser.Sequential(ops.Linear(64, 64), nn.BatchNorm1d(64), ops.GELU(), ops.Linear(64, 32))
        x = torch.empty(128, 64, requires_grad=True)
    first, second = model.plans(x, device="h200")
    assert first.device.name == second.device.name == "h200" and second.backward
    assert second.x.shape == (128, 64)


def test_modules_that_hold_more_than_parameters(ran: list[Plan]) -> None:
    """Tensors in lists, an owner outside of the list, a weight outside of all modules, which autocast would keep."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.listed = [torch.ones(8), nn.Parameter(torch.ones(8))]
            self.buffer = torch.full((8,), 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.listed[0] + self.listed[1] * self.buffer

    owner, outside = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))
    bound = hooked(ops.Bound(ops.MatMul(8, 8, device="meta"), owner, weight="weight"))
    model = te_fuser.Sequential(
        ops.GELU(),
        Holds(),
        ops.GELU(),
        bound,
        ops.ReLU(),
        Apply(lambda x: x @ outside),
        ops.GELU(),
        kernels="reference",
    )
    with torch.autocast("cpu"):
        shown = model.plans(x_of(8, 8))
        y = model(x_of(8, 8))
    assert text_of(shown) == text_of([plan for plan in ran if len(plan.graph.nodes) == 1 and not plan.graph.parameters])
    assert [p.x.dtype for p in shown] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    y.float().sum().backward()
    assert type(outside.grad) is torch.Tensor and owner.weight.grad is not None


def test_stand_ins_are_for_looking_alone() -> None:
    """A tensor without values from anywhere else is refused, as ever."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = FakeTensorMode().from_tensor(torch.randn(5, 8))
    with pytest.raises(TypeError, match="te_fuser runs plain tensors, got FakeTensor"):
        te_fuser.Sequential(ops.GELU(), kernels="reference")(x)
