"""Recipes of FP8: formats, and how scales follow from the largest magnitudes seen."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

_MOST = (2.0 - 2.0**-23) * 2.0**127  # float32's largest number
_FLAG = "it is True or False"


def _check(given: Any, name: str, holds: bool, words: str, error: type[Exception] = ValueError) -> None:
    """Refuse an argument for which something does not hold."""
    if not holds:
        raise error(f"{type(given).__name__}({name}={getattr(given, name)!r}): {words}")


def _check_type(given: Any, name: str, kind: type, words: str) -> None:
    value = getattr(given, name)
    holds = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    _check(given, name, holds, words, TypeError)


def _check_whole(given: Any, name: str, least: int, most: float = math.inf) -> None:
    _check_type(given, name, int, "it is a whole number")
    holds = least <= getattr(given, name) <= most
    _check(given, name, holds, f"it is {least} {'or more' if most == math.inf else f'to {most}'}")


class Largest(NamedTuple):
    """The largest number of the format used in forward, and of that used in backward."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Formats of 8 bits: E4M3 in both directions, or E4M3 forward and E5M2 for gradients (HYBRID).

    E5M2 in both directions is a format that recipes refuse.
    """

    E4M3 = Largest(448.0, 448.0)
    E5M2 = Largest(57344.0, 57344.0)
    HYBRID = Largest(448.0, 57344.0)


@dataclass(frozen=True)
class MMParams:
    """Accumulation of a product in 8 bits.

    Attributes:
        use_split_accumulator: True sums in float32 throughout; False in fewer bits, where the library is faster so.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        _check_type(self, "use_split_accumulator", bool, _FLAG)


_GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_QUANTIZED = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_FAST, _SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)


