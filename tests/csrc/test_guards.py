"""Facts that held and may hold no more, keys of calls, and the stubs of the native module."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import te_fuser
from te_fuser import _native, ops
from te_fuser.fuser.run.call import GuardedCall
from te_fuser.guards import Facts, still_hold
from tests.documents import ROOT

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


D: dict[str, Any] = {"a": T, "b": None}


@pytest.mark.parametrize(
    ("held", "broken"),
    [
        ({"members": ((D, (T, None)),)}, {"members": ((D, (T, T)),)}),
        ({"members": (({}, ()),)}, {"members": ((D, (T,)),)}),
        ({"members": ((D, (T, None)),)}, {"members": ((D, (T, None, T)),)}),
        ({"empty": ({}, {})}, {"empty": ({}, D)}),
        ({"filled": (D,)}, {"filled": (D, {})}),
        ({"items": (({"n": 2.0}, "n", 2), (D, "c", None))}, {"items": (({"n": 2.0}, "n", 3),)}),
        ({"items": ((D, "b", None),)}, {"items": ((D, "c", 1),)}),
        ({"calls": ((dict, {}), (list, []))}, {"calls": ((dict, {}), (list, [1]))}),
        ({"pairs": (({"x": 1}, {"x": 1}),)}, {"pairs": (({"x": 1}, {"x": 2}),)}),
    ],
)
def test_facts_hold_or_do_not(held: dict[str, Any], broken: dict[str, Any]) -> None:
    assert _native.still_hold(Facts(**held))
    assert not _native.still_hold(Facts(**broken))


def test_what_a_fact_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        still_hold(Facts(calls=((lambda: 1 // 0, 1),)))
    with pytest.raises(TypeError, match="Facts"):
        still_hold(())  # type: ignore[arg-type]


def test_facts_of_several_are_all_of_them() -> None:
    both = Facts.of([Facts(empty=({},), filled=(D,)), Facts(empty=({}, {}))])
    assert both == Facts(empty=({}, {}, {}), filled=(D,))
    assert Facts.of([]) == Facts()


class Owner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(2, 2, bias=False)


def _owned(owner: Owner, whether: bool = True) -> Facts:
    fact = weakref.ref(owner), ("part",), weakref.ref(owner.part), "weight", whether
    return Facts(owned=(fact,))


@pytest.mark.parametrize(
    "change",
    [
        lambda owner: setattr(owner.part, "weight", None),
        lambda owner: delattr(owner.part, "weight"),
        lambda owner: setattr(owner, "part", torch.nn.Linear(2, 2)),
        lambda owner: delattr(owner, "part"),
    ],
)
def test_an_owner_has_a_parameter_until_it_or_its_module_goes(change: Callable[[Owner], None]) -> None:
    owner = Owner()
    facts, was = _owned(owner), owner.part
    assert still_hold(facts) and not still_hold(_owned(owner, whether=False))
    owner.part.weight = Parameter(torch.ones(3, 3))  # another one in its place
    assert still_hold(facts)
    change(owner)
    assert not still_hold(facts)
    del was


def test_a_parameter_that_comes_breaks_the_fact_that_there_is_none() -> None:
    owner = Owner()
    facts = Facts(owned=((weakref.ref(owner), (), weakref.ref(owner), "weight", False),))
    assert still_hold(facts)
    owner.weight = Parameter(T)
    assert not still_hold(facts)


def test_facts_let_an_owner_go() -> None:
    owner = Owner()
    facts = _owned(owner)
    del owner
    assert not still_hold(facts)


def _placed(there: dict[str, Any]) -> Facts:
    return Facts(placed=((there, "a", there["a"], _native.tensor_place(there["a"])),))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(a=Parameter(d["a"].data)),
        lambda d: d.update(a=None),
        lambda d: d.pop("a"),
        lambda d: d["a"].requires_grad_(False),
        lambda d: setattr(d["a"], "data", d["a"].data.clone()),
        lambda d: setattr(d["a"], "data", d["a"].data.t()),
        lambda d: setattr(d["a"], "data", d["a"].data[1:]),
    ],
)
def test_a_tensor_is_in_its_place_until_it_is_moved_or_replaced(change: Callable[[dict[str, Any]], Any]) -> None:
    there: dict[str, Any] = {"a": Parameter(torch.arange(4.0).reshape(2, 2))}
    facts = _placed(there)
    there["a"].data.fill_(3.0)
    assert still_hold(facts)
    change(there)
    assert not still_hold(facts)


def test_what_is_no_plain_tensor_has_no_place() -> None:
    own = T.as_subclass(type("Own", (torch.Tensor,), {}))
    assert _native.tensor_place(own) is None and _native.tensor_place(1) is None
    assert not still_hold(_placed({"a": own}))


def declared(body: list[ast.stmt]) -> set[str]:
    """Public names of functions, classes, and annotated names."""
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return {name for name in names if not name.startswith("_")}


def public(names: dict[str, object]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_stubs_name_the_module_and_its_classes() -> None:
    tree = ast.parse((ROOT / "te_fuser" / "_native.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert declared(tree.body) >= public(vars(_native))
    kinds = {name: kind for name, kind in vars(_native).items() if isinstance(kind, type)}
    assert kinds and {n: declared(classes[n].body) for n in kinds} == {n: public(vars(k)) for n, k in kinds.items()}
