"""accumulate_into_main_grad: where the weight's gradient goes, with which flags, under autocast, what is refused."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.graph.graph import Node
from te_fuser.fuser.plan import segmenting
from te_fuser.fusions import cublaslt
from te_fuser.ops import matmul
from te_fuser.ops.base import Gradient, OpCall
from tests.fusions.products import autocast_on_cuda, covered, plan, reasons
from tests.ops.check import normal
from tests.refused import raises
from tests.twins import randomize, tensor

IN, OUT = 6, 5


def model(dtype: torch.dtype = torch.float32) -> te_fuser.Sequential:
    made = te_fuser.Sequential(ops.LayerNorm(IN), ops.Linear(IN, OUT, accumulate_into_main_grad=True), ops.GELU())
    return made.to(dtype)


def gradients(m: te_fuser.Sequential, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x and of the weight, as they are without main_grad."""
    y = m.reference(x)
    return torch.autograd.grad(y.sum(), [x, m[1].weight])  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_added(dtype: torch.dtype) -> None:
    m, x = model(dtype), normal(2, 7, IN).to(dtype).requires_grad_()
    weight = m[1].weight
    dx, dw = gradients(m, x)
    weight.main_grad = torch.ones(OUT, IN)
    weight.grad_added_to_main_grad = False
    for times in (1, 2):
        m(x).sum().backward()
        tolerance = 0.02 * float(dw.abs().max()) if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(weight.main_grad, 1 + times * dw.float(), rtol=0, atol=2 * tolerance)
        assert weight.grad_added_to_main_grad is True
        assert not weight.grad.any() and weight.grad.dtype == dtype
        weight.grad_added_to_main_grad = False
    torch.testing.assert_close(x.grad, 2 * dx, rtol=0.05, atol=0.05)
    assert m[1].bias.grad.abs().sum() > 0


@pytest.mark.parametrize("verify", [False, True])
def test_autograd_gets_no_gradient(verify: bool) -> None:
    """So a loop that takes `grad` for `main_grad` where there is one keeps what is there."""
    m, x = model(), normal(7, IN).float().requires_grad_()
    m.verify = verify
    weight = m[1].weight
    dx, dw = gradients(m, x)
    weight.main_grad = torch.zeros(OUT, IN)
    (m(x).sum() + 0 * m[1].bias.sum()).backward()
    for p in m.parameters():
        if p.grad is not None and p is weight:
            p.main_grad.copy_(p.grad)
    assert weight.grad is None and m[0].weight.grad is not None
    torch.testing.assert_close(weight.main_grad, dw)
    torch.testing.assert_close(x.grad, dx)


def test_autograd_gets_what_others_give() -> None:
    """Of a weight that another op of the list uses without main_grad; of one used twice with it, nothing."""
    m, x = te_fuser.Sequential(*[ops.Linear(IN, IN, accumulate_into_main_grad=k < 2) for k in range(3)]), normal(7, IN)
    x, weight = x.float(), m[0].weight
    m[1].weight = weight
    apart = torch.nn.Parameter(weight.detach().clone())
    m[2].weight = apart
    dw, others = torch.autograd.grad(m.reference(x).sum(), [weight, apart])
    weight.main_grad = torch.zeros(IN, IN)
    m(x).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, dw)
    m[2].weight = weight
    weight.main_grad.zero_()
    m(x).sum().backward()
    torch.testing.assert_close(weight.main_grad, dw)
    torch.testing.assert_close(weight.grad, others)


def micro_batches() -> tuple[te_fuser.Sequential, te_fuser.Sequential]:
    """Two lists over the same parameters: for the first of several micro-batches, and for the others."""
    owner = ops.Linear(IN, OUT)
    first, later = (
        te_fuser.Sequential(
            ops.Bound(
                ops.MatMul(IN, OUT, accumulate_into_main_grad=True, overwrite_main_grad=over, device="meta"),
                owner,
                weight="weight",
            ),
            ops.GELU(),
        )
        for over in (True, False)
    )
    first.owner = later.owner = (owner,)  # type: ignore[assignment]
    return first, later


