"""Plans in which fusions are taken: `python -m tests.fusions.plans` writes them, `git diff` shows what changes."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.float8 import E4M3, E5M2
from tests.fusions import decoding
from tests.fusions.models import (
    BF16,
    F16,
    F32,
    FLASH_4,
    FRONT_END,
    QUACK,
    QUACK8,
    Plans,
    attention,
    by_free_epilogues,
    gated_mlp,
    in_region,
    mlp,
    on_meta,
    relu_mlp,
    taken_away,
    where,
    without,
)
from tests.fusions.products import autocast_on_cuda, gelu_mlp, plan
from tests.plans.text import name_of
from tests.settings import settle
from tests.twins import tensor

FOLDER = Path(__file__).parent / "written"
MEMORY = ("fast", "balanced", "lean")
CAST: dict[str, Any] = {"dtype": F32, "cast": True}


# ----------------------------------------------------------------------------------------------------------- the text


def text_of(plan: Plan) -> str:
    """Text of a plan: steps, their tensors and costs, and kept values."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    for direction, steps in (("before", plan.before), ("forward", plan.forward), ("backward", plan.backward)):
        for step in steps:
            yield f"{direction} {step.start}-{step.stop - 1} {step.name}{'' if step.chain else ' (hanging)'}"
            for word, named in (("takes", step.inputs), ("gives", step.outputs)):
                yield f"  {word} {', '.join(f'{name} = {name_of(plan, ref)}' for name, ref in named)}"
            yield f"  {_cost(step)}"
            if step.task.written:
                yield f"  launches {', '.join(map(str, step.task.written))}"
    for k in plan.kept:
        yield f"kept {name_of(plan, k.ref)}: {k.name}, {k.bytes} B, {k.owner}"


def _cost(step: Step) -> str:
    c = step.cost
    said = {"efficiency": round(c.efficiency, 4), "calls": c.calls, "dtype": c.dtype, "apart": c.apart}
    usual = {"efficiency": 1.0, "calls": None, "dtype": None, "apart": 0.0}
    more = "".join(f", {name} {value}" for name, value in said.items() if value != usual[name])
    return f"{c.read:.17g} B read, {c.written:.17g} B written, {c.flops:.17g} flops, {c.launches} launches{more}"


# ------------------------------------------------------------------------------------------------------------ the plans


def linear(n_in: int = 4096, n_out: int = 4096, **options: Any) -> ops.Linear:
    return ops.Linear(n_in, n_out, device="meta", **options)


def normed(*behind: ops.FusableOperation, n_in: int = 64, n_out: int = 48, **how: Any) -> Plans:
    """A norm, a product with its bias, and what is behind, in a region: of 17 rows."""
    main_grad = how.pop("main_grad", False)
    parts = lambda: [  # noqa: E731
        ops.LayerNorm(n_in),
        ops.MatMul(n_in, n_out, accumulate_into_main_grad=main_grad),
        ops.Bias(n_out),
        *behind,
    ]
    return lambda: in_region(parts, 17, n_in, **how)


def float8(**how: Any) -> Plans:
    """By one scale for each tensor."""
    return normed(ops.GELU(), **how)


def blocks(*behind: ops.FusableOperation, **how: Any) -> Plans:
    """By a scale for each block."""
    return normed(*behind, n_in=128, n_out=256, **{"recipe": Float8BlockScaling(), **how})


def partly(kept: tuple[bool, bool, bool]) -> Plans:
    """Some products in 8 bits."""
    how = DelayedScaling(override_linear_precision=kept)
    return lambda: in_region(lambda: [ops.LayerNorm(32), ops.MatMul(32, 64), ops.GELU()], 17, 32, how)


def mlp8(grad: bool = True) -> Plan:
    """An MLP of 4096 features in a region, where quack is installed."""
    return where(QUACK8, in_region, mlp, 8192, 4096, DelayedScaling(amax_history_len=3), grad=grad)


