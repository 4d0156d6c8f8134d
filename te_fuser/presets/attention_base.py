"""Parts that presets with attention share: arguments of heads, ranks that cut sequences, torch modules."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from te_fuser import ops
from te_fuser.ops.attention.head_norm import NORMS
from te_fuser.ops.sharing import Context
from te_fuser.presets.attention_call import Asking, AttentionCall
from te_fuser.presets.base import Preset, TorchOp
from te_fuser.presets.keyword_arguments import check_choice, check_epsilon, check_size, checked, stacklevel_of_user
from te_fuser.presets.norm import Normed
from te_fuser.sequential import Residual
from te_fuser.variants import Variants


@dataclass(frozen=True)
class ProjectionArguments(Normed):
    """Arguments of `MultiheadAttention` and `TransformerLayer` for the projections."""

    num_gqa_groups: int | None = None
    kv_channels: int | None = checked(None, check_size)
    bias: bool = True
    set_parallel_mode: bool = False
    fuse_qkv_params: bool = False
    qkv_weight_interleaved: bool = True


@dataclass(frozen=True)
class HeadsArguments(ProjectionArguments):
    """Arguments for heads, and for what a call is like."""

    rotary_pos_interleaved: bool = False
    qk_norm_type: str | None = checked(None, NORMS)
    qk_norm_eps: float = checked(1e-6, check_epsilon)
    qk_norm_before_rope: bool = False
    softmax_type: str = "vanilla"
    window_size: Any = None
    bottom_right_diagonal: bool | None = None
    layer_number: int | None = None
    layernorm_epsilon: float = checked(1e-5, check_epsilon)
    seq_length: int | None = checked(None, check_size)
    micro_batch_size: int | None = checked(None, check_size)


@dataclass(frozen=True)
class MultiheadAttentionArguments(HeadsArguments):
    """Keywords of `MultiheadAttention`."""

    attn_mask_type: str = "causal"
    return_bias: bool = False
    input_layernorm: bool = False
    attention_type: str = checked("self", ("self", "cross"))
    qkv_format: str = "sbhd"
    prefix: str = ""


def channels_of(hidden_size: int, heads: int) -> int:
    """Features of a head where nobody says it."""
    if hidden_size % heads:
        raise ValueError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={heads}: give kv_channels")
    return hidden_size // heads


WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")


class ContextParallel(Preset):
    """A preset with an attention in it, or one itself, which alone sees whole sequences."""

    _context: Context = Context()

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: Any = "p2p"
    ) -> None:
        """Let the ranks of a group cut the sequences; x and the output are this rank's part.

        Of 2 n equal blocks of a sequence rank r of n has the blocks r and 2 n - 1 - r, as `te_fuser.parallel
        .cut_sequence(x, group, dim, balanced=True)` gives them; "thd" is refused: of its tokens ranks have one block
        by `te_fuser.parallel.parallelize(model, context=group)`. Masks, lengths and angles are of whole sequences.
        Gradients of parameters are those of this rank's part: whoever averages them over samples does so over these
        ranks, too.

        Args:
            cp_group: the ranks; None: this process alone.
            cp_global_ranks: what torch.distributed says of the group in any case.
            cp_stream: changes nothing: exchanges run on the group's own stream.
            cp_comm_type: "a2a" is what runs: heads are exchanged for positions. "p2p", "all_gather" and "a2a+p2p" give
                the same results, so they are taken, with a warning.

        Raises:
            TypeError, ValueError: for what is no group, or a hierarchy of several; for other ranks than the group's;
                for an unknown cp_comm_type.
        """
        set_context(self, context_of(type(self).__name__, cp_group, cp_global_ranks, cp_comm_type))


def context_of(who: str, cp_group: Any, cp_global_ranks: Any, cp_comm_type: Any) -> Context:
    """Context by Transformer Engine's arguments: how sequences are cut."""
    way = "a2a" if cp_comm_type is None else check_choice("cp_comm_type", cp_comm_type, WAYS)
    if cp_group is None:
        return Context()
    if isinstance(cp_group, (list, tuple)):
        if len(cp_group) != 1:
            raise ValueError(
                f"{who}: cp_group is {len(cp_group)} groups, a hierarchy of exchanges that te_fuser does not have: "
                "give one group of all these ranks"
            )
        (cp_group,) = cp_group
    group = ops.Group.of("cp_group", cp_group)
    ranks = torch.distributed.get_process_group_ranks(group.process_group())
    if cp_global_ranks is not None and list(cp_global_ranks) != ranks:
        raise ValueError(f"{who}: cp_global_ranks={list(cp_global_ranks)}, but cp_group has {ranks}: leave them out")
    if way != "a2a" and group.size > 1:
        warnings.warn(
            f"{who}: cp_comm_type={way!r} runs as 'a2a', which exchanges heads for positions: the results are the "
            "same, and key/value heads have to be cut into equal parts; give 'a2a'",
            stacklevel=stacklevel_of_user(),
        )
    return Context(group, balanced=True)


