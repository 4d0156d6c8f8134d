"""Native steps and programs: what they read and fill, and what they say when something does not fit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from te_fuser import Sequential, _native, fusions, ops
from te_fuser.fusions import Details, fusion
from te_fuser.ops.base import OpCall
from te_fuser.ops.operations import UnfusedOperation


def kernel_step(kernel: Any, outputs: Any, **changes: Any) -> _native.KernelStep:
    arguments: dict[str, Any] = {
        "name": "double",
        "kernel": kernel,
        "inputs": [0],
        "lead": 0,
        "batch_dim": None,
        "outputs": outputs,
        "streams": (),
        "aliases": [],
        "many_rows": 1 << 60,
        "large": None,
    }
    return _native.KernelStep(**(arguments | changes))


def test_a_kernel_step_makes_inputs_contiguous_and_outputs_by_every_rule() -> None:
    calls: list[Any] = []
    outputs = [
        (1, 0, 0, 3, None, torch.float32),
        (2, -1, 0, 7, None, torch.bfloat16),
        (3, -1, 1, 0, (4, 2), torch.float64),
        (4, -1, 2, 0, None, torch.float32),
        (5, -1, 3, 6, None, torch.float32),
        (6, -1, 4, 7, None, torch.uint8),
    ]
    step = kernel_step(lambda *a: calls.append(a), outputs, streams=(8,), aliases=[(7, 1)], batch_dim=1)
    x = torch.randn(2, 3, 5).transpose(1, 2)  # [2, 5, 3]
    slots: list[Any] = [x, *[None] * 7]
    step(slots)
    tensors, rows, inner, samples, streams = calls[0]
    assert (rows, inner, samples, streams) == (10, 1, 5, (8,))
    assert tensors[0].is_contiguous() and torch.equal(tensors[0], x)
    assert [tuple(t.shape) for t in slots[1:7]] == [(2, 5, 3), (2, 5, 7), (4, 2), (5,), (5, 6), (7, 16)]
    assert [t.dtype for t in slots[1:7]] == [o[-1] for o in outputs]
    assert all(a is b for a, b in zip(tensors[1:], slots[1:7], strict=True)) and slots[7] is slots[1]


def test_an_output_of_fixed_sizes_has_some() -> None:
    with pytest.raises(ValueError, match="an output of fixed sizes has none"):
        kernel_step(lambda *a: None, [(1, -1, 1, 0, None, torch.float32)])


@pytest.mark.parametrize(
    ("size", "shape", "words"),
    [
        ((0, 3), (2, 5, 3), None),
        ((1, 6), (6,), None),
        ((2, 1), (5,), None),
        ((3, 4), (5, 4), None),
        ((1, -1), (7,), None),
        ((0, 3), (2, 5, 4), r"step 'double': input 1 has 40 elements, planned were 30 \(10 x 3\)"),
        ((1, 6), (5,), r"has 5 elements, planned were 6 \(1 x 6\)"),
        ((2, 1), (4,), r"has 4 elements, planned were 5 \(5 x 1\)"),
        ((3, 4), (5, 3), r"has 15 elements, planned were 20 \(5 x 4\).* gave another shape than it declares"),
    ],
)
def test_a_kernel_step_refuses_inputs_of_another_size(size: Any, shape: Any, words: str | None) -> None:
    calls: list[Any] = []
    step = kernel_step(lambda *a: calls.append(a), [], inputs=[0, 1], batch_dim=1, input_sizes=[(0, 3), size])
    slots = [torch.zeros(2, 5, 3), torch.zeros(shape)]
    if words is None:
        step(slots)
        assert len(calls) == 1
    else:
        with pytest.raises(ValueError, match=words):
            step(slots)
        assert not calls


def test_sizes_of_inputs_are_given_for_all_or_none() -> None:
    with pytest.raises(ValueError, match="sizes of all inputs, or of none"):
        kernel_step(None, [], input_sizes=[(0, 3), (0, 3)])
    with pytest.raises(ValueError, match="unknown rule"):
        kernel_step(None, [], input_sizes=[(99, 3)])


def test_large_outputs_are_shown_before_anything_is_written() -> None:
    shown: list[torch.Tensor] = []
    step = kernel_step(lambda *a: None, [(1, 0, 0, 3, None, torch.float32)], many_rows=4, large=shown.append)
    for rows in (3, 4):
        step([torch.zeros(rows, 3), None])
    assert [t.shape[0] for t in shown] == [4]


def test_an_empty_slot_and_a_subclass_are_refused_by_name() -> None:
    step = kernel_step(lambda *a: None, [])
    with pytest.raises(RuntimeError, match=r"step 'double': slot 0 is empty"):
        step([None])
    with pytest.raises(TypeError, match=r"'double': tensor 0 must be a plain torch.Tensor"):
        step([torch.zeros(2).as_subclass(type("Special", (torch.Tensor,), {}))])
    with pytest.raises(ValueError, match="comes later"):
        kernel_step(None, [(1, 1, 0, 3, None, torch.float32)])


def test_function_steps_fill_one_slot_or_several() -> None:
    slots: list[Any] = [torch.ones(2), torch.ones(2), None, None]
    _native.FunctionStep("sum", torch.add, [0, 1], [2])(slots)
    assert torch.equal(slots[2], torch.full((2,), 2.0))
    _native.FunctionStep("both", lambda a: (a + 1, a + 2), [0], [-1, 3])(slots)
    assert torch.equal(slots[3], torch.full((2,), 3.0))
    with pytest.raises(TypeError, match=r"step 'none' must give a tensor, got NoneType"):
        _native.FunctionStep("none", lambda a: None, [0], [2])(slots)
    with pytest.raises(TypeError, match=r"step 'both' must give a tuple of 2 tensors, got Tensor"):
        _native.FunctionStep("both", lambda a: a, [0], [2, 3])(slots)


def test_a_program_drops_slots_after_their_last_use_and_stops_at_an_error() -> None:
    held: list[Any] = [torch.ones(3), None]
    watch = weakref.ref(held[0])
    seen: list[bool] = []

    def fail(slots: list[Any]) -> None:
        raise ArithmeticError("stop")

    program = _native.Program(
        [
            (_native.FunctionStep("neg", torch.neg, [0], [1]), [0]),
            (lambda slots: seen.append(watch() is None), []),
            (fail, []),
            (lambda slots: seen.append(True), []),
        ]
    )
    with pytest.raises(ArithmeticError, match="stop"):
        program.run(held)
    assert seen == [True] and held[0] is None and torch.equal(held[1], -torch.ones(3))


def test_a_subclass_that_overrides_a_plain_method_is_heard() -> None:
    class Doubled(ops.MatMul):
        def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().op_forward(call, x)

    assert issubclass(Doubled, UnfusedOperation)
    op = Doubled(3, 2)
    x = torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(op(x), 2 * x @ op.weight.t())


def test_a_fusion_of_plain_tensors() -> None:
    @fusion(
        backward=[ops.Bias, ops.ReLU],
        reads=("output",),
        details=Details(takes=("dy", "output"), gives=("input", "0.bias"), registered=False),
    )
    def bias_relu(dy: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dx = dy * (y > 0)
        return dx, dx.reshape(-1, dx.shape[-1]).sum(0)

    model = Sequential(ops.Bias(5), ops.ReLU())
    torch.nn.init.normal_(model[0].bias)
    with fusions.only(bias_relu):
        x = torch.randn(3, 2, 5, requires_grad=True)
        assert "bias_relu" in [s.name for s in model.plan(x).backward]
        dy = torch.randn(3, 2, 5)
        dx, db = torch.autograd.grad(model(x), [x, model[0].bias], dy)
    on = (x + model[0].bias) > 0
    torch.testing.assert_close(dx, dy * on)
    torch.testing.assert_close(db, (dy * on).sum((0, 1)))


def test_what_a_fusion_takes_must_be_there() -> None:
    @fusion(forward=[ops.Bias, ops.ReLU], details=Details(takes=("input", "0.weight"), registered=False))
    def bias_relu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x

    model = Sequential(ops.Bias(5), ops.ReLU())
    refused = pytest.raises(ValueError, match=r"takes '0\.weight', which it has not")
    with fusions.only(bias_relu), torch.no_grad(), refused:
        model(torch.randn(2, 5))
