"""The part `layer`: the seed layer that ranks share, tensor and sequence parallel, against its floor and its rivals."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import te_fuser
from benchmarks.gpu.contest.entries import MIB, OURS, Entry, compared
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import kept_bytes, peak_bytes
from benchmarks.gpu.parts.floor import Heads, Product, floor_of
from benchmarks.gpu.several import rivals
from benchmarks.gpu.several.links import eight_collectives
from benchmarks.gpu.several.ranks import Ranks, contest
from te_fuser import ops

COMMUNICATION, TE = "collectives alone", "Transformer Engine"
# Ranks -> the most time over the floor, over the best rival.
GOALS = {2: (1.13, 0.89), 4: (1.25, 0.86)}
MOST_KEPT = 1.03  # by a rank with "lean", over its share of what one GPU keeps


@dataclass(frozen=True)
class Entrant:
    """A layer in training: forward and backward, and what is to be added up over ranks afterwards.

    Attributes:
        run: what is called; the model itself, or what was compiled of it.
        shared: whether x is this rank's rows.
        names: of the model's parameters, as rivals.CUTS has them.
    """

    model: nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    dy: torch.Tensor
    names: tuple[str, ...]
    summed: tuple[nn.Parameter, ...] = ()

    def step(self) -> torch.Tensor:
        """The output; all gradients are new."""
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        y = self.run(self.x)
        y.backward(self.dy)
        if self.summed:
            terms = [p.grad for p in self.summed if p.grad is not None]
            total = torch.cat(terms)
            dist.all_reduce(total)
            for p, part in zip(self.summed, total.split([t.numel() for t in terms]), strict=True):
                p.grad = part
        return y

    def memory(self, ranks: Ranks) -> dict[str, float]:
        """Bytes that a step keeps for backward, and its peak where there is a GPU."""
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        peak = peak_bytes(self.step, ranks.card)
        kept = kept_bytes(lambda: self.run(self.x), list(self.model.parameters()))
        return {"kept_mib": kept / MIB, **({} if peak is None else {"peak_mib": peak / MIB})}


# ----------------------------------------------------------------------------------------------- who takes part


def entrant(ranks: Ranks, model: nn.Module, run: nn.Module | None = None, sums: Sequence[str] = ()) -> Entrant:
    """A model that ranks share, with this rank's rows."""
    x, dy = (ranks.own(t) for t in ends(ranks))
    summed = tuple(model.get_parameter(name) for name in sums)
    return Entrant(
        model,
        model if run is None else run,
        x.requires_grad_(),
        dy,
        tuple(n for n, _ in model.named_parameters()),
        summed,
    )


def ours(ranks: Ranks, **options: Any) -> Entrant:
    """By `parallelize`."""
    made = entrant(ranks, te_fuser.parallelize(our_layer(ranks, **options), ranks.mesh(), sequence_parallel=True))
    return Entrant(made.model, made.run, made.x, made.dy, tuple(rivals.CUTS))


def our_layer(ranks: Ranks, **options: Any) -> te_fuser.Sequential:
    """The whole layer as a list of ops, with the numbers of rivals'."""
    sizes, gpu = ranks.sizes, ranks.card.is_gpu
    h, inner, head_dim = sizes.hidden, sizes.inner, sizes.hidden // sizes.heads
    with ranks.device:
        attention = ops.DotProductAttention(
            sizes.heads, head_dim, mask="causal", layout="sequence_first", packing="interleaved"
        )
        made = te_fuser.Sequential(
            te_fuser.Residual(ops.LayerNorm(h), ops.Linear(h, 3 * h), attention, ops.Linear(h, h)),
            te_fuser.Residual(ops.LayerNorm(h), ops.Linear(h, inner), ops.GELU(), ops.Linear(inner, h)),
            **{**({"fallback": "error"} if gpu else {}), **options},
        ).to(sizes.dtype)
    with torch.no_grad():
        for name, p in zip(rivals.CUTS, made.parameters(), strict=True):
            p.copy_(rivals.numbers(ranks, name))
    return made


