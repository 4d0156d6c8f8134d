"""Models under autocast: dtypes and errors are PyTorch's, and plans fuse as in the lower precision."""

from __future__ import annotations

import contextlib
import copy
import re

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import fusions, ops
from te_fuser.formula.evaluate import unrounded
from te_fuser.fuser.graph.refs import AS_MADE, PARAMETER
from te_fuser.ops.autocast import autocast_policy
from tests.fuser.models import our_mlp, torch_mlp
from tests.fusions.products import autocast_on_cuda
from tests.twins import randomize, sequential, tensor


class TorchResidual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def pairs():
    """name -> (ours, the torch.nn twin)."""
    return {
        "mlp": (our_mlp(torch.float32), torch_mlp(torch.float32)),
        "linear": (ops.Linear(8, 8), nn.Linear(8, 8)),
        "linear_without_bias": (ops.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)),
        "layer_norm": (ops.LayerNorm(8), nn.LayerNorm(8)),
        "gelu": (ops.GELU(), nn.GELU("tanh")),
        "linear_relu": (te_fuser.Sequential(ops.Linear(8, 8), ops.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        "norm_of_linear": (
            te_fuser.Sequential(ops.Linear(8, 8), ops.LayerNorm(8)),
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        ),
        # The sum of a branch in bfloat16 and a float32 stream is float32, as x + branch is in PyTorch.
        "residual": (
            te_fuser.Sequential(te_fuser.Residual(ops.LayerNorm(8), ops.Linear(8, 8)), ops.GELU()),
            nn.Sequential(TorchResidual(nn.LayerNorm(8), nn.Linear(8, 8)), nn.GELU("tanh")),
        ),
    }


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", pairs())
def test_autocast_like_torch(name, x_dtype):
    """Output dtypes are torch's, gradients have the parameter's dtype, and errors against float64 are no larger."""
    ours, theirs = (randomize(model) for model in pairs()[name])
    x = tensor(64, 8, dtype=x_dtype)
    exact = randomize(pairs()[name][1]).double()
    exact_x = x.detach().double().requires_grad_()

    def run(model, x):
        y = model(x)
        grads = torch.autograd.grad(y, [x, *model.parameters()], tensor(*y.shape, grad=False, seed=1).to(y.dtype))
        return y, *grads

    with torch.autocast("cpu", torch.bfloat16):
        y, their_y = ours(x), theirs(x)
    dy = tensor(*y.shape, grad=False, seed=1)
    got = (y, *torch.autograd.grad(y, [x, *ours.parameters()], dy.to(y.dtype)))
    rival = (their_y, *torch.autograd.grad(their_y, [x, *theirs.parameters()], dy.to(y.dtype)))
    want = run(exact, exact_x)
    for mine, torchs, truth in zip(got, rival, want, strict=True):
        assert mine.dtype == torchs.dtype and mine.shape == torchs.shape
        scale = truth.abs().max().item()
        mine_error, torch_error = ((t.double() - truth).abs().max().item() for t in (mine, torchs))
        assert mine_error <= 2 * torch_error + torch.finfo(mine.dtype).eps * scale


def test_autocast_on_and_off(planned):
    """A plan with casts is not one without, and each is made once."""
    model, twin, x = our_mlp(torch.float32), torch_mlp(torch.float32), tensor(6, 8, dtype=torch.float32)
    for _ in range(2):
        for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32), (True, torch.float16)):
            with torch.autocast("cpu", dtype if enabled else torch.bfloat16, enabled=enabled):
                y = model(x)
                assert y.dtype == twin(x).dtype == dtype
    assert len(planned) == 3


def test_nothing_inside_is_cast_again():
    """An op that autocast knows nothing of gets the dtype that the plan says, in forward and in its own products."""
    seen = []

    class Product(ops.UnfusedOperation):
        def op_forward(self, call, x):
            y = x @ x.t() @ x
            seen.append(y.dtype)
            return y

        def op_backward(self, call, dy):
            x = call["input"]
            return dy @ (x.t() @ x) + x @ (dy.t() @ x) + x @ (x.t() @ dy)

    model = sequential(Product(), ops.GELU(), dtype=torch.float32)
    x = tensor(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        want = model.reference(x)
    assert seen == [torch.float32] * 2 and y.dtype == torch.float32
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), x) for t in (y, want)), rtol=1e-4, atol=1e-3)


