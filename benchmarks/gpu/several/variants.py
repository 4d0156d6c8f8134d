"""The part `variants`: a Llama layer that ranks share against its floor and rivals, and the seed layer in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import te_fuser
from benchmarks.gpu.contest.entries import OURS, Entry, compared
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import Result, traced
from benchmarks.gpu.parts.floor import Heads, Product, floor_of
from benchmarks.gpu.several import rivals
from benchmarks.gpu.several.layer import GOALS, Entrant, distance, ends, our_layer, taking_part
from benchmarks.gpu.several.ranks import Ranks, Sizes, contest
from te_fuser import ops
from te_fuser.recipe import DelayedScaling

FP8 = "te_fuser fp8"
SUMMED = ("norm1.weight", "norm2.weight")  # each rank's rows give them a term


class Llama(nn.Module):
    """x + attention of a norm, then x + gated MLP of a norm: rotary positions, no biases, products by a style."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, ranks: Ranks, style: rivals.Style = rivals.WHOLE) -> None:
        super().__init__()
        sizes, cut = ranks.sizes, ranks.size if style.parts else 1
        self.style, self.parts = style, _parts(sizes)
        new: dict[str, Any] = {"device": ranks.device, "dtype": sizes.dtype}
        h, self.head_dim, inner = sizes.hidden, sizes.hidden // sizes.heads, _inner(sizes)
        self.qkv_parts = [features // cut for features in self.parts["qkv"]]
        self.norm1, self.norm2 = nn.RMSNorm(h, eps=1e-5, **new), nn.RMSNorm(h, eps=1e-5, **new)
        self.qkv, self.out = nn.Linear(h, sum(self.qkv_parts), False, **new), nn.Linear(h // cut, h, False, **new)
        self.up, self.down = nn.Linear(h, 2 * inner // cut, False, **new), nn.Linear(inner // cut, h, False, **new)
        speeds = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=ranks.device) / self.head_dim)
        angles = (torch.arange(sizes.positions, device=ranks.device)[:, None] * speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(sizes.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(sizes.dtype), persistent=False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                whole = _numbers(ranks, name)
                p.copy_(whole if cut == 1 else _own(ranks, name, whole))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self._by(self.style.column, self.norm1(x), self.qkv)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for t in packed.split(self.qkv_parts, -1))
        y = functional.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self._by(self.style.row, y.permute(2, 0, 1, 3).flatten(2), self.out)
        gate, up = self._by(self.style.column, self.norm2(x), self.up).chunk(2, -1)
        return x + self._by(self.style.row, functional.silu(gate) * up, self.down)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    @staticmethod
    def _by(product: rivals.Product | None, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return product(x, linear.weight) if product else linear(x)


def _inner(sizes: Sizes) -> int:
    return 7 * sizes.hidden // 2


def _kv_heads(sizes: Sizes) -> int:
    """Llama 3 of 8 billion parameters has 8 beside 32 query heads."""
    return max(sizes.heads // 4, 2)


def _parts(sizes: Sizes) -> dict[str, list[int]]:
    """Features that lie side by side in a weight, each of which ranks cut."""
    inner, kv = _inner(sizes), _kv_heads(sizes) * sizes.hidden // sizes.heads
    return {"qkv": [sizes.hidden, kv, kv], "up": [inner, inner]}


def _numbers(ranks: Ranks, name: str) -> torch.Tensor:
    """A parameter of the whole layer, the same on every rank."""
    sizes, owner = ranks.sizes, name.partition(".")[0]
    if owner.startswith("norm"):
        return 1.0 + ranks.random(name, sizes.hidden, scale=0.1)
    inputs = _inner(sizes) if owner == "down" else sizes.hidden
    return ranks.random(name, sum(_parts(sizes).get(owner, [sizes.hidden])), inputs, scale=inputs**-0.5)


def _own(ranks: Ranks, name: str, whole: torch.Tensor) -> torch.Tensor:
    owner = name.partition(".")[0]
    if owner in ("out", "down"):
        return ranks.own(whole, 1)
    parts = _parts(ranks.sizes).get(owner)
    return whole if parts is None else torch.cat([ranks.own(part) for part in whole.split(parts)])


def llama(ranks: Ranks, **options: Any) -> te_fuser.Sequential:
    """The whole layer as a list of ops, with the same numbers."""
    sizes, inner = ranks.sizes, _inner(ranks.sizes)
    h, heads, head_dim = sizes.hidden, sizes.heads, sizes.hidden // sizes.heads
    lies: dict[str, Any] = {"kv_heads": _kv_heads(sizes), "layout": "sequence_first", "packing": "blocked"}
    with ranks.device:
        made = te_fuser.Sequential(
            te_fuser.Residual(
                ops.RMSNorm(h, eps=1e-5),
                ops.Linear(h, sum(_parts(sizes)["qkv"]), bias=False),
                ops.RotaryEmbedding(head_dim, heads=heads, **lies),
                ops.DotProductAttention(heads, head_dim, mask="causal", **lies),
                ops.Linear(h, h, bias=False),
            ),
            te_fuser.Residual(
                ops.RMSNorm(h, eps=1e-5), ops.Linear(h, 2 * inner, bias=False), ops.SwiGLU(),
                ops.Linear(inner, h, bias=False),
            ),
            **{**({"fallback": "error"} if ranks.card.is_gpu else {}), **options},
        ).to(sizes.dtype)  # fmt: skip
    names = ("norm1.weight", "qkv.weight", "out.weight", "norm2.weight", "up.weight", "down.weight")
    with torch.no_grad():
        for name, p in zip(names, made.parameters(), strict=True):
            p.copy_(_numbers(ranks, name))
    return made


def _entrant(ranks: Ranks, model: nn.Module, run: Any = None, summed: Sequence[str] = ()) -> Entrant:
    x, dy = (ranks.own(t) for t in ends(ranks))
    return Entrant(
        model, model if run is None else run, x.requires_grad_(), dy, (), tuple(map(model.get_parameter, summed))
    )


def makers(ranks: Ranks) -> dict[str, Callable[[], Entrant]]:
    """Name -> what makes it; ours begin with "te_fuser"."""

    def theirs(style: rivals.Style, how: Callable[[nn.Module], nn.Module] | None = None) -> Entrant:
        model = Llama(ranks, style)
        return _entrant(ranks, model, how(model) if how else None, SUMMED)

    def ours(**options: Any) -> Entrant:
        return _entrant(ranks, te_fuser.parallelize(llama(ranks, **options), ranks.mesh(), sequence_parallel=True))

    found: dict[str, Callable[[], Entrant]] = {
        "Megatron style": lambda: theirs(rivals.MEGATRON),
        "functional": lambda: theirs(rivals.FUNCTIONS),
        "functional, compiled": lambda: theirs(rivals.FUNCTIONS, rivals.compiled),
        "functional, async TP": lambda: theirs(rivals.FUNCTIONS, lambda model: rivals.asynchronous(ranks, model)),
        OURS: ours,
        f"{OURS} lean": lambda: ours(memory="lean"),
    }
    return {name: make for name, make in found.items() if ranks.with_compile or ", " not in name}


def _checked(ranks: Ranks, made: Entrant, want: Sequence[torch.Tensor]) -> dict[str, Any]:
    y = made.step()
    assert made.x.grad is not None
    found = max(distance(got, whole) for got, whole in zip((y.detach(), made.x.grad), want, strict=True))
    if not found <= ranks.sizes.tolerance:
        raise RuntimeError(f"its results differ from those of the whole layer by {found:.1e}")
    return {"error": found, **made.memory(ranks)}


def _llama(ranks: Ranks, say: Callable[..., None], without: Sequence[str]) -> Entry:
    x, dy = ends(ranks)
    whole = Llama(ranks)
    y = whole(x.requires_grad_())
    y.backward(dy)
    assert x.grad is not None
    want = [ranks.own(t.detach()) for t in (y, x.grad)]
    del whole, y
    found, facts, left_out = taking_part(
        ranks, makers(ranks), lambda _, made: _checked(ranks, made, want), say, without
    )
    sizes, n, inner = ranks.sizes, ranks.size, _inner(ranks.sizes)
    h, parts = sizes.hidden, _parts(sizes)
    products = [Product(sizes.tokens, *io) for io in ((h, sum(parts["qkv"]) // n), (h // n, h), (h, 2 * inner // n))]
    of_a_rank = sizes.heads // n, _kv_heads(sizes) // n, h // sizes.heads
    heads = Heads(sizes.batch, sizes.positions, of_a_rank, 0.0)
    floor = floor_of([products[0], heads, *products[1:], Product(sizes.tokens, inner // n, h)], sizes.dtype, ranks.card)
    times = contest({"floor": floor.run, **{name: made.step for name, made in found.items()}}, ranks)
    case = f"Llama layer on {n} ranks, bf16, tensor and sequence parallel"
    entry: Entry = {**compared(case, times), "floor_products": floor.taken, "left_out": left_out}
    for name, known in facts.items():
        entry["contenders"][name] |= known
    goals = [Goal(what, most) for what, most in zip(("over_floor", "over_best_rival"), GOALS.get(n, ()), strict=False)]
    return {**entry, "goals": judged(goals, entry)}


def _fp8(ranks: Ranks) -> Entry:
    """Beside the same in bfloat16; "over own products": over what products and attention take in a trace."""
    made = te_fuser.parallelize(our_layer(ranks), ranks.mesh(), sequence_parallel=True)

    def narrow(x: torch.Tensor) -> torch.Tensor:
        with te_fuser.autocast(recipe=DelayedScaling(amax_history_len=16)):
            return made(x)  # type: ignore[no-any-return]

    entrants = {OURS: _entrant(ranks, made), FP8: _entrant(ranks, made, narrow)}
    times: dict[str, Result] = contest({name: e.step for name, e in entrants.items()}, ranks)
    contenders = {name: result.as_data() for name, result in times.items()}
    for name, one in entrants.items():
        contenders[name]["over_bfloat16"] = times[name].over(times[OURS])
        trace = traced(one.step, ranks.card)
        contenders[name] |= {} if trace is None else trace.as_data()
    return {"case": f"seed layer on {ranks.size} ranks in FP8, delayed scaling", "contenders": contenders}


def variants(ranks: Ranks, say: Callable[..., None], without: Sequence[str] = ()) -> Iterator[Entry]:
    """The part."""
    with rivals.attending():
        yield _llama(ranks, say, without)
    yield _fp8(ranks)