class _Without(nn.Module):
    """A model that is planned without some fusions."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te_fuser.fusions.disabled(*self.names):
            return self.model(x)


def _tuned(ranks: Ranks) -> Entrant:
    made = ours(ranks)
    made.model.tune(made.x, rounds=3, seconds=0.1)  # type: ignore[operator]
    return made


def ours_without(ranks: Ranks, names: Sequence[str]) -> Entrant:
    """By `parallelize`, planned without some fusions."""
    made = ours(ranks)
    return Entrant(made.model, _Without(made.model, names), made.x, made.dy, made.names)


def _transformer_engine(ranks: Ranks) -> Entrant:
    """Without its overlap, which needs multicast."""
    library = importlib.import_module("transformer_engine.pytorch")
    sizes, group = ranks.sizes, dist.group.WORLD
    model = library.TransformerLayer(
        sizes.hidden, sizes.inner, sizes.heads, hidden_dropout=0.0, attention_dropout=0.0,
        self_attn_mask_type="causal", params_dtype=sizes.dtype, tp_group=group, tp_size=ranks.size,
        sequence_parallel=True, set_parallel_mode=True, fuse_qkv_params=True, bias=True, device=ranks.device.type,
    )  # fmt: skip
    return entrant(
        ranks, model, None, [n for n, p in model.named_parameters() if getattr(p, "sequence_parallel", False)]
    )


def makers(ranks: Ranks) -> dict[str, Callable[[], Entrant]]:
    """Name -> what makes it; ours begin with "te_fuser"."""

    def functions(how: Callable[..., nn.Module] | None = None) -> Entrant:
        model = rivals.layer(ranks, rivals.FUNCTIONS)
        return entrant(ranks, model, how(model) if how else None, rivals.SUMMED)

    def dtensor(how: Callable[..., nn.Module] | None = None) -> Entrant:
        model = rivals.by_parallelize_module(ranks)
        return entrant(ranks, model, how(model) if how else None, [n for n in rivals.SUMMED if "norm" not in n])

    def waiting(model: nn.Module) -> nn.Module:
        return rivals.asynchronous(ranks, model)

    found: dict[str, Callable[[], Entrant]] = {
        "Megatron style": lambda: entrant(ranks, rivals.layer(ranks, rivals.MEGATRON), None, rivals.SUMMED),
        "functional": functions,
        "functional, compiled": lambda: functions(rivals.compiled),
        "functional, async TP": lambda: functions(waiting),
        "DTensor": dtensor,
        "DTensor, compiled": lambda: dtensor(rivals.compiled),
        "DTensor, async TP": lambda: dtensor(waiting),
        OURS: lambda: ours(ranks),
        f"{OURS} lean": lambda: ours(ranks, memory="lean"),
        f"{OURS} fast": lambda: ours(ranks, memory="fast"),
    }
    if not ranks.with_compile:
        found = {name: make for name, make in found.items() if ", " not in name}
    found[f"{OURS} without copies"] = lambda: ours_without(ranks, [te_fuser.fusions.PEER_COPIES])
    if ranks.tune:
        found[f"{OURS} tuned"] = lambda: _tuned(ranks)
    if importlib.util.find_spec("transformer_engine"):
        found[TE] = lambda: _transformer_engine(ranks)
    return found


# --------------------------------------------------------------------------------------------------- checking


def ends(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and gradient of the output, of all ranks."""
    sizes = ranks.sizes
    shape = (sizes.positions, sizes.batch, sizes.hidden)
    return ranks.random("x", *shape), ranks.random("dy", *shape)


def alone(ranks: Ranks, model: nn.Module) -> Entrant:
    """A model that each rank has whole, on the whole batch."""
    x, dy = ends(ranks)
    return Entrant(model, model, x.requires_grad_(), dy, tuple(n for n, _ in model.named_parameters()))


def results(ranks: Ranks, whole: Entrant) -> dict[str, torch.Tensor]:
    """Part that this rank has of output, input gradient and gradients of the whole layer."""
    y = whole.step()
    assert whole.x.grad is not None
    found = {"y": ranks.own(y.detach()), "dx": ranks.own(whole.x.grad)}
    parameters = dict(zip(whole.names, whole.model.parameters(), strict=True))
    return found | {n: rivals.own(ranks, n, p.grad).clone() for n, p in parameters.items() if p.grad is not None}


