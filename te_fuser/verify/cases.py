"""Cases of a model's runs: shapes, dtypes, strides, which gradients are needed, training or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from te_fuser.dtypes import text_of

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
