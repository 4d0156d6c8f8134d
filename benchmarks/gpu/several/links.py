"""The part `links`: collectives alone, by sizes, beside products, and in one step with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.contest.entries import Entry
from benchmarks.gpu.contest.measure import Effort, Result, Step, no_longer
from benchmarks.gpu.several import rivals
from benchmarks.gpu.several.ranks import Ranks, contest
from te_fuser import _native
from te_fuser.kernels import peers
from te_fuser.kernels.cublaslt import products
from te_fuser.ops import Group

SHORT = Effort(5, 0.2, 0.3)
NCCL, COPIES, PRODUCTS = "NCCL", "copy engines", "products"
LAYER_COLLECTIVES = 8  # four all-gathers and four reduce-scatters, forward and backward


def links(ranks: Ranks, say: Callable[..., None], without: object = ()) -> Iterator[Entry]:
    """Rates by sizes, of the layer's eight, and of these beside products; the layer's products with their exchanges."""
    rows = ranks.sizes.tokens
    for share in (1, 8, 64):
        say(preparing=f"rates of {rows // share} rows")
        yield _rates(ranks, rows // share)
    yield _eight(ranks, say)
    if ranks.card.is_gpu:
        yield from _in_one_step(ranks, say)


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
    if ranks.card.is_gpu:
        by, made, mine = _copies(ranks), torch.empty_like(whole), torch.empty_like(part)
        steps["all-gather by copies"] = lambda: by.gather(part, made).wait()
        steps["reduce-scatter by copies"] = lambda: by.scatter(whole, mine).wait()
    times = contest(steps, ranks, no_longer(ranks.effort, SHORT))
    contenders = {n: _with_rate(r, sent(ranks, size, 1 + (n == "all-reduce"))) for n, r in times.items()}
    return {"case": f"{rows} x {ranks.sizes.hidden}", "bytes": size, "contenders": contenders}


def _with_rate(result: Result, moved: float) -> dict[str, Any]:
    return {**result.as_data(), "sent_bytes": moved, "gbps": moved / result.seconds / 1e9}


def eight_collectives(ranks: Ranks, by: str = NCCL, beside: Step | None = None) -> Step:
    """Collectives of a layer shared along the sequence: [sequence, batch, hidden] gathered, or scattered.

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
    by, made, mine = _copies(ranks), torch.empty_like(whole), torch.empty_like(part)
    starts = (lambda: by.gather(part, made), lambda: by.scatter(whole, mine))
    return starts, lambda pending: pending.wait()


def _copies(ranks: Ranks) -> peers.ByCopies:
    return peers.PeersOf(Group.of("the benchmark", dist.group.WORLD), torch.device(ranks.device)).transport()


def _in_one_step(ranks: Ranks, say: Callable[..., None]) -> Iterator[Entry]:
    """The products of a layer as ranks share them: alone, with the exchange before or behind, in one step with it."""
    sizes, group = ranks.sizes, Group.of("the benchmark", dist.group.WORLD)
    buffers = peers.PeersOf(group, torch.device(ranks.device))
    make = products.configured("forward", sizes.dtype, sizes.dtype).make
    hidden, inner = sizes.hidden, 4 * sizes.hidden
    shapes = {
        "queries, keys and values": (hidden, 3 * hidden // ranks.size, True),
        "projection": (hidden // ranks.size, hidden, False),
        "FC1": (hidden, inner // ranks.size, True),
        "FC2": (inner // ranks.size, hidden, False),
    }
    for name, (features, out, gathers) in shapes.items():
        say(preparing=f"{name} with its exchange")
        w, x = ranks.random("w", out, features), ranks.random("x", sizes.tokens, features)
        part = ranks.own(x)
        ours: Any = (_native.GatherMatmul if gathers else _native.MatmulScatter)(make, buffers)

        def by_nccl(gathers: bool = gathers, part: Any = part, x: Any = x, w: Any = w) -> object:
            return make(rivals.gathered(part), w) if gathers else rivals.scattered(make(x, w))

        steps: dict[str, Step] = {
            PRODUCTS: lambda x=x, w=w: make(x, w),  # type: ignore[misc]
            NCCL: by_nccl,
            COPIES: lambda ours=ours, given=part if gathers else x, w=w: ours(given, w),  # type: ignore[misc]
        }
        times = contest(steps, ranks)
        contenders = {n: r.as_data() for n, r in times.items()}
        for data in contenders.values():
            data["over_products"] = data["ms"] / contenders[PRODUCTS]["ms"]
            data["exposed_ms"] = data["ms"] - contenders[PRODUCTS]["ms"]
        moved = sent(ranks, sizes.tokens * hidden * sizes.dtype.itemsize)
        yield {"case": f"{name}, with its exchange", "sent_bytes": moved, "contenders": contenders}


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