def added(p: float | None, inner: int = 4096, **how: Any) -> Plan:
    """A product and the sum with a named input behind it, in a region, where quack is installed."""
    parts = lambda: [  # noqa: E731
        ops.LayerNorm(inner),
        ops.MatMul(inner, 4096),
        ops.Bias(4096),
        *([] if p is None else [ops.Dropout(p)]),
        ops.Add("other"),
    ]
    return where(QUACK8, in_region, parts, 8192, inner, **{"other": BF16, **how})


def quantized(
    device: str | None = "h200",
    weight: torch.dtype = E4M3,
    dtype: torch.dtype = BF16,
    bias: torch.dtype | None = None,
    kernels: str = "auto",
) -> Plan:
    """Behind a norm that gives 8 bits; the weight is a named input. Without a device's name, for the CPU."""
    on = "meta" if device else "cpu"
    product = ops.QuantizedMatMul(64, 32, dtype=dtype, fast_accumulation=False)
    parts = ops.LayerNorm(64), ops.Quantize(E4M3), product, ops.Bias(32), ops.GELU()
    model = te_fuser.Sequential(*parts, kernels=kernels).to(dtype).to_empty(device=on)
    model[3].to(bias)
    x = torch.empty(16, 64, dtype=dtype, device=on, requires_grad=True)
    scales = {name: torch.ones((), device=on) for name in ("scale", "input_scale", "weight_scale")}
    return model.plan(x, device=device, weight=torch.empty(32, 64, dtype=weight, device=on), **scales)


def summed() -> Plan:
    """A sum that is also given to the caller."""
    return plan(te_fuser.Sequential(te_fuser.Residual(linear()), ops.Output("sum"), linear()))


def layer8() -> Plan:
    """A layer in a region, where quack is installed."""
    with torch.device("meta"):
        layer = te_fuser.TransformerLayer(4096, 16384, 32, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16)
        x = torch.empty(2048, 4, 4096, dtype=BF16, requires_grad=True)
    with te_fuser.autocast(recipe=DelayedScaling(amax_history_len=3)):
        return where(QUACK8, layer.plan, x, device="h200")


def turned(
    *parts: ops.FusableOperation, given: Mapping[str, torch.Tensor] | None = None, dtype: torch.dtype = BF16, **how: Any
) -> Plan:
    """Heads of 16 features behind a bias: 4 of queries, 2 of keys and of values."""
    x = tensor(1024, 4, 128, dtype=dtype).requires_grad_()
    model = te_fuser.Sequential(ops.Bias(128), *parts, **how).to(dtype)
    return model.plan(x, device="h200", **({"rotary_pos_emb": angles()} if given is None else given))


def angles(length: int = 1024, samples: int = 1, features: int = 16, **options: Any) -> torch.Tensor:
    return 20 * tensor(length, samples, 1, features, dtype=F32, grad=False, **options)


def norm(**how: Any) -> ops.HeadNorm:
    return ops.HeadNorm(16, **{"heads": 4, "kv_heads": 2, **how})


def by_angles(**how: Any) -> ops.RotaryByAngles:
    return ops.RotaryByAngles(16, **{"heads": 4, "kv_heads": 2, **how})


def turned_under_autocast() -> Plan:
    """A norm behind a product that is cast."""
    model = te_fuser.Sequential(ops.MatMul(128, 128), norm(), by_angles())
    with autocast_on_cuda():
        return model.plan(tensor(1024, 4, 128, dtype=F32), device="h200", rotary_pos_emb=angles())


def turned_layer() -> Plan:
    """Attention of a layer that norms queries and keys."""
    layer = te_fuser.TransformerLayer(
        64, 128, 4, num_gqa_groups=2, qk_norm_type="RMSNorm", params_dtype=BF16, device="cpu"
    )
    x = tensor(128, 2, 64, dtype=BF16).requires_grad_()
    return layer.self_attention.plan(x, device="h200", rotary_pos_emb=angles(128))


def rotary(**how: Any) -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(16, **{"heads": 4, **how})


def rotated(*parts: ops.FusableOperation, fixed: bool = False, **how: Any) -> Plan:
    """4 heads of 16 features behind a bias."""
    model = te_fuser.Sequential(ops.Bias(192), *parts, **how).to(BF16)
    model[0].bias.requires_grad_(not fixed)
    return model.plan(tensor(1024, 4, 192, dtype=BF16).requires_grad_(), device="h200")


