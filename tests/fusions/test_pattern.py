"""Patterns: where they fit, what can never fit, how they read; what a fusion says of a match, and its body."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Body, Cost, Details, Match, OneOf, Optional, Repeat, fusion
from te_fuser.fusions.pattern import check, matches, render
from te_fuser.ops.base import Gradient, Spec
from tests.fusions.products import plan
from tests.twins import assert_as_meant, sequential, tensor

KINDS = {"m": ops.MatMul, "b": ops.Bias, "g": ops.GELU, "r": ops.ReLU, "n": ops.LayerNorm, "f": ops.Fork}
KINDS |= {"s": ops.SwiGLU, "c": ops.ClampedSwiGLU}
MAKE = {
    "m": lambda: ops.MatMul(4, 4),
    "b": lambda: ops.Bias(4),
    "n": lambda: ops.LayerNorm(4),
    "f": lambda: ops.Fork("a"),
}


def listed(text):
    return [MAKE.get(letter, KINDS[letter])() for letter in text]


M, B, G, R, N = (KINDS[k] for k in "mbgrn")

# pattern, the list, and where it fits: [(start, stop), ...], for each start the longest first
FITS = {
    "one": ([G], "gbg", [(0, 1), (2, 3)]),
    "sequence": ([M, B], "mbgmb", [(0, 2), (3, 5)]),
    "not_at_the_end": ([M, B], "gm", []),
    "overlapping": ([G, G], "ggg", [(0, 2), (1, 3)]),
    "alternatives": ([B, OneOf(G, R)], "bgbrbn", [(0, 2), (2, 4)]),
    "optional_inside": ([M, Optional(B), G], "mbgmg", [(0, 3), (3, 5)]),
    "optional_at_the_end": ([M, Optional(B)], "mbm", [(0, 2), (0, 1), (2, 3)]),
    "optional_at_the_start": ([Optional(M), B], "mb", [(0, 2), (1, 2)]),
    "repeat": ([Repeat(G)], "ggb", [(0, 2), (0, 1), (1, 2)]),
    "repeat_at_least": ([Repeat(G, at_least=2)], "gggb", [(0, 3), (0, 2), (1, 3)]),
    "repeat_none": ([M, Repeat(G, at_least=0), R], "mrmggr", [(0, 2), (2, 6)]),
    "repeated_alternatives": ([M, Repeat(OneOf(B, G))], "mbgb", [(0, 4), (0, 3), (0, 2)]),
    "repeated_optional": ([M, Repeat(Optional(B)), G], "mbbg", [(0, 4)]),
    "optional_repeat": ([M, Optional(Repeat(B, 2)), G], "mbbgmgmbg", [(0, 4), (4, 6)]),
    "any_row_op": ([M, ops.RowOp], "mbmm", [(0, 2)]),
    "any_opaque_op": ([ops.UnfusedOperation], "mb", [(0, 1)]),
    "family": ([B, ops.GatedUnit], "bsbcbgbr", [(0, 2), (2, 4)]),
    "family_or": ([OneOf(ops.GatedUnit, G)], "sgb", [(0, 1), (1, 2)]),
    "any_op": ([ops.FusableOperation], "mbf", [(0, 1), (1, 2), (2, 3)]),
    "structure_is_an_op": ([M, B], "mfb", []),
}


@pytest.mark.parametrize("name", FITS)
def test_where_a_pattern_fits(name):
    pattern, text, want = FITS[name]
    found = listed(text)
    parts = check(pattern, name)
    assert [(start, stop) for start in range(len(found)) for stop in matches(parts, found, start)] == want


class MyGELU(ops.GELU):
    """Another formula, perhaps: a kind of its own."""


class SameGELU(ops.GELU):
    kind = ops.GELU


def test_a_subclass_is_another_kind_unless_it_says_so_or_wraps_the_class():
    assert list(matches([G], [MyGELU()], 0)) == []
    assert list(matches([MyGELU], [MyGELU()], 0)) == [1]
    assert list(matches([G], [SameGELU()], 0)) == [1]
    assert list(matches([ops.RowOp], [MyGELU()], 0)) == [1]
    # As fully_shard makes it.
    op = ops.GELU()
    op.__class__ = type("Wrapped", (type("Wrapper", (), {}), ops.GELU), {})
    assert list(matches([G], [op], 0)) == [1]


class MySwiGLU(ops.SwiGLU):
    pass


class WrappedSwiGLU(ops.SwiGLU):
    kind = ops.SwiGLU


def test_a_family_is_every_kind_below_it():
    """A subclass of a family is a kind like others: in a pattern it stands for itself alone."""
    for op in (ops.SwiGLU(), ops.GLU(), MySwiGLU(), WrappedSwiGLU()):
        assert list(matches([ops.GatedUnit], [op], 0)) == [1]
    assert list(matches([ops.SwiGLU], [MySwiGLU()], 0)) == []
    assert list(matches([ops.GatedUnit], [ops.SiLU()], 0)) == []
    families = [k for k in vars(ops).values() if getattr(k, "family", False)]
    general = {ops.FusableOperation, ops.RowOp, ops.UnfusedOperation, ops.FusedOperation}
    of_heads = {ops.OfHeads, ops.OfPositions, ops.SharedAttention}
    assert set(families) == {*general, *of_heads, ops.Collective, ops.Cut, ops.GatedUnit, ops.Norm}


def test_a_fusion_of_a_family_fires():
    fusions.fusion(forward=[ops.GatedUnit], name="gated", cost=lambda m: fusions.Cost(seconds=0.0))(
        lambda m, x: m[0].op.compute(x)
    )
    for op in (ops.GEGLU(), ops.ClampedSwiGLU(gate_first=False)):
        model, x = sequential(op), tensor(3, 8)
        assert [s.name for s in model.plan(x).forward] == ["gated"]
        assert_as_meant(model, x)


class Compound(ops.Linear):
    pass


class Scheme(ops.RowOp):
    """Leaves its formula to subclasses, and does not say that it is a family."""


class Neither(ops.FusableOperation):
    pass


class OpaqueScheme(ops.UnfusedOperation):
    pass


NEVER = {
    "other_kind": ([SameGELU], "the kind of SameGELU is GELU, so the pattern can never match; name GELU"),
    "no_formula": ([Scheme], "Scheme defines no compute, .* never match; name its subclasses, or say family = True"),
    "no_forward": ([M, OneOf(B, OpaqueScheme)], "OpaqueScheme defines no op_forward"),
    "empty": ([], "its pattern is empty and can never match"),
    "no_kinds": ([M, OneOf()], r"OneOf\(\) without kinds can never match"),
    "linear": ([ops.Linear, G], r"Linear is lowered .* can never match; name those instead \(Linear is MatMul, Bias\)"),
    "linear_inside": ([OneOf(M, ops.Linear)], "Linear is lowered"),
    "linear_deep_inside": ([Repeat(Optional(ops.Linear))], "Linear is lowered"),
    "compound": ([Compound], "Compound is lowered"),
    "no_op": ([M, int], "int is not a FusableOperation, so its pattern can never match: list classes of ops, such as"),
    "an_op_itself": ([ops.GELU()], r"GELU\(.*\) is an op, and a pattern lists classes: write GELU, and say by when="),
    "an_op_inside": ([M, Repeat(OneOf(B, ops.ReLU()))], r"ReLU\(\) is an op, and a pattern lists classes: write ReLU"),
    "a_linear_itself": ([ops.Linear(2, 2)], r"name those instead \(Linear is MatMul, Bias\)"),
    "of_torch": ([torch.nn.GELU], r"torch\.nn\.modules\.activation\.GELU is not a FusableOperation"),
    "a_name": (["GELU"], "'GELU' is not a FusableOperation"),
    "all_optional": ([Optional(M), Optional(B)], "every part of its pattern is optional"),
    "repeat_none": ([Repeat(G, at_least=0)], "every part of its pattern is optional"),
    "repeat_optional": ([Repeat(Optional(G)), Optional(B)], "every part of its pattern is optional"),
    "neither": ([Neither], "Neither is neither a RowOp nor an UnfusedOperation"),
}


@pytest.mark.parametrize("direction", ["forward", "backward", "joint"])
@pytest.mark.parametrize("name", NEVER)
def test_a_pattern_that_can_never_match_is_refused_when_it_is_declared(name, direction):
    pattern, words = NEVER[name]
    with pytest.raises(ValueError, match=f"fusion 'mine': .*{words}"):
        fusions.fusion(**{direction: pattern}, name="mine")(lambda m, x: x)
    assert "mine" not in fusions.names()


def test_render():
    pattern = check([M, Optional(B), OneOf(G, R), Repeat(N, 2), Optional(Repeat(G))], "mine")
    assert render(pattern) == "MatMul, [Bias], GELU | ReLU, LayerNorm x 2+, [GELU x 1+]"


def product(dy: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return dy @ other


def chosen(answer: Any) -> fusions.Fusion:
    """dx = dy W by what `answer` makes of that function; dW = dy^T x as it is declared."""

    @fusion(
        backward=[ops.MatMul],
        details=Details(
            gradients=[Gradient(("input",), ("0.weight",), "dx"), Gradient(("0.weight",), ("input",), "dw")],
            choose=lambda m, method: answer(product) if method == "dx" else None,
            registered=False,
        ),  # type: ignore[arg-type, return-value]
        cost=lambda m: Cost(seconds=1e-9),
    )
    class mine:
        @staticmethod
        def dw(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])

    return mine


def described(function: Any) -> Body:
    return Body(function, describe=lambda: "long multiplication")


@pytest.mark.parametrize("answer", [lambda f: f, Body, described])
def test_what_is_chosen_runs_and_what_is_not_is_as_declared(answer: Any) -> None:
    model, x = sequential(ops.MatMul(8, 6)), tensor(5, 8)
    with fusions.only(chosen(answer)):
        assert [s.name for s in model.plan(x).backward] == ["mine", "mine"]
        assert_as_meant(model, x)


def overwritten(p: Plan) -> list[Any]:
    """Pairs of an output and the input that it may overwrite, in kernels of the backward."""
    return [pair for s in p.backward for pair in getattr(getattr(s.task, "description", None), "overwrites", ())]


def test_only_of_a_plain_body_it_is_known_that_nobody_else_holds_what_it_made() -> None:
    parts = ops.MatMul(4096, 4096), ops.Dropout(0.1), ops.MatMul(4096, 4096)
    others = [name for name in fusions.names() if name != "matmul_backward"]
    for answer, number in ((lambda f: f, 0), (Body, 0), (lambda f: Body(f, plain=True), 1)):
        with fusions.only(chosen(answer), *others):
            assert len(overwritten(plan(*parts))) == number
    model, x = te_fuser.Sequential(ops.MatMul(8, 6), ops.MatMul(6, 8)), torch.randn(5, 8, requires_grad=True)
    with fusions.only(chosen(Body)):
        assert "algorithm" not in str(model.explain(x, details=True))
    with fusions.only(chosen(described)):
        assert str(model.explain(x, details=True)).count("algorithm: long multiplication") == 2


def test_row_ops_run_by_something_that_there_is() -> None:
    x = Spec((5, 8), torch.float32, torch.device("cpu"))
    match = Match((), x, x)
    assert match.target == "torch"
    with pytest.warns(DeprecationWarning, match="is called Match.target now") as heard:
        assert match.kernels == "torch"
    assert heard[0].filename == __file__
