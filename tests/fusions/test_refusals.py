"""Reasons for which plans do not take a fusion: a table of cases, and the words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.recipe import DelayedScaling, MMParams, MXFP8BlockScaling
from tests.float8 import E4M3
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
    frozen,
    gated_mlp,
    in_region,
    installed,
    mlp,
    of_dtypes,
    under_autocast,
    where,
)
from tests.fusions.plans import angles, attending, blocks, by_angles, float8, linear, norm, rotary, seed, turned
from tests.fusions.products import gelu_mlp, plan
from tests.twins import tensor

Rows = Iterator[tuple[str, Plans, str]]  # fusions by their names, a plan, why they are not taken
CPU: dict[str, Any] = {"device": None, "rows": 8}
REFERENCE, ALONE = {"kernels": "reference"}, "this plan is one of PyTorch's operations alone"
ON_CPU = "cuBLASLt runs on cuda, the input is on cpu"
DTYPES = "cuBLASLt's products are in bfloat16, float16 and float32, and this one is in float64"
EXACT = "the epilogue's GELU is the tanh form, and this one is exact (erf)"
DROPS = "an epilogue drops nothing, and this Dropout does"
OUTPUT_ALONE = "backward reads the value before the activation, and it gives only its output"
BIAS = "the bias is in torch.float32, the product in torch.bfloat16"
MAIN_GRAD = "the weight's gradient goes to its main_grad"
SPLIT = DelayedScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))


def products() -> Rows:
    both = "matmul matmul_backward"
    yield both, lambda: plan(ops.MatMul(64, 64), features=64, **CPU), ON_CPU
    yield both, lambda: plan(ops.MatMul(64, 64), features=64, **REFERENCE), ALONE
    yield both, lambda: plan(ops.MatMul(64, 64), features=64, dtype=torch.float64), DTYPES
    with_bias = "nobody needs the gradient of 0.weight, which it makes with 1.bias"
    yield "matmul_bias_backward", lambda: frozen([linear()], "0.weight", rows=16, grad=False), with_bias
    yield "matmul_bias_relu", lambda: plan(linear(64, 64), ops.ReLU(), features=64, grad=False, **CPU), ON_CPU
    yield "matmul_bias_gelu", lambda: plan(*gelu_mlp()), OUTPUT_ALONE
    rows_of_8 = "the value before GELU is read and written in rows of a multiple of 8, and this one has 1004"
    too_much = "the epilogue's tanh errs by 1e-5, too much for float32"
    gelus = "matmul_bias_gelu_aux gelu_matmul_backward"
    yield gelus, lambda: plan(*gelu_mlp("none")), EXACT
    yield gelus, lambda: plan(*gelu_mlp(), dtype=F32), too_much
    yield gelus, lambda: plan(*gelu_mlp(inner=1004)), rows_of_8
    yield "matmul_bias_gelu_aux", lambda: plan(*gelu_mlp(inner=64), **CPU), ON_CPU
    yield "matmul_bias_gelu_aux", lambda: of_dtypes([linear(64, 64), ops.GELU()], 64, "0.bias"), BIAS
    residual = te_fuser.Residual
    yield "matmul_add_bias_dropout", lambda: plan(residual(linear(), ops.Dropout(0.1))), DROPS
    yield "matmul_add", added_in_float32, "what is added is in torch.float32, the product in torch.bfloat16"


def added_in_float32() -> Plan:
    model = te_fuser.Sequential(ops.MatMul(64, 64), ops.Add("other")).to("meta", BF16)
    x = torch.empty(16, 64, dtype=BF16, device="meta", requires_grad=True)
    assert "matmul_add" in [s.name for s in model.plan(x, device="h200", other=x.detach()).forward]
    return model.plan(x, device="h200", other=x.detach().float())


# ------------------------------------------------------------------------------------------------------- of 8 bits

NO_GPU = f"{ON_CPU}; it is emulated"
OLD_GPU = "products of 8 bits take compute capability 8.9, this GPU has 8.0; it is emulated"
FLOAT32 = "not every cuBLASLt adds a bias in float32 to products of 8 bits"
BIAS8 = "the bias is in float32, the product in bfloat16"
BY_ROWS = "factors of 8 bits may lie by rows on this device"
ALONG = "factors of 8 bits lie along what is summed on this device"
AT_HAND = "are compiled for the GPU at hand, and this plan has none of these"
BLOCKS = "products with a scale for each block of 128 numbers take compute capability 9.0, this GPU has"


def quantized(device: str | None = "h200", dtype: torch.dtype = BF16, bias: Any = None, kernels: str = "auto") -> Plan:
    on = "meta" if device else "cpu"
    product = ops.QuantizedMatMul(64, 32, dtype=dtype, fast_accumulation=False)
    parts = ops.LayerNorm(64), ops.Quantize(E4M3), product, ops.Bias(32), ops.GELU()
    model = te_fuser.Sequential(*parts, kernels=kernels).to(dtype).to_empty(device=on)
    model[3].to(bias)
    x = torch.empty(16, 64, dtype=dtype, device=on, requires_grad=True)
    scales = {name: torch.ones((), device=on) for name in ("scale", "input_scale", "weight_scale")}
    return model.plan(x, device=device, weight=torch.empty(32, 64, dtype=E4M3, device=on), **scales)


def calibrating() -> Plan:
    model = te_fuser.Sequential(ops.MatMul(32, 64, device="meta", dtype=BF16))
    with te_fuser.autocast(enabled=False, calibrating=True):
        return model.plan(torch.empty(17, 32, dtype=BF16, device="meta"), device="h200")


def products_8_bits() -> Rows:
    yield "quantized_matmul", lambda: quantized(None), NO_GPU
    yield "quantized_matmul", lambda: quantized(**REFERENCE), ALONE
    yield "quantized_matmul", lambda: quantized("a100"), OLD_GPU
    yield "quantized_matmul_bias", lambda: quantized(dtype=F32), FLOAT32
    yield "quantized_matmul_bias", lambda: quantized(bias=F32), BIAS8
    yield "float8_matmul", float8(device=None), NO_GPU
    yield "float8_matmul_backward", float8(device="a100"), OLD_GPU
    yield "float8_matmul_bias", float8(dtype=F32), FLOAT32
    yield "float8_matmul_main_grad", float8(), "accumulate_into_main_grad is off"
    yield "float8_matmul_backward", float8(main_grad=True), MAIN_GRAD
    yield "float8_matmul_backward", float8(device="b200"), BY_ROWS
    yield "float8_matmul_rows_backward", float8(), ALONG
    yield "float8_matmul", float8(**REFERENCE), f"the kernels that lay out its factors {AT_HAND}"
    own = "own_scales_matmul"
    yield own, blocks(device=None), NO_GPU
    yield own, blocks(device="a100"), OLD_GPU
    yield "own_scales_matmul_alone", blocks(), "it keeps nothing that backward reads"
    yield "own_scales_matmul_bias", blocks(dtype=F32), FLOAT32
    yield own, blocks(**REFERENCE), f"the kernels that quantize its factors {AT_HAND}"
    mx = lambda: in_region(lambda: [ops.LayerNorm(128), ops.MatMul(128, 256)], 17, 128, MXFP8BlockScaling())  # noqa: E731
    yield own, mx, "products with a scale for each 32 numbers are emulated alone; it is emulated"
    yield own, blocks(device="l4"), f"{BLOCKS} 8.9; it is emulated"
    yield own, blocks(device="b200"), f"{BLOCKS} 10.0; it is emulated"
    kept = DelayedScaling(override_linear_precision=(False, False, True))
    main = lambda: [ops.LayerNorm(32), ops.MatMul(32, 64, accumulate_into_main_grad=True)]  # noqa: E731
    yield "partly_float8_mat_mul_backward", lambda: in_region(main, 17, 32, kept), MAIN_GRAD
    yield "partly_float8_mat_mul", calibrating, "it is calibrating: amaxes are found by PyTorch's operations"


# ----------------------------------------------------------------------------------------------------------- of quack

AUX, QUACK_ALONE = "matmul_bias_gelu_quack_aux", "matmul_bias_gelu_quack"
BACKWARD, GATED = "bias_gelu_matmul_quack", "swiglu_matmul_quack"
MISSING = 'quack-kernels is not installed: pip install "quack-kernels>=0.6.5"'
OLD = 'it needs quack-kernels 0.6.5, found 0.6.4: pip install "quack-kernels>=0.6.5"'
GPUS = {"a100": "8.0", "b200": "10.0", "l4": "8.9"}
FEWER_BITS = "it sums in fewer bits than float32 has, and the recipe says use_split_accumulator for forward"


def hopper_alone(device: str) -> str:
    return f"it was measured on compute capability 9 alone, this GPU has {GPUS[device]}"


def gate(n_in: int = 64, n_out: int = 64, **how: Any) -> Plan:
    first = how.pop("gate_first", True)
    return where(QUACK, plan, ops.SwiGLU(gate_first=first), ops.MatMul(n_in, n_out), features=2 * n_in, **how)


def of_quack() -> Rows:
    accurate = "its tanh is right to 11 bits, which is enough for bfloat16 alone"
    for names, make, words in (
        (f"{AUX} {BACKWARD}", lambda **how: where(QUACK, plan, *gelu_mlp(inner=64), **how), accurate),
        (QUACK_ALONE, lambda **how: where(QUACK, plan, *gelu_mlp(inner=64), grad=False, **how), accurate),
        (GATED, gate, "it is for bfloat16 alone"),
    ):
        yield names, lambda make=make: make(**CPU), "quack's kernels run on cuda, the input is on cpu"
        yield names, lambda make=make: make(**REFERENCE), ALONE
        for dtype in (F16, F32):
            yield names, lambda make=make, t=dtype: make(dtype=t), f"{words}, and this is {dtype}"
        for device in ("a100", "b200"):
            yield names, lambda make=make, d=device: make(device=d), hopper_alone(device)
    yield f"{AUX} {BACKWARD}", lambda: where(QUACK, plan, *gelu_mlp("none", 64)), EXACT
    yield QUACK_ALONE, lambda: where(QUACK, plan, *gelu_mlp("none", 64), grad=False), EXACT
    yield QUACK_ALONE, lambda: where(QUACK, plan, *mlp()), OUTPUT_ALONE
    for n_in, n_out in ((68, 64), (64, 68), (64, 0), (0, 64)):
        why = f"it reads and writes rows of a multiple of 8, and the product is of {n_in} to {n_out} features"
        if n_out:
            forward = lambda i=n_in, o=n_out: [ops.Linear(i, o), ops.GELU()]  # noqa: E731
            yield AUX, lambda f=forward, i=n_in: where(QUACK, plan, *f(), features=i), why
        if n_in:
            back = lambda i=n_in, o=n_out: [ops.Bias(i), ops.GELU(), ops.MatMul(i, o)]  # noqa: E731
            yield BACKWARD, lambda b=back, i=n_in: where(QUACK, plan, *b(), features=i), why
            yield GATED, lambda i=n_in, o=n_out: gate(i, o), why
    for version, why in ((None, MISSING), ("0.6.4", OLD)):
        for names, make in ((f"{AUX} {BACKWARD}", mlp), (GATED, gated_mlp)):
            yield names, lambda make=make, v=version: of_version(v, plan, *make()), why
    parts = lambda: [ops.Bias(64), ops.GELU(), ops.MatMul(64, 64)]  # noqa: E731
    yield BACKWARD, lambda: where(QUACK, of_dtypes, parts(), 64, "0.bias"), BIAS
    half = "its gate is the first half of SwiGLU's input, and here it is the second (gate_first=False)"
    yield GATED, lambda: gate(gate_first=False), half
    cast = "it reads the weight as it is cast, and main_grad is that of the weight itself"
    for name, make in ((BACKWARD, mlp), (GATED, gated_mlp)):
        yield name, lambda make=make: where(QUACK, under_autocast, make(accumulate_into_main_grad=True)), cast


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
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": F16}, "it was written for bfloat16, and this is float16"),
        ({"recipe": SPLIT}, FEWER_BITS),
        *(({"device": device}, hopper_alone(device)) for device in ("b200", "l4")),
    ]
    for how, why in refused:
        yield biased, lambda h=how: where(QUACK8, mlp8, 8192, **h), why
        yield gelu, lambda h=how: where(QUACK8, mlp8, **h), why
        yield total, lambda h=how: where(QUACK8, sum8, **h), why
    yield biased, lambda: where(QUACK8, mlp8, 8192, dtypes={"1.bias": F32}), BIAS8
    yield gelu, lambda: where(QUACK8, mlp8, dtypes={"1.bias": F32}), BIAS8
    yield total, lambda: where(QUACK8, sum8, dtypes={"2.bias": F32}), BIAS8
    yield gelu, lambda: where(QUACK8, mlp8, gelu="none"), EXACT
    yield biased, lambda: where(QUACK8, mlp8), "of 16384 terms cuBLASLt's is faster, it was up to 8192"
    for version, why in ((None, MISSING), ("0.6.4", OLD)):
        yield biased, lambda v=version: of_version(v, mlp8, 8192), why
        yield total, lambda v=version: of_version(v, sum8), why
    for grad in (True, False):
        yield total, lambda g=grad: where(QUACK8, sum8, 0.1, grad=g), DROPS
    for dtype, other in ((BF16, F32), (F32, BF16)):
        why = f"what is added is in {other}, the product in {dtype}"
        yield total, lambda t=dtype, o=other: where(QUACK8, sum8, dtype=t, other=o), why
    yield total, lambda: where(QUACK8, sum8, inner=64, rows=8, device=None), NO_GPU


# -------------------------------------------------------------------------------------------------------- attention

FRONT, TWIN = "attention_cuda_cudnn_frontend", "attention_cuda_cudnn"
FLASH, FOUR = "attention_cuda_flash", "attention_cuda_flash_attn_4"
Mask = ops.AttentionMask
STRIDES = (
    "query heads of several groups have no common stride in packing='interleaved' with layout='batch_first', so their "
    "gradient cannot be stored there: use another of the two"
)
LAST = "it counts positions from the last query and key, and there may be more of one: take corner='bottom_right'"
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
    yield FRONT, lambda: where(FRONT_END, attention, heads=8, **grouped), STRIDES
    yield FOUR, lambda: where(FLASH_4, attention, **grouped), STRIDES
    missing = 'nvidia-cudnn-frontend is not installed: pip install "nvidia-cudnn-frontend>=1.32"'
    yield FRONT, lambda: attention(heads=8), missing
    yield FOUR, attention, 'flash-attn-4 is not installed: pip install "flash-attn-4>=4.0.0b36"'
    dropped = "it has no dropout, and 0.1 of the probabilities are to be dropped"
    yield FOUR, lambda: where(FLASH_4, seed, dropout=0.1), dropped
    for device in ("b200", "a100"):
        hopper = f"it is meant for compute capability 9 alone, this GPU has {GPUS[device]}"
        yield FOUR, lambda d=device: where(FLASH_4, attention, device=d), hopper
    slow = "the window bounds later positions without hiding all of them, for which its backward is slow"
    for window in ((512, 512), (None, 512)):
        far = {"mask": Mask(window=window), "samples": 1, "positions": 16384, "layout": "batch_first"}
        yield FRONT, lambda h=far: where(FRONT_END, attention, **h), slow
    for scores, words in (({"soft_cap": 30.0}, "a soft cap"), ({"sink": "zero"}, "a sink"), ({"alibi": True}, "ALiBi")):
        given = {"scores": ops.AttentionScores(**scores), "layout": "batch_first"}
        yield FLASH, lambda h=given: attention(**h), f"it is not called for {words}"
    for mask, keys in FROM_THE_LAST:
        yield f"{FLASH} {FOUR}", lambda m=mask, k=keys: structured(m, k), LAST
    tokens = {"layout": "tokens", "positions": 8192}
    own = "sequences of keys have offsets or lengths of their own, and one without keys would read another's"
    yield FOUR, lambda: structured(Mask(offsets="cu", key_offsets="cu_keys"), 4096, **tokens), own
    behind = "it is not called for sequences one behind the other"
    yield FRONT, lambda: structured(Mask(causal=True, offsets="cu"), **tokens), behind
    given_mask = Mask(causal=True, window=(7, 0), given="mask")
    yield FLASH, lambda: structured(given_mask), "it takes no mask tensor, only none or causal"
    moved = (
        "padding by a boolean tensor is told by moving tokens together, which changes how far apart they are, and a "
        "window or a corner counts that"
    )
    yield FLASH, lambda: structured(Mask(window=(5, 0), padding="pad")), moved


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
    of_16 = "it takes bfloat16 and float16, there is torch.float32"
    at_end = "its query stands at the last key: take corner='bottom_right'"
    yield name, lambda: one_query(row(2)), "it takes one query of each sample, there are several"
    yield name, lambda: one_query(row(dtype=F32), decoding.inputs(dtype=F32)), of_16
    yield name, lambda: one_query(row(), mask=Mask(causal=True)), at_end
    yield name, lambda: one_query(row(), scores=ops.AttentionScores(soft_cap=3.0)), "it is not called for a soft cap"
    yield name, lambda: one_query(row(), scores=ops.AttentionScores(sink="zero")), "it is not called for a sink"
    of_two = "queries are bfloat16, keys or values float16"
    yield name, lambda: one_query(row(), decoding.inputs(dtype=F16)), of_two
    given = {**decoding.inputs(), "attention_mask": torch.zeros(3, 1, 1, 41, dtype=torch.bool)}
    yield name, lambda: one_query(row(), given, mask="given"), "it is not called for a boolean mask"
    apart = "it reads keys and values from two inputs, and queries from a third"
    yield name, lambda: one_query(row(features=192), {}, mask="none", packing="interleaved"), apart
    yield name, lambda: one_query(row(), grad=True), "it has no backward"
    small = ops.KeyValueCache(4, heads=32, kv_heads=8)
    yield "key_value_cache", lambda: cached(small), "it moves 16 bytes at once, and a head has 8"
    of_both = "it takes starts and counts of one dtype, they are int64 and int32"
    narrow = torch.ones(3, dtype=torch.int32)
    yield "key_value_cache", lambda: cached(decoding.cache(), counts=narrow), of_both
    rotations, turns = "rotary_embedding_forward rotary_embedding_backward", "turned_heads_forward"
    generated = "it is a kernel that is compiled for the GPU at hand, and this plan is one without generated kernels"
    for how in (REFERENCE, {"dtype": torch.float64}):
        yield rotations, lambda h=how: rotated(rotary(), **h), generated
        yield turns, lambda h=how: turned(by_angles(), **h), generated
    cpu = "it runs on cuda, the input is on cpu"
    yield "rotary_embedding_forward", lambda: turned_alone(rotary(), 192), cpu
    yield turns, lambda: turned_alone(norm(), 128), cpu
    lie = "PackedHeads(heads=4, kv_heads=4, head_dim=16, layout='sequence_first', packing='{}')".format
    reads_otherwise = f"it turns heads that lie as {lie('interleaved')}, attention reads them as {lie('blocked')}"
    yield TWIN, lambda: rotated(rotary(), attending(packing="blocked")), reads_otherwise
    of_groups = "Groups(groups={0}, queries={1}, keys={2}, others={2}, head_dim=16)".format
    differently = f"heads are normed and turned as they lie differently: {of_groups(2, 2, 1)}, {of_groups(1, 4, 2)}"
    yield turns, lambda: turned(norm(), by_angles(packing="blocked")), differently
    twice = "it norms once and turns once, and here one of them is done twice"
    yield turns, lambda: torch.no_grad()(turned)(norm(), by_angles(), norm()), twice
    two = {"a": angles(), "b": angles(features=8)}
    tables = "it takes two tables of one dtype and size, there are float32 [.., 16] and float32 [.., 8]"
    yield turns, lambda: turned(by_angles(angles=("a", "b")), given=two), tables
    starts = {"rotary_pos_emb": angles(), "s": torch.zeros(4, dtype=torch.int16)}
    whole = "starts and offsets are int32 or int64, both alike, got int16"
    yield turns, lambda: turned(by_angles(starts="s"), given=starts), whole
    wide = "its kernel takes heads of at most 512 features"
    yield turns, lambda: turned_alone(ops.HeadNorm(1024, heads=2), 2048, "h200"), wide


ALL = [
    (name, make, why)
    for names, make, why in itertools.chain(
        products(), products_8_bits(), of_quack(), of_quack_8_bits(), attentions(), of_heads()
    )
    for name in names.split()
]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("name", "make", "why"), ALL, ids=[f"{name}: {why}" for name, _, why in ALL])
def test_fusion_refused_says_why(name: str, make: Plans, why: str) -> None:
    p = make()
    refused = [r for r in p.refusals if r.name == name and not r.reason.startswith(("predicted", "no gain"))]
    assert {r.reason for r in refused} == {why}
    taken = {(s.name, s.start, s.stop) for s in (*p.forward, *p.backward) if s.task.what == "fusion"}
    assert not taken & {(r.name, r.start, r.stop) for r in refused}


@pytest.mark.parametrize(("mask", "keys"), NOT_FROM_THE_LAST)
def test_positions_that_agree_from_both_ends_are_not_refused(mask: Mask, keys: int) -> None:
    p = structured(mask, keys)
    assert LAST not in {r.reason for r in p.refusals if r.name in (FLASH, FOUR)}


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