def attending(**how: Any) -> ops.DotProductAttention:
    return ops.DotProductAttention(4, 16, **{"mask": "causal", "layout": "sequence_first", **how})


def decoded(positions: int, features: int, *parts: ops.FusableOperation, given: str = "") -> Plan:
    """A step of decoding for 3 samples, with those inputs whose names end so."""
    x = torch.randn(positions, 3, features, generator=torch.Generator().manual_seed(0)).to(BF16)
    inputs = {name: t for name, t in decoding.inputs().items() if name.endswith(given)}
    return decoding.planned(x, inputs, *parts)


Mask = ops.AttentionMask
WINDOW, LENGTHS, OFFSETS = Mask(causal=True, window=(1023, 0)), Mask(lengths="lengths"), Mask(causal=True, offsets="cu")
STRUCTURED: Mapping[str, dict[str, Any]] = {
    "window": {"mask": WINDOW, "samples": 1, "positions": 16384, "layout": "batch_first"},
    "lengths": {"mask": LENGTHS, "layout": "batch_first"},
    "offsets": {"mask": OFFSETS, "positions": 8192, "layout": "tokens"},
    "bounded ahead": {"mask": Mask(window=(512, 512)), "samples": 1, "positions": 16384, "layout": "batch_first"},
    "bounded behind": {"mask": Mask(window=(512, None)), "samples": 1, "positions": 16384, "layout": "batch_first"},
    "padding": {"mask": Mask(padding="pad"), "layout": "batch_first"},
    "short padding": {"mask": Mask(padding="pad"), "positions": 128, "layout": "batch_first"},
    "window, later positions too": {"mask": Mask(window=(1023, 0)), "samples": 1, "positions": 16384},
    "offsets, later positions too": {"mask": Mask(offsets="cu"), "positions": 8192, "layout": "tokens"},
    "padding, causal": {"mask": Mask(causal=True, padding="pad"), "layout": "batch_first"},
    "soft cap": {"scores": ops.AttentionScores(soft_cap=30.0), "layout": "batch_first"},
    "sink": {"scores": ops.AttentionScores(sink="learned"), "layout": "batch_first"},
}
KEYS_APART = {"mask": Mask(offsets="cu", key_offsets="cu_keys"), "positions": 8192, "keys": 4096, "layout": "tokens"}
RECIPES: Mapping[str, Recipe] = {"delayed": DelayedScaling(amax_history_len=3), "current": Float8CurrentScaling()}


def seed(**how: Any) -> Plan:
    """Up to attention: rows of 4 x 2048, 32 heads of 128 features."""
    return attention(linear(4096, 3 * 4096), **how)


def _some(name: str, make: Any, **choices: Any) -> Iterator[tuple[str, Plans]]:
    """A plan for each of the choices of one option."""
    ((option, values),) = choices.items()
    yield from ((f"{name}, {option} {v}", lambda v=v: make(**{option: v})) for v in values)


