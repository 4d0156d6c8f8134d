"""Bound on a result's error against float64: at most twice that of plain PyTorch in the same dtype, plus one ulp.

PyTorch's libraries differ in how many products they add up in a row before they begin a new sum. The error of a sum
of n grows with the square root of n. So where the data have sums that long, a result's bound is larger by the
difference in error between the longest and the shortest such run.

Source: Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019).

The error of plain PyTorch is itself a matter of luck on few elements. So where the data at hand would fail a result,
plain PyTorch is asked again on neighbouring data, moved by at most an ulp, and its largest error counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from te_fuser.dtypes import text_of

Tensors = Mapping[str, torch.Tensor]
# (data, exact) -> results by name: plain PyTorch in the data's dtypes; exact: on float64 data, rounding nowhere.
Evaluate = Callable[[Tensors, bool], Tensors]

UPSTREAM = "upstream "  # how the names of incoming gradients begin, among the data

_TIMES_PLAIN = 2.0
_NEIGHBOURS = 24
_FEW, _HOPELESS = 3, 30.0  # luck does not explain such a multiple of what so many neighbours allow
_AT_ONCE = 1 << 24  # elements that are compared at a time: in float64 they take several times their memory
_RUNS = (192, 1024)  # products that MKL and oneDNN add up one after the other, in float32
_LIKE_ROUNDING = 10.0  # a wrong formula mostly errs by more times what is allowed
# Dtype of a result that errs so little -> what to do.
_ONCE, _BY_SUM = "compute in float32, and round once at the end", "add up many terms by .sum(), not one after another"
_ADVICE = {"bfloat16": _ONCE, "float16": _ONCE, "float32": _BY_SUM, "float64": _BY_SUM}
_EXACT_ULPS = 512.0  # what it is compared with has float64's rounding errors too
# What float64 may err by is not seen in float64: float32's error, scaled, is the yardstick.
_FLOAT32_EPS = torch.finfo(torch.float32).eps
_NARROWED = torch.finfo(torch.float64).eps / _FLOAT32_EPS


@dataclass(frozen=True)
class Distance:
    """Largest distance of two tensors' elements, and the root of the mean square."""

    largest: float = 0.0
    rms: float = 0.0

    def __mul__(self, factor: float) -> Distance:
        return Distance(self.largest * factor, self.rms * factor)

    def __add__(self, other: Distance) -> Distance:
        return Distance(self.largest + other.largest, self.rms + other.rms)

    def or_more(self, other: Distance) -> Distance:
        """The larger of each."""
        return Distance(max(self.largest, other.largest), max(self.rms, other.rms))


@dataclass(frozen=True)
class Row:
    """Errors of one tensor in one case, as shares of the tensor's scale.

    Attributes:
        tensor: which result: "output", "gradient of input", "gradient of 0.weight", ...
        error: the largest one, over the largest magnitude of the exact result.
        rms_error: the root of the mean square one, over that of the exact result.
        note: what is wrong where it is not a matter of accuracy.
    """

    case: str
    tensor: str
    error: float = 0.0
    allowed: float = 0.0
    rms_error: float = 0.0
    rms_allowed: float = 0.0
    note: str = ""
    dtype: str = ""

    @property
    def passed(self) -> bool:
        """True where both errors are allowed and nothing else is wrong."""
        return not self.note and self.error <= self.allowed and self.rms_error <= self.rms_allowed

    @property
    def share(self) -> float:
        """Share of the allowed error that was used; above 1 it failed."""
        if self.note:
            return float("inf")
        return max(_share(self.error, self.allowed), _share(self.rms_error, self.rms_allowed))

    def __str__(self) -> str:
        if self.note:
            return f"{self.case}: {self.tensor}: {self.note}"
        name, error, allowed = "error", self.error, self.allowed
        if error <= allowed:
            name, error, allowed = "root-mean-square error", self.rms_error, self.rms_allowed
        said = f"{self.case}: {self.tensor}: {name} {error:.2e} of its scale, allowed {allowed:.2e}"
        whose, to_do = self.dtype, _ADVICE.get(self.dtype, "")
        if self.share > _LIKE_ROUNDING and whose == "float64" and error <= _LIKE_ROUNDING * _FLOAT32_EPS:
            whose, to_do = "float32", "keep the dtype of the inputs in all that is computed"
        elif self.passed or self.share > _LIKE_ROUNDING or not to_do:
            return said
        if self.dtype == "float64":
            return f"{said}; this looks like rounding to {whose} rather than a wrong formula: {to_do}"
        wider = "float64" if whose == "float32" else "float32"
        return f"{said}; this is rounding to {whose} if {wider} passes, else a wrong formula: {to_do}"


