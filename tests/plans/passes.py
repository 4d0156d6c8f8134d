"""Plans that passes change: exchanges between ranks, 8 bits in other layouts, scales of a call; and what is shown."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.distributed.group import Group
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.plan.device import DEVICES, Device, device_of
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.step_rows import gains
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, QParams, Recipe
from tests.float8 import models
from tests.fusions.products import autocast_on_cuda
from tests.plans.models import BF16, attention_branch, llama, mlp_branch

Parts = Sequence[torch.nn.Module]
Made = Callable[[], Plan | str]  # a plan, or a text about one
HIDDEN, HEADS = 4096, 32
BLOCKS, CURRENT, DELAYED = Float8BlockScaling(), Float8CurrentScaling(), DelayedScaling()
ANY_SCALES = Float8BlockScaling(
    fp8_format=Format.E4M3,
    fp8_quant_fwd_inp=QParams(power_2_scale=False),
    fp8_quant_bwd_grad=QParams(power_2_scale=False),
)


def planned(
    make: Callable[[], Parts],
    shape: tuple[int, ...],
    recipe: Recipe | None = None,
    device: str | None = "h200",
    dtype: torch.dtype = BF16,
    grad: bool = True,
    training: bool = True,
    frozen: Sequence[str] = (),
    left_out: Sequence[str] = (),
    **options: Any,
) -> Plan:
    """The plan of a list, maybe in a region of FP8; without a device's name, for the CPU."""
    on = "meta" if device else "cpu"
    with torch.device("meta"):
        model = te_fuser.Sequential(*make(), **options).to(dtype)
    model = model.to_empty(device=on)
    for name, p in model.named_parameters():
        p.requires_grad_(training and name not in frozen)
    x = torch.empty(shape, dtype=dtype, device=on, requires_grad=grad)
    region = contextlib.nullcontext() if recipe is None else te_fuser.autocast(recipe=recipe)
    with fusions.disabled(*left_out), region, torch.set_grad_enabled(training):
        (plan,) = model.plans(x, device=device)
    return plan


def in_many_segments(ranks: bool, make: Callable[..., Plan], *given: Any, **options: Any) -> Plan:
    """The plan whose segments end wherever they may, as where ranks share a model if they do."""
    small = mock.patch.multiple(segmenting, SEGMENT_BYTES=1, WORTH_A_NODE=0)
    with small, mock.patch.object(pipeline, "has_ranks", lambda: ranks):
        return make(*given, **options)


# ------------------------------------------------------------------------------------------- exchanges between ranks


def group(ranks: int = 2) -> Group:
    """Ranks that this process does not know: it plans for them."""
    return Group("tp", ranks, "tp")


def exchanged(ranks: int = 2, layers: int = 1, first: Parts = (), **options: Any) -> list[torch.nn.Module]:
    """The products of an MLP as one rank of several runs them, between exchanges."""
    inner = 4 * HIDDEN // ranks
    layer = lambda: [  # noqa: E731
        ops.RMSNorm(HIDDEN),
        ops.AllGather(group(ranks)),
        ops.MatMul(HIDDEN, inner, **options),
        ops.GELU(),
        ops.MatMul(inner, HIDDEN, **options),
        ops.ReduceScatter(group(ranks)),
    ]
    found = [op for _ in range(layers) for op in layer()]
    return [*first, *found[len(first) :], *([ops.Bias(HIDDEN)] if layers == 1 else [])]


