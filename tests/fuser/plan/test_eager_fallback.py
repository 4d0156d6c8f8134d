"""Small segments as PyTorch's functions: when, with which numbers, and what holds for them as for our own nodes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import Residual, Sequential, fusions, ops
from te_fuser.fuser.plan import device
from te_fuser.fuser.plan.device import DEVICES, cpu_device
from te_fuser.fuser.plan.plan import Plan
from te_fuser.ops.tensor_function import TorchFunction, torch_function
from te_fuser.verify.report import VerificationError
from tests.recorded import recorded


@pytest.fixture(autouse=True)
def _on_a_cpu_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CPU the command names: where products are converted, there is nothing to record."""
    monkeypatch.setitem(DEVICES, "cpu", cpu_device(2, "AVX512", {"bfloat16": 2.5}))


@pytest.fixture(autouse=True)
def _recorded() -> Iterator[None]:
    with recorded():
        yield


@pytest.fixture
def dear_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be recorded is."""
    monkeypatch.setattr(device, "CPU_HOST", replace(device.CPU_HOST, node=(1e-3, 1e-3)))


def is_recorded(plan: Plan) -> bool:
    return all(s.recorded for s in plan.segments)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def mlp() -> Sequential:
    return Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8))


class Halved(ops.GELU):
    """Another formula under an op that PyTorch has."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return super().compute(x) * 0.5