def _products() -> Iterator[tuple[str, Plans]]:
    yield "matmul", lambda: plan(ops.MatMul(4096, 1024))
    two = lambda: on_meta(lambda: [ops.MatMul(4096, 4096), ops.MatMul(4096, 4096)])  # noqa: E731
    yield "matmul, needed gradients alone", lambda: plan(*two(), frozen=("1.weight", "x"))
    silu = ops.SiLU()
    yield (
        "matmul, behind what is computed again",
        lambda: plan(ops.LayerNorm(4096), ops.MatMul(4096, 4096), silu, memory="lean"),
    )
    yield "matmul, under autocast", lambda: plan(ops.MatMul(4096, 64), **CAST)
    yield "bias, few rows", lambda: plan(silu, ops.Linear(256, 256), features=256, rows=16)
    yield "bias, many rows", lambda: plan(silu, linear())
    yield "bias, before an activation", lambda: plan(linear(), silu)
    yield from _some("gelu", lambda grad: plan(*gelu_mlp(), grad=grad), grad=(True, False))
    for memory in ("fast", "lean"):
        yield f"gelu, its slope free, {memory}", lambda m=memory: by_free_epilogues(*gelu_mlp(), memory=m)
    for bias, dropout in itertools.product((True, False), repeat=2):
        inner = lambda b=bias, d=dropout: [linear(bias=b), *([ops.Dropout(0.0)] if d else [])]  # noqa: E731
        yield f"sum, bias {bias}, dropout {dropout}", lambda i=inner: plan(te_fuser.Residual(*i()))
    yield "sum, read by others", summed
    yield "relu, without a backward", lambda: plan(linear(), ops.ReLU(), grad=False)
    yield from _some("relu", lambda memory: plan(*relu_mlp(), memory=memory), memory=MEMORY)
    for name, make in (("quack gelu", mlp), ("quack swiglu", gated_mlp)):
        of = lambda make=make, **how: where(QUACK, plan, *make(), **how)  # noqa: E731
        yield from _some(name, of, memory=MEMORY)
        yield f"{name}, main_grad", lambda make=make: where(QUACK, plan, *make(accumulate_into_main_grad=True))
        yield f"{name}, frozen weight", lambda make=make: where(QUACK, plan, *make(), frozen=["3.weight"])
        yield f"{name}, under autocast", lambda make=make: where(QUACK, plan, *make(), **CAST)
        yield (
            f"{name}, main_grad under autocast",
            lambda make=make: where(QUACK, plan, *make(accumulate_into_main_grad=True), **CAST),
        )
        yield from _some(name, of, rows=(16, 256))
    yield "quack gelu, without a backward", lambda: where(QUACK, plan, *mlp(), grad=False)
    yield "quack gelu, frozen bias", lambda: where(QUACK, plan, *mlp(), frozen=["1.bias"])
    yield "quack gelu, frozen both", lambda: where(QUACK, plan, *mlp(), frozen=["1.bias", "3.weight"])


def _products_8_bits() -> Iterator[tuple[str, Plans]]:
    for device, dtype in itertools.product(("h200", "l4"), (BF16, F16)):
        yield f"float8, {device}, {str(dtype)[6:]}", float8(device=device, dtype=dtype)
    for name, how in {
        "by rows": {"device": "b200"},
        "by rows, main_grad": {"device": "b200", "main_grad": True},
        "by rows, kept weights": {"device": "b200", "first": False},
        "without a backward": {"grad": False},
        "main_grad": {"main_grad": True},
        "first micro-batch": {"first": True},
        "later micro-batch": {"first": False},
        "float32": {"dtype": F32},
    }.items():
        yield f"float8, {name}", float8(**how)
    yield "blocks, bfloat16", blocks()
    yield "blocks, float16", blocks(dtype=F16)
    yield "blocks, taken away", lambda: taken_away(blocks())
    yield "blocks, behind gelu", blocks(ops.GELU())
    yield "blocks, behind gelu, taken away", lambda: taken_away(blocks(ops.GELU()))
    yield "blocks, without a backward", blocks(grad=False)
    yield "blocks, all frozen", blocks(frozen=("x", "0.weight", "0.bias", "1.weight"))
    yield "blocks, frozen weight", blocks(frozen=("1.weight",))
    yield "blocks, weight alone", blocks(frozen=("x", "0.weight", "0.bias"))
    for device, weight in itertools.product(("h200", "l4", "b200"), (E4M3, E5M2)):
        yield f"quantized, {device}, {str(weight)[6:]}", lambda d=device, w=weight: quantized(d, w)
    yield "quantized, float32", lambda: quantized("h200", dtype=F32)
    for kept in itertools.product((False, True), repeat=3):
        if any(kept) and not all(kept):
            yield f"partly, kept {kept}", partly(kept)
    yield from _some("quack float8", mlp8, grad=(True, False))
    gelus = ("float8_matmul_gelu_quack", "float8_matmul_gelu_quack_aux")
    for grad in (True, False):
        yield f"quack float8 bias, grad {grad}", lambda g=grad: without(gelus, mlp8, g)
    for (name, recipe), p, grad in itertools.product(RECIPES.items(), (None, 0.0), (True, False)):
        yield (
            f"quack float8 sum, {name}, dropout {p}, grad {grad}",
            lambda r=recipe, p=p, g=grad: added(p, recipe=r, grad=g),
        )
    yield "quack float8 sum, many terms", lambda: added(0.0, 4 * 4096, recipe=RECIPES["delayed"])
    yield "quack float8 sum, in evaluation", lambda: added(0.1, recipe=RECIPES["delayed"], training=False)
    yield "quack float8 layer", layer8


