"""The part `links`: collectives alone, by sizes, and beside products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from benchmarks.gpu.contest.entries import Entry
from benchmarks.gpu.contest.measure import Effort, Result, Step, no_longer
from benchmarks.gpu.several import rivals
from benchmarks.gpu.several.ranks import Ranks, contest

SHORT = Effort(5, 0.2, 0.3)
NCCL, COPIES, PRODUCTS = "NCCL", "copy engines", "products"
LAYER_COLLECTIVES = 8  # four all-gathers and four reduce-scatters, forward and backward


def links(ranks: Ranks, say: Callable[..., None], without: object = ()) -> Iterator[Entry]:
    """Rates by sizes, of the layer's eight, and of these beside products."""
    rows = ranks.sizes.tokens
    for share in (1, 8, 64):
        say(preparing=f"rates of {rows // share} rows")
        yield _rates(ranks, rows // share)
    yield _eight(ranks, say)


def sent(ranks: Ranks, whole: int, times: int = 1) -> float:
    """Bytes that a rank sends in all-gathers or reduce-scatters of so many bytes, over all ranks."""
    return times * whole * (1 - 1 / ranks.size)


def _rates(ranks: Ranks, rows: int) -> Entry:
    rows -= rows % ranks.size
    whole = ranks.random("whole", rows, ranks.sizes.hidden)
    part, size = ranks.own(whole), whole.nbytes
    steps: dict[str, Step] = {
        "all-gather": lambda: rivals.gathered(part),
        "reduce-scatter": lambda: rivals.scattered(whole),
        "all-reduce": lambda: dist.all_reduce(whole),
    }
    whole.zero_()  # sums of sums would not stay finite
    times = contest(steps, ranks, no_longer(ranks.effort, SHORT))
    moved = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
    contenders = {n: _with_rate(r, sent(ranks, size, moved[n])) for n, r in times.items()}
    return {"case": f"{rows} x {ranks.sizes.hidden}", "bytes": size, "contenders": contenders}


def _with_rate(result: Result, moved: float) -> dict[str, Any]:
    return {**result.as_data(), "sent_bytes": moved, "gbps": moved / result.seconds / 1e9}


def eight_collectives(ranks: Ranks, by: str = NCCL, beside: Step | None = None) -> Step:
    """Those of a layer that ranks share along the sequence: [sequence, batch, hidden] gathered, or scattered.

    Args:
        beside: what runs while each is under way.

    Raises:
        RuntimeError: for copy engines where there is no GPU.
    """
    sizes = ranks.sizes
    whole = torch.zeros(sizes.positions, sizes.batch, sizes.hidden, dtype=sizes.dtype, device=ranks.device)
    part = ranks.own(whole)
    starts, finish = (_by_nccl if by == NCCL else _by_copies)(ranks, part, whole)

    def step() -> None:
        for start in starts * (LAYER_COLLECTIVES // 2):
            pending = start()
            if beside is not None:
                beside()
            finish(pending)

    return step


def _by_nccl(
    ranks: Ranks, part: torch.Tensor, whole: torch.Tensor
) -> tuple[tuple[Step, Step], Callable[[Any], object]]:
    starts = (lambda: rivals.gathered(part, wait=False), lambda: rivals.scattered(whole, wait=False))
    return starts, lambda pending: pending[1].wait()


def _by_copies(
    ranks: Ranks, part: torch.Tensor, whole: torch.Tensor
) -> tuple[tuple[Step, Step], Callable[[Any], object]]:
    if not ranks.card.is_gpu:
        raise RuntimeError("copies between GPUs need symmetric memory, which GPUs have")
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    symmetric.enable_symm_mem_for_group(name)
    known = torch.ops.symm_mem
    starts = (
        lambda: known._low_contention_all_gather(part, name),
        lambda: known._low_contention_reduce_scatter(whole.flatten(0, 1), "sum", name),
    )
    return starts, torch.ops._c10d_functional.wait_tensor


def _eight(ranks: Ranks, say: Callable[..., None]) -> Entry:
    """Alone, and each beside a product as large as the weight gradient of queries, keys and values."""
    sizes = ranks.sizes
    d, x = (
        ranks.random("d", sizes.tokens, 3 * sizes.hidden // ranks.size),
        ranks.random("x", sizes.tokens, sizes.hidden),
    )

    def product() -> torch.Tensor:
        return torch.mm(d.t(), x)

    left_out = {}
    steps: dict[str, Step] = {PRODUCTS: lambda: [product() for _ in range(LAYER_COLLECTIVES)]}
    for by in (NCCL, COPIES):
        for name, beside in ((by, None), (f"{by} beside {PRODUCTS}", product)):
            say(preparing=name)
            step, reason = ranks.all_can(lambda by=by, beside=beside: _tried(eight_collectives(ranks, by, beside)))
            if reason:
                left_out[name] = reason
            else:
                steps[name] = step
    times = contest(steps, ranks)
    whole = sizes.tokens * sizes.hidden * sizes.dtype.itemsize
    moved = sent(ranks, whole, LAYER_COLLECTIVES)
    contenders = {PRODUCTS: times.pop(PRODUCTS).as_data()}
    for name, result in times.items():
        contenders[name] = _with_rate(result, moved)
        if "beside" in name:
            contenders[name]["over_products"] = contenders[name]["ms"] / contenders[PRODUCTS]["ms"]
    return {"case": f"eight of {sizes.tokens} x {sizes.hidden}", "contenders": contenders, "left_out": left_out}


def _tried(step: Step) -> Step:
    step()
    return step
