"""MultiheadAttention: projections, attention, and the projection behind it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fuser import ops
from te_fuser.ops.attention.head_norm import NORMS
from te_fuser.presets.attention_base import (
    ContextParallel,
    MultiheadAttentionArguments,
    TorchAttention,
    channels_of,
    first_or_later,
    plan_given_sizes,
)
from te_fuser.presets.attention_call import ARGUMENTS, LAYOUTS, Asking, AttentionCall, sequence_dim_of
from te_fuser.presets.base import Asked, Preset, understands
from te_fuser.presets.dot_product_attention import CACHES, KEYS, DotProductAttention, groups_of
from te_fuser.presets.inference_params import CacheRequest, cached
from te_fuser.presets.keyword_arguments import (
    Fill,
    PlacementArguments,
    check_call,
    check_flag,
    check_size,
    constructor_keywords,
)
from te_fuser.presets.keyword_types import MultiheadAttentionKeys, Unpack
from te_fuser.presets.linear import LayerNormLinear, Linear
from te_fuser.presets.norm import LayerNorm, Normed, RMSNorm, share_norm

_OUTPUT = "layernorm_output"
_PAIR = ("rotary_pos_emb_q", "rotary_pos_emb_k")


class MultiheadAttention(ContextParallel):
    """y = attention(q, k, v) W^T + b, with q, k and v projected from x, or k and v from `encoder_output`.

    Args:
        hidden_size: features of x and y.
        num_attention_heads: heads of the queries.
        kv_channels: features of a head; None: hidden_size / num_attention_heads.
        attention_dropout: probability that a softmax probability is dropped, in training.
        layernorm_epsilon: added to the variance of the norm.
        num_gqa_groups: heads of keys and values; None: as many as of queries.
        bias: True for biases in the projections.
        input_layernorm: normalize x first: `layernorm_qkv` in place of `qkv`, for cross attention `layernorm_query` in
            place of `query_layer`.
        attention_type: "self", or "cross": keys and values are projected from `encoder_output`, by `key_value`.
        fuse_qkv_params: one weight for queries, keys and values in place of query_weight, key_weight and value_weight.
        qkv_weight_interleaved: in such a weight heads lie group by group [queries.., key, value], else all queries, all
            keys, all values.
        qk_norm_type: "L2Normalization", "RMSNorm" or "LayerNorm" of each head, of queries (`q_norm`) and keys
            (`k_norm`); both are None without.
        qk_norm_eps: added to their variance; `zero_centered_gamma` does not apply to them.
        qk_norm_before_rope: they come before the rotation, otherwise after it.
        rotary_pos_interleaved: pairs for the rotation are neighbouring features, otherwise feature n of each half of a
            head.
        attn_mask_type, window_size, bottom_right_diagonal, softmax_type, layer_number, qkv_format: see
            `DotProductAttention`.
        return_bias: the last bias is not added but returned: (y, bias).
        return_layernorm_output: with input_layernorm, calls return what the norm gives, too, behind everything else.
        set_parallel_mode: ranks of `tp_group` cut the first projections by columns and the last by rows.
        seq_length, micro_batch_size: where both are given, such calls are planned, and what they need is compiled, when
            the preset is made.
        **keywords: these, what presets share, see `te_fuser.presets.norm.Normed` and
            `te_fuser.presets.keyword_arguments.Common`, and options of lists.
    """

    flattens = True
    arguments = MultiheadAttentionArguments

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Fill | None = None,
        output_layer_init_method: Fill | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        **keywords: Unpack[MultiheadAttentionKeys],
    ) -> None:
        super().__init__(**constructor_keywords(self.arguments, locals()))
        said = self.common
        self.hidden_size = check_size("hidden_size", hidden_size)
        self.num_attention_heads = check_size("num_attention_heads", num_attention_heads)
        self.num_gqa_groups = groups_of(num_attention_heads, said.num_gqa_groups)
        self.attention_type, self.input_layernorm = said.attention_type, bool(said.input_layernorm)
        self.layer_number, self.return_bias = said.layer_number, bool(said.return_bias)
        self.hidden_size_per_attention_head = self.channels = kv_channels or channels_of(
            hidden_size, num_attention_heads
        )
        self.sequence_dim = sequence_dim_of(said.qkv_format)
        self._make_parts(attention_dropout)
        self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition = self.core_attention.own_heads
        default, scale = self.core_attention.common.call(), self.core_attention.softmax_scale
        self.asking = Asking(type(self).__name__, default, self.crosses, scale, self.crosses)
        self._returns_norm = self.input_layernorm and bool(said.return_layernorm_output)
        if self._returns_norm:
            share_norm(self.first, _OUTPUT)
        self.relist()
        plan_given_sizes(self, hidden_size, self.asking)

    # --------------------------------------------------------------------------------------- parts

    @property
    def crosses(self) -> bool:
        """True where keys and values are another tensor's."""
        return self.attention_type == "cross"

    @property
    def qk_norm_before_rope(self) -> bool:
        """True where norms of heads come before the rotation."""
        return bool(self.common.qk_norm_before_rope)

    @property
    def first(self) -> Preset:
        """The projection of x."""
        names = ("layernorm_query", "query_layer") if self.crosses else ("layernorm_qkv", "qkv")
        return self.get_submodule(names[not self.input_layernorm])  # type: ignore[return-value]

    @property
    def _core(self) -> DotProductAttention:
        """Attention between the projections, which must be a DotProductAttention."""
        found = self._modules.get("core_attention")
        if not isinstance(found, DotProductAttention):
            is_now = None if found is None else type(found).__name__
            raise TypeError(
                f"{type(self).__name__}: core_attention is {is_now}, and calls tell it their mask and where heads lie: "
                "put a DotProductAttention there, or another module in place of the whole attention"
            )
        return found

    @property
    def qkv_weight_interleaved(self) -> bool:
        """True where heads lie group by group, as asked for; False where q, k and v have weights of their own."""
        projection: Any = self.key_value if self.crosses else self.first
        return bool(self.common.qkv_weight_interleaved) and len(projection.parts["weight"]) == 1

    @property
    def _packing(self) -> str:
        """Layout of the heads that attention reads."""
        packing = "interleaved" if self.qkv_weight_interleaved else "blocked"
        return f"{KEYS}{packing}" if self.crosses else packing

    def _pack(self) -> None:
        """Read heads as they lie in a weight that has come in place of several."""
        core = self._core
        if core.common.packing != self._packing:
            core.common = replace(core.common, packing=self._packing)
            core.relist()
            self.relist()

    def check_nested(self, path: str) -> None:
        super().check_nested(path)
        self._pack()

    def _make_parts(self, attention_dropout: float) -> None:
        said = self.common
        queries, keys = (heads * self.channels for heads in (self.num_attention_heads, self.num_gqa_groups))
        if self.crosses:
            self._project("query", {"query": queries})
            self.key_value = self._linear(2 * keys, {"key": keys, "value": keys})
        else:
            self._project("qkv", {"query": queries, "key": keys, "value": keys})
        self.q_norm, self.k_norm = self._norm_of_heads(), self._norm_of_heads()
        names = (
            "softmax_type", "window_size", "bottom_right_diagonal", "layer_number", "qkv_format", "attn_mask_type",
            "get_rng_state_tracker", "rng_tracker_name",
        )  # fmt: skip
        self.core_attention = DotProductAttention(
            self.num_attention_heads,
            self.channels,
            self.num_gqa_groups,
            attention_dropout,
            packing=self._packing,
            prefix=said.prefix,
            attention_type=said.attention_type,
            **{name: getattr(said, name) for name in names},
            set_parallel_mode=bool(said.set_parallel_mode),
            **{name: self.keywords()[name] for name in ("params_dtype", "device", "tp_group", "tp_size")},
        )
        self.proj = Linear(
            queries,
            self.hidden_size,
            said.bias,
            parallel_mode="row" if said.set_parallel_mode else None,
            **self.keywords(init_method=said.output_layer_init_method),
        )
        if self.return_bias:
            self.proj.return_bias = True
            self.proj.relist()

    def _norm_of_heads(self) -> torch.nn.Module | None:
        """The parameters of a norm, which an op of this list reads; called by itself it normalizes heads."""
        if self.common.qk_norm_type is None:
            return None
        if not NORMS[self.common.qk_norm_type]:
            return ops.L2Norm(self.common.qk_norm_eps)
        kind = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[self.common.qk_norm_type]
        return kind(self.channels, self.common.qk_norm_eps, **self.keywords(PlacementArguments))

    def _project(self, what: str, split: Mapping[str, int]) -> None:
        """The projection of x, behind a norm or not."""
        rows = sum(split.values())
        if not self.input_layernorm:
            parts = split if len(split) > 1 else {}
            self.add_module("query_layer" if what == "query" else what, self._linear(rows, parts))
            return
        made = LayerNormLinear(
            self.hidden_size,
            rows,
            self.common.layernorm_epsilon,
            self.common.bias,
            **self._cut(split),
            **self.keywords(Normed, return_layernorm_output=False, return_layernorm_output_gathered=False),
        )
        self.add_module(f"layernorm_{what}", made)

    def _linear(self, rows: int, split: Mapping[str, int]) -> Linear:
        return Linear(self.hidden_size, rows, self.common.bias, **self._cut(split), **self.keywords())

    def _cut(self, split: Mapping[str, int]) -> dict[str, Any]:
        parallel = "column" if self.common.set_parallel_mode else None
        return {"parallel_mode": parallel, "parameters_split": None if self.common.fuse_qkv_params else split or None}

    def share_norm(self, name: str) -> None:
        """Let later ops of the list around read by `name` what the norm at the head gives."""
        share_norm(self.first, name)
        self.shares_names = True
        self.relist()

    # --------------------------------------------------------------------------------------- lists

    def variant_ops(self, **how: Any) -> Iterator[torch.nn.Module]:
        return (op for _, op in self.named_ops(**how))

    def named_ops(  # type: ignore[override]
        self, call: AttentionCall | None = None, rotary: str = "one", over: bool = False, caches: bool = False
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The list, with what a call of this kind has.

        `rotary` is "pair" where it gives angles of queries and of keys; `over` writes gradients over main_grad.
        """
        call = call or self._core.common.call()
        names = {module: name for name, module in self._modules.items()}
        yield names[self.first], first_or_later(self.first, over)
        yield from self._turned(call, rotary, caches)
        if self.crosses:
            yield "query", ops.Fork("query")
            yield "encoder_output", ops.Take("encoder_output")
            yield "key_value", first_or_later(self.key_value, over)
            if self.common.qk_norm_type is not None:
                yield "key_norm", self._head_norm(keys_alone=True)
            yield "keys", ops.Fork("key_value")
            yield "queries", ops.Take("query")
        if caches:
            layout = LAYOUTS[call.qkv_format]
            cache = ops.KeyValueCache(self.channels, **self._heads(), layout=layout)
            yield "cache", self._core.with_own_heads(cache)
            yield "core_attention", self._core.within(call=call, packing=CACHES)
        elif call.keys_apart:
            yield "apart", self._core.with_own_heads(ops.QueriesApart(self.channels, **self._heads()))
            yield "core_attention", self._core.within(call=call, packing=f"{KEYS}{self._packing}")
        else:
            usual = call == self._core.common.call()
            yield "core_attention", self._core if usual else self._core.within(call=call)
        yield "proj", first_or_later(self.proj, over)
        if self._returns_norm:
            yield "output", ops.Fork("attention_output")
            yield "normed", ops.Take(_OUTPUT)
            yield "layernorm_output", ops.Output(_OUTPUT)
            yield "result", ops.Take("attention_output")

    def _turned(self, call: AttentionCall, rotary: str, caches: bool) -> Iterator[tuple[str, torch.nn.Module]]:
        """Norms of heads and the rotation, which does nothing where a call gives no angles."""
        norm = None if self.common.qk_norm_type is None else self._head_norm()
        if norm is not None and self.qk_norm_before_rope:
            yield "qk_norm", norm
        if not self.crosses:
            turned = ops.RotaryByAngles(
                self.channels,
                **self._heads(),
                angles=_PAIR if rotary == "pair" else "rotary_pos_emb",
                starts="starts" if caches else None,
                padded=caches,  # of sequences themselves `cached` knows that all positions have angles
                layout=LAYOUTS[call.qkv_format],
                offsets=call.begins if call.qkv_format == "thd" else None,
                style="interleaved" if self.common.rotary_pos_interleaved else "half",
            )
            yield "rotary", self._core.with_own_heads(turned)
        if norm is not None and not self.qk_norm_before_rope:
            yield "qk_norm", norm

    def _heads(self, keys_alone: bool = False) -> dict[str, Any]:
        """Keywords of an op on heads: of queries alone, of all, or of `keys_alone`."""
        heads, groups = self._core.own_heads
        packing = "interleaved" if self.qkv_weight_interleaved else "blocked"
        kv_heads = groups if keys_alone or not self.crosses else None
        return {"heads": 0 if keys_alone else heads, "kv_heads": kv_heads, "packing": packing}

    def _head_norm(self, keys_alone: bool = False) -> ops.FusableOperation:
        said = self.common
        norm = ops.HeadNorm(
            self.channels, **self._heads(keys_alone), norm=said.qk_norm_type, eps=said.qk_norm_eps, device="meta"
        )
        self._core.with_own_heads(norm)
        names = {n: f"k_norm.{n[4:]}" if n.startswith("key_") else f"q_norm.{n}" for n in norm.parameter_names()}
        return ops.Bound(norm, self, **names) if names else norm

    # --------------------------------------------------------------------------------------- calls

    def understood(
        self,
        given: Mapping[str, Any],
        rotary_pos_emb: Any = None,
        inference_params: Any = None,
        hidden_states: torch.Tensor | None = None,
    ) -> tuple[dict[str, Hashable], dict[str, torch.Tensor]]:
        """Differences from the list itself, as keywords of `variant`, and the tensors that ops read by name."""
        self._pack()
        continues = inference_params is not None
        if continues and self.crosses:
            raise ValueError(
                f"{type(self).__name__}: inference_params are for attention_type='self', got 'cross': keys are "
                "projected from encoder_output in each call: leave them out"
            )
        call, tensors = self.asking.understood(given, continues)
        how: dict[str, Hashable] = {} if call == self.asking.default else {"call": call}
        if continues:
            assert hidden_states is not None
            how["caches"] = True
            tensors |= self._cached(inference_params, call, hidden_states, rotary_pos_emb)
        if rotary_pos_emb is not None:
            if self.crosses:
                raise ValueError(f"{type(self).__name__}: rotary_pos_emb is for attention_type='self', got 'cross'")
            if call.keys_apart and call.qkv_format == "thd":
                raise ValueError(
                    f"{type(self).__name__}: rotary_pos_emb turns by cu_seqlens_q, and cu_seqlens_kv puts keys into "
                    "other sequences: turn them by apply_rotary_pos_emb, and call DotProductAttention"
                )
            pair = isinstance(rotary_pos_emb, (tuple, list))
            if pair and len(rotary_pos_emb) != 2:
                raise ValueError(
                    f"{type(self).__name__}: rotary_pos_emb is angles, or a pair, of queries and keys, got "
                    f"{len(rotary_pos_emb)} of them"
                )
            how |= {"rotary": "pair"} if pair else {}
            tensors |= zip(_PAIR, rotary_pos_emb, strict=True) if pair else {"rotary_pos_emb": rotary_pos_emb}.items()
        return how, tensors

    def _cached(self, params: Any, call: AttentionCall, x: torch.Tensor, angles: Any) -> dict[str, torch.Tensor]:
        cutting = self._core._context.group
        if cutting.size > 1:
            raise ValueError(
                f"{type(self).__name__}: inference_params hold whole sequences, and the ranks of "
                f"{cutting.title} cut them: call set_context_parallel_group(None) before"
            )
        groups, kind = self._core.own_heads[1], x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        who, key = type(self).__name__, self if self.layer_number is None else self.layer_number
        sizes = (groups * self.channels,) * 2
        tables = angles if isinstance(angles, (tuple, list)) else (angles,)
        if any(t is not None and t.shape[0] < params.max_sequence_length for t in tables):
            raise ValueError(
                f"{who}: rotary_pos_emb has {tables[0].shape[0]} positions, and sequences may have "
                f"{params.max_sequence_length} (max_sequence_length): give angles for all"
            )
        return cached(params, CacheRequest(who, key, self, sizes, dtype, call.qkv_format == "sbhd"), groups, x)

    @understands
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_output: torch.Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        **call: Any,
    ) -> Asked:
        """Run it: y, then bias and layernorm_output where they are asked for.

        Args:
            hidden_states: [S, B, hidden_size] in the order of qkv_format, [T, hidden_size] for "thd".
            attention_mask: boolean, True = hidden, for a type of mask that reads it; a pair for cross attention.
            encoder_output: [keys, B, hidden_size], the tensor that cross attention projects keys and values from.
            is_first_microbatch: True overwrites the weights' main_grad, None and False add to it. In a region of FP8
                True quantizes the weights and keeps the result, False reuses it, None quantizes in this call.
            checkpoint_core_attention: changes nothing: backward computes the probabilities again in any case.
            inference_params: `InferenceParams`: hidden_states continue sequences, whose keys and values it holds.
            rotary_pos_emb: angles [S, 1, 1, D], or a pair, of queries and keys; with inference_params those of all
                positions, from the first on.
            **call: see `DotProductAttention.forward`.

        Raises:
            TypeError, ValueError, RuntimeError: for what the preset was not made for, before anything runs.
        """
        self.check_group()
        outputs = (*((_OUTPUT,) if self._returns_norm else ()), *call.pop("outputs", ()))
        check_call(self, call, ARGUMENTS)
        check_flag("checkpoint_core_attention", checkpoint_core_attention)
        check_encoder_output(self, encoder_output, self.crosses, "attn_mask_type")
        given = {"attention_mask": attention_mask, **call}
        how, tensors = self.understood(given, rotary_pos_emb, inference_params, hidden_states)
        if encoder_output is not None:
            tensors["encoder_output"] = encoder_output
        bias = self.proj.returned(self.proj._parameters.get("bias"), None) if self.return_bias else None
        return self.answer(how, hidden_states, {"outputs": outputs, **tensors}, is_first_microbatch, bias)

    def to_torch(self) -> torch.nn.Module:
        """torch.nn.Sequential of the projections and attention with the same function, over copies of the parameters.

        Raises:
            TypeError: where calls take or return more than one tensor.
            NotImplementedError: for norms of heads, windows, and other masks than "causal" and "no_mask".
        """
        self.check_one_value("to_torch()")
        if self.crosses:
            raise TypeError("to_torch(): cross attention takes a second tensor; call it by itself")
        if self.common.qk_norm_type is not None:
            raise NotImplementedError("to_torch() knows no norms of heads: make it with qk_norm_type=None")
        self._pack()
        projection: Any = self.first
        attention = TorchAttention(next(iter(self._core.variant_ops())))
        return torch.nn.Sequential(projection.to_torch(), attention, self.proj.to_torch()).train(self.training)


def check_encoder_output(preset: Preset, given: Any, wanted: bool, kind: str) -> None:
    """Refuse what is no tensor, or not taken; `kind` is the argument of a mask, maybe meant."""
    who = type(preset).__name__
    if isinstance(given, str):
        raise TypeError(
            f"{who}: encoder_output takes a tensor, got {given!r}: give the type of a mask by its keyword, "
            f"{kind}={given!r}"
        )
    if wanted and not isinstance(given, torch.Tensor):
        raise TypeError(f"{who}: cross attention takes encoder_output=..., a tensor, got {type(given).__name__}")
    if not wanted and given is not None:
        raise ValueError(f"{who}: encoder_output is for cross attention, and this preset has none: leave it out")
