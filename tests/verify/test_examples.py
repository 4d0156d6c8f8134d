"""Ops, lists and layouts that verify makes: ops by their class or a user's row, lists by what a pattern stands for."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import partial
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fusions import Details, OneOf, Optional, Repeat, fusion
from te_fuser.ops.attention.heads import PackedHeads
from te_fuser.ops.base import FusableOperation, Spec
from te_fuser.verify import VerificationError, example
from te_fuser.verify.examples import EXAMPLES, LAYOUTS, OpExample, example_cases, example_of, examples, expand

pytestmark = pytest.mark.usefixtures("few_rows")
check = partial(te_fuser.verify, dtypes=[torch.float32], kernels="reference", device="cpu")

# Bases, and what is made of other ops.
_OTHERS = {
    ops.Bound, ops.Collective, ops.Cut, ops.Float8MatMul, ops.FusableOperation, ops.FusedOperation, ops.GatedUnit,
    ops.Norm, ops.OfHeads, ops.OfPositions, ops.OwnScalesMatMul, ops.PartlyFloat8MatMul, ops.RowOp, ops.SharedAttention,
    ops.UnfusedOperation,
}  # fmt: skip
KINDS: list[type[FusableOperation]] = [
    kind
    for name in ops.__all__
    if inspect.isclass(kind := getattr(ops, name)) and issubclass(kind, FusableOperation) and kind not in _OTHERS
]


def made(kind: type[FusableOperation], features: int, **changed: Any) -> Any:
    return example_of(kind, features, torch.Generator().manual_seed(3), "free", **changed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_op_of_every_class(kind: type[FusableOperation]) -> None:
    """The op takes so many features, names only free names, and draws from its given generator alone."""
    before = torch.get_rng_state()
    first, second = made(kind, 48), made(kind, 48)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(first) is kind and not any(p.is_meta for p in first.parameters())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and a.unique().numel() == a.numel()
    if "name" in inspect.signature(kind).parameters:
        assert first.name == "free"


@pytest.mark.parametrize("features", [3, 7, 16, 24, 100, 768])
@pytest.mark.parametrize("changed", [{}, {"mask": "causal", "packing": "blocked"}, {"layout": "batch_first"}], ids=str)
def test_attention_of_so_many_features(changed: dict[str, str], features: int) -> None:
    op = made(ops.DotProductAttention, features, **changed)
    out = op.infer(Spec((7, 2, features), torch.float32, torch.device("cpu")))
    assert out.features == op.heads * op.head_dim and not op.named_inputs()


@pytest.mark.parametrize("features", [6, 9, 16, 64, 100, 768])
def test_a_rotation_of_so_many_features(features: int) -> None:
    op, x = made(ops.RotaryEmbedding, features), Spec((7, 2, features), torch.float32, torch.device("cpu"))
    assert op.infer(x) == x and op.rotary_dim % 2 == 0 < op.rotary_dim <= op.packed.head_dim


def test_features_that_no_heads_have() -> None:
    assert made(ops.DotProductAttention, 48).packed == PackedHeads(2, 2, 8)
    with pytest.raises(ValueError, match="no packed queries, keys and values have 2 features"):
        made(ops.DotProductAttention, 2)
    with pytest.raises(ValueError, match="no packed queries, keys and values have 7 features"):
        made(ops.RotaryEmbedding, 7)


@example(arguments=lambda features, name: {"scale": f"{name}_scale"}, normal=lambda op: (op.center, 1e-3))
class Centred(ops.RowOp):
    """y = weight x + scale."""

    def __init__(self, features: int, *, scale: str, center: float = 3.0, device: Any = None) -> None:
        super().__init__()
        self.scale, self.center = scale, center
        self.weight = torch.nn.Parameter(torch.empty(features, device=device))

    def compute(self, x: Any, weight: Any) -> Any:
        return x * weight


class Heir(Centred):
    """One with its base's row."""