def error(ranks: Ranks, made: Entrant, want: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of any of these, on this rank.

    Raises:
        RuntimeError: where a parameter got no gradient.
    """
    y = made.step()
    assert made.x.grad is not None
    got = {"y": y.detach(), "dx": made.x.grad}
    for name, p in zip(made.names, made.model.parameters(), strict=True):
        if p.grad is None:
            raise RuntimeError(f"{name} got no gradient")
        summed = isinstance(p.grad, DTensor)
        got[name] = rivals.own(ranks, name, p.grad.full_tensor()) if summed else p.grad  # type: ignore[attr-defined]
    return max(distance(got[name], want[name]) for name in want)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of a to b, by the norm of b."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --------------------------------------------------------------------------------------------------- measuring


def one_gpu(ranks: Ranks, say: Callable[..., None]) -> Entry:
    """The whole layer on each rank by itself."""
    found = {"eager": alone(ranks, rivals.layer(ranks)), OURS: alone(ranks, our_layer(ranks))}
    found[f"{OURS} lean"] = alone(ranks, our_layer(ranks, memory="lean"))
    times = contest({name: made.step for name, made in found.items()}, ranks)
    entry = compared("seed layer on one GPU, bf16 dropout 0", times)
    for name, made in found.items():
        entry["contenders"][name] |= made.memory(ranks)
    return entry


def taking_part(
    ranks: Ranks,
    makers: Mapping[str, Callable[[], Entrant]],
    check: Callable[[str, Entrant], dict[str, Any]],
    say: Callable[..., None],
    without: Sequence[str],
) -> tuple[dict[str, Entrant], dict[str, dict[str, Any]], dict[str, str]]:
    """(those that all ranks can make and that are right, what is known of each, why others are left out).

    Args:
        check: f(name, entrant) -> facts for the record; it raises where results differ.
        say: told of each one that is about to be made, for it may end the process.
        without: names that did that before.
    """
    left_out, facts = dict.fromkeys(without, "it ended the process"), dict[str, dict[str, Any]]()
    found: dict[str, Entrant] = {}
    for name in [name for name in makers if name not in without]:
        say(preparing=name)
        made, reason = ranks.all_can(makers[name])
        known, reason = (None, reason) if reason else ranks.all_can(lambda made=made, n=name: check(n, made))
        if reason:
            left_out[name] = reason
        else:
            found[name], facts[name] = made, known
    say(preparing="")
    return found, facts, left_out


def shared(ranks: Ranks, say: Callable[..., None], without: Sequence[str] = ()) -> Entry:
    """The layer of all ranks: who takes part is checked against the whole first."""
    want = results(ranks, alone(ranks, rivals.layer(ranks)))
    found, facts, left_out = taking_part(
        ranks, makers(ranks), lambda name, made: _checked(ranks, name, made, want), say, without
    )
    sizes, n = ranks.sizes, ranks.size
    h, inner, head_dim = sizes.hidden, sizes.inner, sizes.hidden // sizes.heads
    products = [Product(sizes.tokens, *io) for io in ((h, 3 * h // n), (h // n, h), (h, inner // n), (inner // n, h))]
    heads = Heads(sizes.batch, sizes.positions, (sizes.heads // n, sizes.heads // n, head_dim), 0.0)
    floor = floor_of([products[0], heads, *products[1:]], sizes.dtype, ranks.card)
    steps = {"floor": floor.run, **{name: made.step for name, made in found.items()}}
    times = contest({**steps, COMMUNICATION: eight_collectives(ranks)}, ranks)
    communication = times.pop(COMMUNICATION)
    case = f"seed layer on {n} ranks, bf16 dropout 0, tensor and sequence parallel"
    entry = {**compared(case, times), "floor_products": floor.taken, "left_out": left_out}
    entry[COMMUNICATION] = {**communication.as_data(), "over_floor": communication.over(times["floor"])}
    for name, known in facts.items():
        entry["contenders"][name] |= known
        excess = entry["contenders"][name]["ms"] - entry["contenders"]["floor"]["ms"]
        entry["contenders"][name]["excess_over_communication"] = excess / entry[COMMUNICATION]["ms"]
    return entry


def _checked(ranks: Ranks, name: str, made: Entrant, want: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    found = error(ranks, made, want) if name != TE else 0.0  # its weights are its own
    if not found <= ranks.sizes.tolerance:
        raise RuntimeError(f"its results differ from those of the whole layer by {found:.1e}")
    fused = {"fused_calls": _fused_calls(made)} if "async" in name else {}
    return {"error": found, **fused, **made.memory(ranks)}


def _fused_calls(made: Entrant) -> int:
    """Number of products in pipelines with collectives; eight is all. torch.compile may make fewer than asked."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        made.step()
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    counts = {event.key: event.count for event in seen.key_averages()}  # releases of PyTorch name the calls in two ways
    return sum(max(counts.get(name, 0), counts.get(f"symm_mem::{name}", 0)) for name in names)


def layer(ranks: Ranks, say: Callable[..., None], without: Sequence[str] = ()) -> Iterator[Entry]:
    """The part."""
    with rivals.attending():
        whole = one_gpu(ranks, say)
        yield whole
        entry = shared(ranks, say, without)
    mine, single = entry["contenders"], whole["contenders"]
    for data in mine.values():
        data["of_one_gpu"] = single["eager"]["ms"] / data["ms"]
    lean = f"{OURS} lean"
    goals: list[Goal] = []
    if lean in mine:
        mine[lean]["kept_over_share"] = mine[lean]["kept_mib"] * ranks.size / single[lean]["kept_mib"]
        goals.append(Goal("kept_over_share", MOST_KEPT, lean))
    if ranks.size in GOALS:
        floor, rival = GOALS[ranks.size]
        goals += [Goal("over_floor", floor), Goal("over_best_rival", rival)]
    entry["goals"] = judged(goals, entry)
    yield entry
