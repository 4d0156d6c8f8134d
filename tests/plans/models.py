"""The models whose plans are written down: name -> a call on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack
from te_fuser.recipe import DelayedScaling, Recipe

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A call: the ops, the input, what else is given, what it runs within, and whether steps alone are written down."""

    parts: Callable[[], list[torch.nn.Module]]
    shape: tuple[int, ...]
    dtype: torch.dtype = FP32
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    grad: bool = True
    within: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda kind: contextlib.nullcontext()
    is_short: bool = False

    def model(self, memory: str) -> te_fuser.Sequential:
        """The model, without memory."""
        with torch.device("meta"):
            return te_fuser.Sequential(*self.parts(), memory=memory).to(self.dtype)

    def call(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The main input and the named ones, without memory."""
        options: Any = {"dtype": self.dtype, "device": "meta", "requires_grad": self.grad}
        masks: Any = {"dtype": torch.bool, "device": "meta"}
        given = {n: torch.empty(*s, **(masks if "mask" in n else options)) for n, s in self.inputs.items()}
        return torch.empty(*self.shape, **options), given


def attention_branch(hidden: int, heads: int, dtype: torch.dtype, dropout: float, **options: Any) -> te_fuser.Residual:
    """LayerNorm, attention with its projections, dropout."""
    return te_fuser.Residual(
        ops.LayerNorm(hidden, dtype=dtype),
        ops.Linear(hidden, 3 * hidden, dtype=dtype),
        ops.DotProductAttention(heads, hidden // heads, **{"layout": "sequence_first", "mask": "causal", **options}),
        ops.Linear(hidden, hidden, dtype=dtype),
        ops.Dropout(dropout),
    )


def mlp_branch(hidden: int, dtype: torch.dtype, dropout: float, kind: type[ops.RowOp] = ops.GELU) -> te_fuser.Residual:
    """LayerNorm, two products with an activation between them, dropout."""
    up = 8 * hidden if issubclass(kind, ops.SwiGLU) else 4 * hidden
    return te_fuser.Residual(
        ops.LayerNorm(hidden, dtype=dtype),
        ops.Linear(hidden, up, dtype=dtype),
        kind(),
        ops.Linear(4 * hidden, hidden, dtype=dtype),
        ops.Dropout(dropout),
    )


def gpt(layers: int, hidden: int, heads: int, dtype: torch.dtype, dropout: float = 0.1) -> list[torch.nn.Module]:
    """GPT layers."""
    each = (lambda: attention_branch(hidden, heads, dtype, dropout), lambda: mlp_branch(hidden, dtype, dropout))
    return [branch() for _ in range(layers) for branch in each]


def llama(hidden: int, heads: int, dtype: torch.dtype, layout: str = "batch_first") -> list[torch.nn.Module]:
    """A Llama layer."""
    packed: Any = {"heads": heads, "kv_heads": heads // 4, "layout": layout, "packing": "blocked"}
    width = (heads + heads // 2) * (hidden // heads)
    linear: Any = {"bias": False, "dtype": dtype}
    return [
        te_fuser.Residual(
            ops.RMSNorm(hidden, dtype=dtype),
            ops.Linear(hidden, width, **linear),
            ops.RotaryEmbedding(hidden // heads, **packed),
            ops.DotProductAttention(head_dim=hidden // heads, **packed, mask="causal"),
            ops.Linear(hidden, hidden, **linear),
        ),
        te_fuser.Residual(
            ops.RMSNorm(hidden, dtype=dtype),
            ops.Linear(hidden, 7 * hidden, **linear),
            ops.SwiGLU(),
            ops.Linear(7 * hidden // 2, hidden, **linear),
        ),
    ]


def mlp(hidden: int, dtype: torch.dtype, kind: type[ops.RowOp], **options: Any) -> list[torch.nn.Module]:
    """LayerNorm, Linear, an activation, Linear."""
    return [
        ops.LayerNorm(hidden, dtype=dtype),
        ops.Linear(hidden, 4 * hidden, dtype=dtype, **options),
        kind(),
        ops.Linear(4 * hidden, hidden, dtype=dtype, **options),
    ]


def rms_swiglu(hidden: int, dtype: torch.dtype) -> list[torch.nn.Module]:
    """RMSNorm, Linear, SwiGLU, Linear, without biases."""
    return [
        ops.RMSNorm(hidden, dtype=dtype),
        ops.Linear(hidden, 8 * hidden, bias=False, dtype=dtype),
        ops.SwiGLU(),
        ops.Linear(4 * hidden, hidden, bias=False, dtype=dtype),
    ]


def frozen(parts: list[torch.nn.Module], *which: int) -> list[torch.nn.Module]:
    """The parts, some of which are not trained."""
    for k in which:
        parts[k].requires_grad_(False)
    return parts


@contextlib.contextmanager
def autocast(dtype: torch.dtype, kind: str) -> Iterator[None]:
    """torch.autocast for a kind of device that need not be there."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


@contextlib.contextmanager
def packages(kind: str) -> Iterator[None]:
    """All optional packages as if they were installed."""
    modules = (cudnn_frontend, flash_attn_4, quack)
    with pytest.MonkeyPatch.context() as patch:
        for m in modules:
            patch.setattr(m.PACKAGE, "version", lambda: "99.0")
        yield


def region(recipe: Recipe) -> Callable[[str], contextlib.AbstractContextManager[Any]]:
    """A region of FP8."""
    return lambda kind: te_fuser.autocast(recipe=recipe)


@contextlib.contextmanager
def user_fusions(kind: str) -> Iterator[None]:
    """Three fusions of a user's: one that emits, one joint, one that covers backward."""
    cheap = fusions.Cost(seconds=1e-9)

    def gelu(m: Any, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    class norm:
        forward = backward = gelu

    made = [
        te_fuser.fusion(
            forward=[ops.MatMul, ops.Bias, ops.GELU], emits=["1.output"], cost=lambda m: cheap, name="users_gelu"
        )(gelu),
        te_fuser.fusion(joint=[ops.LayerNorm], saves=["rstd"], cost=lambda m: cheap, name="users_norm")(norm),
        te_fuser.fusion(backward=[ops.Bias, ops.Dropout], when=lambda m: "a reason of its own", name="users_backward")(
            gelu
        ),
    ]
    try:
        yield
    finally:
        for entry in made:
            fusions.unregister(entry)


class SoftCap(ops.RowOp):
    """An op of a user's."""

    def compute(self, x: Any) -> Any:
        from te_fuser.formula import tanh

        return 30.0 * tanh(x / 30.0)


TOKENS = (2048, 4, 4096)
CASES: dict[str, Case] = {
    "gpt": Case(lambda: gpt(1, 4096, 32, BF16), TOKENS, BF16),
    "gpt without dropout": Case(lambda: gpt(1, 4096, 32, BF16, 0.0), TOKENS, BF16),
    "gpt with packages": Case(lambda: gpt(1, 4096, 32, BF16, 0.0), TOKENS, BF16, within=packages),
    "gpt dropout with packages": Case(lambda: gpt(1, 4096, 32, BF16), TOKENS, BF16, within=packages),
    "gpt of three layers": Case(lambda: gpt(3, 1024, 16, FP16), (512, 4, 1024), FP16),
    "gpt in inference": Case(lambda: gpt(1, 1024, 16, BF16), (512, 4, 1024), BF16, within=lambda kind: torch.no_grad()),
    "gpt small": Case(lambda: gpt(1, 256, 4, FP32), (33, 3, 256)),
    "llama": Case(lambda: llama(4096, 32, BF16), (2, 2048, 4096), BF16),
    "llama with packages": Case(lambda: llama(4096, 32, BF16), (2, 2048, 4096), BF16, within=packages),
    "mlp": Case(lambda: mlp(4096, BF16, ops.GELU), TOKENS, BF16),
    "mlp with packages": Case(lambda: mlp(4096, BF16, ops.GELU), TOKENS, BF16, within=packages),
    "mlp tiny": Case(lambda: mlp(16, FP32, ops.GELU), (16, 16)),
    "linear alone": Case(lambda: [ops.Linear(256, 256, dtype=BF16)], (16, 256), BF16),
    "mlp float32": Case(lambda: mlp(512, FP32, ops.GELU), (128, 3, 512)),
    "mlp float64": Case(lambda: mlp(96, torch.float64, ops.GELU), (33, 96), torch.float64),
    "mlp relu": Case(lambda: mlp(4096, BF16, ops.ReLU), TOKENS, BF16),
    "mlp main_grad": Case(lambda: mlp(2048, BF16, ops.GELU, accumulate_into_main_grad=True), (4096, 2048), BF16),
    "mlp frozen": Case(lambda: frozen(mlp(2048, BF16, ops.GELU), 0, 1), (4096, 2048), BF16),
    "mlp frozen input": Case(lambda: frozen(mlp(2048, BF16, ops.GELU), 3), (4096, 2048), BF16, grad=False),
    "mlp by users": Case(lambda: mlp(2048, BF16, ops.GELU), (4096, 2048), BF16, within=user_fusions),
    "swiglu": Case(lambda: [mlp_branch(2048, BF16, 0.1, ops.SwiGLU)], (4096, 2048), BF16),
    "swiglu with packages": Case(
        lambda: [mlp_branch(2048, BF16, 0.1, ops.SwiGLU)], (4096, 2048), BF16, within=packages
    ),
    "autocast bfloat16": Case(lambda: gpt(1, 1024, 16, FP32), (512, 4, 1024), within=lambda kind: autocast(BF16, kind)),
    "autocast float16": Case(lambda: mlp(1024, FP32, ops.GELU), (512, 1024), within=lambda kind: autocast(FP16, kind)),
    "gated": Case(
        lambda: [
            *(ops.Linear(512, 2048), ops.GEGLU(), ops.L2Norm(), ops.Linear(1024, 1024)),
            *(ops.ClampedSwiGLU(gate_first=False), ops.ReGLU(), ops.Scale(256, 0.1)),
        ],
        (64, 9, 512),
        BF16,
    ),
    "outputs": Case(
        lambda: [
            *(ops.LayerNorm(512), ops.Output("norm"), ops.Fork("skip"), ops.Linear(512, 512), SoftCap()),
            *(ops.Dropout(0.5), ops.Add("skip"), ops.ReLU(), ops.Output("end")),
            *(ops.Reshape((-1, 256)), ops.Linear(256, 64)),
        ],
        (48, 4, 512),
        outputs=("norm", "end"),
    ),
    "parallel branches": Case(
        lambda: [
            *(ops.Fork("skip"), ops.LayerNorm(1024), ops.Fork("norm"), ops.Linear(1024, 1024), ops.Add("skip")),
            *(ops.Fork("first"), ops.Take("norm"), ops.Linear(1024, 4096), ops.GELU(), ops.Linear(4096, 1024)),
            ops.Add("first"),
        ],
        (2048, 1024),
        BF16,
        is_short=True,
    ),
    "named inputs": Case(
        lambda: [
            *(ops.AdaptiveLayerNorm(256, batch_dim=1), ops.Linear(256, 256), ops.DropPath(0.2, batch_dim=1)),
            *(ops.Add("other"), ops.Cast(BF16), ops.GELU(), ops.Cast(FP32)),
        ],
        (48, 4, 256),
        inputs={"scale": (4, 256), "shift": (4, 256), "other": (48, 4, 256)},
    ),
    "float8 layer": Case(lambda: gpt(1, 4096, 32, BF16), TOKENS, BF16, within=region(DelayedScaling()), is_short=True),
    "float8 mlp": Case(lambda: mlp(4096, BF16, ops.GELU), TOKENS, BF16, within=region(DelayedScaling()), is_short=True),
    "float8 swiglu": Case(lambda: rms_swiglu(4096, BF16), TOKENS, BF16, within=region(DelayedScaling()), is_short=True),
    "dense mask": Case(
        lambda: [attention_branch(256, 4, BF16, 0.0, mask="given")],
        (128, 2, 256),
        BF16,
        inputs={"attention_mask": (2, 1, 128, 128)},
    ),
}
