"""Providers of attention: what each can do, how fast, and how it is called below autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from te_fuser.formula.random import RandomStream
from te_fuser.kernels.attention.lengths import Blank, Sides, blank_by_torch
from te_fuser.kernels.attention.problem import AttentionProblem, Condition
from te_fuser.kernels.attention.qkv_views import AttentionInputs, Gradients, HeadsCall, PackedCall, Tensors, call_of
from te_fuser.ops.attention.dot_product_attention import AttentionSettings

Saved = dict[str, torch.Tensor]


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
        """Speed of the same shares for every problem."""
        every = {(wide, drops): (1.0 / forward, 1.0 / backward) for wide in (False, True) for drops in (False, True)}
        return cls(every, {False: (0.0, 0.0), True: (0.0, 0.0)})

    def times(self, forward: float, backward: float) -> Speed:
        """Speed of a kernel that takes so many times as long."""

        def longer(pair: tuple[float, float]) -> tuple[float, float]:
            return pair[0] * forward, pair[1] * backward

        return Speed(
            {key: longer(pair) for key, pair in self.slowness.items()},
            {key: longer(pair) for key, pair in self.warm_up.items()},
        )

    def shares(self, settings: AttentionSettings, positions: int) -> tuple[float, float]:
        """Shares of the rate of large matrix products in forward and in backward."""
        slowness = self.slowness[settings.heads.head_dim > 64, settings.dropout > 0.0]
        warm_up = self.warm_up[settings.causal]
        forward, backward = (a + b / max(positions, 1) for a, b in zip(slowness, warm_up, strict=True))
        return 1.0 / forward, 1.0 / backward


class Provider:
    """One way to compute attention, forward and backward; use the instances in `PROVIDERS`.

    `emits` are the tensors that forward gives and backward takes; backward also takes the inputs, the output and what
    hides. HeadsCall both with grad mode off, as inside an autograd Function. Plans go by `speed`.
    """

    name: ClassVar[str]
    schemas: ClassVar[tuple[str, ...]] = ()
    emits: ClassVar[tuple[str, ...]]
    conditions: ClassVar[tuple[Condition, ...]]
    speed: ClassVar[Speed]
    beyond: ClassVar[tuple[str, ...]] = ()  # of what `AttentionSettings.beyond` says, what it is called for
    by_structure: ClassVar[bool] = False  # what hides by structure is told to the kernel, not as a dense bias
    by_lengths: ClassVar[tuple[float, float]] = (1.0, 1.0)  # times as long as one that skips what is behind lengths
    on_cuda: ClassVar[bool] = False
    calls: ClassVar[tuple[float, float]] = (30.0, 46.0)  # of PyTorch, that its step takes the host as long as, each way
    hides_later: ClassVar[bool] = False  # of packed heads, beside a mask; else the bias hides them, too
    packs: ClassVar[bool] = False  # its own `backward` stores the packed gradient: no pass over it is left to do
    draws: ClassVar[bool] = False  # from the op's random stream; PyTorch's kernels draw from PyTorch's generator

    def __init__(self) -> None:
        self._unavailable = next(filter(None, map(why_no_operator, self.schemas)), None)
        if self.schemas:
            self._forward, self._backward = map(function_of, self.schemas)

    def __repr__(self) -> str:
        return f"<attention provider {self.name}>"

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Reason why this provider cannot compute the problem."""
        if self._unavailable is not None:
            return self._unavailable
        asked = [words for words in problem.settings.beyond if words not in self.beyond]
        if asked:
            return f"it is not called for {' and '.join(asked)}"
        return next(filter(None, (condition(problem) for condition in self.conditions)), None)

    def forward(
        self,
        settings: AttentionSettings,
        tensors: Tensors,
        blank: Blank | None = blank_by_torch,
        random: RandomStream | None = None,
    ) -> tuple[torch.Tensor, Saved]:
        """The output, and for each name in `emits` a tensor.

        Args:
            tensors: inputs and what hides, by name.
            blank: for kernels that are told lengths and leave rows out; None: nobody reads those.
            random: for providers that draw from it.
        """
        call = self._call(settings, tensors)
        if self._is_empty(call, tensors):
            return self.nothing(call)
        if not self.tells(settings):
            inputs, hidden = self._inputs(call, tensors)
            out, saved = self._run(inputs)
            blind = None if hidden is None else self._blind(hidden)
            return call.output(out if blind is None else out.masked_fill_(blind, 0.0)), saved
        sides = Sides.of(call, tensors) if settings.beyond else None
        y, saved = self._run_told(call, sides, tensors, blank is not None)
        if sides is not None:
            sides.blank({"input": y}, blank)
        return y, saved

    def backward(
        self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank | None = blank_by_torch
    ) -> Saved:
        """The gradients by input; `tensors` has the same, "output" and `emits`."""
        call = self._call(settings, tensors)
        if self._is_empty(call, tensors):
            return call.zeros()
        if not self.tells(settings):
            return call.gradients(*self._gradients(call, tensors, dy))
        sides = Sides.of(call, tensors) if settings.beyond else None
        found = self._run_told_backward(call, sides, tensors, dy)
        if sides is not None:
            sides.blank({name: found[name] for name in call.inputs}, blank)
        return found

    def tells(self, settings: AttentionSettings) -> bool:
        """True where `_run_told` calls the kernel."""
        return False

    def gradients_apart(
        self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor
    ) -> tuple[Gradients, Callable[..., Gradients]]:
        """Gradients of packed heads, and the views that group them."""
        call = PackedCall.of(settings, tensors, self._readable)
        if call.is_empty:
            return settings.packed.split(call.zeros()["input"]), lambda *parts: parts
        return self._gradients(call, tensors, dy), call.views.grouped

    def gradients_of_rows(self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor) -> Gradients:
        """Gradients of heads q [B, H, S, D], k and v [B, G, K, D], of one that is told offsets."""
        raise NotImplementedError

    def nothing(self, call: HeadsCall) -> tuple[torch.Tensor, Saved]:
        """Result of `forward` where nothing is seen."""
        empty = {name: call.heads[0].new_empty(0, dtype=torch.float32) for name in self.emits}
        return call.memory().zero_(), empty

    def _gradients(self, call: HeadsCall, tensors: Tensors, dy: torch.Tensor) -> Gradients:
        inputs, hidden = self._inputs(call, tensors)
        y = tensors["output"]
        assert y is not None
        saved = {name: tensor for name in self.emits if (tensor := tensors[name]) is not None}
        out, dout = (call.split_output(self._readable(t.contiguous())) for t in (y, dy))
        blind = None if hidden is None else self._blind(hidden)
        return self._run_backward(inputs, out, dout if blind is None else dout.masked_fill(blind, 0.0), saved)

    def _call(self, settings: AttentionSettings, tensors: Tensors) -> HeadsCall:
        return call_of(settings, tensors, self._readable)

    def _is_empty(self, call: HeadsCall, tensors: Tensors) -> bool:
        """True where there is nothing to do."""
        return call.is_empty

    def _inputs(self, call: HeadsCall, tensors: Tensors) -> tuple[AttentionInputs, torch.Tensor | None]:
        """Inputs of the kernel, and what a bias hides."""
        hidden, causal = call.hidden(tensors, self.hides_later)
        bias = None if hidden is None else self._bias(hidden, call.heads)
        return AttentionInputs(call.settings, *call.heads, bias, causal), hidden

    def _run(self, call: AttentionInputs) -> tuple[torch.Tensor, Saved]:
        """The kernel's output [b, h, S, D] and what it gives for backward."""
        raise NotImplementedError

    def _run_backward(self, call: AttentionInputs, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        """The kernel's dq, dk, dv."""
        raise NotImplementedError

    def _run_told(
        self, call: HeadsCall, sides: Sides | None, tensors: Tensors, all_rows: bool
    ) -> tuple[torch.Tensor, Saved]:
        """The op's output and what the kernel gives for backward.

        `sides` is None where packed heads are all that there is; `all_rows`: somebody reads rows of no sequence.
        """
        raise NotImplementedError

    def _run_told_backward(self, call: HeadsCall, sides: Sides | None, tensors: Tensors, dy: torch.Tensor) -> Saved:
        """The gradients by input."""
        raise NotImplementedError

    def _bias(self, hidden: torch.Tensor, heads: Gradients) -> torch.Tensor:
        """Addend of the scores of these heads where so much is hidden."""
        raise NotImplementedError

    def _blind(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Rows that see nothing, [.., .., .., 1]; None: the kernel zeroes them."""
        return None

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a copy that the kernel can read."""
        return x


# PyTorch's operators, by the schemas that their calls were written for, and whether those still hold.


def operator_of(schema: str) -> Any:
    """Operator of this torch by the schema's name; None where there is none."""
    name = schema.removeprefix("aten::").partition("(")[0]
    found = getattr(torch.ops.aten, name, None)
    return None if found is None else found.default


def function_of(schema: str) -> Any:
    """Torch's own function for the operator, which is the shortest way, else the operator."""
    name = schema.removeprefix("aten::").partition("(")[0]
    return getattr(torch, name, None) or operator_of(schema)


def why_no_operator(schema: str) -> str | None:
    """Reason why this torch has no operator that can be called by that schema."""
    operator, name = operator_of(schema), schema.partition("(")[0]
    if operator is None:
        return f"torch {torch.__version__} has no {name}"
    if not fits(operator._schema, torch._C.parse_schema(schema)):
        return f"{name} has changed in torch {torch.__version__}: it is {operator._schema}, known is {schema}"
    return None


def fits(found: Any, known: Any) -> bool:
    """True where a call for the schema `known` means the same under `found`, with defaults."""

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


_ALIGNMENT = 16  # bytes: what the CUDA kernels load at a time
# Added to a masked score on CUDA: it leaves nothing of a probability, and float16 holds it.
_MASKED_SCORE = -65504.0


class CudaProvider(Provider):
    """Base of the CUDA kernels: aligned loads, a dense bias, and rows that see nothing made zero here.

    Speeds are those measured on an H200 (torch 2.11, cuDNN 9.19): bfloat16, head_dim 64 and 128, S from 512 to 8192,
    8192 tokens of 4096 features, dropout 0 and 0.1; medians over 790e12 operations per second. The two terms fit each
    provider's times within some percent. Of other GPUs, and for other sizes of heads, the same shares are assumed.
    """

    on_cuda = True

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        size = x.element_size()
        if x.data_ptr() % _ALIGNMENT:
            return x.clone(memory_format=torch.contiguous_format)
        if x.is_contiguous() and x.shape[-1] * size % _ALIGNMENT == 0:
            return x
        if x.stride(-1) == 1 and not any(stride * size % _ALIGNMENT for stride in x.stride()[:-1]):
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def _bias(self, hidden: torch.Tensor, heads: Gradients) -> torch.Tensor:
        # Rows that see nothing see everything: what comes of it is made zero, and kernels disagree on rows of nothing
        # (cuDNN 9.19 gave NaN for 64 positions of 128 features).
        keys = heads[1].shape[2]
        hidden = (hidden & ~hidden.all(-1, keepdim=True)).expand(*hidden.shape[:-1], keys)
        # Rows of the bias start at multiples of 16 elements, as the kernels' loads need it.
        bias = heads[0].new_zeros((*hidden.shape[:-1], -(-keys // 16) * 16))[..., :keys]
        return bias.masked_fill_(hidden, _MASKED_SCORE)

    def _blind(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden.all(-1, keepdim=True)

    def _saved(self, logsumexp: torch.Tensor, seed: torch.Tensor | None, offset: torch.Tensor | None) -> Saved:
        """Tensors that an operator returned for backward, empty ones for nothing."""
        returned = (logsumexp, seed, offset)
        kept = (logsumexp.new_empty(0) if tensor is None else tensor for tensor in returned)
        return dict(zip(self.emits, kept, strict=True))