def test_a_linear_under_autocast_is_torchs():
    ours = te_fuser.Sequential(ops.Linear(8, 5), kernels="reference")
    theirs = nn.Linear(8, 5)
    theirs.load_state_dict(ours[0].state_dict())
    x = torch.randn(7, 8)
    with torch.autocast("cpu", torch.bfloat16), fusions.only("matmul_bias"):
        assert "matmul_bias" in [s.name for s in ours.plan(x).forward]
        assert torch.equal(ours(x), theirs(x))
        bias = next(s for s in ours.plan(x).forward if s.name == "matmul_bias").reads()
    assert sum(ref.kind is PARAMETER and ref.form != AS_MADE for ref in bias) == 2


def test_a_formula_reads_the_bias_as_it_is_under_autocast():
    model, x = te_fuser.Sequential(ops.Linear(8, 5), ops.GELU(), kernels="reference"), torch.randn(7, 8)
    with torch.autocast("cpu", torch.bfloat16), fusions.disabled("matmul_bias", "matmul_bias_gelu", "matmul_bias_relu"):
        steps = [s for s in model.plan(x).forward if "bias" in s.name]
        assert steps and all(ref.kind is not PARAMETER or ref.form == AS_MADE for s in steps for ref in s.reads())
        plain = model.reference(x)
        assert (model(x) - plain).abs().max() <= 2**-7 * plain.abs().max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_another_half_precision(dtype, bias):
    """autocast casts them as PyTorch does, and their gradients have their own dtype."""
    ours, theirs = ops.Linear(24, 16, bias=bias).to(dtype), nn.Linear(24, 16, bias=bias).to(dtype)
    theirs.load_state_dict(randomize(ours).state_dict())
    x = tensor(9, 24, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = ours(x), theirs(x)
    dy = tensor(9, 16, grad=False, seed=1).to(y.dtype)
    got = torch.autograd.grad(y, [x, *ours.parameters()], dy)
    meant = torch.autograd.grad(want, [x, *theirs.parameters()], dy)
    for a, b in zip((y, *got), (want, *meant), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [ops.LayerNorm, ops.RMSNorm])
def test_norms_in_half_precision_under_cuda_autocast(kind):
    """Norms run in float32, and read their parameters as they are."""
    model = te_fuser.Sequential(ops.Linear(64, 64), kind(64)).to(torch.bfloat16)
    x = torch.empty(32, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with autocast_on_cuda():
        plan = model.to("meta").plan(x, device="h200")
    assert plan.graph.values[plan.graph.output].spec.dtype == torch.float32
    (norm,) = (s for s in plan.forward if s.name.endswith("norm_fwd"))
    assert {str(r.form.dtype) for r in norm.reads()} == {"None"}


class Mixing(ops.UnfusedOperation):
    """y = (x weight) scale, without a policy."""

    reads = ("input", "weight", "scale")

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(tensor(8, 8, grad=False).float())
        self.scale = nn.Parameter(tensor(8, grad=False, seed=1).float())

    def op_forward(self, call, x):
        return x @ call["weight"] * call["scale"].to(x.dtype)

    def op_backward(self, call, dy):
        x, weight, scale = (call[name] for name in self.reads)
        dh, rows = dy * scale.to(dy.dtype), x.reshape(-1, 8)
        scaled = ((x @ weight) * dy).reshape(-1, 8).sum(0).to(scale.dtype)
        return dh @ weight.mT, {"weight": rows.mT @ dh.reshape(-1, 8), "scale": scaled}


@autocast_policy("lower")
class Lower(Mixing):
    """Mixing with the policy "lower"."""


class Heir(Lower):
    """One with its base's."""


@autocast_policy(wide_parameters=("scale",))
class Wide(Mixing):
    """One that takes its scale in float32 behind what is not."""

    def __init__(self):
        super().__init__()
        self.weight.data = self.weight.data.bfloat16()


@autocast_policy("float32")
class Squared(ops.RowOp):
    """y = x^2."""

    def compute(self, x):
        return x * x


@pytest.mark.parametrize("kind, dtype", [(Mixing, torch.float32), (Lower, torch.bfloat16), (Heir, torch.bfloat16)])
def test_an_op_of_a_user_runs_in_the_dtype_of_its_policy(kind, dtype):
    op, x = kind(), tensor(5, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)
    dy = tensor(5, 8, grad=False, seed=2)
    got = y, *torch.autograd.grad(y, [x, *op.parameters()], dy.to(y.dtype))
    exact, x64 = kind().double(), x.detach().double().requires_grad_()
    meant = x64 @ exact.weight * exact.scale
    wanted = meant, *torch.autograd.grad(meant, [x64, *exact.parameters()], dy)
    assert y.dtype == dtype and {g.dtype for g in got[1:]} == {torch.float32}
    for mine, truth in zip(got, wanted, strict=True):
        assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max()


def test_an_op_of_a_user_runs_in_float32_on_gpus():
    model = te_fuser.Sequential(ops.Linear(64, 64), Squared(), ops.Linear(64, 64)).to("meta")
    with autocast_on_cuda():
        plan = model.plan(torch.empty(32, 64, device="meta"), device="h200")
    dtypes = {n.op.kind: plan.graph.values[n.output].spec.dtype for n in plan.graph.nodes}
    assert dtypes[Squared] == torch.float32 and dtypes[ops.MatMul] == torch.bfloat16


def test_parameters_that_a_policy_leaves_in_float32():
    x = tensor(5, 8, dtype=torch.bfloat16)
    meant = x.detach().double() @ Wide().weight.double() * Wide().scale.double()
    assert (Wide()(x).double() - meant).abs().max() <= 2**-6 * meant.abs().max()
    narrow = Mixing()
    narrow.weight.data = narrow.weight.data.bfloat16()
    with pytest.raises(TypeError, match="parameter scale is float32, its input bfloat16"):
        narrow(x)


def test_what_autocast_cannot_mend_is_not_blamed_on_its_absence():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"model with \.to\(torch\.float32\)$"):
        ops.LayerNorm(8).double()(tensor(4, 8, dtype=torch.float32))


def layer(**how):
    return te_fuser.TransformerLayer(8, 16, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **how)


MIXED = {  # -> a model in one dtype, an input in another, and whether autocast to bfloat16 makes them fit
    "layer": (layer, torch.bfloat16, torch.float32, False),
    "layer, narrow input": (layer, torch.float32, torch.bfloat16, True),
    "norm at the end": (lambda: layer(output_layernorm=True), torch.bfloat16, torch.float32, False),
    "linear": (lambda: te_fuser.Linear(8, 8, device="cpu"), torch.bfloat16, torch.float32, True),
    "half": (lambda: te_fuser.Linear(8, 8, device="cpu"), torch.float16, torch.bfloat16, True),
    "double": (lambda: ops.Linear(8, 8), torch.float32, torch.float64, False),
    "norm": (lambda: ops.LayerNorm(8), torch.bfloat16, torch.float32, False),
    "mlp": (
        lambda: te_fuser.Sequential(ops.Linear(8, 8), ops.GELU(), ops.LayerNorm(8)),
        torch.bfloat16,
        torch.float32,
        True,
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_is_advised_where_dtypes_do_not_fit_runs(name):
    make, own, given, helps = MIXED[name]
    model, x = make().to(own), torch.randn(16, 2, 8, dtype=given, requires_grad=True)
    with pytest.raises(TypeError) as error:
        model(x)
    advice = re.search(
        r"convert the input with \.to\(torch\.(\w+)\), or the model with \.to\(torch\.(\w+)\)", str(error.value)
    )
    for_x, for_model = (getattr(torch, dtype) for dtype in advice.groups())
    assert str(error.value).endswith(", or run under torch.autocast") == helps
    runs = [(model, x.to(for_x), False), (copy.deepcopy(model).to(for_model), x, False), (model, x, True)]
    for run, at, inside in runs if helps else runs[:2]:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = run(at)
        (dx,) = torch.autograd.grad(y.sum(), at)
        assert y.isfinite().all() and dx.isfinite().all()
    if not helps:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=advice.re):
            model(x)


def test_it_is_advised_in_regions_where_it_helps():
    x = torch.randn(16, 16)
    for kind, helps in ((te_fuser.Linear, True), (te_fuser.LayerNormLinear, False)):
        model = kind(16, 16, params_dtype=torch.bfloat16, device="cpu")
        with te_fuser.autocast(), pytest.raises(TypeError) as error:
            model(x)
        assert ("or run under torch.autocast" in str(error.value)) == helps
        with te_fuser.autocast(), torch.autocast("cpu", torch.bfloat16), contextlib.ExitStack() as stack:
            if not helps:
                stack.enter_context(pytest.raises(TypeError))
            assert model(x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_exactly_is_cast_nowhere(dtype: torch.dtype) -> None:
    """In float64 without rounding a Cast gives float64 still, so nothing behind it may be taken for another dtype."""
    model = sequential(ops.Cast(torch.bfloat16), ops.Cast(dtype), ops.Linear(4, 3), dtype=torch.float64)
    x = tensor(5, 4, dtype=torch.float64)
    with unrounded(), torch.autocast("cpu", torch.bfloat16):
        y = model.reference(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, x @ model[2].weight.T + model[2].bias)
