"""Models in PyTorch's distributed wrappers, in one process."""

from __future__ import annotations

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
from te_fuser import ops
from tests.fuser.models import our_mlp
from tests.twins import assert_same_gradients, sequential, tensor

X = tensor(6, 8)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    path = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp(one_process):
    model, twin = our_mlp(), our_mlp()
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        for m in (parallel, twin):
            m.zero_grad()
            m(X).square().sum().backward()
            X.grad = None
        got = {n.removeprefix("module."): p.grad for n, p in parallel.named_parameters()}
        assert_same_gradients(got, {n: p.grad for n, p in twin.named_parameters()})


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
