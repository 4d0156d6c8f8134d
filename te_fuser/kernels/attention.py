"""Attention by PyTorch's own kernels, called below autograd: each provider is one of them, forward and backward.

The kernels take heads [batch, heads, positions, head_dim] by strides, so packed queries, keys and values are read where
they lie. A provider says what it can do (`conditions`) and which operators it calls (`schemas`, as it was written for
them); `providers(problem)` says which of them can compute a problem and, of the others, why not.

Legend: B samples, S positions, G key/value heads, R query heads of each, H = G * R, D features of a head;
b, h, g: the kernel's batch, query heads and key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from te_fuser.formula.random import RandomStream
from te_fuser.ops.base import Spec
from te_fuser.ops.dot_product_attention import KERNEL_SWITCHES, AttentionSettings, hidden_positions

Saved = dict[str, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Condition = Callable[["AttentionProblem"], "str | None"]

_LARGEST_GRID = 65535
_RECENT_CUDNN = 91900
_ALIGNMENT = 16  # bytes: what the CUDA kernels load at a time
# Added to a masked score on CUDA: it leaves nothing of a probability, and float16 holds it.
_MASKED_SCORE = -65504.0


@dataclass(frozen=True)
class AttentionProblem:
    """Everything that decides which kernel can compute an attention; hashable, so it can be part of a plan's key."""

    settings: AttentionSettings
    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    samples: int
    positions: int
    deterministic: bool = False
    switched_off: frozenset[str] = frozenset()
    cudnn: int = 0

    @classmethod
    def of(cls, settings: AttentionSettings, x: Spec, capability: tuple[int, int] | None = None) -> AttentionProblem:
        """The problem of packed heads x on the device that they are on, under PyTorch's switches as they are now.

        `capability` is that of a GPU which is not at hand; it is then taken to have a recent cuDNN.
        """
        samples, positions = settings.heads.lengths(x.shape)
        on_cuda = x.device.type == "cuda"
        return cls(
            settings=settings,
            device_type=x.device.type,
            capability=capability or (torch.cuda.get_device_capability(x.device) if on_cuda else (0, 0)),
            dtype=x.dtype,
            samples=samples,
            positions=positions,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            switched_off=frozenset(name for name, enabled in _SWITCHES.items() if not enabled()),
            cudnn=_RECENT_CUDNN if capability else (torch.backends.cudnn.version() or 0) if on_cuda else 0,
        )


# Provider -> PyTorch's own switch for its kernel (torch.nn.attention.sdpa_kernel sets them).
_SWITCHES = {f"cuda_{name}": enabled for name, enabled in KERNEL_SWITCHES.items()}


def _lead(settings: AttentionSettings, samples: int) -> tuple[int, int, int]:
    """How (B, G, R) become a kernel's (b, h, g) without a copy, as far as the layout allows.

    Where samples and heads lie at one stride they are all heads, and the output comes out in the op's layout; where
    only samples and groups do, those are the batch. A mask needs samples and heads apart.
    """
    heads = settings.heads
    groups, per_group = heads.kv_heads, heads.per_group
    one_stride = heads.packing == "interleaved" and (heads.layout == "sequence_first" or samples == 1)
    if settings.masked or not one_stride:
        return samples, heads.heads, groups
    return (1, samples * groups, samples * groups) if per_group == 1 else (samples * groups, per_group, 1)


