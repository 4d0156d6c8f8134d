"""Keys that tell whether a call is like an earlier one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import te_fuser
from te_fuser import _native, ops
from te_fuser.fuser.run.call import GuardedCall
from te_fuser.guards import Facts

T = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "other",
    [
        [Parameter(T, requires_grad=False)],
        [T.double()],
        [T.clone().requires_grad_()],
        [T.reshape(3, 2)],
        [T.reshape(1, 2, 3)],
        [T[0]],
        [T, T],
        [],
    ],
)
def test_a_key_tells_tensors_apart(other: list[torch.Tensor]) -> None:
    assert _native.tensor_key(other) != _native.tensor_key([T])


def test_a_key_knows_neither_values_nor_strides() -> None:
    assert _native.tensor_key([T]) == _native.tensor_key([torch.ones(3, 2).t()])


@pytest.mark.parametrize(
    "other", [T.to("meta"), T.to_sparse(), torch.nn.Buffer(T).as_subclass(type("Own", (torch.Tensor,), {})), 1]
)
def test_what_is_no_plain_tensor_has_no_key(other: torch.Tensor) -> None:
    assert _native.tensor_key([T, other]) is None


def test_attributes_are_those_of_all_in_order() -> None:
    assert _native.attributes([T, T.double()], "dtype") == (torch.float32, torch.float64)
    with pytest.raises(AttributeError):
        _native.attributes([T], "nothing")
    with pytest.raises(TypeError, match="2 arguments"):
        _native.attributes([T])  # type: ignore[call-arg]


def test_what_is_no_known_call_is_refused() -> None:
    with pytest.raises(TypeError, match="Known"):
        _native.like(Facts(), T, {}, ())  # type: ignore[arg-type]


def test_calls_that_are_like_the_known_one_get_its_parameters() -> None:
    weight = Parameter(torch.ones(2))
    owner = {"weight": weight}
    key = _native.tensor_key([T, T, weight])
    assert key is not None
    known = GuardedCall(Facts(), ("other",), ((owner, "weight"),), key, None, ("out",))  # type: ignore[arg-type]

    def like(x: Any, inputs: dict[str, Any], outputs: tuple[str, ...] = ("out",)) -> Any:
        return _native.like(known, x, inputs, outputs)

    assert like(T, {"other": T}) == [weight]
    for x, inputs in (
        (T.double(), {"other": T}),
        (T, {"an": T}),
        (T, {}),
        (T, {"other": T, "an": T}),
        (T, {"other": 1}),
    ):
        assert like(x, inputs) is None
    assert like(T, {"other": T}, ()) is None
    assert like(torch._neg_view(T), {"other": T}) is None
    for there in (None, torch.ones(2), Parameter(torch.ones(3))):
        owner["weight"] = there
        assert like(T, {"other": T}) is None
    del owner["weight"]
    assert like(T, {"other": T}) is None


def test_the_function_of_a_known_call_runs_on_its_tensors_and_refuses_to_be_differentiated_twice() -> None:
    weight, x = Parameter(torch.tensor([2.0, -3.0])), torch.tensor([1.5, 0.5], requires_grad=True)
    key = _native.tensor_key([x, weight])
    assert key is not None
    owner = {"weight": weight}
    known = GuardedCall(Facts(), (), ((owner, "weight"),), key, None, (), torch.mul)  # type: ignore[arg-type]
    y = _native.run_if_like(known, x, {}, ())
    assert y is not None and torch.equal(y, x * weight)
    with pytest.raises(RuntimeError, match="does not differentiate its backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    again = _native.run_if_like(known, x, {}, ())
    assert again is not None and torch.equal(torch.autograd.grad(again.sum(), x)[0], weight)
    assert _native.run_if_like(known, T, {}, ()) is None
    with torch.no_grad():
        assert not _native.run_if_like(known, x, {}, ()).requires_grad  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="multiply"):
        _native.run_if_like(known._replace(function=_multiply), x, {}, ())


def _multiply(*_: torch.Tensor) -> torch.Tensor:
    raise TypeError("does not multiply")


def test_one_of_several_results_refuses_too() -> None:
    x = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    _, second = torch.split(x * 2, [1, 2])
    with pytest.raises(RuntimeError, match="does not differentiate its backward"):
        torch.autograd.grad(_native.refusing(second).sum(), x, create_graph=True)
    assert _native.refusing(T) is T


def test_a_call_after_another_sees_what_changed_behind_its_parameters() -> None:
    model = te_fuser.Sequential(ops.Linear(4, 4), ops.GELU())
    x = torch.randn(3, 4)
    model(x)
    for p in model.parameters():
        p.data = p.data.double()
    assert torch.allclose(model(x.double()), model.reference(x.double()))
    for p in model.parameters():
        p.requires_grad_(False)
    assert not model(x.double()).requires_grad
    with pytest.raises(TypeError, match="dense"):
        model(x.double().to_sparse())
    with pytest.raises(TypeError, match="meta"):
        model(x.double().to("meta"))
    assert torch.equal(model(x.double()), model(x.double().clone()))


def test_hooks_of_one_result_are_not_those_of_another() -> None:
    model, seen = te_fuser.Sequential(ops.Linear(4, 4)), list[torch.Tensor]()
    x = torch.randn(3, 4, requires_grad=True)
    first, second = model(x), model(x)
    first.register_hook(seen.append)
    second.sum().backward()
    assert not seen
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(first.sum(), x, create_graph=True)
