"""Conditions that held once and may hold no more."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from te_fuser import _native
from te_fuser.guards import Facts, still_hold

T = torch.zeros(2, 3)
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