@pytest.mark.parametrize("verify", [False, True])
def test_the_forward_says_whether_it_is_written_over(verify: bool) -> None:
    first, later = micro_batches()
    first.verify = later.verify = verify
    weight = first.owner[0].weight
    weight.main_grad = torch.full((OUT, IN), torch.nan)
    xs = [normal(7, IN, seed=k).float() for k in range(3)]
    want = [torch.autograd.grad(later.reference(x).sum(), weight)[0] for x in xs]
    for _ in range(2):
        ys = [(later if k else first)(x) for k, x in enumerate(xs)]  # all in flight
        for y in ys:
            y.sum().backward()
        torch.testing.assert_close(weight.main_grad, sum(want))
        assert weight.grad is None
    with pytest.raises(RuntimeError, match="written over in a backward that has added to it: run the backward of each"):
        (first(xs[0]).sum() + later(xs[1]).sum()).backward()
    raises(ValueError, "takes accumulate_into_main_grad=True", ops.Linear, IN, OUT, overwrite_main_grad=True)


def test_a_frozen_weight_needs_none() -> None:
    m, x = model(), normal(7, IN).float().requires_grad_()
    dx, _ = gradients(m, x)
    m[1].weight.requires_grad_(False)
    m(x).sum().backward()
    torch.testing.assert_close(x.grad, dx)
    m[1].weight.requires_grad_(True)
    raises(RuntimeError, "has no main_grad", lambda: m(x).sum().backward())


def tied(**options: bool) -> tuple[te_fuser.Sequential, torch.nn.Parameter]:
    """A model that uses one Linear three times, and its weight, whose main_grad is to be written over."""
    shared = ops.Linear(IN, IN, accumulate_into_main_grad=True)
    m = te_fuser.Sequential(shared, ops.Linear(IN, IN), shared, ops.GELU(), ops.Linear(IN, IN), shared, **options)
    return m, to_be_written_over(shared.weight)


def uses(m: te_fuser.Sequential, x: torch.Tensor) -> list[Node]:
    """The nodes of a model's graph whose gradient goes to main_grad."""
    return [n for n in m.plan(x).graph.nodes if getattr(n.op, "accumulate_into_main_grad", False)]


def to_be_written_over(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    weight.main_grad = torch.full_like(weight, torch.nan)
    weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, False
    return weight


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_tied_weight_is_written_over_once(apart: bool, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1 if apart else 2**30)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    (m, weight), x = tied(verify=verify), normal(7, IN).float()
    cuts = [s.start for s in m.plan(x).segments]
    assert len({bisect.bisect(cuts, n.index) for n in uses(m, x)}) == (2 if apart else 1)
    (dw,) = torch.autograd.grad(m.reference(x).sum(), weight)
    for _ in range(2):  # the next backward begins anew
        y = m(x)
        y.sum().backward(retain_graph=True)
        torch.testing.assert_close(weight.main_grad, dw)
        assert weight.grad_added_to_main_grad and not weight.grad.any()
    y.sum().backward()
    torch.testing.assert_close(weight.main_grad, dw)


def test_two_models_share_a_weight() -> None:
    first = te_fuser.Sequential(ops.Linear(IN, IN, accumulate_into_main_grad=True), ops.GELU())
    second = te_fuser.Sequential(ops.SiLU(), ops.Linear(IN, IN, accumulate_into_main_grad=True))
    second[1].weight = first[0].weight
    weight, x = to_be_written_over(first[0].weight), normal(7, IN).float()
    parts = [torch.autograd.grad(m.reference(x).sum(), weight)[0] for m in (first, second)]
    (first(x).sum() + second(x).sum()).backward()  # one backward
    torch.testing.assert_close(weight.main_grad, parts[0] + parts[1])
    for m, dw in zip((first, second), parts, strict=True):  # two
        m(x).sum().backward()
        torch.testing.assert_close(weight.main_grad, dw)


def test_who_reads_it_does_so_after_all_uses() -> None:
    (m, weight), x = tied(), normal(7, IN).float()
    (dw,) = torch.autograd.grad(m.reference(x).sum(), weight)
    read: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: read.append(p.main_grad.clone()))
    m(x).sum().backward()
    (found,) = read
    torch.testing.assert_close(found, dw)


