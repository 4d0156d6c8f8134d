"""Models in PyTorch's distributed wrappers, in one process; models that are dropped are freed at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import context_parallel

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.ops import FusableOperation, FusedOperation
from tests.fuser.models import our_mlp
from tests.twins import assert_same_gradients, sequential, tensor

X = tensor(6, 8)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    path = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_attention_refuses_context_parallel(one_process):
    """Of a sequence that is spread over processes it would see its own part alone."""

    model, x = (
        sequential(ops.GELU(), ops.DotProductAttention(2, 4, mask="none", layout="sequence_first")),
        tensor(6, 2, 24),
    )
    want = model(x)
    with context_parallel(init_device_mesh("cpu", (1,)), buffers=[torch.zeros(6, 2)], buffer_seq_dims=[0]):
        for call in (
            model,
            model.plan,
            model.reference,
            ops.DotProductAttention(2, 4, mask="none", layout="sequence_first"),
        ):
            with pytest.raises(RuntimeError, match="DotProductAttention: inside torch's context_parallel.*outside of"):
                call(x)
        sequential(ops.GELU())(x)
    torch.testing.assert_close(model(x), want)


class Owner(te_fuser.Sequential):
    """Its ops read what it owns."""

    def __init__(self):
        super().__init__(
            ops.Bound(ops.MatMul(8, 16, device="meta"), self, weight="fc_weight"),
            ops.GELU(),
            ops.Bound(ops.Bias(16, device="meta"), self, bias="fc_bias"),
            ops.Linear(16, 8),
        )
        self.fc_weight, self.fc_bias = nn.Parameter(torch.ones(16, 8)), nn.Parameter(torch.ones(16))


def bound():
    return sequential(Owner(), ops.SiLU(), Owner())


@pytest.mark.parametrize(
    ("make", "parts"), [*((our_mlp, p) for p in ((), (0, 1, 3), (1,))), *((bound, p) for p in ((), (0,), (0, 2)))]
)
def test_fsdp2(one_process, make, parts, planned):
    """Of ops bound to what a module around them owns, too."""
    mesh = init_device_mesh("cpu", (1,))
    model, twin = make(), make()
    for k in parts:
        fully_shard(model[k], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for round in range(3):
        if round == 1:
            plans = len(planned)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(X).square().mean().backward()
            X.grad = None
        got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        assert_same_gradients(got, {n: p.grad for n, p in twin.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model(X), twin(X))
    assert len(planned) == plans, "unsharding must not plan again"


def test_inputs_that_are_dtensors_are_refused(one_process):

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(TypeError, match=r"te_fuser runs plain tensors, got DTensor; .*to_local\(\)"):
        our_mlp()(DTensor.from_local(X.detach(), mesh, [Replicate()]))
    with pytest.raises(TypeError, match="input 'c' is a DTensor"):
        sequential(ops.Add("c"))(X, c=DTensor.from_local(X.detach(), mesh, [Replicate()]))


def split_projection(**keywords):
    """Parameters that lie in one buffer."""
    split = {"parameters_split": ("query", "key", "value"), "params_dtype": torch.float64, **keywords}
    return te_fuser.LayerNormLinear(8, 24, **split)


@pytest.mark.parametrize("way", ["load", "made on meta", "another dtype and back"])
def test_fsdp2_of_parameters_that_are_kept_together(one_process, way):
    """While they are spread over ranks they have no memory to be kept together in."""

    twin = split_projection(device="cpu")
    model = split_projection(device="meta" if way == "made on meta" else "cpu")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if way == "made on meta":
        model.to_empty(device="cpu")
    elif way == "another dtype and back":
        model.to(torch.float32).to(torch.float64)
    set_model_state_dict(model, twin.state_dict(), options=StateDictOptions(full_state_dict=True))
    model.load_state_dict(model.state_dict())
    y, want = model(X), twin(X)
    torch.testing.assert_close(y, want)
    for out in (y, want):
        out.square().sum().backward()
    X.grad = None
    got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    assert_same_gradients(got, {n: p.grad for n, p in twin.named_parameters()})


class Pair(FusedOperation):
    """Two ops by one name."""

    def __init__(self) -> None:
        super().__init__(up=ops.Linear(8, 8), act=ops.GELU())


class OwnerOp(FusableOperation):
    """An op that one of its own parts reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.part = ops.Bound(ops.Scale(8, device="meta"), self, weight="scale")

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.part(x)


