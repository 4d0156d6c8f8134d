"""Regions around lists and presets: what they compute and how scales follow, by an emulation; what works with them."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.utils.parametrize

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import lowering, states
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.quantization.regions import FFN, MODELS, RECIPE, F, amaxes, call, data, gradients, mlp, on, trained
from tests.threads import in_threads

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Tensor:
    """State of one tensor of a product."""

    dtype: torch.dtype
    scale: float = 1.0
    seen: float = 0.0
    history: list[float] = field(default_factory=list)

    def rounded(self, x: torch.Tensor, scale: float, record: bool) -> torch.Tensor:
        """Values of x rounded to 8 bits, float32."""
        if record and x.numel():
            self.seen = max(self.seen, x.detach().abs().max().item())
        largest = torch.finfo(self.dtype).max
        by = torch.tensor(scale, dtype=torch.float32)
        return (x.float() * by).clamp(-largest, largest).to(self.dtype).float() / by

    def fold(self, recipe: DelayedScaling) -> None:
        """One call later."""
        if self.seen > 0:
            self.history = [self.seen, *self.history][: recipe.amax_history_len]
            amax = max(self.history) if recipe.amax_compute_algo == "max" else self.history[0]
            self.scale = torch.finfo(self.dtype).max / amax / 2.0**recipe.margin
        self.seen = 0.0


class Emulated:
    """The products of a model, in their order in a call."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe, self.products, self._next = recipe, list[list[Tensor]](), 0
        self.records = True

    @contextmanager
    def region(self) -> Iterator[None]:
        """As a region: scales follow from what earlier calls saw, and products are rounded."""
        for tensors in self.products:
            for tensor in tensors:
                tensor.fold(self.recipe)
        with self.call():
            yield

    @contextmanager
    def call(self) -> Iterator[None]:
        """One more call in it."""
        self._next = 0
        with mock.patch("te_fuser.ops.matmul.linear", self._linear):
            yield

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 16 or weight.shape[0] % 16:
            return torch.nn.functional.linear(x, weight)
        if self._next == len(self.products):
            gradients = E5M2 if self.recipe.fp8_format is Format.HYBRID else E4M3
            self.products.append([Tensor(E4M3), Tensor(E4M3), Tensor(gradients)])
        tensors = self.products[self._next]
        self._next += 1
        return _Product.apply(x, weight, tensors, self.recipe.override_linear_precision, torch.is_grad_enabled())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, tensors: list[Tensor], kept: tuple[bool, ...], record: bool
    ) -> torch.Tensor:
        x8, w8 = (t.rounded(v, t.scale, record) for t, v in zip(tensors, (x, weight), strict=False))
        ctx.save_for_backward(x, weight, x8, w8)
        ctx.tensors, ctx.kept, ctx.scale = tensors, kept, tensors[2].scale
        return (x.float() @ weight.float().t() if kept[0] else x8 @ w8.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, x8, w8 = ctx.saved_tensors
        (dy,) = gradients
        dy8 = ctx.tensors[2].rounded(dy, ctx.scale, True)
        dx = dy.float() @ weight.float() if ctx.kept[1] else dy8 @ w8
        dw = dy.float().t() @ x.float() if ctx.kept[2] else dy8.t() @ x8
        return dx.to(x.dtype), dw.to(weight.dtype), None, None, None


RECIPES = {
    "hybrid": RECIPE,
    "e4m3": DelayedScaling(fp8_format=Format.E4M3, amax_history_len=2, margin=1),
    "most_recent": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    **{f"kept_{y:d}{dx:d}{dw:d}": DelayedScaling(amax_history_len=3, override_linear_precision=(y, dx, dw)) for y, dx,
     dw in [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]},
}  # fmt: skip


def close(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Close but for numbers next to a tie, which one or the other may have rounded the other way.

    In half precision there are more of these: what is fused is not rounded twice.
    """
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    apart, size = (found - wanted).detach().float(), wanted.detach().float()
    often, far = (2e-3, 0.03) if wanted.dtype == torch.float32 else (0.1, 0.3)
    assert apart.square().mean().sqrt() <= often * size.square().mean().sqrt() + 1e-6, name
    assert apart.abs().max() <= far * size.abs().max() + 1e-6, name


def followed(model: Any, recipe: DelayedScaling, steps: int = 4, dtype: torch.dtype = torch.float32) -> None:
    """Train for some steps; each one's values, gradients and scales are those of the emulation."""
    twin, emulated = copy.deepcopy(model), Emulated(recipe)
    for step in range(steps):
        x, dy = data(step, scale=1.0 + step), data(100 + step) * 2.0**step
        ours, theirs = (x.clone().to(dtype).requires_grad_() for _ in range(2))
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = model(ours)
        with emulated.region():
            wanted = twin.reference(theirs)
        close("output", y, wanted)
        dy = dy.reshape(-1)[:1].expand(y.shape) if dy.shape != y.shape else dy
        dy = (dy * data(7, *y.shape)).to(dtype)
        y.backward(dy)
        wanted.backward(dy)
        found, right = gradients(model, ours), gradients(twin, theirs)
        assert found.keys() == right.keys()
        for name, gradient in right.items():
            if name.endswith("key_bias"):  # which softmax takes away: nothing but rounding
                continue
            close(f"{name} in step {step}", found[name], gradient)
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                p -= 0.05 * p.grad
                q.copy_(p)
                p.grad = q.grad = None


@pytest.mark.parametrize("name", MODELS)
def test_followed(name: str) -> None:
    torch.manual_seed(0)
    followed(MODELS[name](), RECIPE)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str) -> None:
    torch.manual_seed(0)
    followed(MODELS["mlp"](), RECIPES[name])


def test_machines_that_would_emulate_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is kept; calibrating quantizes nothing, and runs anywhere."""
    asked: list[torch.device] = []

    def refuse(device: torch.device, scales: str) -> None:
        assert scales == "tensor"
        asked.append(device)
        raise RuntimeError("no products of 8 bits")

    monkeypatch.setattr(lowering, "check_machine", refuse)
    model, x = te.Sequential(ops.Linear(F, FFN)), torch.randn(3, F)
    with pytest.raises(RuntimeError, match="no products of 8 bits"), te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        model(x)
    assert asked == [torch.device("cpu")] and not [name for name, _ in model.named_buffers()]
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=RECIPE):
        model(x)
    assert len(asked) == 1


@pytest.mark.parametrize(("name", "dtype"), [("mlp", torch.float16), ("te.TransformerLayer", torch.bfloat16)])
def test_half_precision_and_torch_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    twin, emulated = copy.deepcopy(model), Emulated(RECIPE)
    for step in range(2):
        ours, theirs = (data(step).requires_grad_() for _ in range(2))
        with torch.autocast("cpu", dtype), on():
            y = model(ours)
            again = model.reference(ours.detach())
        with torch.autocast("cpu", dtype), emulated.region():
            wanted = twin.reference(theirs)
        assert y.dtype == wanted.dtype == again.dtype
        for found in (y, again):  # as near as numbers that were rounded in half precision on their way
            close("output", found.detach().to(dtype), wanted.detach().to(dtype))
        (y.float().square().sum()).backward()
        (wanted.float().square().sum()).backward()
        found, right = gradients(model, ours), gradients(twin, theirs)
        for parameter, gradient in right.items():
            if "key_bias" not in parameter:
                close(parameter, found[parameter].to(dtype), gradient.to(dtype))
        model.zero_grad()
        twin.zero_grad()
    torch.manual_seed(0)
    followed(MODELS[name]().to(dtype), RECIPE, 2, dtype)


def test_frozen_weights_and_unused_parameters() -> None:
    model, twin = trained(mlp()), trained(mlp())
    _, wanted = call(twin, RECIPE, data(3))
    inner = model[0]
    inner[1].weight.requires_grad_(False)
    _, found = call(model, RECIPE, data(3))
    assert found.keys() == wanted.keys() - {"0.1.weight"}
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name]), name
    model.requires_grad_(False)
    with on():
        assert not model(data(3)).requires_grad
    x = data(3).requires_grad_()
    with on():
        model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", ["linear", "mlp", "te.LayerNormMLP", "te.Linear"])
def test_empty_batches(name: str) -> None:
    model = trained(MODELS[name]())
    before = amaxes(model)
    x = torch.zeros(0, 3, F, requires_grad=True)
    with on():
        y = model(x)
    y.sum().backward()
    assert y.shape[:2] == (0, 3) and x.grad is not None and x.grad.shape == x.shape
    after = amaxes(model)
    assert {n: h for n, h in after.items() if not n.endswith("weight")} == {
        n: h for n, h in before.items() if not n.endswith("weight")
    }


def test_float64_is_refused_before_anything_runs_and_references_take_it() -> None:
    model, x = mlp().double(), data(1).double()
    y = model(x)
    for region in (on(), te.autocast(recipe=Float8CurrentScaling()), te.fp8_autocast(calibrating=True)):
        for look in (model, model.explain):
            with region, pytest.raises(TypeError, match=r"0.1.matmul: x is in float64, .*FP8.*convert model"):
                look(x)
    with on():
        torch.testing.assert_close(model.reference(x), y)
    assert states(model) == {} and torch.equal(model(x), y)
    mixed = mlp()
    mixed[0][1].double()
    with on(), torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="0.1.*weight is in float64"):
        mixed(data(1))
    te.precision(model, {"*": None})
    with on():
        assert torch.equal(model(x), y)


def test_weights_given_at_the_call() -> None:
    held = te.Linear(F, FFN)
    with on():
        wanted = held(data(1))
    given = ops.Given()
    model = te.Sequential(ops.Bound(ops.MatMul(F, FFN, device="meta"), given, weight="weight"), ops.Bias(FFN))
    model[1].bias.data.copy_(held.bias)
    weight = held.weight.detach().clone().requires_grad_()
    with on():
        y = model(data(1), weight=weight)
    assert torch.equal(y, wanted)
    y.sum().backward()
    with on():
        pass
    wanted.sum().backward()
    assert torch.equal(weight.grad, held.weight.grad)


def test_dropout_draws_the_same_masks() -> None:
    torch.manual_seed(0)
    model = te.Sequential(ops.Linear(F, F), ops.Dropout(0.5))
    torch.manual_seed(1)
    plain = model(data(1))
    torch.manual_seed(1)
    with on():
        y = model(data(1))
    assert torch.equal(plain == 0, y == 0)


def test_an_op_by_itself() -> None:
    torch.manual_seed(0)
    op, x = ops.Linear(F, FFN), data(1)
    plain = op(x)
    with on():
        y = op(x)
        torch.testing.assert_close(y, te.Sequential(op).reference(x))
    assert not torch.equal(y, plain)
    y.sum().backward()
    assert {"fp8_scale", "fp8_amax_history"} <= op.state_dict().keys()


def test_scales_stay_while_another_thread_is_in_its_region() -> None:
    model, twin, other, found = trained(mlp()), trained(mlp()), mlp(), []
    called, trained_on = threading.Event(), threading.Event()

    def run() -> None:
        with on():
            first = model(data(1))
            called.set()
            trained_on.wait(60)
            found.append((model(data(1)), first))

    thread = threading.Thread(target=run)
    thread.start()
    assert called.wait(60)
    trained(other)
    assert amaxes(model) == amaxes(twin) and amaxes(other) == amaxes(trained(mlp()))
    trained_on.set()
    thread.join()
    assert torch.equal(*found[0])
    with on():
        wanted = twin(data(1))
    assert torch.equal(found[0][0], wanted)
    assert amaxes(model) == amaxes(twin)  # now that the region has ended


def test_a_thread_that_ended_inside_of_a_region_is_waited_for_no_more() -> None:
    model, twin = trained(mlp()), trained(mlp())

    def run() -> None:
        on().__enter__()
        model(data(1))

    in_threads(run)
    with on():
        twin(data(1))
    assert amaxes(model) == amaxes(twin)


def test_tasks_that_wait_inside_of_their_regions() -> None:
    model, twin, others = trained(mlp()), trained(mlp()), mlp()

    def calls() -> Any:
        with on():
            yield model(data(1))
            yield model(data(1))

    context, generator = contextvars.copy_context(), calls()
    first = context.run(next, generator)
    trained(others)
    assert torch.equal(context.run(next, generator), first)
    context.run(generator.close)
    with on():
        twin(data(1))
    assert amaxes(model) == amaxes(twin)


def test_compiled_around() -> None:
    model = trained(mlp())
    with on():
        wanted = model(data(1))
        y = torch.compile(torch.nn.Sequential(model), backend="eager")(data(1))
    assert torch.equal(y, wanted)


def test_hooks_see_gradients_in_the_dtype_of_values() -> None:
    model, seen = trained(te.Sequential(ops.Linear(F, F), torch.nn.Identity(), ops.Linear(F, F))), []
    with on():
        y = model[1](model[0](data(1)))
        y.register_hook(lambda g: seen.append(g.dtype))
        model[2](y).sum().backward()
    assert seen == [torch.float32]


def test_parametrized_weights_are_computed_once_a_call() -> None:
    calls = []

    class Doubled(torch.nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return 2.0 * w

    op = ops.Linear(F, F)
    torch.nn.utils.parametrize.register_parametrization(op, "weight", Doubled())
    model = te.Sequential(op)
    calls.clear()
    for step in range(3):
        with on():
            model(data(step)).sum().backward()
    assert len(calls) == 3 and op.parametrizations.weight.original.grad is not None