def exchanging(ranks: int = 2, memory: str = "fast", **how: Any) -> Plan:
    of = {name: how.pop(name) for name in ("layers", "first", "accumulate_into_main_grad") if name in how}
    return planned(lambda: exchanged(ranks, **of), (8192 // ranks, HIDDEN), memory=memory, **how)


def exchanging_under_autocast() -> Plan:
    with autocast_on_cuda():
        return exchanging(accumulate_into_main_grad=True, dtype=torch.float32)


class Traced(ops.AllGather):
    """A gather that starts in a way of its own."""

    def op_forward(self, call: Any, x: torch.Tensor) -> Any:
        return super().op_forward(call, x)


def little(*parts: torch.nn.Module, shape: tuple[int, ...] = (64, 8), device: str | None = "h200") -> Made:
    return lambda: planned(lambda: parts, shape, device=device, dtype=torch.float32)


def product() -> ops.MatMul:
    return ops.MatMul(8, 8, device="meta")


def shared(branch: te_fuser.Residual, ranks: int, sequence_parallel: bool = True) -> te_fuser.Residual:
    """A branch whose first product ranks share by column, its second by row."""
    products = [m for m in branch.modules() if isinstance(m, ops.Linear)]
    for linear, mode in zip(products, ("column", "row"), strict=True):
        linear.group, linear.parallel_mode, linear.sequence_parallel = group(ranks), mode, sequence_parallel
        cut = [s // (ranks if dim == (mode == "row") else 1) for dim, s in enumerate(linear.weight.shape)]
        linear.weight = torch.nn.Parameter(torch.empty(cut, dtype=BF16))
        if mode == "column" and linear.bias is not None:
            linear.bias = torch.nn.Parameter(torch.empty(cut[0], dtype=BF16))
    return branch


def gpt_branches(dropout: float) -> list[te_fuser.Residual]:
    """A GPT layer."""
    attention: Any = attention_branch(HIDDEN, HEADS, BF16, dropout)
    attention[2].dropout = dropout
    return [attention, mlp_branch(HIDDEN, BF16, dropout)]


def llama_branches(dropout: float) -> list[te_fuser.Residual]:
    """A Llama layer with eight heads of keys and values."""
    found: Any = llama(HIDDEN, HEADS, BF16, "sequence_first")
    for branch in found:
        branch.append(ops.Dropout(dropout))
    found[0][3].dropout = dropout
    return found


Branches = Callable[[float], list[te_fuser.Residual]]


def of_ranks(
    ranks: int,
    memory: str | int,
    layers: int = 1,
    dropout: float = 0.0,
    made: Branches = gpt_branches,
    recipe: Recipe | None = None,
) -> Plan:
    """Plan of layers for an H200, 8192 tokens, whose products and exchanges are steps apart."""
    branches = lambda: [branch for _ in range(layers) for branch in made(dropout)]  # noqa: E731
    parts = lambda: [shared(b, ranks) if ranks > 1 else b for b in branches()]  # noqa: E731
    apart = (fusions.PEER_COPIES,)
    return planned(parts, (2048 // ranks, 4, HIDDEN), recipe, memory=memory, left_out=apart)


def tied(ranks: int, memory: str) -> Plan:
    """Plan of two MLPs that share their weights, whose gradients are sums of terms."""

    def parts() -> Parts:
        products = list(shared(mlp_branch(1024, BF16, 0.0), ranks).children())[1:]
        return [te_fuser.Residual(ops.LayerNorm(1024, dtype=BF16), *products) for _ in range(2)]

    return planned(parts, (512 // ranks, 1, 1024), memory=memory, left_out=(fusions.PEER_COPIES,))


def branch_of_ranks(rows: int, sequence_parallel: bool = True, **how: Any) -> Plan:
    """One branch that two ranks share."""
    parts = lambda: [shared(mlp_branch(HIDDEN, BF16, 0.0), 2, sequence_parallel)]  # noqa: E731
    names = ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "0.3.weight", "0.3.bias")
    return planned(parts, (rows, 4, HIDDEN), frozen=names if how.pop("all_frozen", False) else (), **how)


# ----------------------------------------------------------------------------------------------------------- 8 bits

IN, WIDE, ROWS = 128, 256, 132


def mlp8(act: type[Any] = ops.GELU, residual: bool = False) -> list[torch.nn.Module]:
    """A norm, two products with their biases, and what is between them; what comes in may be added."""
    up = ops.LayerNorm(IN), ops.MatMul(IN, WIDE * (1 + (act is ops.SwiGLU))), ops.Bias(WIDE * (1 + (act is ops.SwiGLU)))
    parts = *up, act(), ops.MatMul(WIDE, IN), ops.Bias(IN)
    return [te_fuser.Residual(*parts)] if residual else [*parts]


def by_blocks(act: type[Any] = ops.GELU, residual: bool = False, rows: int = ROWS, **how: Any) -> Plan:
    return planned(lambda: mlp8(act, residual), (rows, IN), **{"recipe": BLOCKS, **how})


def by_scales_of_now(device: str | None = "h200", **how: Any) -> Plan:
    return planned(mlp8, (64, IN), CURRENT, device=device, **how)


def branches_by_scales_of_now(*behind: torch.nn.Module) -> Plan:
    """The norm of the second branch hands its gradient to the bias of the first: as it is, or times a mask."""
    branch = lambda: te_fuser.Residual(*mlp8(), *behind)  # noqa: E731
    return planned(lambda: [branch(), branch()], (64, IN), CURRENT)


def transposed(capability: tuple[int, int]) -> Plan:
    """An MLP by scales of a history, on a GPU of that compute capability."""
    one = replace(DEVICES["b200"], name="one", capability=capability)
    with mock.patch.dict(DEVICES, {"one": one}):
        return planned(lambda: [*models(64, 128)["mlp"]()], (8192, 64), DELAYED, device="one")


def layer8() -> Plan:
    """A layer of Transformer Engine's by scales of a history."""
    layer = lambda: [te_fuser.TransformerLayer(4096, 16384, 32, params_dtype=BF16)]  # noqa: E731
    return planned(layer, (2048, 4, 4096), DELAYED)


# ------------------------------------------------------------------------------------------------- ends of segments


def narrow() -> list[torch.nn.Module]:
    return [ops.LayerNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64), ops.Dropout(0.1)]


def ended(residual: bool, recipe: Recipe | None, training: bool = True) -> Plan:
    branches = lambda: [te_fuser.Residual(*narrow()) for _ in range(3)]  # noqa: E731
    frozen = () if training else tuple(name for name, _ in te_fuser.Sequential(*branches()).named_parameters())
    return planned(branches if residual else lambda: [*narrow(), *narrow()], (256, 64), recipe, frozen=frozen)


# --------------------------------------------------------------------------------------------------- what is shown


def turned(**layout: Any) -> te_fuser.Residual:
    """Rotation and attention whose dimensions could be misread."""
    attention = ops.DotProductAttention(4, 4, kv_heads=2, **{"mask": "none", "layout": "sequence_first", **layout})
    return te_fuser.Residual(ops.Linear(16, 32), ops.RotaryEmbedding(4, heads=4, kv_heads=2, **layout), attention)


def explained(*parts: torch.nn.Module, shape: tuple[int, ...] = (6, 3, 16), **how: Any) -> str:
    """Text for a list that runs by PyTorch's operations."""
    model = te_fuser.Sequential(*parts, kernels="reference")
    return str(model.explain(torch.zeros(shape, requires_grad=True), **{"details": True, **how}))


class Own(te_fuser.Sequential):
    """A list with a call of its own."""

    def forward(self, x: torch.Tensor, **inputs: Any) -> Any:
        return super().forward(x, **inputs)


def hooked(op: torch.nn.Module) -> torch.nn.Module:
    op.register_forward_hook(lambda *_: None)
    return op


def by_themselves() -> list[torch.nn.Module]:
    """Modules that no plan has, each for a reason of its own."""
    plain = te_fuser.Residual(torch.nn.Linear(16, 16), torch.nn.GELU())
    return [torch.nn.BatchNorm1d(3), ops.LayerNorm(16), plain, ops.ReLU(), Own(ops.GELU()), hooked(ops.Linear(16, 16))]


def passes_in(region: contextlib.AbstractContextManager[Any]) -> str:
    """Text of a region, with a record of each pass."""
    with region:
        return explained(*mlp8(), shape=(64, IN), passes=True)


def gained(recipe: Recipe | None, device: str = "h200") -> str:
    """Gains of products by 8 bits, and losses where they are emulated."""
    with torch.device("meta"):
        parts = te_fuser.LayerNormMLP(4096, 16384), te_fuser.Linear(4096, 100)
        model = te_fuser.Sequential(*parts).bfloat16()
    x = torch.empty(8192, 4096, dtype=BF16, device="meta", requires_grad=True)
    with te_fuser.autocast(enabled=recipe is not None, recipe=recipe):
        text = str(explanation := model.explain(x, device=device, details=True))
    shown = re.findall(r"^Products in 8 bits.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*map(str, gains(explanation.plans[0])), *shown])


# ---------------------------------------------------------------------------------------------- devices at hand

KNOWN = (
    *("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA B200"),
    *("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    *("A100-SXM4-40GB", "NVIDIA A10", "NVIDIA L4", "NVIDIA L40", "NVIDIA L40S"),
)
# Name, capability, multiprocessors, memory clock (kHz), memory width (bits); by the vendors 600, 192, 1008, 2039, 4023,
# 8184, 419 and 1792 GB/s, and for the RTX 4090 165.2 TFLOP/s that add up in float32.
OTHERS: tuple[tuple[str, tuple[int, int], int, int, int], ...] = (
    ("NVIDIA A10G", (8, 6), 80, 6251000, 384),
    ("NVIDIA RTX A1000", (8, 6), 18, 6001000, 128),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 10501000, 384),
    ("NVIDIA A800-SXM4-80GB", (8, 0), 108, 1593000, 5120),
    ("NVIDIA GH200 480GB", (9, 0), 132, 2619000, 6144),
    ("NVIDIA B300 SXM6 AC", (10, 3), 148, 3996000, 8192),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, 2619000, 640),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), 188, 14001000, 512),
    ("NVIDIA of an unread clock", (8, 6), 132, 0, 128),
)


def at_hand(name: str, capability: tuple[int, int] = (9, 0), count: int = 132, **memory: int) -> Device:
    """The roofline of a GPU with this name and these properties, on a machine that has none."""
    major, minor = capability
    found = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=count, **memory)
    read = {"get_device_name": lambda device: name, "get_device_properties": lambda device: found}
    with mock.patch.multiple(torch.cuda, **read):
        return device_of(torch.device("cuda", 0))


def devices() -> str:
    """Known by whole words of their names, read, and estimated by the nearest that is known."""
    found = [at_hand(name) for name in KNOWN]
    found += [at_hand(*how, memory_clock_rate=clock, memory_bus_width=width) for *how, clock, width in OTHERS]
    nearest = (7, 5), (8, 6), (8, 7), (9, 0), (10, 3), (11, 0), (12, 0)
    return "\n".join(map(str, [*found, *(at_hand("NVIDIA Something", capability) for capability in nearest)]))


HEADS_4 = ops.HeadNorm(64, heads=4, norm="L2Normalization")
PASSES: Mapping[str, Made | Sequence[Made]] = {
    **{f"exchanges of {n} ranks": lambda n=n: exchanging(n) for n in (1, 2, 4, 8)},
    "exchanges, balanced": lambda: exchanging(memory="balanced"),
    "exchanges, no gradient of x": lambda: exchanging(memory="balanced", first=[ops.LayerNorm(HIDDEN)], grad=False),
    "exchanges, sums apart": lambda: exchanging(left_out=[fusions.PEER_SUMS]),
    "exchanges by nccl": lambda: exchanging(left_out=[fusions.PEER_COPIES]),
    "exchanges, main_grad under autocast": exchanging_under_autocast,
    "exchanges of four layers": lambda: exchanging(layers=4),
    "exchanges that are small": (
        little(ops.AllGather(group(), 1), product(), shape=(4, 6, 8)),
        little(product(), ops.ReduceScatter(group(), -1)),
        little(ops.AllGather(group(), -2), product()),
        little(ops.AllGather(group())),
        little(ops.AllGather(group()), ops.GELU()),
        little(ops.AllGather(group()), HEADS_4, shape=(64, 2, 256)),
        little(ops.GELU(), ops.ReduceScatter(group())),
        little(ops.AllReduce(group())),
        little(ops.AllGather(group()), ops.MatMul(8, 8), device=None),
        little(Traced(group()), product()),
        little(product(), ops.ReduceScatter(group())),
        little(product(), ops.ReduceScatter(group()), ops.LayerNorm(8, device="meta")),
    ),
    **{f"overlap, {memory}": lambda memory=memory: of_ranks(2, memory, 2) for memory in ("fast", "balanced", "lean")},
    "overlap, whole rows": lambda: branch_of_ranks(2048, sequence_parallel=False, memory="fast"),
    "overlap, frozen": lambda: branch_of_ranks(1024, all_frozen=True, memory="lean"),
    "overlap, not measured": lambda: branch_of_ranks(64, device="b200"),
    "overlap, tied": lambda: tied(2, "balanced"),
    "overlap, 8 bits": lambda: of_ranks(2, "lean", recipe=DELAYED),
    "blocks": by_blocks,
    "blocks, disabled": lambda: by_blocks(left_out=[fusions.BY_BLOCKS]),
    "blocks, gated": lambda: by_blocks(ops.SwiGLU),
    "blocks, no sum of the bias": lambda: by_blocks(frozen=["5.bias"]),
    "blocks, residual": lambda: by_blocks(residual=True),
    "blocks, one frozen weight": lambda: by_blocks(frozen=["1.weight"]),
    "blocks, the other frozen weight": lambda: by_blocks(frozen=["4.weight"]),
    "blocks without gradients": lambda: by_blocks(grad=False, training=False),
    "blocks apart": (
        lambda: by_blocks(rows=130),
        lambda: by_blocks(recipe=ANY_SCALES),
        lambda: by_blocks(device="b200"),
        lambda: by_blocks(kernels="reference"),
    ),
    "blocks, many segments": lambda: in_many_segments(False, by_blocks),
    **{f"scales of now, {device}": lambda device=device: by_scales_of_now(device) for device in ("h200", "l4", None)},
    "scales of now, branches": branches_by_scales_of_now,
    "scales of now, branches with dropout": lambda: branches_by_scales_of_now(ops.Dropout(0.1)),
    **{
        f"transposed, capability {major}.{minor}": lambda c=(major, minor): transposed(c)
        for major, minor in ((9, 0), (10, 3))
    },
    "transposed, a layer": layer8,
    "shown layouts": (
        lambda: explained(turned(), turned(), shape=(2, 7, 16)),
        lambda: explained(turned(layout="batch_first", packing="blocked"), shape=(2, 7, 16)),
    ),
    "shown by themselves": (
        lambda: explained(*by_themselves()),
        lambda: explained(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)),
    ),
    "shown passes": (
        lambda: passes_in(torch.autocast("cpu", torch.bfloat16)),
        lambda: passes_in(te_fuser.autocast(recipe=CURRENT)),
    ),
    "shown gains of 8 bits": tuple(
        lambda given=given: gained(*given)
        for given in (
            (DELAYED,),
            (DelayedScaling(override_linear_precision=(False, False, True)),),
            (BLOCKS, "b200"),
            (BLOCKS,),
            (DELAYED, "cpu"),
            (None,),
        )
    ),
    "devices at hand": devices,
    "segments of branches": lambda: in_many_segments(True, ended, True, DELAYED),
    "segments outside of regions": tuple(
        lambda ranks=ranks: in_many_segments(ranks, ended, True, None) for ranks in (False, True)
    ),
    "segments that are one": (
        lambda: in_many_segments(False, ended, True, DELAYED),
        lambda: in_many_segments(True, ended, False, DELAYED),
        lambda: in_many_segments(True, ended, True, DELAYED, training=False),
    ),
}
