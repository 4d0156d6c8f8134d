"""Examples that verify runs: cases of shapes, dtypes and gradients, ops by class, lists that patterns match."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from te_fuser import ops
from te_fuser.dtypes import text_of
from te_fuser.fusions import Fusion, OneOf, Optional, Repeat
from te_fuser.fusions.pattern import PatternPart
from te_fuser.ops import op_table
from te_fuser.ops.base import FusableOperation, Spec, output_specs
from te_fuser.ops.op_table import Kind, OpTable
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.row_op import RowOp

# Rows around the multiples that kernels work in, and an outer and a batch dimension.
LEADING = ((1,), (7,), (16,), (33,), (128,), (515,), (3, 11), (1, 16))
# More rows than any schedule begins at to share them out or to sum otherwise, where features leave room for so many.
_MANY_ROWS, _LONG, _MANY_ELEMENTS = 20_011, 1_031, 1 << 20
VARIANT_LEADING = (17,)
LAYOUT_LEADING = (5, 4)  # strides mean more with one dimension more


@dataclass(frozen=True)
class Case:
    """One way to run a model.

    Attributes:
        leading: the dimensions before the features of an example input; None for a given one.
        layout: how the input lies in memory, a key of LAYOUTS; `upstream` how the output's gradient does.
        frozen: which gradients are not needed: "none", "input", "parameters", "all", "all but NAME", or a set of
            names ("input", "input NAME", parameters by their path).
        calls: how often the model is called before one backward.
        negated: whether the parameters were others in the calls before, and changed in place.
    """

    name: str
    dtype: torch.dtype | None
    leading: tuple[int, ...] | None = None
    layout: str = "contiguous"
    upstream: str = "contiguous"
    frozen: str | frozenset[str] = "none"
    calls: int = 1
    other_mode: bool = False
    negated: bool = False


def _every_other(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
    wide[..., ::2] = t
    return wide[..., ::2]


# Name of a layout -> a tensor that lies so, with the same numbers where that is possible.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else _every_other(t),
    "every other column": _every_other,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
    # Contiguous, but not at an address that 16 divides.
    "misaligned": lambda t: t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t),
    # Every row the first one, by stride 0.
    "same rows": lambda t: t[:1].expand(t.shape) if t.dim() > 1 and t.shape[0] else t,
    # The gradient that y.sum().backward() brings: one 1 by stride 0.
    "ones": lambda t: t.new_ones(()).expand(t.shape),
}

# Name of a variant -> what it changes.
VARIANTS: dict[str, dict[str, object]] = {
    "transposed input": {"layout": "transposed"},
    "strided input": {"layout": "every other column"},
    "misaligned input": {"layout": "misaligned"},
    "input of stride 0": {"layout": "same rows"},
    "gradient of stride 0": {"upstream": "ones"},
    "transposed gradient": {"upstream": "transposed"},
    "misaligned gradient": {"upstream": "misaligned"},
    "input frozen": {"frozen": "input"},
    "parameters frozen": {"frozen": "parameters"},
    "no gradients": {"frozen": "all"},
    "two calls, one backward": {"calls": 2},
    "train and eval swapped": {"other_mode": True},
    "parameters changed in place": {"negated": True},
}


def example_cases(
    dtypes: Sequence[torch.dtype], parameters: Sequence[str], draws: bool, features: int
) -> Iterator[Case]:
    """Every shape and every variant in every dtype."""
    many = max(_LONG, min(_MANY_ROWS, _MANY_ELEMENTS // max(features, 1)))
    for dtype in dtypes:
        for leading in (*LEADING, (1, _LONG), *([(many,)] if dtype != torch.float64 else [])):
            yield _case(dtype, leading)
        yield from variants(_case(dtype, VARIANT_LEADING), parameters, draws)
        for case in variants(_case(dtype, LAYOUT_LEADING), (), False):
            if case.layout != "contiguous" or case.upstream != "contiguous":
                yield case


def variants(case: Case, parameters: Sequence[str], draws: bool) -> Iterator[Case]:
    """The variants of a case; each of up to 8 parameters is also the only one to need a gradient."""
    for name, changes in VARIANTS.items():
        if (changes.get("other_mode") and not draws) or (changes.get("negated") and not parameters):
            continue
        yield replace(case, name=f"{case.name}, {name}", **changes)  # type: ignore[arg-type]
    for name in parameters[:8]:
        yield replace(case, name=f"{case.name}, gradient of {name} alone", frozen=f"all but {name}")


def _case(dtype: torch.dtype, leading: tuple[int, ...]) -> Case:
    return Case(f"{text_of(dtype)} [{', '.join(map(str, leading))}, features]", dtype, leading)


Kinds = tuple[type[FusableOperation], ...]

_MOST_LISTS = 12
_MOST_VARIANTS = 16
# What stands for a pattern part that takes any op.
_STANDS_FOR: dict[type[FusableOperation], type[FusableOperation]] = {
    FusableOperation: ops.GELU,
    RowOp: ops.GELU,
    UnfusedOperation: ops.MatMul,
}


_UNINITIALIZED = 1e4  # numbers from here on, and NaN, are those of memory that no constructor wrote to


@dataclass(frozen=True)
class OpExample:
    """Construction of an op from its class.

    The constructor gets, where it takes these, the number of input features as `features`, `in_features` and
    `out_features`, a free `name`, and "meta" as `device`. Its parameters get random numbers.

    Attributes:
        arguments: its further arguments; or a function (features, name) that gives these.
        choices: argument -> another text to try; switches and floating-point numbers are changed without being named.
        make: called in place of the constructor; gets a torch.Generator as `rng`, too, where it takes one.
        normal: mean and standard deviation of these, or a function of the op that gives them; None: 0.5 around the
            numbers that the constructor gave, around 0 where it gave none.
    """

    arguments: Mapping[str, Any] | Callable[[int, str], Mapping[str, Any]] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    make: Callable[..., FusableOperation] | None = None
    normal: tuple[float, float] | Callable[[Any], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        pair = self.normal if self.normal is not None and not callable(self.normal) else (0.0, 0.5)
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(n, (int, float)) for n in pair):
            raise TypeError(f"normal is a mean and a standard deviation, (1.0, 0.2), or a function, got {pair!r}")

    def draw(self, op: FusableOperation, rng: torch.Generator) -> None:
        """Give the op's parameters random numbers."""
        found = self.normal(op) if callable(self.normal) else self.normal
        mean, deviation = found or (0.0, 0.5)
        made = found is None and not any(p.is_meta for p in op.parameters())
        if any(p.is_meta for p in op.parameters()):
            op.to_empty(device=rng.device)
        with torch.no_grad():
            for p in (p for p in op.parameters() if p.is_floating_point()):
                if not (made and p.numel() and p.abs().max() < _UNINITIALIZED):
                    p.zero_()
                p.add_(torch.empty_like(p).normal_(mean, deviation, generator=rng))