LISTS: dict[str, Callable[[], Sequential]] = {
    "linear": lambda: Sequential(ops.Linear(8, 5)),
    "no bias": lambda: Sequential(ops.Linear(8, 5, bias=False)),
    "mlp": mlp,
    "exact gelu": lambda: Sequential(ops.Bias(8), ops.GELU("none")),
    "activations": lambda: Sequential(ops.ReLU(), ops.Linear(8, 8), ops.SiLU(), ops.Bias(8)),
    "norm without bias": lambda: Sequential(ops.LayerNorm(8, bias=False), ops.Identity(), ops.Dropout(0.0)),
    "residual": lambda: Sequential(Residual(ops.Linear(8, 8), ops.GELU()), ops.LayerNorm(8)),
    "forked product": lambda: Sequential(ops.MatMul(8, 8), ops.Fork("a"), ops.Bias(8), ops.Add("a")),
    "reshape": lambda: Sequential(ops.Linear(8, 8), ops.Reshape(-1, 4), ops.Linear(4, 3)),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.usefixtures("dear_nodes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_values_and_gradients_are_right(name: str, dtype: torch.dtype) -> None:
    model, x = LISTS[name]().to(dtype), numbers(3, 2, 8, dtype=dtype)
    normed = any(isinstance(op, ops.LayerNorm) for op in model.operations())
    assert is_recorded(model.plan(x)) == (dtype != torch.bfloat16 or not normed)  # torch's adds up in bfloat16
    if dtype == torch.float32 and name in ("no bias", "activations", "residual", "reshape"):
        te_fuser.verify(model, x.detach())
    found = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    exact = copy.deepcopy(model).double()
    x64 = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact.reference(x64).sum(), [x64, *exact.parameters()])
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("dear_nodes")
@pytest.mark.parametrize("shape", [(8,), (0, 8), (1, 8), (7, 13, 8)])
def test_any_rows(shape: tuple[int, ...]) -> None:
    model, x = mlp(), numbers(*shape)
    assert is_recorded(model.plan(x))
    y = model(x)
    y.sum().backward()
    torch.testing.assert_close(y, model.reference(x))
    assert x.grad is not None and x.grad.shape == x.shape
    torch.testing.assert_close(model(x[..., ::1].t().t() if x.dim() == 2 else x), y)


OWN_NODES: dict[str, Callable[[], Sequential]] = {
    "draws": lambda: Sequential(ops.Linear(8, 8), ops.Dropout(0.5)),
    "emits": lambda: Sequential(ops.DotProductAttention(2, 4, layout="batch_first", mask="none"), ops.Linear(8, 8)),
    "main_grad": lambda: Sequential(ops.Linear(8, 8, accumulate_into_main_grad=True)),
    "no function": lambda: Sequential(ops.Linear(8, 8), ops.QGELU()),
    "another formula": lambda: Sequential(ops.Linear(8, 8), Halved()),
    "another norm": lambda: Sequential(ops.LayerNorm(8, zero_centered_gamma=True), ops.Linear(8, 8)),
    "another dtype": lambda: Sequential(ops.Cast(torch.bfloat16), ops.LayerNorm(8)),
    "nothing to run": lambda: Sequential(ops.Output("a")),
    "generated": lambda: Sequential(ops.Linear(8, 8), kernels="generated"),
    "reference": lambda: Sequential(ops.Linear(8, 8), kernels="reference"),
}


@pytest.mark.usefixtures("dear_nodes")
@pytest.mark.parametrize("name", OWN_NODES)
def test_what_needs_a_node_of_our_own_has_one(name: str) -> None:
    width = 24 if name == "emits" else 8
    model, x = OWN_NODES[name](), numbers(2, 3, width)
    assert not any(s.recorded for s in model.plan(x).segments)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    model(x).sum().backward()
    assert x.grad is not None


def test_only_where_it_is_cheaper_and_wanted() -> None:
    model, x = Sequential(ops.Linear(8, 8)), numbers(3, 8)
    assert is_recorded(model.plan(x))
    assert not is_recorded(mlp().plan(x)), "four functions' nodes cost more than one of ours"
    large = Sequential(ops.LayerNorm(512), ops.Linear(512, 2048), ops.GELU(), ops.Linear(2048, 512))
    assert not is_recorded(large.plan(numbers(512, 512)))
    with fusions.disabled(fusions.RECORDED):
        assert not is_recorded(model.plan(x))
    with fusions.only("stretch"):
        assert not is_recorded(model.plan(x))
    with fusions.only(fusions.RECORDED):
        assert is_recorded(model.plan(x))
    with torch.no_grad():
        assert not any(s.recorded for s in model.plan(x).segments)
    with pytest.raises(ValueError, match="a fusion named 'torch_functions' is registered"):
        te_fuser.fusion(forward=[ops.GELU], name=fusions.RECORDED)(lambda m, x: x)


@pytest.mark.usefixtures("dear_nodes")
def test_what_autograd_keeps_is_what_the_plan_says() -> None:
    model, x = mlp(), numbers(64, 8)
    plan = model.plan(x)
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    theirs = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    assert is_recorded(plan) and plan.kept_bytes() == sum(n for at, n in kept.items() if at not in theirs)


@pytest.mark.usefixtures("dear_nodes")
def test_memory_decides_too() -> None:
    """A budget that autograd's tensors do not fit in is kept by a node of our own."""
    x = numbers(64, 8)
    fused = Sequential(*mlp(), memory=10**6)
    assert is_recorded(fused.plan(x))
    tight = Sequential(*mlp(), memory=fused.plan(x).kept_bytes() - 1)
    plan = tight.plan(x)
    assert not is_recorded(plan) and plan.kept_bytes() < fused.plan(x).kept_bytes()


@pytest.mark.usefixtures("dear_nodes")
@pytest.mark.parametrize("outputs", [(), ("inner",)])
def test_differentiating_twice_is_refused_as_ever(outputs: tuple[str, ...]) -> None:
    model, x = Sequential(ops.Linear(8, 8), ops.Output("inner"), ops.GELU()), numbers(3, 8)
    made = model(x, outputs=outputs)
    for y in made if outputs else (made,):
        with pytest.raises(RuntimeError, match="te_fuser does not differentiate its backward"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(y.sum(), x, retain_graph=True)


@pytest.mark.usefixtures("dear_nodes")
def test_outputs_are_those_of_our_own_nodes_with_hooks_and_gradients() -> None:
    model, x = Sequential(ops.Output("first"), ops.Linear(8, 8), ops.Output("last")), numbers(3, 8)
    y, first, last = model(x, outputs=("first", "last"))
    assert is_recorded(model.plan(x, outputs=("first", "last")))
    with fusions.disabled(fusions.RECORDED):
        theirs = model(x, outputs=("first", "last"))
    same = [[a is b for a in (x, *made)] for made in ((y, first, last), theirs) for b in (x, *made)]
    assert same[:4] == same[4:]
    seen: list[torch.Tensor] = []
    last.register_hook(seen.append)
    (2 * first.sum() + 3 * last.sum() + y.sum()).backward()
    assert [g.unique().item() for g in seen] == [3.0]
    torch.testing.assert_close(x.grad, 2.0 + (4.0 * model[1].weight.detach().sum(0)).expand(3, 8))


@pytest.mark.usefixtures("dear_nodes")
def test_frozen_parts_checkpoints_copies_and_autocast() -> None:
    model, x = mlp(), numbers(3, 8)
    model[1].requires_grad_(False)
    plain = torch.autograd.grad(model(x).sum(), [x, *(p for p in model.parameters() if p.requires_grad)])
    for reentrant in (False, True):
        model.zero_grad()
        x.grad = None
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(x.grad, plain[0])
        torch.testing.assert_close(model[3].weight.grad, plain[-2])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert is_recorded(model.plan(x))
        y = model(x)
        torch.testing.assert_close(y, model.reference(x), rtol=0.02, atol=0.02)
    y.sum().backward()
    assert model[3].weight.grad.dtype == torch.float32
    detached = model(x.detach())
    detached.sum().backward()
    assert detached.requires_grad


@torch_function(TorchFunction("thrice", lambda t: 3.0 * t))
class Wrong(ops.RowOp):
    """Names a function that is not its formula."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x


class Heir(Wrong):
    """Another op."""


@pytest.mark.usefixtures("dear_nodes")
def test_verify_sees_a_wrong_function() -> None:
    model, x = Sequential(Wrong(), ops.Bias(8)), numbers(3, 8)
    assert is_recorded(model.plan(x))
    with pytest.raises(VerificationError):
        te_fuser.verify(model, x.detach())
    with pytest.raises(VerificationError, match="thrice"):
        Sequential(*model, verify=True)(x)
    right = Sequential(*mlp(), verify=True)
    right(x).sum().backward()


@pytest.mark.usefixtures("dear_nodes")
def test_a_function_is_named_for_its_class_alone() -> None:
    x = numbers(3, 8)
    assert not is_recorded(Sequential(Heir(), ops.Bias(8)).plan(x))
    te_fuser.verify(Sequential(Heir(), ops.Bias(8)), x.detach())


def test_a_torch_function_is_nothing_but_such_a_function() -> None:
    with pytest.raises(TypeError, match=r"torch_function takes a TorchFunction, or a function \(op, x, names\)"):
        torch_function(torch.tanh)

    @torch_function(lambda op, x, names: torch.tanh)  # type: ignore[arg-type, return-value]
    class Bare(ops.RowOp):
        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0

    with pytest.raises(TypeError, match="torch_function of Bare gives a TorchFunction, or None, got <built-in"):
        Sequential(Bare())(numbers(3, 8))


def test_a_torch_function_reads_all_that_the_op_has() -> None:
    @torch_function(TorchFunction("torch.tanh", torch.tanh))
    class Scaled(ops.RowOp):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def compute(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * weight

    with pytest.raises(ValueError, match=r"of Scaled: 'torch.tanh' reads \('input',\), .* has \('input', 'weight'\)"):
        Sequential(Scaled())(numbers(3, 8))