def test_a_weight_that_is_tied_to_an_embedding() -> None:
    """The embedding's gradient comes by autograd, and is all that `grad` holds."""
    m, x = te_fuser.Sequential(ops.Linear(IN, OUT, accumulate_into_main_grad=True)), torch.tensor([3, 1, 1])
    weight = to_be_written_over(m[0].weight)
    rows = torch.nn.functional.embedding(x, weight)
    parts = [
        torch.autograd.grad(r.square().sum(), weight, retain_graph=True)[0] for r in (rows, m.reference(rows.detach()))
    ]
    m(rows.detach()).square().sum().backward(retain_graph=True)
    torch.testing.assert_close(weight.main_grad, parts[1])
    weight.grad = None
    (rows.square().sum() + m(rows.detach()).square().sum()).backward()
    torch.testing.assert_close(weight.grad, parts[0])
    torch.testing.assert_close(weight.main_grad, parts[1])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (None, r"the weight \[5, 6\] on cpu has no main_grad; set weight.main_grad"),
        (torch.zeros(6, 5), r"main_grad must be \[5, 6\] on cpu, as its weight, got \[6, 5\] on cpu"),
        (torch.zeros(5, 6, dtype=torch.int32), "main_grad holds floating-point numbers, got int32: make it in float32"),
        (torch.zeros(5, 6, device="meta"), r"got \[5, 6\] on meta"),
    ],
)
def test_what_does_not_fit(held: torch.Tensor | None, message: str) -> None:
    m, x = model(), normal(7, IN).float()
    if held is not None:
        m[1].weight.main_grad = held
    raises(RuntimeError, message, lambda: m(x).sum().backward())


