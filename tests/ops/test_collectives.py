"""Collective: what holds of all ops that ranks run together without other ranks; what they do is in tests/parallel."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from te_fuser import ops, verify
from te_fuser.distributed.exchange import Exchange
from te_fuser.fuser.plan.tuned import list_key
from te_fuser.fusions import fusion
from te_fuser.ops.base import FusableOperation, Spec
from te_fuser.ops.collectives import Carried, Collective
from tests.ops.check import spec
from tests.refused import raises
from tests.twins import assert_as_meant, sequential, tensor

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ALL: dict[str, tuple[Any, ...]] = {
    "AllGather": (-1,), "ReduceScatter": (1,), "AllReduce": (), "AllReduceGradient": (), "AllToAll": (0, 1),
}  # fmt: skip


def made(name: str, group: Any) -> Collective:
    return getattr(ops, name)(group, *ALL[name])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ALL)
def test_alone(name: str) -> None:
    """In a group of one rank nothing is exchanged, and no process group is needed."""
    op = made(name, ops.Group())
    x = tensor(3, 5, 8)
    model = sequential(ops.GELU(), op, ops.Linear(8, 8), verify=True)
    torch.testing.assert_close(assert_as_meant(model, x)[0], sequential(ops.GELU(), model[2])(x).detach())
    assert torch.equal(op(x), x) and op(x) is not x
    assert not [s.name for s in model.plan(x).forward if s.name.endswith((".start", ".wait"))]


@pytest.mark.parametrize("name, dtypes", [("AllGather", (FP8, BF16)), ("ReduceScatter", (BF16, FP8))])
def test_bytes_that_are_sent_in_8_bits(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Of two ranks each sends one's part of the values, and back one's part of their gradients, in its own dtype."""
    op = made(name, ops.Group("tp", 2))
    op.carried = Carried(*dtypes)
    x = Spec((4, 6, 8), dtypes[0], torch.device("cpu"))
    part = 4 * 6 * 8 // (1 if name == "AllGather" else 2)
    assert op.sent_bytes(x, back=False) == part * dtypes[0].itemsize
    assert op.sent_bytes(x, back=True) == part * dtypes[1].itemsize


@pytest.mark.parametrize("group", [None, "tp", 2])
@pytest.mark.parametrize("name", ALL)
def test_what_is_no_group(name: str, group: Any) -> None:
    raises(TypeError, rf"^{name} takes a group of ranks, got .*mesh\['tp'\].*new_group\(ranks\)", made, name, group)
    op = made(name, ops.Group())
    with pytest.raises(TypeError, match=f"^{name} takes a group of ranks"):
        op.group = group


@pytest.mark.parametrize("name", ALL)
def test_a_group_that_is_not_here(name: str) -> None:
    """A plan of it can be looked at; a call says what is missing, before anything is sent."""
    op, x = made(name, ops.Group("tp", 2)), tensor(4, 6, 8)
    model = sequential(op, ops.GELU())
    assert model.plan(x).graph.values[0].spec.shape == (4, 6, 8)
    for run in (model, model.reference) if name != "AllReduceGradient" else (model.reference,):
        raises(RuntimeError, rf"{name}: .*knows no group 'tp' of 2 ranks.*init_process_group\(\)", run, x)
    if name == "AllReduceGradient":
        raises(RuntimeError, f"{name}: .*knows no group 'tp'", lambda: model(x).sum().backward())


@pytest.mark.parametrize("name", ALL)
def test_another_group_is_another_op(name: str) -> None:
    op = made(name, ops.Group("a", 2))
    before = op.revision
    op.group = ops.Group("b", 2)
    assert op.revision > before and op.group == ops.Group("b", 2)
    for copied in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert copied.group == op.group and vars(copied)["_group"] is not None


def test_choices_that_were_measured_hold_for_as_many_ranks() -> None:
    x, keys = tensor(4, 6, 8, dtype=torch.float32), set()
    for ranks in (1, 2, 4):
        graph = sequential(ops.AllReduce(ops.Group("tp", ranks)), ops.GELU(), dtype=torch.float32).plan(x).graph
        keys.add(list_key(graph, "balanced", "auto"))
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("exchange", "want", "sent"),
    [(Exchange(), (4, 6, 8), 96), (Exchange(join=0), (8, 6, 8), 192), (Exchange(join=-1), (4, 6, 16), 192),
     (Exchange(cut=1), (4, 3, 8), 48), (Exchange(cut=-1, join=0), (8, 6, 4), 48),
     (Exchange(cut=1, join=1), (4, 6, 8), 48)],
)  # fmt: skip
def test_shapes(exchange: Exchange, want: tuple[int, ...], sent: float) -> None:
    """There, and back to where it came from; and the bytes of 64 that each of four ranks sends."""
    assert exchange.shape((4, 6, 8), 2) == want and exchange.sent(64.0, 4) == sent
    assert exchange.back.shape(want, 2) == (4, 6, 8)


def test_wrong_inputs() -> None:
    op = ops.ReduceScatter(ops.Group("g", 3, "tp"), 1)
    words = r"ReduceScatter on one of 3 ranks \(tp\): dimension 1 of .*\[3, 8\].* 3 equal"
    raises(ValueError, words, op.infer, spec(3, 8))
    raises(ValueError, r"an input of shape \[\] has no dimension 1 to cut: give another one", op.infer, spec())
    raises(TypeError, r"convert with \.float\(\)", op.infer, spec(3, 9, dtype=torch.int64))
    with pytest.raises(TypeError, match="AllGather takes a whole number as dim, got 1.5"):
        ops.AllGather(ops.Group(), 1.5)  # type: ignore[arg-type]
    for argument in ("forth", "back"):
        raises(NotImplementedError, "must say what it exchanges", getattr, Collective(ops.Group()), argument)


def test_verify_takes_patterns_with_them_and_asks_ranks_that_are_there() -> None:
    @fusion(forward=[ops.AllGather, ops.ReLU], name="gathered_relu")
    def gathered_relu(match: Any, x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    assert verify(gathered_relu, dtypes=[torch.float32]).passed
    with pytest.raises(RuntimeError, match="knows no group 'tp' of 2 ranks in this process"):
        verify(sequential(ops.GELU(), ops.AllReduce(ops.Group("tp", 2))), tensor(4, 8))


def test_every_one_is_told_by_its_family() -> None:
    kinds = {kind.__name__ for kind in Collective.__subclasses__() if kind.__module__.startswith("te_fuser.")}
    assert kinds == set(ALL) and issubclass(Collective, FusableOperation) and Collective.family
