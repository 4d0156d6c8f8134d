"""Looking at a model changes nothing, and the plans that it shows are those that run, whatever stands between."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.fake_tensors import NotSeenError
from te_fuser.fuser.plan.plan import Plan
from te_fuser.ops.hooks import silenced
from tests.looking import Apply, assert_unchanged, hooked, plans_that_run, state_of, text_of, x_of
from tests.threads import in_threads
from tests.twins import Around, sequential


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that ran, in order."""
    return plans_that_run(monkeypatch)


class Counted(nn.Module):
    """Counts its runs where no copy does it for it."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return x.sin()


class Looks(nn.Module):
    """Module whose result's shape depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.abs().sum(-1) > 0] if x.abs().max().item() > 1e-6 else x


def split() -> te_fuser.Sequential:
    """Groups between modules that have state: buffers, random numbers, gradients."""
    return sequential(
        ops.Linear(8, 6),
        nn.BatchNorm1d(6),
        ops.GELU(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.Dropout(0.5),
        ops.LayerNorm(8),
        ops.Linear(8, 8),
        dtype=torch.float32,
    )


LOOKS: dict[str, Callable[[te_fuser.Sequential, torch.Tensor], Any]] = {
    "plans": lambda model, x: model.plans(x),
    "explain": lambda model, x: str(model.explain(x, details=True)),
    "source": lambda model, x: str(model.explain(x, source=True, details=True)),
    "measure": lambda model, x: str(model.explain(x, measure=True, details=True)),
    "tune": lambda model, x: model.tune(x, rounds=1, seconds=0.001),
}


MEASURING = ("measure", "tune")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_looking_changes_nothing(name: str, called: bool) -> None:
    model, x = split(), x_of(5, 8)
    model.append(Apply(lambda x: x * random.random()))  # Python's generator, too
    if called:
        model(x).sum().backward()
    seen: list[str] = []
    for p in model.parameters():
        p.register_hook(lambda g: seen.append("gradient"))
    x.register_hook(lambda g: seen.append("gradient"))
    before, x_before = state_of(model), x.detach().clone()
    LOOKS[name](model, x)
    assert_unchanged(model, before)
    assert torch.equal(x, x_before) and seen == []


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", MEASURING)
def test_measuring_keeps_graphs_of_earlier_calls(name: str) -> None:
    """Their saved buffers have the version that they had."""
    model, x = split().eval(), x_of(5, 8)
    y = model(x)
    model[1].train()
    LOOKS[name](model, x)
    y.sum().backward()
    assert x.grad is not None


def test_measuring_leaves_generators_of_modules() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn(x.shape, generator=self.generator)

    model = sequential(ops.GELU(), Noise(), ops.ReLU())
    before = model[1].generator.get_state()
    for look in (LOOKS["explain"], LOOKS["measure"]):
        look(model, x_of(5, 8))
        assert torch.equal(model[1].generator.get_state(), before)


def test_a_failed_measurement_puts_buffers_back() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

    model = sequential(ops.GELU(), nn.BatchNorm1d(8).double(), Fails(), ops.ReLU())
    before = state_of(model)
    with pytest.raises(RuntimeError, match="not today"):
        model.explain(x_of(5, 8, dtype=torch.float64), measure=True, details=True)
    assert_unchanged(model, before)


def test_measuring_with_a_scripted_module() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    model, x = sequential(ops.Linear(8, 8), scripted, ops.GELU(), dtype=torch.float32), x_of(5, 8)
    before = state_of(model)
    assert len(model.explain(x, measure=True, details=True).plans) == 2
    assert_unchanged(model, before)


def hook_all(m: nn.Module, fired: list[str]) -> None:
    """Hooks of three kinds, which note that they fired."""
    for register in (m.register_forward_hook, m.register_forward_pre_hook, m.register_full_backward_hook):
        register(lambda *_: fired.append("hook"))


def test_no_hook_fires() -> None:
    """Of plain modules, of modules in them, of ops and lists that have one, and of all modules."""
    fired: list[str] = []
    inner = sequential(ops.GELU(), ops.Linear(8, 8), dtype=torch.float32)
    model = sequential(ops.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), inner, ops.ReLU(), ops.GELU())
    for m in (model[1], model[1][0], inner, inner[1], model[3]):
        hook_all(m, fired)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: fired.append("hook"))
    try:
        assert model.float().plans(x_of(5, 8)) == []  # all ops would run by themselves, for the hook
    finally:
        handle.remove()
    plans = model.plans(x_of(5, 8))
    assert fired == [] and len(plans) == 2
    assert [p.graph.values[0].spec.shape for p in plans] == [(5, 8), (5, 8)]
    assert all(p.backward for p in plans)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", MEASURING)
def test_no_hook_of_users_fires_where_real_data_run(name: str) -> None:
    """Hooks of PyTorch fire, as a pruned weight is computed by one; in other threads all do, and afterwards."""
    fired: list[str] = []
    model = sequential(ops.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), ops.Linear(8, 8), ops.ReLU())
    model = model.float().requires_grad_()
    torch.nn.utils.prune.l1_unstructured(model[1][0], "weight", 0.5)
    for m in (model[1], model[1][0], model[3]):
        hook_all(m, fired)
    with torch.no_grad():
        model[1][0].weight_orig.zero_()  # what the pruning's hook computes the weight from
    LOOKS[name](model, x_of(5, 8))
    assert fired == [] and not model[1][0].weight.any()
    with silenced(model):
        model(x_of(5, 8))
        assert fired == []
        in_threads(lambda: model(x_of(5, 8)))
    assert len(fired) == 6
    model(x_of(5, 8)).sum().backward()
    assert len(fired) == 15


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", MEASURING)
def test_what_a_hook_makes_of_a_result_is_known_from_the_last_call(name: str) -> None:
    recurrent = nn.GRU(8, 8)
    recurrent.register_forward_hook(lambda m, args, made: made[0])
    model, x = sequential(ops.GELU(), recurrent, ops.Linear(8, 8), dtype=torch.float32), x_of(5, 8)
    want = model(x)
    assert LOOKS[name](model, x)
    assert torch.equal(model(x), want)


