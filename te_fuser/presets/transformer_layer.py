"""TransformerLayer: attention and an MLP, each in a residual branch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser import ops
from te_fuser.presets.attention_base import (
    ContextParallel,
    HeadsArguments,
    TorchBranch,
    first_or_later,
    plan_given_sizes,
)
from te_fuser.presets.attention_call import ARGUMENTS, CROSS, LAYOUTS, OF_BOTH, SELF, AttentionCall, sequence_dim_of
from te_fuser.presets.base import Asked, understands
from te_fuser.presets.keyword_arguments import (
    Fill,
    PlacementArguments,
    check_call,
    check_drop,
    check_flag,
    check_size,
    checked,
    constructor_keywords,
)
from te_fuser.presets.keyword_types import TransformerLayerKeys, Unpack
from te_fuser.presets.layer_norm_mlp import LayerNormMLP
from te_fuser.presets.multihead_attention import MultiheadAttention, check_encoder_output
from te_fuser.presets.norm import LayerNorm, Normed, RMSNorm, share_norm
from te_fuser.sequential import Sequential

_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
_BATCH = {"sbhd": 1, "bshd": 0}
_CROSS = {  # what calls say of cross attention -> what that calls it
    "enc_dec_attn_mask": "attention_mask",
    "enc_dec_attn_mask_type": "attn_mask_type",
    "enc_dec_window_size": "window_size",
    "enc_dec_bottom_right_diagonal": "bottom_right_diagonal",
}

_NO_CROSSING = AttentionCall(prefix=CROSS)
_ARGUMENTS = ("self_attn_mask_type", *_CROSS, *(name for name in ARGUMENTS if name != "attn_mask_type"))


@dataclass(frozen=True)
class BranchArguments(HeadsArguments):
    """Arguments of `TransformerLayer` for dropout, and for the masks of its attentions."""

    hidden_dropout: float = checked(0.1, check_drop)
    attention_dropout: float = checked(0.1, check_drop)
    self_attn_mask_type: str = "causal"
    enc_dec_attn_mask_type: str | None = None
    enc_dec_window_size: Any = None
    enc_dec_bottom_right_diagonal: bool | None = None


@dataclass(frozen=True)
class TransformerLayerArguments(BranchArguments):
    """Keywords of `TransformerLayer`, documented there."""

    apply_query_key_layer_scaling: bool = True
    attention_softmax_in_fp32: bool = False
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    parallel_attention_mlp: bool = False
    layer_type: str = checked("encoder", ("encoder", "decoder"))
    drop_path_rate: float = checked(0.0, check_drop)
    activation: str = "gelu"
    activation_params: Mapping[str, float] | None = None
    attn_input_format: str = checked("sbhd", LAYOUTS)
    overlap_switch = "ub_tp_comm_overlap"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.enc_dec_attn_mask_type, self.enc_dec_window_size, self.enc_dec_bottom_right_diagonal
        AttentionCall.of(*given, self.attn_input_format, CROSS)  # refused where there is no cross attention, too
        if self.drop_path_rate and self.attn_input_format == "thd":
            raise ValueError("drop_path_rate drops samples, and attn_input_format='thd' has none: leave one out")
        others = ("apply_residual_connection_post_layernorm", "output_layernorm")
        twice = [name for name in others if getattr(self, name)] + ["layer_type"] * (self.layer_type == "decoder")
        if self.parallel_attention_mlp and twice:
            raise ValueError(f"parallel_attention_mlp=True stands alone, got {twice[0]} too: leave one out")
        if self.fuse_wgrad_accumulation and not self.fuse_qkv_params:
            raise ValueError(
                "fuse_wgrad_accumulation=True takes fuse_qkv_params=True: gradients are added to the main_grad of one "
                "weight for queries, keys and values"
            )
        if self.return_layernorm_output:
            raise ValueError("return_layernorm_output is for the parts of a layer: ask its layernorm_mlp")


class TransformerLayer(ContextParallel):
    """h = x + drop(attention(norm(x))), y = h + drop(mlp(norm(h))), in the order of GPT, BERT or T5.

    Its parts are presets: `self_attention`, `inter_attention` in a decoder, `layernorm_mlp`, and `layernorm` with
    output_layernorm.

    Args:
        hidden_size: features of x and y, [S, B, hidden_size] in the order of attn_input_format.
        ffn_hidden_size: features between the products of the MLP.
        num_attention_heads: heads of the queries.
        layernorm_epsilon: added to the variance of the norms.
        hidden_dropout: probability that an element of a branch is dropped.
        attention_dropout: probability that a softmax probability is dropped, in training.
        self_attn_mask_type, window_size, bottom_right_diagonal: of self attention, see `DotProductAttention`.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: of cross attention; with a type of
            None the call's mask decides: none, a pair for padding, or one tensor for "arbitrary".
        apply_query_key_layer_scaling, attention_softmax_in_fp32: change nothing: scores are float32 in any case.
        apply_residual_connection_post_layernorm: the residual is the output of a branch's norm, otherwise its input.
        output_layernorm: the layer ends with a norm, and self attention begins with none.
        parallel_attention_mlp: attention and MLP both read x: y = x + drop(attention(norm(x)) + mlp(norm(x))).
        layer_type: "encoder", or "decoder" with cross attention to `encoder_output` between the two.
        drop_path_rate: probability that a branch is dropped for a sample.
        num_gqa_groups, kv_channels, bias, fuse_qkv_params, qkv_weight_interleaved, qk_norm_type, qk_norm_eps,
        qk_norm_before_rope, rotary_pos_interleaved, softmax_type, layer_number, set_parallel_mode: see
            `MultiheadAttention`.
        activation, activation_params: see `LayerNormMLP`.
        attn_input_format: "sbhd", "bshd" or "thd".
        seq_length, micro_batch_size: where both are given, such calls are planned, and what they need is compiled, when
            the layer is made.
        **keywords: these, what presets share, see `te_fuser.presets.norm.Normed` and
            `te_fuser.presets.keyword_arguments.Common`, and options of lists.
    """

    flattens = True
    arguments = TransformerLayerArguments

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Fill | None = None,
        output_layer_init_method: Fill | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        **keywords: Unpack[TransformerLayerKeys],
    ) -> None:
        super().__init__(**constructor_keywords(self.arguments, locals()))
        said = self.common
        self.hidden_size = check_size("hidden_size", hidden_size)
        self.layer_type, self.layer_number = said.layer_type, said.layer_number
        self.sequence_dim = sequence_dim_of(said.attn_input_format)
        self.self_attention = self._attention(num_attention_heads, "self")
        self.kv_channels = self.self_attention.channels
        if self.decodes:
            self.inter_attention = self._attention(num_attention_heads, "cross")
        common = {"return_layernorm_output": False, "return_layernorm_output_gathered": False}
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            said.layernorm_epsilon,
            said.bias,
            activation=said.activation,
            activation_params=said.activation_params,
            set_parallel_mode=said.set_parallel_mode,
            **self.keywords(Normed, **common),
        )
        if said.output_layernorm:
            gamma, kind = bool(said.zero_centered_gamma), _NORMS[said.normalization]
            placed = self.keywords(PlacementArguments)
            self.layernorm = kind(hidden_size, said.layernorm_epsilon, zero_centered_gamma=gamma, **placed)
        if said.apply_residual_connection_post_layernorm:
            self._add_to_norms()
        self.relist()
        attentions = (self.self_attention, self.inter_attention) if self.decodes else (self.self_attention,)
        plan_given_sizes(self, hidden_size, *[attention.asking for attention in attentions])

    def _attention(self, heads: int, attention_type: str) -> MultiheadAttention:
        said, cross = self.common, attention_type == "cross"
        prefix = CROSS if cross else ""
        return MultiheadAttention(
            self.hidden_size,
            heads,
            attention_type=attention_type,
            attention_dropout=said.attention_dropout,
            input_layernorm=cross or not said.output_layernorm,
            attn_mask_type=(said.enc_dec_attn_mask_type or "no_mask") if cross else said.self_attn_mask_type,
            prefix=CROSS if cross else SELF,
            qkv_format=said.attn_input_format,
            **self.keywords(
                HeadsArguments,
                window_size=getattr(said, f"{prefix}window_size"),
                bottom_right_diagonal=getattr(said, f"{prefix}bottom_right_diagonal"),
                seq_length=None,
                micro_batch_size=None,
            ),
        )

    def _add_to_norms(self) -> None:
        """Let branches be added to what their norms give."""
        if self.self_attention.input_layernorm:
            self.self_attention.share_norm("self_attention_residual")
        if self.decodes:
            self.inter_attention.share_norm("inter_attention_residual")
        share_norm(self.layernorm_mlp, "mlp_residual")

    @property
    def is_list(self) -> bool:
        part = self.self_attention
        return not (self.decodes or isinstance(part, MultiheadAttention) and part.asking.reads)

    @property
    def decodes(self) -> bool:
        """True where there is cross attention."""
        return self.layer_type == "decoder"

    # --------------------------------------------------------------------------------------- lists

    def variant_ops(self, **how: Any) -> Iterator[torch.nn.Module]:
        return (op for _, op in self.named_ops(**how))

    def named_ops(  # type: ignore[override]
        self,
        self_attention: tuple[tuple[str, Hashable], ...] = (),
        inter_attention: tuple[tuple[str, Hashable], ...] = (),
        over: bool = False,
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The list, with these variants of its attentions; `over` writes gradients over main_grad."""
        attention = _variant(self.self_attention, self_attention, over)
        mlp = first_or_later(self.layernorm_mlp, over)
        if self.common.parallel_attention_mlp:
            yield "self_attention_fork", ops.Fork("residual")
            yield "self_attention", attention
            yield "mlp_fork", ops.Fork("self_attention")
            yield "mlp_take", ops.Take("residual")
            yield "layernorm_mlp", mlp
            yield "mlp_add", ops.Add("self_attention")
            yield "mlp_end", self._end("residual")
            return
        added = bool(self.common.apply_residual_connection_post_layernorm)
        yield from self._branch("self_attention", attention, added and self.self_attention.input_layernorm)
        if self.decodes:
            yield from self._branch("inter_attention", _variant(self.inter_attention, inter_attention, over), added)
        yield from self._branch("mlp", mlp, added)
        if self.common.output_layernorm:
            yield "layernorm", self.layernorm

    def _branch(self, name: str, part: torch.nn.Module, to_norm: bool) -> Iterator[tuple[str, torch.nn.Module]]:
        if not to_norm:
            yield f"{name}_fork", ops.Fork(f"{name}_residual")
        yield "layernorm_mlp" if name == "mlp" else name, part
        yield f"{name}_end", self._end(f"{name}_residual")

    def _end(self, residual: str) -> Sequential:
        """Ops at the end of a branch: dropout, stochastic depth, and the sum with the residual."""
        said = self.common
        paths = [ops.DropPath(said.drop_path_rate, _BATCH[said.attn_input_format])] if said.drop_path_rate else []
        return Sequential(ops.Dropout(said.hidden_dropout), *paths, ops.Add(residual))

    # --------------------------------------------------------------------------------------- calls

    @understands
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool | None = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        **call: Any,
    ) -> Asked:
        """y, as hidden_states.

        Args:
            hidden_states: [S, B, hidden_size] in the order of attn_input_format, [T, hidden_size] for "thd".
            attention_mask: boolean, True = hidden, for a type of mask that reads it: [B, 1, 1, S] of padding,
                broadcastable to [B, heads, S, S] for "arbitrary".
            encoder_output: [keys, B, hidden_size], the input of a decoder's cross attention.
            enc_dec_attn_mask: its mask: a pair of padding masks, of queries (or None) and of keys, or one tensor,
                broadcastable to [B, heads, queries, keys].
            is_first_microbatch: True overwrites the weights' main_grad, None and False add to it. In a region of FP8
                True quantizes the weights and keeps the result, False reuses it, None quantizes in this call.
            checkpoint_core_attention: changes nothing: backward computes the probabilities again in any case.
            inference_params: `InferenceParams`: hidden_states continue sequences, whose keys and values it holds.
            rotary_pos_emb: angles [S, 1, 1, D] of self attention, or a pair, of queries and keys; with inference_params
                those of all positions, from the first on.
            **call: self_attn_mask_type, window_size, bottom_right_diagonal, enc_dec_attn_mask_type,
                enc_dec_window_size, enc_dec_bottom_right_diagonal in place of the constructor's;
                core_attention_bias_type and core_attention_bias, alibi_slopes; cu_seqlens_q and cu_seqlens_kv.

        Raises:
            TypeError, ValueError, RuntimeError: for what the layer was not made for, before anything runs.
        """
        self.check_group()
        of_masks = attention_mask is encoder_output is enc_dec_attn_mask is None
        of_others = is_first_microbatch is inference_params is rotary_pos_emb is None
        usual = checkpoint_core_attention is False or checkpoint_core_attention is None
        if of_masks and of_others and usual and not call and self.is_list:
            return Asked(self, hidden_states)
        outputs = call.pop("outputs", ())
        self._check_call(encoder_output, enc_dec_attn_mask, checkpoint_core_attention, call)
        ours = {n: item for n, item in call.items() if n not in _CROSS and not (self.decodes and "_kv" in n)}
        ours |= {"attention_mask": attention_mask, "attn_mask_type": ours.pop("self_attn_mask_type", None)}
        found, tensors = _attending(self.self_attention).understood(
            ours, rotary_pos_emb, inference_params, hidden_states
        )
        how: dict[str, Hashable] = {"self_attention": tuple(found.items())} if found else {}
        if self.decodes:
            theirs = {plain: call.get(name) for name, plain in _CROSS.items()}
            theirs |= {name: call[name] for name in OF_BOTH if name in call}
            theirs["attention_mask"] = enc_dec_attn_mask
            crossing, others = _attending(self.inter_attention).understood(theirs)
            how |= {"inter_attention": tuple(crossing.items())} if crossing else {}
            assert encoder_output is not None
            tensors |= {**others, "encoder_output": encoder_output}
        return self.answer(how, hidden_states, {"outputs": outputs, **tensors}, is_first_microbatch)

    def to_torch(self) -> torch.nn.Module:
        """torch.nn.Sequential of two branches with the same function, over copies of the parameters.

        Raises:
            NotImplementedError: for other layers than GPT's, and what `MultiheadAttention.to_torch` does not know.
        """
        said = self.common
        others = ("apply_residual_connection_post_layernorm", "output_layernorm", "parallel_attention_mlp")
        asked = [name for name in (*others, "drop_path_rate") if getattr(said, name)]
        if asked or self.decodes:
            what = asked[0] if asked else "layer_type"
            raise NotImplementedError(f"to_torch() knows layers without {what}={getattr(said, what)!r} alone")
        branches = (
            TorchBranch(part.to_torch(), torch.nn.Dropout(said.hidden_dropout))
            for part in (self.self_attention, self.layernorm_mlp)
        )
        return torch.nn.Sequential(*branches).train(self.training)

    def _check_call(
        self, encoder_output: Any, enc_dec_attn_mask: Any, checkpoint_core_attention: Any, call: Mapping[str, Any]
    ) -> None:
        who = type(self).__name__
        check_encoder_output(self, encoder_output, self.decodes, "self_attn_mask_type")
        if enc_dec_attn_mask is not None and not self.decodes:
            raise ValueError(f"{who}: enc_dec_attn_mask is for layer_type='decoder': leave it out")
        check_flag("checkpoint_core_attention", checkpoint_core_attention)
        check_call(self, call, _ARGUMENTS)
        crossing = {name: call[name] for name in _CROSS if call.get(name) is not None}
        if crossing and not self.decodes:
            _NO_CROSSING.changed(*[crossing.get(name) for name in _CROSS if name != "enc_dec_attn_mask"])
            raise ValueError(f"{who}: {next(iter(crossing))} is for layer_type='decoder': leave it out")


def _attending(part: torch.nn.Module) -> MultiheadAttention:
    if not isinstance(part, MultiheadAttention):
        raise TypeError(
            f"TransformerLayer: {type(part).__name__} stands in place of a MultiheadAttention, so a call may give "
            "nothing but hidden_states"
        )
    return part


def _variant(attention: torch.nn.Module, how: tuple[tuple[str, Hashable], ...], over: bool) -> torch.nn.Module:
    return _attending(attention).within(**dict(how), **{"over": True} if over else {}) if how or over else attention