@pytest.mark.parametrize("kind", [Centred, Heir])
def test_a_row_of_a_user(kind: type[Centred]) -> None:
    op = made(kind, 5, center=7.0)
    assert type(op) is kind and op.scale == "free_scale" and EXAMPLES.of(kind) is EXAMPLES.of(Centred)
    torch.testing.assert_close(op.weight.detach(), torch.full((5,), 7.0), rtol=0.0, atol=0.01)


@pytest.mark.parametrize(
    ("name", "value", "decorator"),
    [
        ("example", lambda self, features, rng: self, "@example of te_fuser.verify"),
        ("prototype_arguments", {"p": 0.25}, "@example of te_fuser.verify"),
        ("other_choices", {}, "@example of te_fuser.verify"),
        ("autocast", "lower", "@autocast_policy(...) of te_fuser.ops.autocast"),
        ("by_torch", None, "@torch_function(...) of te_fuser.ops.tensor_function"),
        ("spread", lambda self, x, told: x, "@sharding_rule(...) of te_fuser.parallel"),
        ("exports", True, "@op_table.exports.row(...) of te_fuser.ops"),
    ],
)
def test_a_member_that_nobody_reads(name: str, value: object, decorator: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"Old.{name} is not read any more: put {decorator} above the class")):
        type("Old", (ops.RowOp,), {name: value})


# ---- verifying with ops of one's own


@example(
    make=lambda features, rng, **others: Offset(torch.randn(features, generator=rng), **others),
    choices={"sign": "minus"},
)
class Offset(ops.RowOp):
    """y = x - offset or offset - x."""

    def __init__(self, offset: torch.Tensor, sign: str = "plus") -> None:
        super().__init__()
        self.offset, self.sign = torch.nn.Parameter(offset), sign

    def compute(self, x: Any, offset: Any) -> Any:
        return x - offset if self.sign == "plus" else offset - x


def test_an_op_says_how_it_is_made_and_what_else_to_try() -> None:
    @fusion(forward=[Offset], when=lambda m: m[0].op.sign == "plus" or "minus", details=Details(registered=False))
    def right(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x - m[0].offset

    assert check(right).passed
    wrong = dataclasses.replace(right, when=None)
    with pytest.raises(VerificationError, match="Offset with sign='minus'"):
        check(wrong)
    report = check(Offset(torch.randn(8)))
    assert report.passed and "gradient of 0.offset" in {row.tensor for row in report.rows}


@example(arguments={"power": 2.0})
class Weighted(ops.RowOp):
    """y = x * weight**power."""

    def __init__(self, features: int, power: float, flat: bool = False) -> None:
        super().__init__()
        self.power, self.flat = power, flat
        self.weight = torch.nn.Parameter(torch.full((features,), 2.0))

    def compute(self, x: Any, weight: Any) -> Any:
        return x if self.flat else x * weight**self.power


def test_an_op_is_made_by_its_constructor() -> None:
    made = example_of(Weighted, 5, torch.Generator(), flat=True)
    assert isinstance(made, Weighted) and made.weight.shape == (5,) and (made.power, made.flat) == (2.0, True)
    like = example_of(Weighted, 7, torch.Generator(), power=3.0)
    assert isinstance(like, Weighted) and 0 < (like.weight - 2.0).abs().max() < 2.5 and like.power == 3.0

    @fusion(forward=[Weighted], details=Details(registered=False))
    def squared(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * m[0].weight ** 2

    with pytest.raises(VerificationError, match="Weighted with (power=4.125|flat=True)"):
        check(squared)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "missing 1 required positional argument: 'offset'"),
        ({"make": lambda: 3}, "its example is 3"),
        ({"make": lambda: {}["size"]}, "'size'"),
        ({"arguments": lambda features, name: None}, "'NoneType' object is not .*"),
    ],
)
def test_an_op_that_its_row_does_not_make(row: dict[str, Any], words: str) -> None:
    @example(**row)
    class Other(Offset):
        """One with a row of its own."""

    entry = fusion(forward=[Other], name="other", details=Details(registered=False))(lambda m, x: x - m[0].offset)
    with pytest.raises(ValueError, match=rf"cannot make a Other by itself \(.*({words})\): say how by @example\("):
        check(entry)


