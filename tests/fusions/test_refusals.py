"""Reasons for which plans do not take fusions are those written down: `python -m tests.fusions.test_refusals`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.recipe import DelayedScaling, MMParams, MXFP8BlockScaling
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
    gated_mlp,
    in_region,
    installed,
    mlp,
    where,
)
from tests.fusions.plans import (
    CAST,
    angles,
    attending,
    blocks,
    by_angles,
    float8,
    linear,
    norm,
    quantized,
    rotary,
    seed,
    turned,
)
from tests.fusions.products import gelu_mlp, plan
from tests.settings import settle
from tests.twins import tensor

Rows = Iterator[tuple[str, Plans]]  # fusions by their names, and a plan that does not take them
CPU: dict[str, Any] = {"device": None, "rows": 8}
REFERENCE = {"kernels": "reference"}
SPLIT = DelayedScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))


def products() -> Rows:
    both = "matmul matmul_backward"
    yield both, lambda: plan(ops.MatMul(64, 64), features=64, **CPU)
    yield both, lambda: plan(ops.MatMul(64, 64), features=64, **REFERENCE)
    yield both, lambda: plan(ops.MatMul(64, 64), features=64, dtype=torch.float64)
    yield "matmul_bias_backward", lambda: plan(linear(), frozen=("0.weight", "x"), rows=16)
    yield "matmul_bias_relu", lambda: plan(linear(64, 64), ops.ReLU(), features=64, grad=False, **CPU)
    yield "matmul_bias_gelu", lambda: plan(*gelu_mlp())
    gelus = "matmul_bias_gelu_aux gelu_matmul_backward"
    yield gelus, lambda: plan(*gelu_mlp("none"))
    yield gelus, lambda: plan(*gelu_mlp(), dtype=F32)
    yield gelus, lambda: plan(*gelu_mlp(inner=1004))
    yield "matmul_bias_gelu_aux", lambda: plan(*gelu_mlp(inner=64), **CPU)
    yield "matmul_bias_gelu_aux", lambda: plan(linear(64, 64), ops.GELU(), features=64, rows=16, dtypes={"0.bias": F32})
    residual = te_fuser.Residual
    yield "matmul_add_bias_dropout", lambda: plan(residual(linear(), ops.Dropout(0.1)))
    yield "matmul_add", added_in_float32


def added_in_float32() -> Plan:
    model = te_fuser.Sequential(ops.MatMul(64, 64), ops.Add("other")).to("meta", BF16)
    x = torch.empty(16, 64, dtype=BF16, device="meta", requires_grad=True)
    assert "matmul_add" in [s.name for s in model.plan(x, device="h200", other=x.detach()).forward]
    return model.plan(x, device="h200", other=x.detach().float())


# ------------------------------------------------------------------------------------------------------- of 8 bits


def calibrating() -> Plan:
    model = te_fuser.Sequential(ops.MatMul(32, 64, device="meta", dtype=BF16))
    with te_fuser.autocast(enabled=False, calibrating=True):
        return model.plan(torch.empty(17, 32, dtype=BF16, device="meta"), device="h200")


def products_8_bits() -> Rows:
    yield "quantized_matmul", lambda: quantized(None)
    yield "quantized_matmul", lambda: quantized(**REFERENCE)
    yield "quantized_matmul", lambda: quantized("a100")
    yield "quantized_matmul_bias", lambda: quantized(dtype=F32)
    yield "quantized_matmul_bias", lambda: quantized(bias=F32)
    yield "float8_matmul", float8(device=None)
    yield "float8_matmul_backward", float8(device="a100")
    yield "float8_matmul_bias", float8(dtype=F32)
    yield "float8_matmul_main_grad", float8()
    yield "float8_matmul_backward", float8(main_grad=True)
    yield "float8_matmul_backward", float8(device="b200")
    yield "float8_matmul_rows_backward", float8()
    yield "float8_matmul", float8(**REFERENCE)
    own = "own_scales_matmul"
    yield own, blocks(device=None)
    yield own, blocks(device="a100")
    yield "own_scales_matmul_alone", blocks()
    yield "own_scales_matmul_bias", blocks(dtype=F32)
    yield own, blocks(**REFERENCE)
    mx = lambda: in_region(lambda: [ops.LayerNorm(128), ops.MatMul(128, 256)], 17, 128, MXFP8BlockScaling())  # noqa: E731
    yield own, mx
    yield own, blocks(device="l4")
    yield own, blocks(device="b200")
    kept = DelayedScaling(override_linear_precision=(False, False, True))
    main = lambda: [ops.LayerNorm(32), ops.MatMul(32, 64, accumulate_into_main_grad=True)]  # noqa: E731
    yield "partly_float8_mat_mul_backward", lambda: in_region(main, 17, 32, kept)
    yield "partly_float8_mat_mul", calibrating


# ----------------------------------------------------------------------------------------------------------- of quack

AUX, QUACK_ALONE = "matmul_bias_gelu_quack_aux", "matmul_bias_gelu_quack"
BACKWARD, GATED = "bias_gelu_matmul_quack", "swiglu_matmul_quack"


def gate(n_in: int = 64, n_out: int = 64, **how: Any) -> Plan:
    first = how.pop("gate_first", True)
    return where(QUACK, plan, ops.SwiGLU(gate_first=first), ops.MatMul(n_in, n_out), features=2 * n_in, **how)


def of_quack() -> Rows:
    others: list[dict[str, Any]] = [
        CPU,
        REFERENCE,
        {"dtype": F16},
        {"dtype": F32},
        {"device": "a100"},
        {"device": "b200"},
    ]
    for how in others:
        yield f"{AUX} {BACKWARD}", lambda h=how: where(QUACK, plan, *gelu_mlp(inner=64), **h)
        yield QUACK_ALONE, lambda h=how: where(QUACK, plan, *gelu_mlp(inner=64), grad=False, **h)
        yield GATED, lambda h=how: gate(**h)
    yield f"{AUX} {BACKWARD}", lambda: where(QUACK, plan, *gelu_mlp("none", 64))
    yield QUACK_ALONE, lambda: where(QUACK, plan, *gelu_mlp("none", 64), grad=False)
    yield QUACK_ALONE, lambda: where(QUACK, plan, *mlp())
    for n_in, n_out in ((68, 64), (64, 68), (64, 0), (0, 64)):
        if n_out:
            forward = lambda i=n_in, o=n_out: [ops.Linear(i, o), ops.GELU()]  # noqa: E731
            yield AUX, lambda f=forward, i=n_in: where(QUACK, plan, *f(), features=i)
        if n_in:
            back = lambda i=n_in, o=n_out: [ops.Bias(i), ops.GELU(), ops.MatMul(i, o)]  # noqa: E731
            yield BACKWARD, lambda b=back, i=n_in: where(QUACK, plan, *b(), features=i)
            yield GATED, lambda i=n_in, o=n_out: gate(i, o)
    for version in (None, "0.6.4"):
        for names, make in ((f"{AUX} {BACKWARD}", mlp), (GATED, gated_mlp)):
            yield names, lambda make=make, v=version: of_version(v, plan, *make())
    parts = lambda: [ops.Bias(64), ops.GELU(), ops.MatMul(64, 64)]  # noqa: E731
    yield BACKWARD, lambda: where(QUACK, plan, *parts(), features=64, rows=16, dtypes={"0.bias": F32})
    yield GATED, lambda: gate(gate_first=False)
    for name, make in ((BACKWARD, mlp), (GATED, gated_mlp)):
        yield name, lambda make=make: where(QUACK, plan, *make(accumulate_into_main_grad=True), **CAST)


def of_version(version: str | None, make: Any, *given: Any, **how: Any) -> Plan:
    with installed(*QUACK8, version=version):
        return make(*given, **how)


def mlp8(inner: int = 16384, gelu: str = "tanh", **how: Any) -> Plan:
    parts = lambda: [ops.LayerNorm(4096), ops.Linear(4096, inner), ops.GELU(gelu), ops.Linear(inner, 4096)]  # noqa: E731
    return in_region(parts, 8192, 4096, **{"recipe": DelayedScaling(amax_history_len=3), **how})


def sum8(p: float = 0.0, inner: int = 4096, rows: int = 8192, **how: Any) -> Plan:
    parts = lambda: [ops.LayerNorm(inner), ops.MatMul(inner, 4096), ops.Bias(4096), ops.Dropout(p), ops.Add("other")]  # noqa: E731
    return in_region(parts, rows, inner, **{"other": how.get("dtype", BF16), **how})


def of_quack_8_bits() -> Rows:
    biased, gelu, total = (
        "float8_matmul_bias_quack",
        "float8_matmul_gelu_quack_aux",
        "float8_matmul_add_bias_quack_dropout",
    )
    others: list[dict[str, Any]] = [{"dtype": F16}, {"recipe": SPLIT}, {"device": "b200"}, {"device": "l4"}]
    for how in others:
        yield biased, lambda h=how: where(QUACK8, mlp8, 8192, **h)
        yield gelu, lambda h=how: where(QUACK8, mlp8, **h)
        yield total, lambda h=how: where(QUACK8, sum8, **h)
    yield biased, lambda: where(QUACK8, mlp8, 8192, dtypes={"1.bias": F32})
    yield gelu, lambda: where(QUACK8, mlp8, dtypes={"1.bias": F32})
    yield total, lambda: where(QUACK8, sum8, dtypes={"2.bias": F32})
    yield gelu, lambda: where(QUACK8, mlp8, gelu="none")
    yield biased, lambda: where(QUACK8, mlp8)
    for version in (None, "0.6.4"):
        yield biased, lambda v=version: of_version(v, mlp8, 8192)
        yield total, lambda v=version: of_version(v, sum8)
    for grad in (True, False):
        yield total, lambda g=grad: where(QUACK8, sum8, 0.1, grad=g)
    for dtype, other in ((BF16, F32), (F32, BF16)):
        yield total, lambda t=dtype, o=other: where(QUACK8, sum8, dtype=t, other=o)
    yield total, lambda: where(QUACK8, sum8, inner=64, rows=8, device=None)


# -------------------------------------------------------------------------------------------------------- attention

FRONT, TWIN = "attention_cuda_cudnn_frontend", "attention_cuda_cudnn"
FLASH, FOUR = "attention_cuda_flash", "attention_cuda_flash_attn_4"
Mask = ops.AttentionMask
CAUSAL, LOWER = {"causal": True}, {"causal": True, "corner": "bottom_right"}
FROM_THE_LAST = [
    (Mask(**CAUSAL, window=(5, 0)), 1024),
    (Mask(**CAUSAL, lengths="lengths"), 2048),
    (Mask(**CAUSAL, lengths="one", key_lengths="other"), 2048),
]
NOT_FROM_THE_LAST = [
    (Mask(**LOWER), 1024),
    (Mask(**CAUSAL, lengths="lengths", key_lengths="lengths"), 2048),
    (Mask(**LOWER, key_lengths="key_lengths"), 2048),
    (Mask(key_lengths="key_lengths"), 1024),
    (Mask(**CAUSAL, window=(5, 0)), 2048),
]


def structured(mask: Mask, keys: int | None = None, **how: Any) -> Plan:
    return where(FLASH_4, attention, keys=keys, **{"mask": mask, "layout": "batch_first", **how})


def attentions() -> Rows:
    grouped = {"kv_heads": 2, "layout": "batch_first"}
    yield FRONT, lambda: where(FRONT_END, attention, heads=8, **grouped)
    yield FOUR, lambda: where(FLASH_4, attention, **grouped)
    yield FRONT, lambda: attention(heads=8)
    yield FOUR, attention
    yield FOUR, lambda: where(FLASH_4, seed, dropout=0.1)
    for device in ("b200", "a100"):
        yield FOUR, lambda d=device: where(FLASH_4, attention, device=d)
    for window in ((512, 512), (None, 512)):
        far = {"mask": Mask(window=window), "samples": 1, "positions": 16384, "layout": "batch_first"}
        yield FRONT, lambda h=far: where(FRONT_END, attention, **h)
    for scores in ({"soft_cap": 30.0}, {"sink": "zero"}, {"alibi": True}):
        given = {"scores": ops.AttentionScores(**scores), "layout": "batch_first"}
        yield FLASH, lambda h=given: attention(**h)
    for mask, keys in FROM_THE_LAST:
        yield f"{FLASH} {FOUR}", lambda m=mask, k=keys: structured(m, k)
    tokens = {"layout": "tokens", "positions": 8192}
    yield FOUR, lambda: structured(Mask(offsets="cu", key_offsets="cu_keys"), 4096, **tokens)
    yield FRONT, lambda: structured(Mask(causal=True, offsets="cu"), **tokens)
    given_mask = Mask(causal=True, window=(7, 0), given="mask")
    yield FLASH, lambda: structured(given_mask)
    yield FLASH, lambda: structured(Mask(window=(5, 0), padding="pad"))


# ------------------------------------------------------------------------------------------------------------ heads


def one_query(x: torch.Tensor, given: Any = None, grad: bool = False, **how: Any) -> Plan:
    return decoding.planned(x, decoding.inputs() if given is None else given, decoding.attention(**how), grad=grad)


def row(positions: int = 1, dtype: torch.dtype = BF16, features: int = 128) -> torch.Tensor:
    return torch.randn(positions, 3, features, generator=torch.Generator().manual_seed(0)).to(dtype)


def rotated(*parts: ops.FusableOperation, dtype: torch.dtype = BF16, **how: Any) -> Plan:
    model = te_fuser.Sequential(ops.Bias(192), *parts, **how).to(dtype)
    return model.plan(tensor(1024, 4, 192, dtype=dtype).requires_grad_(), device="h200")


def turned_alone(op: ops.FusableOperation, features: int, device: str | None = None) -> Plan:
    return te_fuser.Sequential(op).plan(tensor(8, 2, features, dtype=F32), device=device)


def cached(op: ops.KeyValueCache, **changed: torch.Tensor) -> Plan:
    return decoding.planned(row(2, features=192), {**decoding.inputs(), **changed}, op)


def of_heads() -> Rows:
    name = "one_query_attention"
    yield name, lambda: one_query(row(2))
    yield name, lambda: one_query(row(dtype=F32), decoding.inputs(dtype=F32))
    yield name, lambda: one_query(row(), mask=Mask(causal=True))
    yield name, lambda: one_query(row(), scores=ops.AttentionScores(soft_cap=3.0))
    yield name, lambda: one_query(row(), scores=ops.AttentionScores(sink="zero"))
    yield name, lambda: one_query(row(), decoding.inputs(dtype=F16))
    given = {**decoding.inputs(), "attention_mask": torch.zeros(3, 1, 1, 41, dtype=torch.bool)}
    yield name, lambda: one_query(row(), given, mask="given")
    yield name, lambda: one_query(row(features=192), {}, mask="none", packing="interleaved")
    yield name, lambda: one_query(row(), grad=True)
    small = ops.KeyValueCache(4, heads=32, kv_heads=8)
    yield "key_value_cache", lambda: cached(small)
    narrow = torch.ones(3, dtype=torch.int32)
    yield "key_value_cache", lambda: cached(decoding.cache(), counts=narrow)
    rotations, turns = "rotary_embedding_forward rotary_embedding_backward", "turned_heads_forward"
    for how in (REFERENCE, {"dtype": torch.float64}):
        yield rotations, lambda h=how: rotated(rotary(), **h)
        yield turns, lambda h=how: turned(by_angles(), **h)
    yield "rotary_embedding_forward", lambda: turned_alone(rotary(), 192)
    yield turns, lambda: turned_alone(norm(), 128)
    yield TWIN, lambda: rotated(rotary(), attending(packing="blocked"))
    yield turns, lambda: turned(norm(), by_angles(packing="blocked"))
    yield turns, lambda: torch.no_grad()(turned)(norm(), by_angles(), norm())
    two = {"a": angles(), "b": angles(features=8)}
    yield turns, lambda: turned(by_angles(angles=("a", "b")), given=two)
    starts = {"rotary_pos_emb": angles(), "s": torch.zeros(4, dtype=torch.int16)}
    yield turns, lambda: turned(by_angles(starts="s"), given=starts)
    yield turns, lambda: turned_alone(ops.HeadNorm(1024, heads=2), 2048, "h200")


GROUPS = (products, products_8_bits, of_quack, of_quack_8_bits, attentions, of_heads)
WRITTEN = Path(__file__).with_name("refusals.txt")


def lines(group: Callable[[], Rows]) -> Iterator[str]:
    """A fusion and why a plan has it nowhere that it could be; of prices is said elsewhere."""
    for names, make in group():
        p = make()
        taken = {(s.name, s.start, s.stop) for s in (*p.forward, *p.backward) if s.task.what == "fusion"}
        for name in names.split():
            refused = [r for r in p.refusals if r.name == name and not r.reason.startswith(("predicted", "no gain"))]
            assert refused and not taken & {(r.name, r.start, r.stop) for r in refused}, name
            yield f"{name}: {'; or '.join(sorted({r.reason for r in refused}))}"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("group", GROUPS)
def test_fusions_refused_say_why(group: Callable[[], Rows]) -> None:
    sections = {head: rest for head, *rest in (part.splitlines() for part in WRITTEN.read_text().split("==== ")[1:])}
    assert list(lines(group)) == sections[group.__name__]


@pytest.mark.parametrize(("mask", "keys"), NOT_FROM_THE_LAST)
def test_positions_that_agree_from_both_ends_are_not_refused(mask: Mask, keys: int) -> None:
    reasons = [r.reason for r in structured(mask, keys).refusals if r.name in (FLASH, FOUR)]
    assert not any("counts positions from the last query and key" in reason for reason in reasons)


def few(*parts: ops.FusableOperation, rows: int) -> Plan:
    return where(QUACK, plan, *parts, rows=rows)


DEARER: list[tuple[str, Plans, str]] = [
    ("matmul_bias_backward", lambda: plan(ops.SiLU(), linear()), "us more than"),
    ("matmul_bias_backward", lambda: plan(linear(), ops.SiLU()), "us more than"),
    ("gelu_matmul_backward", lambda: plan(*gelu_mlp(), memory="fast"), "us more than"),
    *((name, lambda rows=rows, parts=parts: few(*parts(), rows=rows), words) for name, parts,
     words in ((AUX, mlp, "matmul_bias_gelu_aux"),
     (BACKWARD, mlp, "us more than matmul_bias_backward + gelu_matmul_bias_backward"),
     (GATED, gated_mlp, "us more than ")) for rows in (16, 256)),
    (FOUR, lambda: where(FLASH_4, seed, positions=64), "us more than"),
    (TWIN, lambda: where(FRONT_END, attention, ops.Bias(3072), ops.RotaryEmbedding(128, heads=8), heads=8),
     "us more than"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "words"), DEARER)
def test_fusion_that_costs_more_is_left_out_by_its_price(name: str, make: Plans, words: str) -> None:
    p = make()
    assert any(words in r.reason for r in p.refusals if r.name == name)
    assert name not in {s.name for s in (*p.forward, *p.backward)}
    assert not {k.name for k in p.kept if "mask" in k.name}


def main() -> None:
    """Write the reasons down."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        settle(patch, "avx512", Path(folder))
        WRITTEN.write_text("".join(f"==== {g.__name__}\n" + "".join(f"{line}\n" for line in lines(g)) for g in GROUPS))


if __name__ == "__main__":
    main()