@dataclass(frozen=True)
class _Views:
    """The way between packed tensors and a kernel's [b, h, S, D]."""

    settings: AttentionSettings
    samples: int
    positions: int

    @property
    def order(self) -> tuple[int, ...]:
        """[B, G, R, S, D] -> the op's layout."""
        return (3, 0, 1, 2, 4) if self.settings.heads.layout == "sequence_first" else (0, 3, 1, 2, 4)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [b, h, S, D], k and v [b, g, S, D]; views, except for query heads of groups that have no common stride."""
        q, k, v = self.settings.heads.split(qkv)
        b, h, g = _lead(self.settings, self.samples)
        return q.reshape(b, h, *q.shape[3:]), k.reshape(b, g, *k.shape[2:]), v.reshape(b, g, *v.shape[2:])

    def split_output(self, y: torch.Tensor) -> torch.Tensor:
        """The output or its gradient as [b, h, S, D], features side by side."""
        heads = self.settings.heads.split_output(y.contiguous())
        b, h, _ = _lead(self.settings, self.samples)
        return heads.reshape(b, h, *heads.shape[3:])

    def merge_output(self, out: torch.Tensor) -> torch.Tensor:
        """[b, h, S, D] as the op's output."""
        return self.settings.heads.merge_output(self._grouped(out, self.settings.heads.per_group))

    def grouped(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
        """The kernel's [b, h, S, D] as queries [B, G, R, S, D], keys and values [B, G, S, D]; views."""
        dq = self._grouped(dq, self.settings.heads.per_group)
        return dq, self._grouped(dk, 1).squeeze(2), self._grouped(dv, 1).squeeze(2)

    def pack(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of the packed input: one concatenation where all three lie in its order, else three copies."""
        heads = self.settings.heads
        parts = [part.permute(self.order) for part in (dq, dk.unsqueeze(2), dv.unsqueeze(2))]
        if dq.dtype != dtype or not all(part.is_contiguous() for part in parts):
            return heads.pack(dq, dk, dv, dtype)
        rows = self.samples * self.positions * (heads.kv_heads if heads.packing == "interleaved" else 1)
        packed = torch.cat([part.view(rows, -1) for part in parts], 1)
        return torch.ops.aten._unsafe_view.default(packed, [*parts[0].shape[:2], heads.features])

    def _grouped(self, part: torch.Tensor, per_group: int) -> torch.Tensor:
        return part.view(self.samples, self.settings.heads.kv_heads, per_group, self.positions, part.shape[-1])


@dataclass(frozen=True)
class _Call:
    """What a kernel is given: q [b, h, S, D], k and v [b, g, S, D], and what it adds to the scores, if anything."""

    settings: AttentionSettings
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    causal: bool

    @property
    def positions(self) -> int:
        """S."""
        return self.q.shape[2]


@dataclass(frozen=True)
class Speed:
    """The share of the rate of large matrix products that forward and backward reach: 1 / (slowness + warm_up / S).

    Attributes:
        slowness: the factor for long sequences, of forward and backward, by (head_dim > 64, dropout > 0).
        warm_up: positions, of forward and backward, by whether later positions are hidden: what a block of scores
            that is computed and half thrown away costs, and the first block's way in.
    """

    slowness: Mapping[tuple[bool, bool], tuple[float, float]]
    warm_up: Mapping[bool, tuple[float, float]]

    @classmethod
    def constant(cls, forward: float, backward: float) -> Speed:
        """The same share for every problem."""
        every = {(wide, drops): (1.0 / forward, 1.0 / backward) for wide in (False, True) for drops in (False, True)}
        return cls(every, {False: (0.0, 0.0), True: (0.0, 0.0)})

    def shares(self, settings: AttentionSettings, positions: int) -> tuple[float, float]:
        """Of forward and of backward."""
        slowness = self.slowness[settings.heads.head_dim > 64, settings.dropout > 0.0]
        warm_up = self.warm_up[settings.causal]
        forward, backward = (a + b / max(positions, 1) for a, b in zip(slowness, warm_up, strict=True))
        return 1.0 / forward, 1.0 / backward


class Provider:
    """One way to compute attention, forward and backward; use the instances in `PROVIDERS`.

    `emits` are the tensors that forward gives and backward takes; backward also takes the packed input, the output and,
    where there is one, the mask. Call both with grad mode off, as inside an autograd Function. Plans go by `speed`.
    """

    name: ClassVar[str]
    schemas: ClassVar[tuple[str, ...]] = ()
    emits: ClassVar[tuple[str, ...]]
    conditions: ClassVar[tuple[Condition, ...]]
    speed: ClassVar[Speed]
    on_cuda: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # from the op's random stream; PyTorch's kernels draw from PyTorch's generator

    def __init__(self) -> None:
        problems = [_schema_problem(schema) for schema in self.schemas]
        self._unavailable = next((problem for problem in problems if problem is not None), None)
        if self.schemas:
            self._forward, self._backward = (_operator(schema) for schema in self.schemas)

    def __repr__(self) -> str:
        return f"<attention provider {self.name}>"

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Why this provider cannot compute the problem; None when it can."""
        if self._unavailable is not None:
            return self._unavailable
        reasons = (condition(problem) for condition in self.conditions)
        return next((reason for reason in reasons if reason is not None), None)

    def reads(self, settings: AttentionSettings) -> tuple[str, ...]:
        """What backward takes, by name."""
        return ("input", "output", *self.emits, *(("attention_mask",) if settings.masked else ()))

    def forward(
        self,
        settings: AttentionSettings,
        qkv: torch.Tensor,
        mask: torch.Tensor | None = None,
        random: RandomStream | None = None,
    ) -> tuple[torch.Tensor, Saved]:
        """The output, and for each name in `emits` a tensor.

        `random` is there for providers that draw from it.
        """
        heads = settings.heads
        if not qkv.numel():
            empty = {name: qkv.new_empty(0, dtype=torch.float32) for name in self.emits}
            return qkv.new_empty((*qkv.shape[:2], heads.heads * heads.head_dim)), empty
        views = _Views(settings, *heads.lengths(qkv.shape))
        out, saved = self._run(self._call(views, self._readable(qkv), mask))
        y = views.merge_output(out).to(qkv.dtype)
        blind = None if mask is None else self._blind(views, mask)
        if blind is not None:
            y.view(*blind.shape[:3], heads.head_dim).masked_fill_(blind, 0.0)
        return y, saved

    def backward(
        self, settings: AttentionSettings, tensors: Mapping[str, torch.Tensor | None], dy: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the packed input; `tensors` has the names of `reads`."""
        qkv = tensors["input"]
        assert qkv is not None
        if not qkv.numel():
            return torch.zeros_like(qkv, memory_format=torch.contiguous_format)
        views = _Views(settings, *settings.heads.lengths(qkv.shape))
        return views.pack(*self.gradients(settings, tensors, dy), dtype=qkv.dtype)

    def gradients(
        self, settings: AttentionSettings, tensors: Mapping[str, torch.Tensor | None], dy: torch.Tensor
    ) -> Gradients:
        """The same before it is packed: queries [B, G, R, S, D], keys and values [B, G, S, D], as the kernel left them.

        They may have another dtype than the input.
        """
        qkv, out, mask = tensors["input"], tensors["output"], tensors.get("attention_mask")
        assert qkv is not None and out is not None
        if not qkv.numel():
            return settings.heads.split(torch.zeros_like(qkv, memory_format=torch.contiguous_format))
        views = _Views(settings, *settings.heads.lengths(qkv.shape))
        saved = {name: tensor for name in self.emits if (tensor := tensors[name]) is not None}
        blind = None if mask is None else self._blind(views, mask)
        if blind is not None:
            dy = dy.view(*blind.shape[:3], settings.heads.head_dim).masked_fill(blind, 0.0).reshape(dy.shape)
        dout = views.split_output(self._readable(dy))
        call = self._call(views, self._readable(qkv), mask)
        return views.grouped(*self._run_backward(call, views.split_output(self._readable(out)), dout, saved))

    def _call(self, views: _Views, qkv: torch.Tensor, mask: torch.Tensor | None) -> _Call:
        causal = views.settings.causal
        if mask is None:
            return _Call(views.settings, *views.split(qkv), bias=None, causal=causal)
        bias, causal = self._bias(views, mask, qkv)
        return _Call(views.settings, *views.split(qkv), bias=bias, causal=causal)

    def _run(self, call: _Call) -> tuple[torch.Tensor, Saved]:
        """The kernel's output [b, h, S, D] and what it gives for backward."""
        raise NotImplementedError

    def _run_backward(self, call: _Call, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        """The kernel's dq, dk, dv."""
        raise NotImplementedError

    def _bias(self, views: _Views, mask: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """What the kernel adds to the scores, and whether it is still to hide later positions."""
        raise NotImplementedError

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a copy that the kernel can read."""
        return x

    def _blind(self, views: _Views, mask: torch.Tensor) -> torch.Tensor | None:
        """Which rows of which heads see nothing, as [.., .., H, 1] of the op's layout; None: the kernel zeroes them."""
        return None


def _operator(schema: str) -> Any:
    name = schema.removeprefix("aten::").partition("(")[0]
    found = getattr(torch.ops.aten, name, None)
    return None if found is None else found.default


def _schema_problem(schema: str) -> str | None:
    """Why this torch has no operator that can be called by that schema, or None."""
    operator, name = _operator(schema), schema.partition("(")[0]
    if operator is None:
        return f"torch {torch.__version__} has no {name}"
    if not _fits(operator._schema, torch._C.parse_schema(schema)):
        return f"{name} has changed in torch {torch.__version__}: it is {operator._schema}, known is {schema}"
    return None


def _fits(found: Any, known: Any) -> bool:
    """Whether a call written for the schema `known` means the same under `found`; new arguments may have defaults."""

    def described(arguments: Any) -> list[tuple[str, str, bool]]:
        return [(a.name, str(a.type), a.kwarg_only) for a in arguments]

    names = {a.name for a in known.arguments}
    added = [a for a in found.arguments if a.name not in names]
    kept = [a for a in found.arguments if a.name in names]
    return (
        described(kept) == described(known.arguments)
        and all(a.has_default_value() and a.kwarg_only for a in added)
        and [str(r.type) for r in found.returns] == [str(r.type) for r in known.returns]
    )


def _needs(holds: Callable[[AttentionProblem], bool], words: Callable[[AttentionProblem], str]) -> Condition:
    return lambda problem: None if holds(problem) else words(problem)


def _on(device_type: str) -> Condition:
    return _needs(
        lambda p: p.device_type == device_type, lambda p: f"it runs on {device_type}, the input is on {p.device_type}"
    )


def _takes(*dtypes: torch.dtype) -> Condition:
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return _needs(lambda p: p.dtype in dtypes, lambda p: f"it takes {names}, the input is {p.dtype}")


def _head_dim(most: int | None = None, multiple: Callable[[AttentionProblem], int] = lambda p: 8) -> Condition:
    def fits(p: AttentionProblem) -> bool:
        dim = p.settings.heads.head_dim
        return dim % multiple(p) == 0 and (most is None or dim <= most)

    limit = "" if most is None else f" up to {most}"
    return _needs(
        fits, lambda p: f"head_dim must be a multiple of {multiple(p)}{limit}, it is {p.settings.heads.head_dim}"
    )


def _capability(major: int) -> Condition:
    return _needs(
        lambda p: p.capability[0] >= major,
        lambda p: f"it needs compute capability {major}.0, this GPU has {p.capability[0]}.{p.capability[1]}",
    )


def _switched_on(name: str) -> Condition:
    return _needs(
        lambda p: name not in p.switched_off,
        lambda p: "it is switched off in torch.backends.cuda (enable_..._sdp, or torch.nn.attention.sdpa_kernel)",
    )


_NO_DROPOUT = _needs(
    lambda p: p.settings.dropout == 0.0,
    lambda p: f"it has no dropout, and {p.settings.dropout} of the probabilities are to be dropped",
)
_DROPS_SOME = _needs(lambda p: p.settings.dropout < 1.0, lambda p: "it cannot drop all probabilities")
_NO_MASK = _needs(lambda p: not p.settings.masked, lambda p: "it takes no mask tensor, only none or causal")
_IN_GRID = _needs(
    lambda p: max(_lead(p.settings, p.samples)) <= _LARGEST_GRID,
    lambda p: f"batch * heads passes {_LARGEST_GRID}: {p.samples} * {p.settings.heads.heads}",
)


class CpuFlash(Provider):
    """PyTorch's blocked attention for the CPU; grouped heads, -inf and rows that see nothing are its own business.

    `logsumexp` is the op's, so that the op's own backward could take it.
    """

    name = "cpu_flash"
    schemas = (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
        "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor output, Tensor logsumexp)",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, "
        "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    )
    emits = ("logsumexp",)
    speed = Speed.constant(0.6, 0.5)
    conditions = (_on("cpu"), _takes(torch.float32, torch.float64, torch.bfloat16, torch.float16), _NO_DROPOUT)

    def _run(self, call: _Call) -> tuple[torch.Tensor, Saved]:
        out, logsumexp = self._forward(
            call.q, call.k, call.v, 0.0, call.causal, attn_mask=call.bias, scale=call.settings.scale
        )
        heads = call.settings.heads.heads
        shape = [logsumexp.shape[0] * logsumexp.shape[1] // heads, heads, call.positions]
        return out, {"logsumexp": torch.ops.aten._unsafe_view.default(logsumexp.contiguous(), shape)}

    def _run_backward(self, call: _Call, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        logsumexp = saved["logsumexp"].view(call.q.shape[:3])
        inputs = (dout, call.q, call.k, call.v, out, logsumexp, 0.0, call.causal)
        return self._backward(*inputs, attn_mask=call.bias, scale=call.settings.scale)

    def _bias(self, views: _Views, mask: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, bool]:
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        return torch.zeros(mask.shape, dtype=qkv.dtype).masked_fill_(mask, -torch.inf), views.settings.causal

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        # In float16 the kernel is several times slower than in float32.
        x = x.float() if x.dtype == torch.float16 else x
        return x if x.stride(-1) == 1 else x.contiguous()


class _CudaProvider(Provider):
    """What the CUDA kernels have in common: aligned loads, a dense bias, and rows that see nothing made zero here.

    Speeds are those measured on an H200 (torch 2.11, cuDNN 9.19): bfloat16, head_dim 64 and 128, S from 512 to 8192,
    8192 tokens of 4096 features, dropout 0 and 0.1; medians over 790e12 operations per second. The two terms fit each
    provider's times within some percent. Of other GPUs, and for other sizes of heads, the same shares are assumed.
    """

    on_cuda = True

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        steps = [stride * x.element_size() for stride in x.stride()[:-1]]
        if x.stride(-1) == 1 and not any(step % _ALIGNMENT for step in (x.data_ptr(), *steps)):
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def _bias(self, views: _Views, mask: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, bool]:
        hidden = _hidden(views, mask)
        # Rows that see nothing see everything: what comes of it is made zero, and kernels disagree on rows of nothing
        # (cuDNN 9.19 gave NaN for 64 positions of 128 features).
        hidden = hidden & ~hidden.all(-1, keepdim=True)
        # Rows of the bias start at multiples of 16 elements, as the kernels' loads need it.
        padded = -(-views.positions // 16) * 16
        bias = qkv.new_zeros((*hidden.shape[:-1], padded))[..., : views.positions]
        return bias.masked_fill_(hidden, _MASKED_SCORE), False

    def _blind(self, views: _Views, mask: torch.Tensor) -> torch.Tensor | None:
        heads = views.settings.heads
        blind = _hidden(views, mask).all(-1).expand(views.samples, heads.heads, views.positions)
        return blind.permute((2, 0, 1) if heads.layout == "sequence_first" else (0, 2, 1))[..., None]


def _hidden(views: _Views, mask: torch.Tensor) -> torch.Tensor:
    """What is masked, later positions included: [B or 1, H or 1, S or 1, S or 1]."""
    hidden = hidden_positions(views.settings.causal, mask, views.positions, mask.device)
    assert hidden is not None
    return hidden


def _defined(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """What an operator returned, or an empty tensor for nothing, so that there is one to keep."""
    return like.new_empty(0) if tensor is None else tensor


class CudaCudnn(_CudaProvider):
    """cuDNN's attention.

    Its dropout is unbiased (cuDNN 9.19): in 100 calls of 34 million probabilities each it dropped 0.099995 +- 0.000009
    for 0.1, 0.200010 +- 0.000014 for 0.2 and 0.500018 +- 0.000020 for 0.5, and scaled the others by 1 / (1 - p).
    """

    name = "cuda_cudnn"
    schemas = (
        "aten::_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
        "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
        "aten::_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, float? scale=None) "
        "-> (Tensor, Tensor, Tensor)",
    )
    emits = ("cudnn_logsumexp", "cudnn_seed", "cudnn_offset")
    speed = Speed(
        {
            (True, False): (1.18, 1.32),
            (True, True): (2.67, 1.73),
            (False, False): (1.63, 1.62),
            (False, True): (4.29, 2.34),
        },
        {True: (730.0, 1320.0), False: (220.0, 550.0)},
    )
    conditions = (
        _on("cuda"),
        _switched_on("cuda_cudnn"),
        _takes(torch.bfloat16, torch.float16),
        _capability(8),
        _head_dim(128),
        _IN_GRID,
        _needs(lambda p: p.cudnn >= 90000, lambda p: f"it needs cuDNN 9.0, found {p.cudnn}"),
        _needs(lambda p: p.positions != 1, lambda p: "it takes no sequence of length 1"),
        _needs(lambda p: not p.deterministic, lambda p: "its backward does not repeat bit for bit"),
        _needs(
            lambda p: p.settings.dropout == 0.0 or not 91100 < p.cudnn < 91400,
            lambda p: f"cuDNN {p.cudnn} has no dropout in attention",
        ),
        _DROPS_SOME,
    )

    def _run(self, call: _Call) -> tuple[torch.Tensor, Saved]:
        settings = call.settings
        result = self._forward(
            call.q, call.k, call.v, call.bias, True, settings.dropout, call.causal, False, scale=settings.scale
        )
        out, logsumexp, _, _, _, _, seed, offset, _ = result
        kept = (_defined(tensor, logsumexp) for tensor in (logsumexp, seed, offset))
        return out, dict(zip(self.emits, kept, strict=True))

    def _run_backward(self, call: _Call, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        settings, length = call.settings, call.positions
        no_varying_lengths = (None, None, length, length)
        tensors = (dout, call.q, call.k, call.v, out, *(saved[name] for name in self.emits), call.bias)
        return self._backward(*tensors, *no_varying_lengths, settings.dropout, call.causal, scale=settings.scale)


class CudaFlash(_CudaProvider):
    """FlashAttention-2 as PyTorch builds it.

    Its dropout draws 8 bits: for 0.1 it drops 26/256 = 0.1016 and scales the others by 1 / (1 - 0.1), so outputs are
    0.17% small on average; multiples of 1/256 are exact.
    """

    name = "cuda_flash"
    schemas = (
        "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, "
        "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, "
        "Tensor unused, Tensor debug_attn_mask)",
        "aten::_scaled_dot_product_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    )
    emits = ("flash_logsumexp", "flash_seed", "flash_offset")
    speed = Speed(
        {
            (True, False): (2.37, 2.61),
            (True, True): (2.88, 2.77),
            (False, False): (2.57, 2.78),
            (False, True): (3.40, 3.22),
        },
        {True: (1100.0, 1450.0), False: (180.0, 560.0)},
    )
    conditions = (
        _on("cuda"),
        _switched_on("cuda_flash"),
        _takes(torch.bfloat16, torch.float16),
        _capability(8),
        _head_dim(256),
        _IN_GRID,
        _NO_MASK,
        _needs(
            lambda p: p.settings.heads.head_dim <= 192 or p.capability in ((8, 0), (8, 7)) or 9 <= p.capability[0] < 12,
            lambda p: f"its backward for head_dim {p.settings.heads.head_dim} passes this GPU's shared memory",
        ),
        _DROPS_SOME,
    )

    def _run(self, call: _Call) -> tuple[torch.Tensor, Saved]:
        settings = call.settings
        result = self._forward(call.q, call.k, call.v, settings.dropout, call.causal, False, scale=settings.scale)
        out, logsumexp, _, _, _, _, seed, offset, _ = result
        kept = (_defined(tensor, logsumexp) for tensor in (logsumexp, seed, offset))
        return out, dict(zip(self.emits, kept, strict=True))

    def _run_backward(self, call: _Call, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        settings, length = call.settings, call.positions
        logsumexp, seed, offset = (saved[name] for name in self.emits)
        no_varying_lengths = (None, None, length, length)
        tensors = (dout, call.q, call.k, call.v, out, logsumexp)
        draws = (settings.dropout, call.causal, seed, offset)
        return self._backward(*tensors, *no_varying_lengths, *draws, scale=settings.scale)


class CudaEfficient(_CudaProvider):
    """The memory-efficient attention of xFormers, as PyTorch builds it: any mask, float32 too, no grouped heads."""

    name = "cuda_efficient"
    schemas = (
        "aten::_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, "
        "Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
        "aten::_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, "
        "Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, "
        "float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    )
    emits = ("efficient_logsumexp", "efficient_seed", "efficient_offset")
    speed = Speed(
        {
            (True, False): (4.63, 5.88),
            (True, True): (7.57, 9.97),
            (False, False): (6.01, 7.42),
            (False, True): (11.8, 10.7),
        },
        {True: (1140.0, 1560.0), False: (250.0, 460.0)},
    )
    conditions = (
        _on("cuda"),
        _switched_on("cuda_efficient"),
        _takes(torch.bfloat16, torch.float16, torch.float32),
        _capability(7),
        _needs(
            lambda p: p.dtype != torch.bfloat16 or p.capability[0] >= 8,
            lambda p: "bfloat16 needs compute capability 8.0",
        ),
        _head_dim(multiple=lambda p: 4 if p.dtype == torch.float32 else 8),
        _IN_GRID,
        _DROPS_SOME,
    )

    def _run(self, call: _Call) -> tuple[torch.Tensor, Saved]:
        settings = call.settings
        out, logsumexp, seed, offset = self._forward(
            call.q, *self._repeated(call), self._whole(call), True, settings.dropout, call.causal, scale=settings.scale
        )
        kept = (_defined(tensor, logsumexp) for tensor in (logsumexp, seed, offset))
        return out, dict(zip(self.emits, kept, strict=True))

    def _run_backward(self, call: _Call, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        settings = call.settings
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes its positions to be h * D apart
        dq, dk, dv, _ = self._backward(
            *(dout, call.q, *self._repeated(call), self._whole(call), out),
            *(saved[name] for name in self.emits),
            *(settings.dropout, [True, True, True, False], call.causal),
            scale=settings.scale,
        )
        groups, per_group = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
        if per_group == 1:
            return dq, dk, dv
        dk, dv = (part.unflatten(1, (groups, per_group)).sum(2) for part in (dk, dv))
        return dq, dk, dv

    def _repeated(self, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for each query head; of one group a view with stride 0."""
        per_group = call.q.shape[1] // call.k.shape[1]
        if per_group == 1:
            return call.k, call.v
        k, v = (part[:, :, None].expand(-1, -1, per_group, -1, -1).flatten(1, 2) for part in (call.k, call.v))
        return k, v

    def _whole(self, call: _Call) -> torch.Tensor | None:
        """The bias with every size written out."""
        return None if call.bias is None else call.bias.expand(*call.q.shape[:3], call.positions)


# In the order of preference where nothing was measured.
PROVIDERS: tuple[Provider, ...] = (CudaCudnn(), CudaFlash(), CudaEfficient(), CpuFlash())


def providers(problem: AttentionProblem) -> list[tuple[Provider, str | None]]:
    """Every provider, best first, each with the reason why it cannot compute the problem (None: it can)."""
    return [(provider, provider.reason_not(problem)) for provider in PROVIDERS]


def choose(problem: AttentionProblem) -> Provider | None:
    """The first provider that can compute the problem; None leaves it to the op's own explicit math."""
    return next((provider for provider, reason in providers(problem) if reason is None), None)