def _share(error: float, allowed: float) -> float:
    if error <= 0.0:
        return 0.0
    return error / allowed if allowed > 0.0 else float("inf")


def distance(found: torch.Tensor, exact: torch.Tensor) -> Distance:
    """Distance between two tensors; equal infinities and NaN are none."""
    if not exact.numel():
        return Distance()
    pieces = [t.detach().reshape(-1).split(_AT_ONCE) for t in (found, exact)]
    largest, squares = [], []
    for a, b in zip(*pieces, strict=True):
        a, b = a.double(), b.double()
        apart = (a - b).abs_()
        if not apart.max().isfinite():
            apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, apart).nan_to_num(torch.inf, torch.inf)
        largest.append(apart.max())
        squares.append(apart.square().sum())
    return Distance(torch.stack(largest).max().item(), (torch.stack(squares).sum() / exact.numel()).sqrt().item())


def judge(
    case: str,
    found: Tensors,
    data: Tensors,
    evaluate: Evaluate,
    exactly: bool = True,
    coarsest: float = 0.0,
    turned: Callable[[Tensors], Tensors] | None = None,
    settled: Callable[[bool], bool] = bool,
) -> list[Row]:
    """One row for each result of a fused run on `data`.

    Args:
        coarsest: the eps of the narrowest dtype in between, where that is narrower than the data's.
        exactly: whether a result must be that of the data; else it may be that of data that differ by an ulp. So it
            is for intermediate values, which a kernel sees before they are rounded and stored.
        turned: float64 data -> exact results with what is rounded on the way, and lies next to a tie, rounded the other
            way. How far these are off is allowed as if plain PyTorch had erred by it: so few numbers lie so that it
            may have met others.
        settled: whether it is settled -> whether to stop: ranks of which each has its own results do so together.
    """
    exact = evaluate(doubled(data), True)
    scales = _sizes(exact)
    other = exact if turned is None else turned(doubled(data))
    plain = {name: distance(other[name], t) for name, t in exact.items()}
    # Error that the longest sums may have in float32 beyond plain PyTorch's, as a share of their scale.
    terms = [max(t.shape[-1], t.numel() // max(t.shape[-1], 1)) for t in data.values() if t.dim()]
    runs = min(max([*terms, _RUNS[0]]), _RUNS[1])
    of_sums = _FLOAT32_EPS / 2 * (math.sqrt(runs) - math.sqrt(_RUNS[0]))
    rows: list[Row] = []
    for number in range(_NEIGHBOURS + 1):
        sample = neighbour(data, number - 1, coarsest) if number else data
        shown, erred = _plain(sample, evaluate, None if number else exact)
        if number == 1:
            scattered = _sizes(evaluate(doubled(_scattered(data)), True))
            scales = {name: size.or_more(scattered[name]) for name, size in scales.items()}
        if number and not exactly:
            moved = evaluate(doubled(sample), True)
            erred = {name: d + distance(moved[name], exact[name]) for name, d in erred.items()}
        plain = {name: d.or_more(erred[name]) for name, d in plain.items()}
        sums = {name: 0.0 if found[name].dtype == torch.float64 else of_sums for name in exact}
        room = {name: plain[name] * _TIMES_PLAIN + scales[name] * sums[name] for name in exact}
        rows = [_row(case, name, found[name], exact[name], shown[name], room[name], scales[name]) for name in exact]
        if settled(_settled(rows, number)):
            break
    return rows


def judge_alike(
    case: str,
    found: Tensors,
    wanted: Tensors,
    neighbouring: Callable[[int], Tensors],
    whose: str,
    settled: Callable[[bool], bool] = bool,
) -> list[Row]:
    """One row for each result that is to be as good as another one's, in the same dtypes and of the same data.

    As `judge`; what plain PyTorch errs by there is here what the other one's results move by on neighbouring data, and
    since neither is exact, they may be twice as far apart as one of them may lie from float64.

    Args:
        neighbouring: number -> the other one's results on the data as `neighbour` moves them.
        whose: what the other one is called.
        settled: as of `judge`.
    """
    scales = _sizes(wanted)
    moved: dict[str, Distance] = dict.fromkeys(wanted, Distance())
    rows: list[Row] = []
    for number in range(_NEIGHBOURS + 1):
        if number:
            near = neighbouring(number - 1)
            apart = {name: distance(near[name], t) for name, t in wanted.items()}
            # What becomes infinite on other data says nothing of how far apart finite results may be.
            moved = {
                name: d.or_more(apart[name]) if math.isfinite(apart[name].largest) else d for name, d in moved.items()
            }
        both = {name: (d + d) * _TIMES_PLAIN for name, d in moved.items()}  # either may err by so much
        rows = [_row(case, name, found[name], t, t, both[name], scales[name], whose) for name, t in wanted.items()]
        if settled(_settled(rows, number)):
            break
    return rows


def _settled(rows: list[Row], neighbours: int) -> bool:
    """True where more neighbours than these would change nothing."""
    hopeless = _HOPELESS if neighbours >= _FEW else float("inf")
    return all(row.passed or row.share > hopeless for row in rows)


def _plain(data: Tensors, evaluate: Evaluate, exact: Tensors | None) -> tuple[Tensors, dict[str, Distance]]:
    """Results of plain PyTorch, and how far they are from exact ones."""
    shown, exact = evaluate(data, False), exact or evaluate(doubled(data), True)
    erred = {name: distance(t, exact[name]) for name, t in shown.items()}
    if any(t.dtype == torch.float64 for t in data.values()):
        narrow = {name: t.float() if t.dtype == torch.float64 else t for name, t in data.items()}
        shorter, exact = evaluate(narrow, False), evaluate(doubled(narrow), True)
        erred = {name: d + distance(shorter[name], exact[name]) * _NARROWED for name, d in erred.items()}
    return shown, erred


def _sizes(tensors: Tensors) -> dict[str, Distance]:
    """Sizes of tensors, 0 for those that are not finite."""
    sizes = {name: distance(t, torch.zeros_like(t)) for name, t in tensors.items()}
    return {name: size if size.largest < float("inf") else Distance() for name, size in sizes.items()}


def _scattered(data: Tensors) -> dict[str, torch.Tensor]:
    """Data with signs of the incoming gradients changed at random: a result that is 0 because equal terms cancel, as
    the gradient of a softmax's sum, then shows what size its terms have."""
    rng = torch.Generator().manual_seed(0)

    def signs(t: torch.Tensor) -> torch.Tensor:
        return (torch.randint(0, 2, t.shape, generator=rng, device=rng.device) * 2 - 1).to(t)

    return {name: t * signs(t) if name.startswith(UPSTREAM) else t for name, t in data.items()}


def _row(
    case: str,
    name: str,
    found: torch.Tensor,
    exact: torch.Tensor,
    shown: torch.Tensor,
    room: Distance,
    scale: Distance,
    whose: str = "plain PyTorch",
) -> Row:
    if (found.shape, found.dtype) != (shown.shape, shown.dtype):
        return Row(case, name, note=f"is {_kind(found)}, {whose} gives {_kind(shown)}")
    ulp = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    ulp *= _EXACT_ULPS if found.dtype == torch.float64 else 1.0
    error, allowed = distance(found, exact), room + scale * ulp
    largest, rms = scale.largest or 1.0, scale.rms or 1.0
    shares = error.largest / largest, allowed.largest / largest, error.rms / rms, allowed.rms / rms
    return Row(case, name, *shares, dtype=text_of(found.dtype))


def _kind(t: torch.Tensor) -> str:
    return f"{text_of(t.dtype)} {list(t.shape)}"


def doubled(data: Tensors) -> dict[str, torch.Tensor]:
    """Data with the same numbers in float64."""
    return {name: t.double() if t.is_floating_point() else t for name, t in data.items()}


def neighbour(data: Tensors, number: int, coarsest: float) -> dict[str, torch.Tensor]:
    """Data with every number moved by an ulp of the coarsest dtype, or left as it is."""
    rng = torch.Generator().manual_seed(number)
    moved = dict(data)
    for name, t in data.items():
        if t.is_floating_point():
            steps = torch.randint(-1, 2, t.shape, generator=rng, device=rng.device).to(t.device)
            eps = max(torch.finfo(t.dtype).eps, coarsest)
            moved[name] = (t.double() * (1.0 + steps * eps)).to(t.dtype)
    return moved


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where two tensors are equal bit for bit."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    # A clone, because one element with any stride counts as contiguous and still cannot be viewed as bytes.
    return t.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


@contextmanager
def in_eval_mode(*modules: torch.nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped and no statistic of a batch is taken."""
    before = {part: part.training for module in modules for part in module.modules()}
    for part in before:
        part.training = False
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training
