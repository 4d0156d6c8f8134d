"""What every provider of attention is: what it can do, how fast, and how it is called below autograd.

Letters of shapes are those of `views.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from te_fuser.formula.random import RandomStream
from te_fuser.kernels.attention.blank_rows import Blank, by_torch
from te_fuser.kernels.attention.conditions import Condition
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.separate import Separate, Tensors
from te_fuser.kernels.attention.views import AttentionInputs, Gradients, Views, views_of
from te_fuser.ops.attention.dot_product_attention import AttentionSettings

Saved = dict[str, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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

    def times(self, forward: float, backward: float) -> Speed:
        """That of a kernel which takes so many times as long."""

        def longer(pair: tuple[float, float]) -> tuple[float, float]:
            return pair[0] * forward, pair[1] * backward

        return Speed(
            {key: longer(pair) for key, pair in self.slowness.items()},
            {key: longer(pair) for key, pair in self.warm_up.items()},
        )

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
    beyond: ClassVar[tuple[str, ...]] = ()  # of what `AttentionSettings.beyond` says, what it is called for
    by_structure: ClassVar[bool] = False  # what hides by structure is told to the kernel, not as a dense bias
    by_lengths: ClassVar[tuple[float, float]] = (1.0, 1.0)  # times as long as one that skips what is behind lengths
    on_cuda: ClassVar[bool] = False
    calls: ClassVar[tuple[float, float]] = (30.0, 46.0)  # of PyTorch, that its step takes the host as long as, each way
    packs: ClassVar[bool] = False  # its own `backward` stores the packed gradient: no pass over it is left to do
    draws: ClassVar[bool] = False  # from the op's random stream; PyTorch's kernels draw from PyTorch's generator

    def __init__(self) -> None:
        self._unavailable = next(filter(None, map(why_no_operator, self.schemas)), None)
        if self.schemas:
            self._forward, self._backward = map(function_of, self.schemas)

    def __repr__(self) -> str:
        return f"<attention provider {self.name}>"

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Why this provider cannot compute the problem; None when it can."""
        if self._unavailable is not None:
            return self._unavailable
        asked = [words for words in problem.settings.beyond if words not in self.beyond]
        if asked:
            return f"it is not called for {' and '.join(asked)}"
        return next(filter(None, (condition(problem) for condition in self.conditions)), None)

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
        views = views_of(settings, qkv.shape)
        if not qkv.numel():
            empty = {name: qkv.new_empty(0, dtype=torch.float32) for name in self.emits}
            return qkv.new_empty(views.output_shape), empty
        out, saved = self._run(self._call(views, self._readable(qkv), mask))
        y = views.merge_output(out)
        y = y if y.dtype == qkv.dtype else y.to(qkv.dtype)
        blind = None if mask is None else self._blind(views, mask)
        if blind is not None:
            y.view(*blind.shape[:3], settings.heads.head_dim).masked_fill_(blind, 0.0)
        return y, saved

    def backward(
        self, settings: AttentionSettings, tensors: Mapping[str, torch.Tensor | None], dy: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the packed input; `tensors` has "input", "output", `emits` and, if one is given, a mask."""
        qkv = tensors["input"]
        assert qkv is not None
        if not qkv.numel():
            return torch.zeros_like(qkv, memory_format=torch.contiguous_format)
        views = views_of(settings, qkv.shape)
        return views.pack(*self.gradients(settings, tensors, dy), dtype=qkv.dtype)

    def gradients(
        self, settings: AttentionSettings, tensors: Mapping[str, torch.Tensor | None], dy: torch.Tensor
    ) -> Gradients:
        """The same before it is packed: queries [B, G, R, S, D], keys and values [B, G, S, D], as the kernel left them.

        They may have another dtype than the input. Of a provider that packs them itself they are views.
        """
        if self.packs:
            return settings.heads.split(self.backward(settings, tensors, dy))
        parts, grouped = self.gradients_apart(settings, tensors, dy)
        return grouped(*parts)

    def gradients_apart(
        self, settings: AttentionSettings, tensors: Mapping[str, torch.Tensor | None], dy: torch.Tensor
    ) -> tuple[Gradients, Callable[..., Gradients]]:
        """The kernel's own three, and the views that make `gradients` of them."""
        qkv, out, mask = tensors["input"], tensors["output"], tensors.get("attention_mask")
        assert qkv is not None and out is not None
        if not qkv.numel():
            empty = settings.heads.split(torch.zeros_like(qkv, memory_format=torch.contiguous_format))
            return empty, lambda *parts: parts
        views = views_of(settings, qkv.shape)
        saved = {name: tensor for name in self.emits if (tensor := tensors[name]) is not None}
        blind = None if mask is None else self._blind(views, mask)
        if blind is not None:
            dy = dy.view(*blind.shape[:3], settings.heads.head_dim).masked_fill(blind, 0.0).reshape(dy.shape)
        dout = views.split_output(self._readable(dy))
        call = self._call(views, self._readable(qkv), mask)
        return self._run_backward(call, views.split_output(self._readable(out)), dout, saved), views.grouped

    def forward_separate(
        self, settings: AttentionSettings, tensors: Tensors, blank: Blank | None = by_torch
    ) -> tuple[torch.Tensor, Saved]:
        """The same as `forward` for what `beyond` has: inputs and what hides by name.

        `blank` is for kernels that are told lengths and leave rows out; None: nobody reads those.
        """
        call = Separate.of(settings, tensors)
        if call.is_empty:
            return self.nothing(call)
        hidden = call.hidden(tensors)
        out, saved = self._run(self._separate_call(call, hidden))
        return call.output(self._seeing(out, hidden)), saved

    def backward_separate(
        self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank | None = by_torch
    ) -> Saved:
        """The gradients by input."""
        call = Separate.of(settings, tensors)
        if call.is_empty:
            return call.zeros()
        hidden, y = call.hidden(tensors), tensors["output"]
        assert y is not None
        saved = {name: tensor for name in self.emits if (tensor := tensors[name]) is not None}
        out, dout = (call.split_output(self._readable(t.contiguous())) for t in (y, dy))
        return call.gradients(
            *self._run_backward(self._separate_call(call, hidden), out, self._seeing(dout, hidden), saved)
        )

    def gradients_separate(self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor) -> Gradients:
        """The gradients of heads q [B, H, S, D], k and v [B, G, K, D], of one that is told offsets and packs none."""
        raise NotImplementedError

    def nothing(self, call: Separate) -> tuple[torch.Tensor, Saved]:
        """What `forward_separate` gives where nothing is seen."""
        return call.nothing(), {name: call.heads[0].new_empty(0, dtype=torch.float32) for name in self.emits}

    def _separate_call(self, call: Separate, hidden: torch.Tensor | None) -> AttentionInputs:
        q, k, v = (self._readable(part) for part in call.heads)
        call = replace(call, heads=(q, k, v))
        return call.call(None if hidden is None else self._bias_for(hidden, call.heads))

    def _seeing(self, rows: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """Rows [B, H, S, E], zeros for those that see nothing."""
        blind = None if hidden is None else self._blind_in(hidden)
        return rows if blind is None else rows.masked_fill(blind, 0.0)

    def _bias_for(self, hidden: torch.Tensor, heads: Heads) -> torch.Tensor:
        """What the kernel adds to the scores where so much is hidden."""
        raise NotImplementedError

    def _blind_in(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Which rows see nothing, [.., .., .., 1]; None: the kernel zeroes them."""
        return None

    def _call(self, views: Views, qkv: torch.Tensor, mask: torch.Tensor | None) -> AttentionInputs:
        causal = views.settings.causal
        if mask is None:
            return AttentionInputs(views, *views.split(qkv), bias=None, causal=causal)
        bias, causal = self._bias(views, mask, qkv)
        return AttentionInputs(views, *views.split(qkv), bias=bias, causal=causal)

    def _run(self, call: AttentionInputs) -> tuple[torch.Tensor, Saved]:
        """The kernel's output [b, h, S, D] and what it gives for backward."""
        raise NotImplementedError

    def _run_backward(self, call: AttentionInputs, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        """The kernel's dq, dk, dv."""
        raise NotImplementedError

    def _bias(self, views: Views, mask: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """What the kernel adds to the scores, and whether it is still to hide later positions."""
        raise NotImplementedError

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a copy that the kernel can read."""
        return x

    def _blind(self, views: Views, mask: torch.Tensor) -> torch.Tensor | None:
        """Which rows of which heads see nothing, as [.., .., H, 1] of the op's layout; None: the kernel zeroes them."""
        return None


# PyTorch's operators, by the schemas that their calls were written for, and whether those still hold.


def operator_of(schema: str) -> Any:
    """This torch's operator of the schema's name; None where there is none."""
    name = schema.removeprefix("aten::").partition("(")[0]
    found = getattr(torch.ops.aten, name, None)
    return None if found is None else found.default


def function_of(schema: str) -> Any:
    """How it is called: by the function that torch itself has for it, which is the shortest way, else as it is."""
    name = schema.removeprefix("aten::").partition("(")[0]
    return getattr(torch, name, None) or operator_of(schema)


def why_no_operator(schema: str) -> str | None:
    """Why this torch has no operator that can be called by that schema, or None."""
    operator, name = operator_of(schema), schema.partition("(")[0]
    if operator is None:
        return f"torch {torch.__version__} has no {name}"
    if not fits(operator._schema, torch._C.parse_schema(schema)):
        return f"{name} has changed in torch {torch.__version__}: it is {operator._schema}, known is {schema}"
    return None


def fits(found: Any, known: Any) -> bool:
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
