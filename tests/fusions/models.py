"""Lists around the fusions' ops, and their plans for a GPU that is not at hand; with optional packages and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import cublaslt
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack
from te_fuser.ops.base import FusableOperation
from te_fuser.quantization import lowering, microbatch
from te_fuser.recipe import DelayedScaling, Recipe
from tests.fusions.products import autocast_on_cuda, plan
from tests.kernels.packages import fake_cudnn, fake_flash_attn, fake_quack

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Parts = Sequence[FusableOperation]
Plans = Callable[[], Plan]


# ------------------------------------------------------------------------------------------ what plans are made within


@contextlib.contextmanager
def installed(*modules: Any, version: str | None = "") -> Iterator[None]:
    """Packages as if they were there, of that version, or the oldest that will do."""
    versions = {cudnn_frontend: fake_cudnn.VERSION, flash_attn_4: fake_flash_attn.VERSION}
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            found = versions.get(module, fake_quack.VERSION) if version == "" else version
            patch.setattr(getattr(module, "PACKAGE", quack.PACKAGE), "version", lambda v=found: v)
            for asked in ("unusable", "unusable_by_gates", "unusable_8"):
                if module is not cudnn_frontend and hasattr(module, asked):
                    patch.setattr(module, asked, lambda: None)
        yield


QUACK = QUACK8 = (quack,)
FLASH_4, FRONT_END = (flash_attn_4,), (cudnn_frontend,)


def where(modules: Sequence[Any], make: Callable[..., Plan], *given: Any, **options: Any) -> Plan:
    """The plan on a machine that has these packages."""
    with installed(*modules):
        return make(*given, **options)


def without(names: Sequence[str], make: Callable[..., Plan], *given: Any, **options: Any) -> Plan:
    """The plan without these fusions."""
    with fusions.disabled(*names):
        return make(*given, **options)


def taken_away(make: Callable[..., Plan], *given: Any, **options: Any) -> Plan:
    """The plan where weights are taken away after forward, as `fully_shard` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "is_taken_away", lambda owner: True)
        return make(*given, **options)


def by_free_epilogues(*parts: FusableOperation, **options: Any) -> Plan:
    """The plan as if epilogues cost nothing."""
    with mock.patch.dict(cublaslt._EFFICIENCY, dict.fromkeys(cublaslt._EFFICIENCY, 1.0)):
        return plan(*parts, **options)


# ------------------------------------------------------------------------------------------------------------ the lists


def on_meta(make: Callable[[], Parts]) -> Parts:
    """The ops, without memory."""
    with torch.device("meta"):
        return make()


def mlp(**last: Any) -> Parts:
    """LayerNorm, 4096 -> 16384, GELU, -> 4096; the last product is given what is named."""
    return on_meta(
        lambda: [ops.LayerNorm(4096), ops.Linear(4096, 16384), ops.GELU("tanh"), ops.Linear(16384, 4096, **last)]
    )


def gated_mlp(**last: Any) -> Parts:
    """RMSNorm, 4096 -> 2 x 14336, SwiGLU, -> 4096, no biases; the last product is given what is named."""
    up = {"in_features": 4096, "out_features": 2 * 14336, "bias": False}
    return on_meta(
        lambda: [ops.RMSNorm(4096), ops.Linear(**up), ops.SwiGLU(), ops.Linear(14336, 4096, bias=False, **last)]
    )


def relu_mlp(inner: int = 16384, **last: Any) -> Parts:
    """4096 -> inner, ReLU, -> 4096."""
    return on_meta(lambda: [ops.Linear(4096, inner), ops.ReLU(), ops.Linear(inner, 4096, **last)])


def in_region(
    make: Callable[[], Parts],
    rows: int,
    features: int,
    recipe: Recipe | None = None,
    device: str | None = "h200",
    dtype: torch.dtype = BF16,
    dtypes: Mapping[str, torch.dtype] | None = None,
    grad: bool = True,
    training: bool = True,
    frozen: Sequence[str] = (),
    first: bool | None = None,
    kernels: str = "auto",
    **inputs: Any,
) -> Plan:
    """The plan in a region of FP8; without a device's name, for the CPU.

    Args:
        dtypes: of parameters that have another one, under autocast where it is a weight's.
        frozen: parameters, or "x", that need no gradient.
        first: whether it is the first of several micro-batches.
        inputs: dtypes of named inputs of x's rows, or tensors.
    """
    on = "meta" if device else "cpu"
    model = Sequential(*on_meta(make), kernels=kernels).to(dtype).to_empty(device=on).train(training)
    for name, p in model.named_parameters():
        p.requires_grad_(grad and name not in frozen)
    for name, other in (dtypes or {}).items():
        p = model.get_parameter(name)
        p.data = torch.empty(p.shape, dtype=other, device=on)
    x = torch.empty(rows, features, dtype=dtype, device=on, requires_grad=grad and "x" not in frozen)
    given = {
        n: torch.empty(rows, model[1].out_features, dtype=t, device=on, requires_grad=grad) for n, t in inputs.items()
    }
    cast = any("weight" in name for name in dtypes or {})
    region = te_fuser.autocast(recipe=recipe or DelayedScaling())
    casting = autocast_on_cuda() if cast else contextlib.nullcontext()
    with region, microbatch(first), casting, torch.set_grad_enabled(grad):
        return model.plan(x, device=device, **given)


def attention(
    *before: FusableOperation,
    heads: int = 32,
    dim: int = 128,
    positions: int = 2048,
    samples: int = 4,
    keys: int | None = None,
    device: str = "h200",
    training: bool = True,
    grad: bool = True,
    **options: Any,
) -> Plan:
    """The plan of an attention behind other ops, with the named inputs of its mask; `keys` apart where there are any.

    Tokens are as many as positions.
    """
    apart = {"packing": "apart"} if keys else {}
    with torch.device("meta"):
        op = ops.DotProductAttention(heads, dim, **{"layout": "sequence_first", "mask": "causal", **apart, **options})  # type: ignore[arg-type]
        model = Sequential(*before, op).to("meta", BF16).train(training)
        lengths = {"tokens": (positions,), "batch_first": (samples, positions), "sequence_first": (positions, samples)}
        features = getattr(before[0], "in_features", None) if before else None
        x = torch.empty(*lengths[op.layout], features or op.packed.features, dtype=BF16, requires_grad=True)
        inputs: dict[str, Any] = {n: _named(n, samples, positions) for n in op.hides.names.values()}
        if keys:
            lead = (keys,) if op.layout == "tokens" else (samples, keys)
            inputs |= {n: torch.empty(*lead, heads * dim, dtype=BF16, requires_grad=True) for n in ("key", "value")}
    with torch.set_grad_enabled(grad):
        return model.plan(x, device=device, **inputs)


def _named(name: str, samples: int, positions: int) -> torch.Tensor:
    """Padding, a mask, offsets or lengths, by a name that says so."""
    if name in ("pad", "mask"):
        shape = (samples, 1, 1 if name == "pad" else positions, positions)
        return torch.empty(shape, dtype=torch.bool)
    return torch.empty(samples + ("cu" in name), dtype=torch.int32)
