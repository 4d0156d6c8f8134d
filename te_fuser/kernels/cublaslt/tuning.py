"""Tuning the algorithms of cuBLASLt's products: candidates alone first, then those that keep up in their place.

Alone a candidate says little: on a card at its power limit the library's first guess is usually the best in a running
model, whatever wins alone. So a choice has to make the whole model faster, and all choices together have to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from te_fuser import _native
from te_fuser.kernels.cublaslt.products import in_use
from te_fuser.kernels.cublaslt.tuned import ProductForm, ProductProblem, store_on
from te_fuser.kernels.tuning_trials import Contest, Deciding, ModelCall, ReasonNot, Trial, concluded, seconds_alone

MOST_LISTED = 8  # candidates that the library is asked for
MOST_IN_PLACE = 3  # of a problem, beside its first guess, that are tried in the model
_SOLO_LOSS = 1.05  # what a candidate may take alone, over the first guess, to be tried in the model
_RUNS = 10  # of a candidate alone, between two events
_ALIGNMENT = 256


class PlacedProduct:
    """A problem that a model has, with its algorithms, the library's first guess first."""

    def __init__(self, form: ProductForm, product: _native.CudaMatmul, problem: ProductProblem) -> None:
        self.form, self.product, self.problem = form, product, problem
        self.algorithms = [algorithm for algorithm, _, _ in product.algorithms(problem, MOST_LISTED)]
        self.gain = 1.0  # the model's time with the choice that was taken over that without
        self._running = -1

    def __str__(self) -> str:
        return f"{self.form} {self.problem}"

    def take(self, candidate: int) -> None:
        """Run by this candidate from now on."""
        if candidate != self._running:
            self.product.choose(self.problem, self.algorithms[candidate])
            self._running = candidate


_Chosen = Mapping[PlacedProduct, int]


def tune_products(
    call: ModelCall,
    contest: Contest,
    margin: float,
    reason_not: ReasonNot = lambda within: "",
    deciding: Deciding = Deciding(),  # noqa: B008 - frozen
) -> list[Trial]:
    """Tune every product that a call runs, as `Library.tune`."""
    places = places_of(call)
    first = dict.fromkeys(places, 0)
    chosen, trials = dict(first), list[Trial]()
    try:
        for place in places:
            # The candidates that keep up with the first guess alone, the fastest first.
            seconds = _seconds_of(place) if len(place.algorithms) > 1 else []
            keeping_up = [k for k in range(1, len(seconds)) if seconds[k] <= _SOLO_LOSS * seconds[0]]
            fast = sorted(keeping_up, key=seconds.__getitem__)[:MOST_IN_PLACE]
            worth_trying = deciding.first(f"algorithms of {place}", fast)
            trials += _tune_place(place, worth_trying, chosen, call, contest, margin, reason_not)
        together = "algorithms of products together"
        trials = concluded(trials, together, lambda: contest(_with(first, call), _with(chosen, call)))
        if not any(t.taken for t in trials):
            chosen = first
    except BaseException:
        _take(first)
        raise
    _take(chosen)
    if deciding.writes:
        _keep(chosen)
    return trials


def places_of(call: ModelCall) -> list[PlacedProduct]:
    """The problems of cuBLASLt that a call runs, those with the most work first."""
    before = {form: product.problems() for form, product in tuple(in_use.items())}
    call()
    work: dict[PlacedProduct, int] = {}
    for form, product in tuple(in_use.items()):
        for met, runs in product.problems().items():
            times = runs - before.get(form, {}).get(met, 0)
            if times > 0:
                problem = ProductProblem(*met)
                work[PlacedProduct(form, product, problem)] = times * problem.m * problem.n * problem.k
    # All ranks in one order, whatever their GPUs are numbered.
    return sorted(work, key=lambda place: (-work[place], str(place), place.problem[1:]))


def _tune_place(
    place: PlacedProduct,
    worth_trying: Sequence[int],
    chosen: dict[PlacedProduct, int],
    call: ModelCall,
    contest: Contest,
    margin: float,
    reason_not: ReasonNot,
) -> Iterator[Trial]:
    """Try a place's candidates, from number 2 on, beside the best choices."""
    ratios: dict[int, float] = {}
    wrong: dict[int, str] = {}
    for candidate in worth_trying:
        reason = reason_not(_by({**chosen, place: candidate}))
        if reason:
            wrong[candidate] = reason
            continue
        ratios[candidate] = contest(_with(chosen, call), _with({**chosen, place: candidate}, call))
        if ratios[candidate] < 1 - margin:
            chosen[place], place.gain = candidate, ratios[candidate]
    if not ratios and not wrong:
        yield Trial(str(place), "#1", None, False, "no other algorithm keeps up alone")
    for candidate, reason in wrong.items():
        yield Trial(str(place), f"#{candidate + 1}", None, False, reason)
    for candidate, ratio in ratios.items():
        taken = candidate == chosen[place]
        reason = "another one is faster still" if ratio < 1 - margin and not taken else ""
        yield Trial(str(place), f"#{candidate + 1}", ratio, taken, reason)


