"""Folding: histories and scales of what was recorded."""

from __future__ import annotations

import copy
import gc
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_fuser as te
from te_fuser import ops
from te_fuser.kernels.quantizers import FoldAmaxes
from te_fuser.quantization import not_finite, scale_update, states
from te_fuser.quantization.scale_update import update
from te_fuser.quantization.state import SCALED, blocks
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.fake_cuda import FakeDriver, running
from tests.needs import needs_compiler
from tests.quantization.folded import RECIPE, mean_of, product, recorded, state_of, step


def test_history_and_scales() -> None:
    op = product()
    state = recorded(op, 2.0, 0.5, 7.0)
    assert torch.equal(state.history, torch.tensor([[2.0, 0.5, 7.0], [0.0] * 3, [0.0] * 3]))
    assert state.scale.tolist() == [224.0, 896.0, 8192.0]
    assert float(blocks()[-1].amaxes.sum()) == 0.0
    state = recorded(op, 1.0, 0.0, 14.0)  # of what was not quantized nothing moves
    assert torch.equal(state.history, torch.tensor([[1.0, 0.5, 14.0], [2.0, 0.0, 7.0], [0.0] * 3]))
    assert state.scale.tolist() == [224.0, 896.0, 4096.0]
    recorded(op, 1.0)
    state = recorded(op, 1.0)
    assert state.scale.tolist() == [448.0, 896.0, 4096.0]  # 2.0 is forgotten
    op = product(DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"))
    recorded(op, 2.0)
    assert recorded(op, 1.0).scale.tolist() == [448.0, 1.0, 1.0]


@pytest.mark.parametrize("margin", [0, 1, 3, -2, 126])
@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3.0e-36, 0.1, 1.0, 448.0, 3.0e38])
@pytest.mark.parametrize("form", [Format.E4M3, Format.HYBRID])
def test_the_formula(margin: int, amax: float, form: Format) -> None:
    state = recorded(product(DelayedScaling(margin, 1, form, 2)), amax, amax, amax)
    one = torch.tensor(amax)
    for role, largest in ((0, form.value.max_fwd), (1, form.value.max_fwd), (2, form.value.max_bwd)):
        want = torch.tensor(largest) / one / torch.tensor(2.0**margin)
        want = torch.tensor(torch.finfo(torch.float32).max) if want.isinf() else want if want > 0 else torch.tensor(1.0)
        assert torch.equal(state.scale[role], want)


@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_what_is_not_finite_moves_nothing_and_is_counted(amax: float) -> None:
    model = te.Sequential(product(), product())
    recorded(model[1], 2.0, 0.5, 7.0)
    before = state_of(model[1]).scale.clone(), state_of(model[1]).history.clone()
    for _ in range(2):
        state = recorded(model[1], amax, 0.5, amax)
    assert torch.equal(state.scale, before[0]) and torch.equal(state.history[:, [0, 2]], before[1][:, [0, 2]])
    assert not_finite(model) == {"1.input": 2, "1.output_gradient": 2}


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval in no_grad"])
def test_nothing_is_recorded_without_gradients(mode: str) -> None:
    model, x = te.Sequential(ops.Linear(16, 16)), torch.randn(4, 16)
    step(model, x)
    before = states(model)
    model.train(mode != "eval in no_grad")
    with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
        for _ in range(2):
            step(model, 100 * x)
    after = states(model)
    assert all(torch.equal(a, b) for n in before for a, b in zip(before[n], after[n], strict=True))


def test_evaluation_folds_once_what_training_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, folds = te.Sequential(ops.Linear(16, 16)), torch.randn(4, 16), list[int]()
    step(model, x)
    made = scale_update.evaluate
    monkeypatch.setattr(scale_update, "evaluate", lambda: (folds.append(1), made()))
    with torch.no_grad():
        for _ in range(3):
            step(model, x)
    assert folds == [1] and not model[0].fp8_amax_history.any()
    assert float(state_of(model[0]).numbers["input_scale"]) == float(torch.tensor(448.0) / x.abs().max())