def _attentions() -> Iterator[tuple[str, Plans]]:
    eight = {"heads": 8}
    yield "front end", lambda: where(FRONT_END, attention, ops.SiLU(), **eight)
    yield "front end, not there", lambda: attention(ops.SiLU(), **eight)
    yield "front end, bias", lambda: where(FRONT_END, attention, ops.Bias(3072), **eight)
    turns = ops.RotaryEmbedding(128, heads=8)
    yield "front end, bias and rotation", lambda: where(FRONT_END, attention, ops.Bias(3072), turns, **eight)
    grouped = {**eight, "kv_heads": 2, "layout": "batch_first", "mask": "none"}
    yield "front end, grouped heads", lambda: where(FRONT_END, attention, ops.Bias(1536), **grouped)
    yield "flash 4", lambda: where(FLASH_4, seed)
    yield "flash 4, not there", seed
    yield "flash 4, few positions", lambda: where(FLASH_4, seed, positions=64)
    yield "flash 4, dropout", lambda: where(FLASH_4, seed, dropout=0.1)
    yield "flash 4, dropout in evaluation", lambda: where(FLASH_4, seed, dropout=0.1, training=False)
    both = FLASH_4 + FRONT_END
    yield "flash 4 and the front end", lambda: where(both, seed)
    yield "flash 4 and the front end, dropout", lambda: where(both, seed, dropout=0.1)
    yield "front end alone", lambda: where(FRONT_END, seed)
    for name, how in STRUCTURED.items():
        yield f"structure, {name}", lambda h=how: attention(**h)
        yield f"structure, {name}, flash 4", lambda h=how: where(FLASH_4, attention, **h)
        yield f"structure, {name}, all packages", lambda h=how: where(both, attention, **h)
        yield f"structure, {name}, front end", lambda h=how: where(FRONT_END, attention, **h)
    yield "structure, keys apart", lambda: where(FLASH_4, attention, **KEYS_APART)


def _heads() -> Iterator[tuple[str, Plans]]:
    yield "key_value_cache", lambda: decoded(5, 192, decoding.cache())
    yield "one_query", lambda: decoded(1, 192, decoding.cache(), decoding.attention())
    yield "one_query, another sequence", lambda: decoded(1, 128, decoding.attention("none"), given="cache")
    yield "rotary", lambda: rotated(rotary())
    yield "rotary, no bias", lambda: rotated(ops.SiLU(), rotary())
    yield "rotary, attention", lambda: rotated(rotary(), attending())
    yield "rotary, attention, frozen bias", lambda: rotated(rotary(), attending(), fixed=True)
    yield "rotary, attention that lies otherwise", lambda: rotated(rotary(), attending(packing="blocked"))
    yield "bias and attention", lambda: rotated(attending(dropout=0.1))
    yield "turned, norm first", lambda: turned(norm(), by_angles())
    yield "turned, rotation first", lambda: turned(by_angles(), norm())
    yield "turned, rotation alone", lambda: turned(ops.SiLU(), by_angles())
    yield "turned, rotation and bias", lambda: turned(by_angles())
    yield "turned, norm alone", lambda: turned(norm(), by_angles(), given={})
    yield "turned, under autocast", turned_under_autocast
    yield "turned, a layer", turned_layer


PLANS: Mapping[str, Plans] = dict(itertools.chain(_products(), _products_8_bits(), _attentions(), _heads()))


def file_of(name: str) -> Path:
    """Path of a plan's text."""
    return FOLDER / f"{''.join(c if c.isalnum() else '_' for c in name.replace(', ', ' '))}.txt"


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        settle(patch, "avx512", Path(folder))
        for name, make in PLANS.items():
            file_of(name).write_text(text_of(make()))


if __name__ == "__main__":
    main()