def set_context(model: torch.nn.Module, context: Context) -> int:
    """Let attentions in a model run on sequences that are cut so; gives how many there are."""
    found = 0
    for module in model.modules():
        op = module.op if isinstance(module, ops.Bound) else module
        if isinstance(op, ops.OfPositions):
            op.context, op.balanced = context.group, context.balanced
            found += isinstance(op, ops.DotProductAttention)
        if isinstance(module, ContextParallel):
            module._context = context
        if isinstance(module, Preset):
            module._made_from = []  # variants are made anew
        if isinstance(module, ops.FusableOperation):
            module.revision += 1  # lists around look at the preset again
    return found


def plans_ahead(said: Any) -> bool:
    """True where a preset is to plan ahead for calls of sizes that were given."""
    return said.seq_length is not None and said.micro_batch_size is not None


def own_rows(preset: Preset, rows: list[int]) -> list[int]:
    """Sizes of this rank's rows, of those of the whole, where ranks cut the sequence."""
    dim = preset.sequence_dim
    return [*rows[:dim], preset.share(rows[dim], "seq_length"), *rows[dim + 1 :]] if preset.sequence_parallel else rows


def plan_given_sizes(preset: Preset, hidden_size: int, *attentions: Asking) -> None:
    """Plan ahead for calls of the sizes that a preset was given, if any: nothing is hidden."""
    if not plans_ahead(preset.common):
        return
    positions, samples = preset.common.seq_length, preset.common.micro_batch_size
    rows = {"sbhd": [positions, samples], "bshd": [samples, positions], "thd": [positions * samples]}
    own, like = own_rows(preset, rows[attentions[0].default.qkv_format]), next(preset.parameters())
    x, others = like.new_empty(*own, hidden_size, requires_grad=True), dict[str, Any]()
    for asking in attentions:
        others |= _unmasking(asking.default, positions, samples, x.device, asking.cross)
        others |= {"encoder_output": x.detach().requires_grad_()} if asking.cross else {}
    preset.plan_ahead(x, **others)


def _unmasking(call: AttentionCall, positions: int, samples: int, device: torch.device, cross: bool) -> dict[str, Any]:
    """Masks of a call, by its keywords: keys of the queries' length, and nothing is hidden."""
    if call.qkv_format == "thd":
        return {"cu_seqlens_q": torch.arange(samples + 1, dtype=torch.int32, device=device) * positions}
    if not call.reads_mask:
        return {}
    arbitrary = call.mask_type == "arbitrary"
    mask = torch.zeros(samples, 1, positions if arbitrary else 1, positions, dtype=torch.bool, device=device)
    return {call.mask: (mask, mask) if cross and not arbitrary else mask}


class TorchAttention(TorchOp):
    """Attention on packed heads in torch's functions."""

    def __init__(self, op: ops.FusableOperation) -> None:
        super().__init__(op)
        if not isinstance(op, ops.DotProductAttention) or op.scores != ops.AttentionScores():
            raise NotImplementedError("to_torch() knows softmax_type='vanilla' and softcap=0 alone")
        if op.hides.names or op.hides.window is not None:
            raise NotImplementedError("to_torch() knows attn_mask_type='causal' and 'no_mask', without a window, alone")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, heads * head_dim] of packed [S, B, (heads + 2 kv_heads) * head_dim]."""
        op: Any = self._op[0]
        heads, dropout = op.packed, op.dropout if self.training else 0.0
        q, k, v = heads.split(x)
        how = {"is_causal": op.hides.causal, "scale": op.scale, "enable_gqa": heads.per_group > 1}
        y = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, dropout_p=dropout, **how)
        return heads.merge_output(y.unflatten(1, q.shape[1:3]))  # type: ignore[no-any-return]


class TorchBranch(torch.nn.Sequential):
    """x + branch(x)."""

    def as_ops(self, convert: Callable[[str, torch.nn.Module], torch.nn.Module]) -> Residual:
        """A residual branch of ops."""
        return Residual(OrderedDict((name, convert(name, child)) for name, child in self.named_children()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return x + super().forward(x)


def first_or_later(part: torch.nn.Module, over: bool) -> torch.nn.Module:
    """A preset, or the variant that writes gradients over main_grad."""
    if over and not isinstance(part, Variants):
        raise TypeError(
            f"{type(part).__name__} stands in place of a preset, and cannot be told is_first_microbatch=True: fill "
            "main_grad with zeros before a step, and leave it out"
        )
    return part.within(over=True) if isinstance(part, Variants) and over else part