class Gain(ops.UnfusedOperation):
    """y = x w, with the gradient of w in its main_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 2.0, IN))

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input", "gain"), ("input", "gain"), "both", by_attributes=("gain",)),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return x * call["gain"]

    def both(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        gain = call["gain"]
        if call.needs("gain"):
            gain.main_grad += (dy * call["input"]).sum(0)
        return {"input": dy * gain, "gain": torch.zeros_like(gain)}


def test_an_op_of_ones_own_names_such_parameters() -> None:
    m, x = te_fuser.Sequential(ops.SiLU(), Gain(), verify=True), normal(3, IN).float().requires_grad_()
    (want,) = torch.autograd.grad(m.reference(x).sum(), m[1].gain)
    m[1].gain.main_grad = torch.ones(IN)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, torch.clone):
        y = m(x)
    y.sum().backward()
    torch.testing.assert_close(m[1].gain.main_grad, 1 + want)
    assert te_fuser.verify(m, torch.randn(5, IN)).passed


def test_on_a_gpu_the_product_adds() -> None:
    p = plan(ops.SiLU(), ops.Linear(4096, 1024, accumulate_into_main_grad=True), ops.Dropout(0.1))
    assert [s for s in covered(p.backward) if s[0] == "matmul_main_grad"] == [("matmul_main_grad", 1, 2)] * 2
    for over in (True, False):
        product = ops.MatMul(4096, 64, accumulate_into_main_grad=True)
        product.overwrite_main_grad = over
        bodies = [s.task.body.function for s in plan(product).backward]
        put = [body for body in bodies if getattr(body, "func", None) is cublaslt.put_weight_gradient]
        assert [body.keywords for body in put] == [{"over": over}]
    for name in ("matmul_backward", "matmul_bias_backward"):
        assert reasons(p, name) == {"the weight's gradient goes to its main_grad"}
    assert reasons(plan(ops.MatMul(4096, 64)), "matmul_main_grad") == {"accumulate_into_main_grad is off"}
    assert fusions.get("matmul_main_grad").doc


@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize("run", ["tune", "explain"])
def test_runs_that_measure_leave_it_alone(
    run: str, looked_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    m, x = model(), normal(7, IN).float().requires_grad_()
    weight, held = m[1].weight, torch.ones(OUT, IN)
    weight.grad_added_to_main_grad = False
    if looked_up:
        weight.get_main_grad = lambda: held
    else:
        weight.main_grad = held
    attributes = dict(weight.__dict__)
    if run == "tune":
        m.tune(x, rounds=1, seconds=0.001)
    else:
        m.explain(x, measure=True, details=True)
    assert torch.equal(held, torch.ones(OUT, IN)) and weight.__dict__ == attributes
    m(x).sum().backward()
    assert not torch.equal(held, torch.ones(OUT, IN)) and weight.grad_added_to_main_grad


def run_and_verify(how: str, x: torch.Tensor) -> te_fuser.Sequential:
    """Verify a model, or its steps on the data of one call; the model."""
    m = model()
    m.verify = how == "steps"
    weight = m[1].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(OUT, IN), False
    if how == "steps":
        m(x).sum().backward()
    else:
        te_fuser.verify(m, dtypes=[torch.float32])
    return m


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("how", ["steps", "model"])
def test_it_is_verified(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(7, IN).float()
    m = run_and_verify(how, x)
    weight = m[1].weight
    (dw,) = torch.autograd.grad(m.reference(x).sum(), weight)
    torch.testing.assert_close(weight.main_grad, 1 + dw if how == "steps" else torch.ones(OUT, IN))
    assert weight.grad_added_to_main_grad is (how == "steps")
    right = matmul.weight_gradient_of
    monkeypatch.setattr(matmul, "weight_gradient_of", lambda dy, x: 1.01 * right(dy, x))
    raises(te_fuser.VerificationError, r"gradient of (1\.)?weight", run_and_verify, how, x)


# -------------------------------------------------------------------------------- under autocast


OWN = {"device": "cpu", "fuse_wgrad_accumulation": True}
MODELS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: te_fuser.Linear(8, 8, **OWN),
    "LayerNormLinear, split": lambda: te_fuser.LayerNormLinear(8, 12, parameters_split=("q", "k", "v"), **OWN),
    "LayerNormMLP": lambda: te_fuser.LayerNormMLP(8, 20, activation="swiglu", **OWN),
    "LayerNormMLP, checkpoint": lambda: te_fuser.LayerNormMLP(8, 20, checkpoint=True, **OWN),
    "TransformerLayer": lambda: te_fuser.TransformerLayer(8, 20, 2, fuse_qkv_params=True, hidden_dropout=0.0,
     attention_dropout=0.0, **OWN),
    "verified": lambda: te_fuser.Sequential(ops.LayerNorm(8), ops.Linear(8, 8, accumulate_into_main_grad=True),
     ops.GELU(), verify=True),
}  # fmt: skip
WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "call": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "copies kept": lambda model, x: _with_copies(model, x),
}


def _with_copies(model: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        return model(x)


def weights(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("own", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_go_to_the_weights_main_grad(name: str, way: str, own: torch.dtype) -> None:
    if own == torch.float16 and name not in ("Linear", "LayerNormLinear, split"):
        own = torch.bfloat16  # which norms on a CPU take of what autocast leaves
    model, x = randomize(MODELS[name]()).to(own), tensor(5, 3, 8, dtype=torch.float32)
    x = x if own == torch.float32 or name == "Linear" else x.detach().to(own).requires_grad_()
    exact = copy.deepcopy(model).double()
    exact.verify = False
    given = x.detach().double().requires_grad_()
    y = exact.reference(given)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = dict(zip(weights(exact), torch.autograd.grad(y, [*weights(exact).values()], dy), strict=True))
    for weight in weights(model).values():
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    for times in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            y = WAYS[way](model, x)
        y.backward(dy.to(y.dtype))
        for path, weight in weights(model).items():
            want = wanted[path].float()
            error = (weight.main_grad - 1 - times * want).abs().max()
            assert error <= times * 0.04 * want.abs().max(), path
            assert weight.grad_added_to_main_grad is True
            assert not weight.grad.any() and weight.grad.dtype == own


def test_the_first_micro_batch_writes_over_it_and_autograd_gets_none() -> None:
    model, x = randomize(MODELS["LayerNormMLP"]()), tensor(5, 8, dtype=torch.float32)
    for weight in weights(model).values():
        weight.main_grad = torch.full(weight.shape, torch.nan)
    held = []
    for first in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            model(x, is_first_microbatch=first).sum().backward()
        held.append([weight.main_grad.clone() for weight in weights(model).values()])
    assert all(torch.allclose(twice, 2 * once, rtol=1e-2) for once, twice in zip(*held, strict=True))
    assert all(weight.grad is None for weight in weights(model).values())


@pytest.mark.parametrize("over", [True, False])
def test_on_a_gpu_the_product_is_given_the_weight_itself(over: bool) -> None:
    model = te_fuser.Sequential(ops.MatMul(64, 64, accumulate_into_main_grad=True, overwrite_main_grad=over)).to("meta")
    with autocast_on_cuda():
        plan = model.plan(torch.empty(64, 64, device="meta", requires_grad=True), device="h200")
    of_weight = [s for s in plan.backward if any(arg == "0.weight" for arg, _ in s.outputs)]
    assert [s.name for s in of_weight] == ["matmul_main_grad"]
    assert [ref.form.dtype for arg, ref in of_weight[0].inputs if arg == "0.weight"] == [None]
    of_input = [s for s in plan.backward if any(arg == "input" for arg, _ in s.outputs)]
    assert [ref.form.dtype for arg, ref in of_input[0].inputs if arg == "0.weight"] == [torch.bfloat16]