class Affine(ops.RowOp):
    """y = x * w + b, made with numbers that hide what a fusion forgets."""

    def __init__(self, features: int, empty: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(features))
        self.b = torch.nn.Parameter(torch.full((features,), torch.nan) if empty else torch.zeros(features))

    def compute(self, x: Any, w: Any, b: Any) -> Any:
        return x * w + b


@pytest.mark.parametrize("right", [True, False])
def test_parameters_of_an_op_of_ones_own_are_random(right: bool) -> None:
    @fusion(forward=[ops.GELU, Affine], emits=["0.output"], details=Details(registered=False))
    def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(x, approximate=m[0].approximate)
        m.emit("0.output", y)
        return y * m[1].w + m[1].b if right else y * m[1].w[0]

    assert check(scaled, raise_on_failure=False).passed == right


def test_the_numbers_of_an_example() -> None:
    rng = torch.Generator().manual_seed(0)
    for given, mean, deviation in ((None, 1.0, 0.5), ((3.0, 0.1), 3.0, 0.1), (lambda op: (-2.0, 0.0), -2.0, 0.0)):
        op = Affine(2000)
        OpExample(normal=given).draw(op, rng)  # type: ignore[arg-type]
        assert abs(op.w.mean().item() - mean) < 0.1 and abs(op.w.std().item() - deviation) < 0.1
    op = Affine(2000, empty=True)
    OpExample().draw(op, rng)
    assert abs(op.b.mean().item()) < 0.1
    for wrong in (1.0, {"w": (0, 1)}, (1.0,)):
        with pytest.raises(TypeError, match="normal is a mean and a standard deviation"):
            OpExample(normal=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'argument'"):
        example(argument={"p": 0.25})


# ---- lists and layouts


def test_examples_of_expanded_patterns_match_and_fit_together() -> None:
    pattern = [ops.Fork, ops.LayerNorm, ops.MatMul, ops.Add, ops.AdaptiveLayerNorm, ops.DropPath, ops.SwiGLU]
    entry = fusion(forward=pattern, name="long", details=Details(registered=False))(lambda m, x: x)
    found = list(examples(entry, 16, torch.Generator().manual_seed(0)))
    assert all(list(entry.stops(e.ops, 0)) == [len(pattern)] for e in found)
    changed = {e.label.rpartition(" with ")[2] for e in found if e.changed}
    assert {"bias=False", "zero_centered_gamma=True", "gate_first=False"} <= changed
    pattern = (ops.MatMul, Optional(ops.Bias), OneOf(ops.GELU, ops.ReLU), Repeat(ops.Identity, 0))
    kinds = [[kind.__name__ for kind in found] for found in expand(pattern)]
    assert ["MatMul", "Bias", "GELU", "Identity"] in kinds
    assert ["MatMul", "ReLU"] in kinds or ["MatMul", "ReLU", "Identity"] in kinds
    assert len(kinds) <= 12


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_keep_the_numbers(name: str) -> None:
    t = torch.randn(3, 4, 5, 2)
    laid = LAYOUTS[name](t)
    assert laid.shape == t.shape
    if name not in ("same rows", "ones"):
        assert torch.equal(laid, t)
    if name != "contiguous":
        assert not laid.is_contiguous() or laid.data_ptr() % 16


def test_layouts_of_more_dimensions_are_tried() -> None:
    cases = [*example_cases([torch.float32], ["weight"], True, 8)]
    row, more = ({(c.layout, c.upstream) for c in cases if c.leading == at} for at in ((17,), (5, 4)))
    assert more == row - {("contiguous", "contiguous")} and len(more) > 1
