"""Patterns: where they fit, what can never fit, and how they read."""

from __future__ import annotations

import pytest
import torch

from te_fuser import fusions, ops
from te_fuser.fusions import OneOf, Optional, Repeat
from te_fuser.fusions.pattern import check, matches, render
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


def test_a_subclass_is_another_kind_unless_it_says_so():
    assert list(matches([G], [MyGELU()], 0)) == []
    assert list(matches([MyGELU], [MyGELU()], 0)) == [1]
    assert list(matches([G], [SameGELU()], 0)) == [1]
    assert list(matches([ops.RowOp], [MyGELU()], 0)) == [1]


def test_a_wrapper_in_front_of_the_class_is_the_same_kind():
    """As fully_shard makes it."""
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