def _with(choice: _Chosen, call: ModelCall) -> ModelCall:
    """The call by these algorithms."""
    choice = dict(choice)

    def run() -> None:
        _take(choice)
        call()

    return run


@contextlib.contextmanager
def _by(choice: _Chosen) -> Iterator[None]:
    """Run by these algorithms, and by the first guesses behind it."""
    _take(choice)
    try:
        yield
    finally:
        _take(dict.fromkeys(choice, 0))


def _take(choice: _Chosen) -> None:
    for place, candidate in choice.items():
        place.take(candidate)


def _keep(chosen: _Chosen) -> None:
    """Put what was chosen on disk, and forget what an earlier tuning chose."""
    for place, candidate in chosen.items():
        store, key = store_on(place.problem.device), place.problem.key(place.form)
        if store is None:
            continue
        if candidate:
            store.put(key, place.algorithms[candidate], candidate + 1, place.gain)
        else:
            store.forget(key)


# ------------------------------------------------------------------------------------------------------- alone


def _seconds_of(place: PlacedProduct) -> list[float]:
    """Seconds of each algorithm alone, on random numbers."""
    with torch.cuda.device(place.problem.device):
        tensors = example(place.product, place.form, place.problem, torch.device("cuda", place.problem.device))

        def run() -> None:
            for _ in range(_RUNS):
                place.product(tensors)

        found = []
        for candidate in range(len(place.algorithms)):
            place.take(candidate)
            found.append(seconds_alone(run) / _RUNS)
        place.take(0)
        return found


def example(
    product: _native.CudaMatmul, form: ProductForm, problem: ProductProblem, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Tensors that give a product just this problem, of random numbers."""
    return tuple(_tensor(role, form, problem, device) for role in product.arguments)


def _tensor(role: str, form: ProductForm, p: ProductProblem, device: torch.device) -> torch.Tensor:
    if role == "a":
        rows, columns = (p.k, p.m) if form.transpose_a else (p.m, p.k)
        return _matrix(rows, columns, p.a_stride, p.flipped[0], p.alignment(role), form.dtype, device)
    if role == "b":
        rows, columns = (p.n, p.k) if form.transpose_b else (p.k, p.n)
        return _matrix(rows, columns, p.b_stride, p.flipped[1], p.alignment(role), form.b_dtype, device)
    if role.startswith("scale"):
        lie, rows = (form.scales_a, p.m) if role == "scale_a" else (form.scales_b, p.n)
        return torch.ones(_scales(lie, rows, p.k), device=device)
    if role in ("out", "c"):
        stride = p.out_stride if role == "out" else p.c_stride
        return _matrix(p.m, p.n, stride, False, p.alignment(role), form.out_dtype, device)
    if role == "bias":
        length = p.m if form.epilogue == "sum_a" else p.n
        return _matrix(1, length, length, False, _ALIGNMENT, form.out_dtype, device)[0]
    return _matrix(p.m, p.n, p.aux_stride, False, _ALIGNMENT, form.out_dtype, device)


def _scales(lie: str, rows: int, k: int) -> int:
    """Count of scales that a factor of 8 bits has, as the native type counts them."""
    blocks = -(-k // 128)
    return {"one": 1, "rows": blocks * rows, "squares": -(-blocks // 4) * 4 * -(-rows // 128)}[lie]


def _matrix(
    rows: int, columns: int, stride: int, flipped: bool, alignment: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Random numbers whose rows (columns, if flipped) are `stride` apart, at such an address."""
    long, short = (columns, rows) if flipped else (rows, columns)
    spare = 2 * _ALIGNMENT // dtype.itemsize
    flat = torch.randn((long - 1) * stride + short + spare, device=device).to(dtype)
    wanted = alignment % _ALIGNMENT  # more than 256 is as good as 256
    offset = (wanted - flat.data_ptr()) % _ALIGNMENT // dtype.itemsize
    return flat.as_strided((rows, columns), (1, stride) if flipped else (stride, 1), offset)