MODELS: dict[str, Callable[[], Any]] = {
    "list": lambda: Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.GELU()),
    "reference": lambda: Sequential(ops.Linear(8, 8), ops.Dropout(0.1), kernels="reference"),
    "nested": lambda: Sequential(Residual(ops.LayerNorm(8), ops.Linear(8, 8)), Sequential(ops.ReLU(), memory="lean")),
    "with plain modules": lambda: Sequential(torch.nn.Linear(8, 8), ops.Linear(8, 8), torch.nn.Tanh(), ops.GELU()),
    "attention": lambda: Sequential(
        ops.Linear(8, 24), ops.DotProductAttention(2, 4, mask="none", layout="sequence_first")
    ),
    "verified": lambda: Sequential(ops.Linear(8, 8), ops.GELU(), verify=True),
    "fused operation": lambda: Sequential(Pair(), ops.Bias(8)),
    "row op alone": lambda: ops.LayerNorm(8),
    "opaque op alone": lambda: ops.MatMul(8, 8),
    "Linear alone": lambda: ops.Linear(8, 8),
    "fused operation alone": Pair,
    "bound to its owner, alone": OwnerOp,
}


@pytest.fixture(scope="module", autouse=True)
def _what_others_left_stays() -> Iterator[None]:
    """Collections in here look at nothing else, which takes a second where there is much."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def used(make: Callable[[], Any]) -> list[weakref.ref[Any]]:
    """Make a model, train, look at and drop it; what was in it."""
    model, x = make(), torch.randn(3, 2, 8, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    if isinstance(model, Sequential) and len(model._prepared()) == 1:
        str(model.explain(x, details=True))
    return [weakref.ref(each) for each in (*model.modules(), *model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_a_dropped_model_is_freed_at_once(name: str, no_collector: None) -> None:
    left = [there for each in used(MODELS[name]) if (there := each()) is not None]
    assert not left, [type(each).__name__ for each in left]


class Inside(ops.UnfusedOperation):
    """An op with a module of torch.nn in it, which is no formula's business."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8))

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).detach()  # type: ignore[no-any-return]

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(dy)


@pytest.mark.parametrize("name", [n for n in MODELS if "alone" not in n and n != "fused operation alone"] + ["inside"])
@pytest.mark.parametrize("measure", [False, True])
def test_who_keeps_a_plan_that_is_shown_keeps_no_model(name: str, measure: bool, no_collector: None) -> None:
    model, x = MODELS.get(name, lambda: Sequential(Inside(), ops.GELU()))(), torch.randn(3, 2, 8, requires_grad=True)
    plans, shown = model.plans(x), model.explain(x, measure=measure, details=True)
    gc.collect()  # PyTorch's stand-ins leave cycles through the frames of who made them
    left = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    del model
    assert [type(found).__name__ for each in left if (found := each()) is not None] == []
    assert str(shown) and plans[0].graph.nodes[0].label


def test_an_op_alone_is_itself_to_the_end() -> None:
    """Plans hold another object, which sees every change and shows what the op's forward leaves behind."""
    op, x = ops.LayerNorm(8), torch.randn(3, 8)
    before = op(x)
    op.eps = 10.0
    assert not torch.allclose(op(x), before) and torch.allclose(
        op(x), torch.nn.functional.layer_norm(x, (8,), eps=10.0)
    )
    op.weight = torch.nn.Parameter(torch.full((8,), 2.0))
    torch.testing.assert_close(op(x), 2 * torch.nn.functional.layer_norm(x, (8,), eps=10.0))
    dropout = ops.Dropout(0.5)
    assert (dropout(x) == 0).any() and torch.equal(dropout.eval()(x), x) and (dropout.train()(x) == 0).any()