def test_backward_inside_and_outside_record_alike() -> None:
    x, found = torch.randn(4, 16), []
    for inside in (False, True):
        torch.manual_seed(0)
        model = te.Sequential(ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16))
        for _ in range(3):
            with te.autocast(recipe=RECIPE):
                y = model(x).square().sum()
                if inside:
                    y.backward()
            if not inside:
                y.backward()
        found.append(states(model))
    assert all(torch.equal(a, b) for n in found[0] for a, b in zip(found[0][n], found[1][n], strict=True))
    assert all(float(history[2]) > 0 for _, history in found[0].values())


def test_calls_and_nested_regions_in_a_region_are_one_entry_of_the_history() -> None:
    model, x = te.Sequential(ops.Linear(16, 16)), torch.randn(4, 16)
    with te.autocast(recipe=RECIPE):
        for factor in (1.0, 3.0):
            with te.autocast(recipe=RECIPE):
                model(factor * x)
            with te.autocast(enabled=False):
                y = model(x)
                assert torch.equal(y, torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(states(model)["0.input"][1], torch.stack([3 * x.abs().max(), *torch.zeros(2)]))


def test_calibrating_records_and_quantizes_nothing() -> None:
    model, x = te.Sequential(ops.Linear(16, 16)), torch.randn(4, 16)
    with te.fp8_autocast(calibrating=True, fp8_recipe=RECIPE):
        y = model(x)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    y.sum().backward()
    found = states(model)
    assert torch.equal(found["0.input"][0], torch.tensor(448.0) / x.abs().max())
    assert torch.equal(found["0.weight"][0], torch.tensor(448.0) / model[0].weight.abs().max())
    assert torch.equal(found["0.output_gradient"][0], torch.tensor(57344.0))


@pytest.mark.filterwarnings("error:Dynamo")
def test_regions_inside_of_what_is_compiled() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = te.Sequential(ops.Linear(16, 16))

        def run(x: torch.Tensor, model: Any = model) -> torch.Tensor:
            with te.autocast(recipe=RECIPE):
                y = model(2 * x)
            return y + 1

        call = torch.compile(run, backend="eager") if compiled else run
        for k in range(3):
            y = call(torch.randn(4, 16) * (k + 1))
            y.sum().backward()
        found.append([y, *[t for pair in states(model).values() for t in pair]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_frozen_and_unused_parameters() -> None:
    model = te.Sequential(ops.Linear(16, 16), ops.Linear(16, 16))
    te.Linear(16, 16)  # which nobody calls
    model[0].weight.requires_grad_(False)
    step(model, torch.randn(4, 16))
    found = states(model)
    assert float(found["1.output_gradient"][1][0]) > 0 and float(found["0.input"][1][0]) > 0
    model.requires_grad_(False)
    before = states(model)
    step(model, torch.randn(4, 16))  # nobody needs a gradient
    assert torch.equal(states(model)["0.output_gradient"][0], before["0.output_gradient"][0])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    """The kernel run by a driver that executes it on the CPU."""
    with running([FoldAmaxes()], tmp_path_factory.mktemp("fold")) as driver:
        yield driver


@pytest.fixture
def by_kernel(emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Fold on the CPU by the kernel, as on a GPU; in blocks of the test's own."""
    monkeypatch.setattr("te_fuser.quantization.state._blocks", [])
    monkeypatch.setattr(scale_update, "has_kernel", lambda device: device.type == "cpu")
    return emulated


def all_of(model: Any) -> list[torch.Tensor]:
    """Scales and histories, and the numbers that calls read."""
    products = [state_of(op) for op in model if isinstance(op, ops.MatMul)]
    read = [s.numbers[name] for s in products for name in SCALED if s.numbers]
    return [t for pair in states(model).values() for t in pair] + [torch.stack(read)]


OWN = DelayedScaling(amax_history_len=2, amax_compute_algo=mean_of)
MIXED = {
    "0": DelayedScaling(margin=1, amax_history_len=70),
    "2": OWN,
    "4": DelayedScaling(amax_compute_algo="most_recent"),
}


@needs_compiler
@pytest.mark.parametrize("by_path", [{}, {"0": None}, MIXED], ids=["one", "some", "mixed"])
def test_the_kernel_folds_as_pytorch(by_path: Any, emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with functions of somebody's own beside it, and amaxes that are not finite."""
    found = []
    for device_type in ("cpu", "none"):
        monkeypatch.setattr(scale_update, "has_kernel", lambda device, which=device_type: device.type == which)
        torch.manual_seed(0)
        model = te.Sequential(*(ops.MatMul(16, 16) if k % 2 == 0 else ops.GELU() for k in range(5)))
        if by_path:
            te.precision(model, by_path)
        emulated.launches = 0
        for k in range(6):
            step(model, torch.randn(8, 16) * (math.inf if k == 2 else 3.0**k))
            if k % 3 == 1:  # behind a look PyTorch folds once
                states(model)
        found.append([*all_of(model), torch.tensor([*not_finite(model).values()])])
        assert (emulated.launches > 0) == (device_type == "cpu")
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*found, strict=True))


@needs_compiler
def test_one_launch_a_fold_and_where_things_lie_is_told_once(by_kernel: FakeDriver) -> None:
    model, x = te.Sequential(ops.MatMul(16, 16), ops.MatMul(16, 16)), torch.randn(4, 16)
    step(model, x)
    update()
    block = state_of(model[0]).block
    assert block is not None
    told, by_kernel.launches = scale_update._kernels[block], 0
    for _ in range(3):
        step(model, x)
    assert by_kernel.launches == 3 and scale_update._kernels[block] is told
    assert torch.equal(state_of(model[0]).numbers["input_scale"], 448.0 / x.abs().max())


@needs_compiler
def test_numbers_are_written_in_place_where_nobody_holds_them(
    by_kernel: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that a graph has saved, a view or somebody else holds, stay as they were, and calls find others."""
    monkeypatch.setattr(scale_update, "_threads", set())
    model, x = te.Sequential(ops.MatMul(16, 16), ops.MatMul(16, 16)), torch.randn(4, 16, requires_grad=True)
    state = state_of(model[0])

    def found() -> tuple[int, float]:
        return id(state.numbers["input_scale"]), state.numbers["input_scale"].item()

    for _ in range(2):
        step(model, x)
    update()
    first = found()
    step(model, 2.0 * x)
    update()
    assert found() == (first[0], first[1] / 2.0)
    for hold in (lambda: state.numbers["input_scale"], lambda: state.numbers["input_scale"].detach(), lambda: model(x)):
        with te.autocast(recipe=RECIPE):
            kept = hold()
        place, number = found()
        recorded(model[0], 448.0 / number + 1.0)
        assert found()[0] != place and found()[1] != number
        assert kept.dim() or kept.item() == number
        del kept
        update()
    before = found()[0]
    monkeypatch.setattr(scale_update, "_threads", {1, 2})  # another one may look them up meanwhile
    update()
    assert found()[0] != before


def test_regions_whose_recipes_keep_nothing_fold_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a call are folded once; those of a late backward at the next region that may read them."""
    model, x = te.Sequential(ops.MatMul(16, 16)), torch.randn(4, 16, requires_grad=True)
    folds = []
    monkeypatch.setattr(scale_update, "update", lambda: folds.append(update()))
    stateless = Float8CurrentScaling()
    with te.autocast(recipe=RECIPE):
        y = model(x)
    for _ in range(3):
        folds.clear()
        with te.autocast(recipe=stateless):
            model(x)
    assert not folds
    y.sum().backward()
    with te.autocast(recipe=RECIPE):
        assert len(folds) == 1 and states(model)["0.output_gradient"][1][0] == 1.0
    with te.autocast(recipe=stateless), te.autocast(recipe=RECIPE):
        model(x)
    folds.clear()
    with te.autocast(recipe=stateless), te.autocast(recipe=RECIPE):  # what was called inside of the last one recorded
        assert len(folds) == 1


@needs_compiler
def test_what_a_fold_calls_does_not_grow_with_products(by_kernel: FakeDriver) -> None:
    """Python's calls grow with blocks where nothing changed; one loop passes all products, for what they read."""

    def calls(model: Any) -> int:
        step(model, torch.randn(4, 16))
        update()
        found: list[str] = []
        gc.collect()
        gc.disable()  # what a collection finalizes meanwhile calls, too
        sys.setprofile(lambda frame, event, argument: found.append(event))
        try:
            update()
        finally:
            sys.setprofile(None)
            gc.enable()
        return found.count("call")

    few = te.Sequential(ops.MatMul(16, 16))
    one = calls(few)
    assert calls(te.Sequential(*(ops.MatMul(16, 16) for _ in range(30)))) == one


@torch.inference_mode()
def loaded_in_inference_mode(model: Any) -> None:
    scales = {name: t.clone() for name, t in model[0].state_dict().items() if "weight" not in name}
    model[0].load_state_dict(scales, strict=False)


def moved(model: Any) -> None:
    for name in ("fp8_scale", "fp8_amax_history"):
        getattr(model[0], name).data = getattr(model[0], name).clone()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another product": lambda m: m.append(ops.MatMul(16, 16)),
    "a copy": lambda m: step(copy.deepcopy(m), torch.randn(4, 16)),
    "loaded": lambda m: m.load_state_dict({name: t.clone() for name, t in m.state_dict().items()}),
    "loaded in inference mode": loaded_in_inference_mode,
    "moved": moved,
    "turned": lambda m: setattr(m[0], "fp8_amax_history", m[0].fp8_amax_history.mT.contiguous().mT),
    "longer": lambda m: step(m, torch.randn(4, 16), DelayedScaling(amax_history_len=5)),
}


@needs_compiler
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_told_anew(change: str, emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for device_type in ("cpu", "none"):
        monkeypatch.setattr(scale_update, "has_kernel", lambda device, which=device_type: device.type == which)
        torch.manual_seed(0)
        model = te.Sequential(ops.MatMul(16, 16), ops.MatMul(16, 16))
        for k in range(2):
            step(model, torch.randn(4, 16) * 3.0**k)
        CHANGES[change](model)
        for k in range(3):
            step(model, torch.randn(4, 16) * 2.0**k)
        found.append(all_of(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_compiler
@pytest.mark.parametrize("kernel", [False, True])
def test_late_backwards_have_their_own_scales(
    kernel: bool, emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first region on, in which calls read what was there before any fold."""
    monkeypatch.setattr(scale_update, "has_kernel", lambda device: kernel and device.type == "cpu")
    torch.manual_seed(0)
    model, x = te.Sequential(ops.Linear(16, 16)), torch.randn(4, 16, requires_grad=True)
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            y = model(x).square().sum()
        first = torch.autograd.grad(y, [x, model[0].weight], retain_graph=True)
        for _ in range(2):
            step(model, 50 * x)
        again = torch.autograd.grad(y, [x, model[0].weight])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_buffers_are_written_in_place_and_apart() -> None:
    """So a graph that reads them reads those of now, and files take them."""
    model, x = te.Sequential(ops.MatMul(16, 16), ops.MatMul(16, 16)), torch.randn(4, 16)
    step(model, x)
    before = {name: (t, t.data_ptr(), t.clone()) for name, t in model.named_buffers()}
    step(model, x)
    step(model, x)
    for name, t in model.named_buffers():
        kept, address, numbers = before[name]
        assert t is kept and t.data_ptr() == address and not torch.equal(t, numbers)
    assert len({t.untyped_storage().data_ptr() for t in model.buffers()}) == 4


@pytest.mark.parametrize("faked", [False, True])
def test_regions_are_entered_around_what_transforms(faked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = te.Sequential(ops.MatMul(16, 16)), torch.randn(4, 16)

    def call(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return model.reference(x).sum()

    monkeypatch.setattr(scale_update.recorded, "region", None)
    torch.func.grad(call)(x)  # in the first region of all nothing is folded
    step(model, x)
    with pytest.raises(RuntimeError, match="enter the region around these"):
        if faked:
            with FakeTensorMode():
                call(x)
        else:
            torch.func.grad(call)(x)
    with te.autocast(recipe=RECIPE):
        dx = torch.func.grad(lambda x: model.reference(x).sum())(x)
    twin = x.clone().requires_grad_()
    call(twin).backward()
    assert torch.equal(dx, twin.grad)