@dataclass(frozen=True)
class QParams:
    """Rule for a scale from an amax: largest number of the format / max(amax, amax_epsilon).

    Attributes:
        power_2_scale: round scales down to powers of two.
        amax_epsilon: lower bound of the amax.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_type(self, "power_2_scale", bool, _FLAG)
        epsilon = self.amax_epsilon
        holds = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) and 0.0 <= epsilon <= _MOST
        _check(self, "amax_epsilon", holds, "it is a number from 0 on that float32 has")


Block = tuple[int, int]


class OwnScales(NamedTuple):
    """Rule for scales that are computed from the tensor itself, each from the largest magnitude of what it scales.

        scale = largest of the format / max(amax, amax_epsilon)    in float32; infinite: the largest one; of an amax
                                                                   that is 0, infinite or NaN: 1

    Attributes:
        by: the rule from amax to scale.
        block: (rows, columns) with one scale, where products sum along the columns; blocks at the end are smaller.
            None: one scale for the tensor.
    """

    by: QParams
    block: Block | None = None


def _is_one_of(*kinds: str) -> Any:
    """Method of a class that is True for these kinds of recipes and subclasses of theirs."""
    return classmethod(lambda cls: any(base.__name__ in kinds for base in cls.__mro__))


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """Base class of recipes: immutable, and equal where their fields are equal.

    Attributes:
        step: products run in FP8 if their numbers of features are multiples of it.
        formats: the allowed values of fp8_format.
        fp8_format: the formats in use.
        reduce_amax: True takes the largest amax over the ranks.
        override_linear_precision: True for those of (y, dx, dW) that stay in the model's dtype.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: how y = x W^T, dx = dy W and dW = dy^T x are summed.
        fp8_dpa, fp8_mha: attention in FP8, which is refused.
    """

    step: ClassVar[int] = 16
    formats: ClassVar[tuple[Format, ...]] = (Format.HYBRID, Format.E4M3)
    fp8_format = Format.E4M3
    reduce_amax = False
    override_linear_precision = (False, False, False)

    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        for name in _GEMMS:
            _check_type(self, name, MMParams, "it is an MMParams(use_split_accumulator=True or False)")
        for name in filter(self.__dict__.__contains__, _QUANTIZED):
            _check_type(self, name, QParams, "it is a QParams(power_2_scale, amax_epsilon)")
        _check_type(self, "fp8_format", Format, "it is one of te_fuser.recipe.Format")
        if self.fp8_format not in self.formats:
            takes = " or ".join(map(str, self.formats))
            raise ValueError(f"{type(self).__name__}(fp8_format={self.fp8_format}): it takes {takes}")
        for name in ("fp8_dpa", "fp8_mha"):
            _check_type(self, name, bool, _FLAG)
            words = "te_fuser has no attention in FP8; leave it out"
            _check(self, name, not getattr(self, name), words, NotImplementedError)

    @property
    @abstractmethod
    def own_scales(self) -> tuple[OwnScales, ...] | None:
        """Rules for scales computed from x, W and dy themselves; None for recipes with amax histories."""

    def _own_by(self, x: Block | None, weight: Block | None, dy: Block | None) -> tuple[OwnScales, ...]:
        """Rules by the `QParams` of x, W and dy, with blocks of these."""
        return tuple([OwnScales(getattr(self, name), b) for name, b in zip(_QUANTIZED, (x, weight, dy), strict=True)])

    @property
    def scales(self) -> str:
        """The part of x that has one scale: a "tensor", a "block" of 128 numbers, or one of fewer, "mx"."""
        block = None if self.own_scales is None else self.own_scales[0].block
        return "tensor" if block is None else "block" if block[1] == 128 else "mx"

    # Methods of recipes and of their classes.
    delayed = _is_one_of("DelayedScaling")
    float8_current_scaling = _is_one_of("Float8CurrentScaling")
    float8_per_tensor_scaling = _is_one_of("DelayedScaling", "Float8CurrentScaling")
    float8_block_scaling = _is_one_of("Float8BlockScaling")
    mxfp8 = _is_one_of("MXFP8BlockScaling")
    nvfp4 = _is_one_of()  # there is no recipe in 4 bits

    @classmethod
    def custom(cls) -> bool:
        """True for a recipe of your own."""
        return not (cls.float8_per_tensor_scaling() or cls.float8_block_scaling() or cls.mxfp8())


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales from the largest magnitudes of earlier calls.

    Before each product x, W and dy become x * scale in 8 bits, and their largest magnitude goes into a history. Then

        scale = largest of the format / amax(history) / 2^margin    in float32; infinite: the largest one; 1 at first

    History and scale move for what was quantized with gradients on and has a finite amax above 0.

    Attributes:
        margin: power of two by which scales are smaller, -126 to 126.
        interval: not used.
        fp8_format: which formats: Format.HYBRID or Format.E4M3.
        amax_history_len: the number of updates in a history.
        amax_compute_algo: "max", "most_recent", or a function of the history, float32 [amax_history_len, tensors],
            newest first, that returns [tensors], each from its own column.
        scaling_factor_compute_algo: a function (amax, scale, fp8_max, recipe) -> the new scale, all float32 [tensors];
            None: the formula.
        reduce_amax: True takes the largest amax over the ranks.
        override_linear_precision: True for those of (y, dx, dW) that stay in the model's dtype.

    Raises:
        TypeError: for a value of another type.
        ValueError: for E5M2 alone, an unknown algorithm, a length below 1, a margin out of range.
        NotImplementedError: for attention in FP8.

    Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole(self, "margin", -126, 126)
        words = (
            "the second argument is interval, as in older releases of Transformer Engine, and fp8_format in newer "
            "ones: give what stands behind margin by name"
        )
        _check(self, "interval", not isinstance(self.interval, Format), words, TypeError)
        _check_whole(self, "interval", 1)
        _check_whole(self, "amax_history_len", 1)
        _check_type(self, "reduce_amax", bool, _FLAG)
        algo, factor, given = self.amax_compute_algo, self.scaling_factor_compute_algo, self.override_linear_precision
        holds = callable(algo) or algo in ("max", "most_recent")
        _check(self, "amax_compute_algo", holds, 'it is "max", "most_recent", or a function')
        holds = factor is None or callable(factor)
        _check(self, "scaling_factor_compute_algo", holds, "it is a function or None", TypeError)
        holds = isinstance(given, (tuple, list)) and [*map(type, given)] == [bool] * 3
        _check(self, "override_linear_precision", holds, "it is three times True or False: y, dx, dW", TypeError)
        object.__setattr__(self, "override_linear_precision", tuple(given))

    @property
    def own_scales(self) -> None:
        """None: scales are kept from call to call."""


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Scale of each tensor from its own amax, in each call: no history, and no communication between ranks.

        scale = largest of the format / max(amax, amax_epsilon)    in float32; infinite: the largest one; 1 where the
                                                                   amax is 0, infinite or NaN

    Attributes:
        fp8_format: which formats: Format.HYBRID or Format.E4M3.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: how x, W and dy get their scales.
    """

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()

    @property
    def own_scales(self) -> tuple[OwnScales, ...]:
        """Rules of one scale for each tensor."""
        return self._own_by(None, None, None)


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """One scale for each 1 x 128 numbers of x and dy, along what is summed, and for each 128 x 128 of W.

    Scales follow from the amax of a block as in `Float8CurrentScaling`, rounded down to powers of two. x and dy are
    quantized once for each product that reads them. Products with features that are no multiple of 128 stay in their
    dtype.

    Attributes:
        fp8_format: Format.E4M3.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: how x, W and dy get their scales.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1, 2 and 1: the dimensions of a block.
    """

    step: ClassVar[int] = 128
    formats: ClassVar[tuple[Format, ...]] = (Format.E4M3,)

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = QParams(power_2_scale=True)
    fp8_quant_fwd_weight: QParams = QParams(power_2_scale=True)
    fp8_quant_bwd_grad: QParams = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default=_SPLIT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, dims in (("x_block_scaling_dim", 1), ("w_block_scaling_dim", 2), ("grad_block_scaling_dim", 1)):
            holds = type(given := getattr(self, name)) is int and given == dims
            _check(self, name, holds, "blocks are 1 x 128 of x and dy, 128 x 128 of W; leave it out")
        for name in _GEMMS:
            _check(self, name, getattr(self, name).use_split_accumulator, "sums over blocks are split; leave it out")

    @property
    def own_scales(self) -> tuple[OwnScales, ...]:
        """Rules of one scale for each block."""
        return self._own_by((1, self.step), (self.step, self.step), (1, self.step))


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """One scale, a power of two, for each 32 numbers along what is summed: emulated on a CPU, refused on GPUs.

    Products with features that are no multiple of 32 stay in their dtype.

    Attributes:
        margin: 0.
        fp8_format: Format.E4M3.
    """

    step: ClassVar[int] = 32
    formats: ClassVar[tuple[Format, ...]] = (Format.E4M3,)

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_gemm_fprop: MMParams = field(default=_SPLIT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = type(self.margin) is int and self.margin == 0
        _check(self, "margin", holds, "scales of 32 numbers have none; leave it out")

    @property
    def own_scales(self) -> tuple[OwnScales, ...]:
        """Rules of one scale for each block."""
        return (OwnScales(QParams(power_2_scale=True), (1, self.step)),) * 3