def test_looking_within_a_checkpoint() -> None:
    """Stand-ins for tensors are not among those that are saved and computed again."""
    model = split().eval()
    twin = copy.deepcopy(model)

    def run(x: torch.Tensor) -> torch.Tensor:
        model.explain(x, details=True)
        return model(x)

    for rows in (5, 6):
        x, other = x_of(rows, 8), x_of(rows, 8)
        torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
        twin(other).sum().backward()
        torch.testing.assert_close(x.grad, other.grad)


def test_after_a_call_nothing_of_a_plain_module_runs() -> None:
    model, x = sequential(ops.GELU(), Counted(), ops.ReLU(), dtype=torch.float32), x_of(5, 8)
    model(x)
    Counted.runs = 0
    plans = model.plans(x)
    assert len(plans) == 2 and Counted.runs == 0
    assert plans[1].backward and plans[1].graph.values[0].needs_grad
    assert text_of(plans) == text_of(model.plans(x_of(5, 8)))


@pytest.mark.parametrize("called", [False, True])
def test_modules_that_store_into_their_input(called: bool, ran: list[Plan]) -> None:
    model, x = sequential(ops.Linear(8, 8), nn.ReLU(inplace=True), ops.LayerNorm(8), dtype=torch.float32), x_of(8, 8)
    model(x) if called else None
    plans = model.plans(x)
    ran.clear()
    model(x).sum().backward()
    assert text_of(plans) == text_of(ran) and len(plans) == 2


def test_what_needs_values_says_that_it_takes_a_call() -> None:
    model, x = sequential(ops.GELU(), Looks(), ops.ReLU(), dtype=torch.float32), x_of(5, 8)
    with pytest.raises(NotSeenError, match=r"what '1' \(Looks\) gives cannot be told .*; call the model once with"):
        model.plans(x)
    text = str(model.explain(x, details=True))
    assert text.startswith("Plan 1: 1 op") and "No plan is known from here on: what '1' (Looks) gives" in text
    model(x)
    assert len(model.plans(x)) == 2 and "Plan 2 of 2" in str(model.explain(x, details=True))
    with pytest.raises(NotSeenError):
        model.plans(x_of(6, 8))


def test_a_parameter_that_needs_values_says_that_it_takes_a_call() -> None:
    class Clipped(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / max(weight.abs().max().item(), 1.0)

    model, x = sequential(ops.Linear(8, 4), ops.ReLU(), dtype=torch.float32), x_of(5, 8)
    nn.utils.parametrize.register_parametrization(model[0], "weight", Clipped())
    with pytest.raises(
        NotSeenError, match=r"weight of ParametrizedLinear is computed in each call, .*; call the model"
    ):
        model.plan(x)
    assert "No plan is known from here on" in str(model.explain(x, details=True))
    model(x)
    assert model.plan(x_of(6, 8)).backward


def test_what_is_known_of_a_module_holds_while_it_is_what_it_was() -> None:
    """A part that is replaced, frozen or in another mode is looked at anew."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training else x[..., :4]

    model, x = sequential(ops.GELU(), nn.Sequential(nn.Linear(8, 8), Halves()), ops.ReLU()), x_of(5, 8, grad=False)
    model.float()(x)
    assert model.plans(x)[1].x.shape == (5, 8) and model.plans(x)[1].backward
    model[1][1].eval()
    assert model.plans(x)[1].x.shape == (5, 4)
    model[1][0] = nn.Linear(8, 6)
    model[1][1].train()
    assert model.plans(x)[1].x.shape == (5, 6)
    model[1].requires_grad_(False)
    assert not model.plans(x)[1].backward
    with torch.no_grad():
        assert not model.plans(x_of(5, 8))[0].backward


@pytest.mark.parametrize("layers", [1, 12])
def test_what_looking_gives_fits_a_screen_by_itself(layers: int) -> None:
    """A console shows repr() of what a line gives."""
    mlp = [op for _ in range(layers) for op in (ops.LayerNorm(8), ops.Linear(8, 32), ops.GELU(), ops.Linear(32, 8))]
    model, x = te_fuser.Sequential(*mlp, kernels="reference"), torch.randn(4, 8, requires_grad=True)
    plan = model.plan(x)
    model(x)
    text = repr(plan)
    assert text.startswith(f"Plan of {6 * layers} ops, input [4, 8], on cpu\nforward\n  {plan.forward[0]!r}\n")
    assert len(text) < 3000 and len(text.splitlines()) <= 30
    assert ("more" in text) == (layers > 1) and all(s.name in text for s in (plan.forward[11:12] or plan.backward))
    assert all(len(repr(what)) < 300 for what in (*plan.steps, *plan.kept, *model.plans_kept()))


# ---- the plans shown are those that run


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


def first(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The first of what a module gives, called in whatever way it takes."""
    return m(x)[0] if isinstance(m, nn.GRU) else m(x, x, x)[0]


def random_list(rng: random.Random, begin: Callable[[], nn.Module]) -> list[nn.Module]:
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
        plain = (rng.choice(PLAIN) if k else begin)()
        found.append(Around(plain, first) if isinstance(plain, TAKEN_APART) else plain)
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