EXAMPLES = OpTable("example", default=OpExample())


def example(**attributes: Any) -> Callable[[Kind], Kind]:
    """Decorator that gives a class of ops, and those derived from it, an `OpExample` of these attributes."""
    return EXAMPLES.row(OpExample(**attributes))


def example_of(
    kind: type[FusableOperation], features: int, rng: torch.Generator, name: str = "value", /, **changed: Any
) -> FusableOperation:
    """An op of a class for so many input features; `changed` has arguments of its own."""
    row = EXAMPLES.of(kind)
    known: dict[str, Any] = dict.fromkeys(("features", "in_features", "out_features"), features)
    known |= {"name": name, "device": "meta", **({"rng": rng} if row.make else {})}
    takes = inspect.signature(row.make or kind).parameters
    arguments = row.arguments(features, name) if callable(row.arguments) else row.arguments
    op = (row.make or kind)(**{k: v for k, v in known.items() if k in takes} | {**arguments, **changed})
    if not isinstance(op, FusableOperation):
        raise TypeError(f"its example is {op!r}")
    if row.make is None or any(p.is_meta for p in op.parameters()):
        row.draw(op, rng)
    return op


def _packed(features: int, smallest: int = 1) -> dict[str, int]:
    """Heads of q, k and v of that size, as many of each where that can be, of about 8 features."""
    dims = [dim for dim in range(smallest, features // 3 + 1) if features % dim == 0]
    if not dims:
        raise ValueError(
            f"no packed queries, keys and values have {features} features: that is (heads + 2 * kv_heads) * head_dim "
            f"with head_dim >= {smallest}; take a multiple of {3 * smallest}"
        )
    dim = min(dims, key=lambda dim: (features // dim % 3 != 0, abs(dim - 8)))
    total = features // dim
    heads, kv_heads = (total - 2, 1) if total % 3 else (total // 3, total // 3)
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}


def _one_head(features: int, name: str) -> dict[str, int]:
    return {"head_dim": features, "heads": 1}


EXAMPLES.add(OpExample(normal=lambda op: (0.0, max(op.in_features, 1) ** -0.5)), ops.MatMul, ops.Linear)
EXAMPLES.add(OpExample(normal=lambda op: (0.0 if op.zero_centered_gamma else 1.0, 0.5)), ops.Norm)
EXAMPLES.add(OpExample(normal=lambda op: (1.0, 0.5)), ops.Scale)
EXAMPLES.add(OpExample(choices={"approximate": "none"}), ops.GELU, ops.GEGLU)
EXAMPLES.add(OpExample({"p": 0.25}), ops.Dropout)
EXAMPLES.add(OpExample({"p": 0.25, "batch_dim": 0}), ops.DropPath)
EXAMPLES.add(OpExample({"dtype": torch.bfloat16}), ops.Cast)
EXAMPLES.add(OpExample({"dtype": torch.float32}), ops.QuantizedMatMul)
EXAMPLES.add(OpExample({"group": ops.Group()}), ops.Collective)
EXAMPLES.add(OpExample({"group": ops.Group(), "cut": 0, "join": 1}), ops.AllToAll)
EXAMPLES.add(OpExample({"head_dim": 8, "heads": 2, "kv_heads": 1}), ops.QueriesApart, ops.KeyValueCache)
EXAMPLES.add(OpExample({"start_dim": 0, "end_dim": -2}), ops.Flatten)
EXAMPLES.add(OpExample(lambda features, name: {"dim": -1, "unflattened_size": (1, features)}), ops.Unflatten)
EXAMPLES.add(OpExample(make=lambda features: ops.Reshape(-1, features)), ops.Reshape)
EXAMPLES.add(OpExample(lambda _, name: {"dtype": torch.float8_e4m3fn, "scale": f"{name}_scale"}), ops.Quantize)
EXAMPLES.add(OpExample(lambda _, name: {"dtype": torch.float8_e5m2, "scale": f"{name}_scale"}), ops.QuantizeGradient)
EXAMPLES.add(OpExample(_one_head, {"norm": "LayerNorm"}, normal=lambda op: (1.0, 0.5)), ops.HeadNorm)
EXAMPLES.add(OpExample(_one_head, {"layout": "batch_first", "style": "interleaved"}), ops.RotaryByAngles)
EXAMPLES.add(
    OpExample(lambda _, name: {"scale": f"{name}_scale", "shift": f"{name}_shift", "batch_dim": 0}),
    ops.AdaptiveLayerNorm,
)
EXAMPLES.add(
    OpExample(
        lambda features, _: {**(heads := _packed(features, 2)), "rotary_dim": min(8, heads["head_dim"] // 2 * 2)},
        {"layout": "batch_first", "packing": "blocked", "style": "interleaved"},
    ),
    ops.RotaryEmbedding,
)
EXAMPLES.add(
    OpExample(
        lambda features, _: {**_packed(features), "mask": "none", "layout": "sequence_first"},
        {"mask": "causal", "layout": "batch_first", "packing": "blocked"},
    ),
    ops.DotProductAttention,
)


@dataclass(frozen=True)
class Example:
    """A list of ops; `changed` when an argument of one is not its default."""

    label: str
    ops: tuple[FusableOperation, ...]
    changed: bool = False


def expand(pattern: Sequence[PatternPart]) -> list[Kinds]:
    """The kinds of ops in lists that match: every alternative, optional parts there and not, repeats at their least
    number and one more; the first ones, if they are many."""
    return list(itertools.islice(dict.fromkeys(_expansions(tuple(pattern))), _MOST_LISTS))


def _expansions(pattern: tuple[PatternPart, ...]) -> Iterator[Kinds]:
    if not pattern:
        yield ()
        return
    for rest in _expansions(pattern[1:]):
        for head in _heads(pattern[0]):
            yield (*head, *rest)


def _heads(part: PatternPart) -> Iterator[Kinds]:
    if isinstance(part, Optional):
        yield from _heads(part.part)
        yield ()
    elif isinstance(part, Repeat):
        for count in (max(part.at_least, 1), part.at_least + 1):
            yield from _expansions((part.part,) * count)
    else:
        for kind in part.kinds if isinstance(part, OneOf) else (part,):
            yield (_STANDS_FOR.get(kind, kind),)


def examples(fusion: Fusion, features: int, rng: torch.Generator) -> Iterator[Example]:
    """Op lists that the fusion's pattern matches, and variants with one argument changed."""
    for kinds in expand(fusion.pattern):
        label = ", ".join(kind.__name__ for kind in kinds)
        yield Example(label, tuple(_chain(kinds, features, rng, None)))
        for place, argument, other in itertools.islice(_changes(kinds), _MOST_VARIANTS):
            try:
                made = tuple(_chain(kinds, features, rng, (place, argument, other)))
            except (ValueError, TypeError):
                continue  # not every made-up number is one that the op takes
            yield Example(f"{label} with {argument}={other!r}", made, True)


def _chain(
    kinds: Kinds, features: int, rng: torch.Generator, change: tuple[int, str, Any] | None
) -> Iterator[FusableOperation]:
    """Ops that take one another's output; forks and what closes them share their names."""
    opened: list[str] = []
    x = Spec((2, 4, features), torch.float32, torch.device("cpu"))
    for place, kind in enumerate(kinds):
        name, changed = f"value{place}", {} if change is None or change[0] != place else {change[1]: change[2]}
        op = _made(kind, x.features, name, changed, rng)
        if opened and name in [given.name for given in op.named_inputs().values()]:
            op = _made(kind, x.features, opened.pop(), changed, rng)
        if op.named_outputs() and not op_table.exports.of(type(op)):
            opened.append(name)
        yield op
        x = output_specs(op, x)["output"]


def _made(
    kind: type[FusableOperation], features: int, name: str, changed: dict[str, Any], rng: torch.Generator
) -> FusableOperation:
    try:
        return example_of(kind, features, rng, name, **changed)
    except (TypeError, NotImplementedError, AttributeError, LookupError) as error:
        raise ValueError(
            f"verify cannot make a {kind.__name__} by itself ({error}): say how by @example(...) of "
            "te_fuser.verify above the class, or give the ops to verify with, verify(fusion, ops=[[...], ...])"
        ) from error


def _changes(kinds: Kinds) -> Iterator[tuple[int, str, Any]]:
    for place, kind in enumerate(kinds):
        for argument, parameter in inspect.signature(kind).parameters.items():
            default = parameter.default
            if isinstance(default, bool):
                yield place, argument, not default
            elif isinstance(default, float):
                yield place, argument, default * 2.0 + 0.125
            elif argument in (choices := EXAMPLES.of(kind).choices):
                yield place, argument, choices[argument]
