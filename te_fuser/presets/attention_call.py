"""Arguments of an attention's call: the variant of the op that they select, and the tensors that it reads by name."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from te_fuser import ops
from te_fuser.presets.keyword_arguments import check_choice, check_flag, stacklevel_of_user

Window = tuple[int | None, int | None] | None

MASK_TYPES = (
    "no_mask",
    "causal",
    "padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
LAYOUTS = {"sbhd": "sequence_first", "bshd": "batch_first", "thd": "tokens"}
_SEQUENCE_DIMS = {"sbhd": 0, "bshd": 1, "thd": 0}
SELF, CROSS = "self_", "enc_dec_"  # before the arguments of an attention in the calls of a layer
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")

# What calls of a layer say of both its attentions.
OF_BOTH = (
    "core_attention_bias_type",
    "core_attention_bias",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
)
# What calls of an attention may say of it, by keyword.
ARGUMENTS = (
    "attention_mask",
    "attn_mask_type",
    "window_size",
    "bottom_right_diagonal",
    "qkv_format",
    *OF_BOTH,
    "fast_zero_fill",
    "pad_between_seqs",
)
_COUNTS = tuple(name for name in OF_BOTH if name.startswith("cu_"))


@dataclass(frozen=True)
class AttentionCall:
    """A variant of an attention.

    Attributes:
        mask_type: one of `MASK_TYPES`.
        window: (left, right), how many positions a query sees on each side; None: all.
        bottom_right: whether the last query stands at the last key, else the first at the first.
        qkv_format: "sbhd", "bshd" or "thd".
        padded_by: what says the padding: a "mask", "keys" for a mask of the keys alone, "lengths" of samples; in "thd"
            "offsets" of sequences, or "offsets and lengths"; "cache": how far caches are filled.
        keys_apart: whether keys that are packed with queries are in other sequences, or of other lengths.
        keys_alike: whether the keys' mask of padding, in "thd" their sequences, are the queries'.
        longest: in "thd", no sequence is longer.
        bias: "none", "given", "alibi" or "slopes".
        prefix: what stands before its arguments in the calls of a layer, see `argument`.
    """

    mask_type: str = "causal"
    window: Window = None
    bottom_right: bool = False
    qkv_format: str = "sbhd"
    padded_by: str = "mask"
    keys_apart: bool = False
    keys_alike: bool = False
    longest: int | None = None
    bias: str = "none"
    prefix: str = ""

    @classmethod
    def of(
        cls, mask_type: Any, window_size: Any, bottom_right_diagonal: Any, qkv_format: Any, prefix: str = ""
    ) -> AttentionCall:
        """Variant of a preset that was made with these arguments."""
        qkv_format = check_choice("qkv_format", qkv_format, LAYOUTS)
        padded_by = "offsets" if qkv_format == "thd" else "mask"
        made = cls("no_mask", qkv_format=qkv_format, padded_by=padded_by, prefix=prefix)
        return made.changed(mask_type, window_size, bottom_right_diagonal)

    def changed(
        self, mask_type: Any = None, window_size: Any = None, bottom_right_diagonal: Any = None
    ) -> AttentionCall:
        """Copy with arguments replaced that are not None; a mask's type may set the corner."""
        found = self
        if isinstance(mask_type, str) and "," in mask_type:  # "padding,causal", either way round, is "padding_causal"
            mask_type = "_".join(sorted((word.strip() for word in mask_type.split(",")), reverse=True))
        if mask_type is not None:
            kind = check_choice(self.argument("attn_mask_type"), mask_type, MASK_TYPES)
            found = replace(found, mask_type=kind, bottom_right=kind not in ("causal", "padding_causal"))
        if window_size is not None:
            name, sides = self.argument("window_size"), window_size if isinstance(window_size, (tuple, list)) else ()
            if len(sides) != 2 or any(not isinstance(side, int) or side < -1 for side in sides):
                how = "how many positions on each side, -1 for all"
                raise ValueError(f"{name} is (left, right), {how}; got {window_size!r}")
            left, right = (None if side == -1 else side for side in sides)
            found = replace(found, window=None if left is None and right is None else (left, right))
        if bottom_right_diagonal is not None:
            name = self.argument("bottom_right_diagonal")
            found = replace(found, bottom_right=check_flag(name, bottom_right_diagonal))
        return found

    def argument(self, name: str) -> str:
        """Keyword of an argument in calls, with a layer's prefix."""
        return f"{self.prefix}{name}" if self.prefix == CROSS or name == "attn_mask_type" else name

    @property
    def mask(self) -> str:
        """The name of its mask in the call."""
        return f"{CROSS}attn_mask" if self.prefix == CROSS else "attention_mask"

    @property
    def causal(self) -> bool:
        """True where later positions are hidden."""
        return "causal" in self.mask_type

    @property
    def reads_mask(self) -> bool:
        """True where a boolean tensor is read as the mask."""
        return self.mask_type == "arbitrary" or "padding" in self.mask_type and self.padded_by in ("mask", "keys")

    @property
    def begins(self) -> str:
        """The name of where sequences of "thd" begin."""
        return "cu_seqlens_q_padded" if "lengths" in self.padded_by else "cu_seqlens_q"

    def with_caches(self, who: str, given: Mapping[str, Any]) -> AttentionCall:
        """The variant that continues sequences: the last token sees the last key."""
        if self.mask_type == "arbitrary" or self.qkv_format == "thd":
            what = "attn_mask_type='arbitrary'" if self.mask_type == "arbitrary" else "qkv_format='thd'"
            raise ValueError(f"{who}: {what} with inference_params: give 'causal' masks, and 'sbhd' or 'bshd'")
        said = [name for name in ("attention_mask", *_COUNTS) if given.get(name) is not None]
        if said and "padding" in self.mask_type:
            raise ValueError(
                f"{who}: {_type(self)} with inference_params reads no {said[0]}: pre_step says how many tokens each "
                "sequence has, padding lies behind them: leave it out"
            )
        if given.get("bottom_right_diagonal") is False:
            raise ValueError(
                f"{who}: bottom_right_diagonal=False with inference_params: the last token of a call stands at the "
                "last key: leave it out"
            )
        return replace(self, bottom_right=True, padded_by="cache")

    def hides(self, apart: bool) -> ops.AttentionMask:
        """Mask of the op, for keys that are packed with the queries or `apart` from them."""
        counts = self.causal or self.window is not None or self.bias in ("alibi", "slopes")
        # Of packed heads there are as many keys as queries: both corners are the same.
        corner = "bottom_right" if apart and counts and self.bottom_right else "top_left"
        return ops.AttentionMask(causal=self.causal, corner=corner, window=self.window, **self._named(apart))

    def _named(self, apart: bool) -> dict[str, Any]:
        if self.padded_by == "cache":
            return {"lengths": "counts", "key_lengths": "filled"}
        if self.mask_type == "arbitrary":
            return {"given": self.mask}
        found: dict[str, Any] = {}
        if self.qkv_format == "thd":
            found |= {"offsets": self.begins, "longest": self.longest}
            if apart and not self.keys_alike:
                found["key_offsets"] = self.begins.replace("_q", "_kv")
        elif "padding" in self.mask_type and self.padded_by in ("mask", "keys"):
            ours = f"{self.mask}_q" if apart else self.mask
            theirs = ours if self.keys_alike else f"{self.mask}_kv"
            found |= {"padding": ours} if self.padded_by == "mask" else {}
            found |= {"key_padding": theirs} if apart else {}
        if "lengths" in self.padded_by and (self.qkv_format == "thd" or "padding" in self.mask_type):
            found["lengths"] = "seqlens_q"
            found |= {"key_lengths": "seqlens_kv"} if apart else {}
        return found

    def scores(self, soft_cap: float, sink: str) -> ops.AttentionScores:
        """Changes to the scores: soft cap, bias, ALiBi slopes and sink."""
        alibi = "alibi_slopes" if self.bias == "slopes" else self.bias == "alibi"
        bias = "core_attention_bias" if self.bias == "given" else None
        by_position = bias is not None and self.qkv_format == "thd"
        return ops.AttentionScores(soft_cap, bias, alibi, sink, by_position)


@dataclass(frozen=True)
class Asking:
    """An attention that calls ask something of.

    Attributes:
        who: what errors call it.
        default: the variant of a call that says nothing.
        apart: whether keys and values are apart from queries.
        scale: the factor on its scores.
        cross: whether keys are another tensor's than queries.
        reads: whether a call that says nothing would have to give tensors.
        said: what its calls were warned of.
    """

    who: str
    default: AttentionCall
    apart: bool
    scale: float
    cross: bool = False
    reads: bool = field(init=False)
    said: set[str] = field(init=False, default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", self.default.qkv_format == "thd" or self.default.reads_mask)

    def understood(
        self, given: Mapping[str, Any], caches: bool = False
    ) -> tuple[AttentionCall, dict[str, torch.Tensor]]:
        """Variant for these `ARGUMENTS`, and the tensors it reads; `caches` may say lengths."""
        if not (caches or self.reads) and all(value is None for value in given.values()):
            return self.default, {}
        call = self.default
        if given.get("qkv_format") is not None:
            qkv_format = check_choice("qkv_format", given["qkv_format"], LAYOUTS)
            call = replace(call, qkv_format=qkv_format, padded_by="offsets" if qkv_format == "thd" else "mask")
        mask = given.get("attention_mask") if self.cross and call.qkv_format != "thd" else None
        if self.default.mask_type == "no_mask" and mask is not None and given.get("attn_mask_type") is None:
            call = call.changed("padding" if isinstance(mask, (tuple, list)) else "arbitrary")  # as it looks
        call = call.changed(*[given.get(name) for name in ("attn_mask_type", "window_size", "bottom_right_diagonal")])
        tensors: dict[str, torch.Tensor] = {}
        if caches:
            self._say_unread(call, given)
            call = call.with_caches(self.who, given)
        else:
            call, tensors = self._padding(call, given)
        call, added = self._bias(call, given)
        return call, {**tensors, **added}

    def _padding(self, call: AttentionCall, given: Mapping[str, Any]) -> tuple[AttentionCall, dict[str, torch.Tensor]]:
        for name in _COUNTS:
            if given.get(name) is not None and not isinstance(given[name], torch.Tensor):
                kind = type(given[name]).__name__
                raise TypeError(f"{self.who}: {name} is a tensor of [sequences + 1] whole numbers, got {kind}")
        ours, theirs, *_ = map(given.get, _COUNTS)
        mask = given.get("attention_mask")
        if call.mask_type == "arbitrary" and call.qkv_format == "thd":
            raise ValueError(f"{self.who}: qkv_format='thd' takes no {_type(call)}: sequences differ in length")
        self._say_unread(call, given)
        if call.mask_type == "arbitrary":
            if mask is None:
                raise ValueError(f"{self.who}: {_type(call)} reads a mask: give {call.mask}=..., True = hidden")
            return call, {call.mask: _boolean(self.who, call.mask, mask)}
        if call.qkv_format == "thd":
            return self._sequences(call, given)
        if "padding" not in call.mask_type:
            return call, {}
        if mask is not None:
            return self._padded_by_mask(call, mask)
        if ours is None:
            raise ValueError(
                f"{self.who}: {_type(call)} reads what is padding: give {call.mask}=..., [batch, 1, 1, positions] with "
                "True = padding, or cu_seqlens_q=... [batch + 1]"
            )
        own = theirs is not None and theirs is not ours
        lengths = {"seqlens_q": ours.diff()}
        if own or self.apart:
            lengths["seqlens_kv"] = theirs.diff() if own else lengths["seqlens_q"]  # type: ignore[union-attr]
        return replace(call, padded_by="lengths", keys_apart=own and not self.apart), lengths

    def _padded_by_mask(self, call: AttentionCall, mask: Any) -> tuple[AttentionCall, dict[str, torch.Tensor]]:
        if not self.apart:
            return replace(call, padded_by="mask"), {call.mask: _boolean(self.who, call.mask, mask)}
        if isinstance(mask, torch.Tensor) and not self.cross:
            mask = (mask, mask)
        if not isinstance(mask, (tuple, list)) or len(mask) != 2 or mask[1] is None:
            raise TypeError(
                f"{self.who}: {call.mask} of keys apart is a pair of masks, of queries (or None) and of keys, got "
                f"{mask if not isinstance(mask, torch.Tensor) else 'one tensor'}: give (query_mask, key_mask)"
            )
        ours, theirs = mask
        if ours is theirs:
            alike = replace(call, padded_by="mask", keys_alike=True)
            return alike, {f"{call.mask}_q": _boolean(self.who, call.mask, ours)}
        tensors = {f"{call.mask}_kv": _boolean(self.who, call.mask, theirs)}
        if ours is None:
            return replace(call, padded_by="keys"), tensors
        return replace(call, padded_by="mask"), {f"{call.mask}_q": _boolean(self.who, call.mask, ours), **tensors}

    def _sequences(
        self, call: AttentionCall, given: Mapping[str, Any]
    ) -> tuple[AttentionCall, dict[str, torch.Tensor]]:
        """Variant for "thd", where sequences begin, and how long they are between padding."""
        ends: list[Any] = [given.get("cu_seqlens_q"), given.get("cu_seqlens_kv")]
        begins: list[Any] = [given.get("cu_seqlens_q_padded"), given.get("cu_seqlens_kv_padded")]
        if ends[0] is None:
            raise ValueError(f"{self.who}: qkv_format='thd' takes cu_seqlens_q=..., [sequences + 1] whole numbers")
        if given.get("pad_between_seqs") and begins[0] is begins[1] is None:
            raise ValueError(
                f"{self.who}: pad_between_seqs=True, and nothing says where sequences begin: give "
                "cu_seqlens_q_padded=..., [sequences + 1] whole numbers, or leave it out"
            )
        alike = all(theirs is None or theirs is ours for ours, theirs in (ends, begins))
        sides = ("q", "kv") if self.apart or not alike else ("q",)
        ends, begins = ends[: len(sides)], begins[: len(sides)]
        call = replace(call, keys_apart=not (self.apart or alike), keys_alike=self.apart and alike)
        longest = self._longest([given.get(f"max_seqlen_{side}") for side in sides], alike)
        if all(begin is None for begin in begins):
            own = 1 if alike else len(sides)
            found = {f"cu_seqlens_{side}": end for side, end in zip(sides[:own], ends[:own], strict=True)}
            return replace(call, padded_by="offsets", longest=longest), found
        # Padding may be longer than any sequence: nothing bounds both.
        return replace(call, padded_by="offsets and lengths"), _between_padding(sides, ends, begins, alike)

    def _longest(self, given: list[Any], alike: bool) -> int | None:
        """Upper bound of all sequences' lengths, a power of two."""
        try:
            lengths = [operator.index(length) for length in given if length is not None]
        except TypeError:
            raise TypeError(f"{self.who}: max_seqlen_q and max_seqlen_kv are whole numbers, got {given}") from None
        if not lengths or len(lengths) < len(given) and not alike:
            return None
        return 1 << (max(*lengths, 1) - 1).bit_length()

    def _say_once(self, text: str) -> None:
        """Warn, unless this attention did so before."""
        if text not in self.said:
            self.said.add(text)
            warnings.warn(text, stacklevel=stacklevel_of_user())

    def _say_unread(self, call: AttentionCall, given: Mapping[str, Any]) -> None:
        """Warn of tensors on hidden positions that the type of the mask does not read."""
        mask, counts = given.get("attention_mask"), [name for name in _COUNTS if given.get(name) is not None]
        if isinstance(mask, str):
            raise TypeError(f"{self.who}: {call.mask} takes a tensor, got {mask!r}: give its type by {_type(call)}")
        if mask is not None and not call.reads_mask:
            self._say_once(
                f"{self.who}: {_type(call)} reads no mask, and the {call.mask} that calls give changes nothing: leave "
                "it out, or give a type that reads it ('padding', 'padding_causal' or 'arbitrary')"
            )
        padded = "padding" in call.mask_type
        if call.qkv_format == "thd" and call.mask_type != "arbitrary" or not counts:
            return
        if not padded:
            self._say_once(
                f"{self.who}: {_type(call)} reads no lengths, and the cu_seqlens that calls give change nothing: "
                "leave them out, or give a type that reads them ('padding' or 'padding_causal')"
            )
        elif mask is not None:
            self._say_once(
                f"{self.who}: {_type(call)} reads {call.mask}, and the {counts[0]} that calls give beside it changes "
                "nothing: leave one out"
            )
        elif counts[-1].endswith("_padded"):
            self._say_once(
                f"{self.who}: qkv_format={call.qkv_format!r} has no padding between sequences, and the {counts[-1]} "
                "that calls give changes nothing: leave it out, or give 'thd'"
            )

    def _bias(self, call: AttentionCall, given: Mapping[str, Any]) -> tuple[AttentionCall, dict[str, torch.Tensor]]:
        kind = given.get("core_attention_bias_type")
        kind = "no_bias" if kind is None else check_choice("core_attention_bias_type", kind, BIAS_TYPES)
        bias, slopes = given.get("core_attention_bias"), given.get("alibi_slopes")
        if (bias is not None) != kind.endswith("scale_bias"):
            what = "a core_attention_bias" if bias is not None else "no core_attention_bias"
            raise ValueError(
                f"{self.who}: core_attention_bias_type={kind!r} with {what}: a bias is added by 'post_scale_bias' or "
                "'pre_scale_bias', and by these alone"
            )
        if slopes is not None and kind != "alibi":
            raise ValueError(f"{self.who}: alibi_slopes are for core_attention_bias_type='alibi', got {kind!r}")
        if bias is not None:
            added = bias * self.scale if kind == "pre_scale_bias" else bias
            return replace(call, bias="given"), {"core_attention_bias": added}
        if kind != "alibi":
            return call, {}
        return replace(call, bias="alibi" if slopes is None else "slopes"), (
            {} if slopes is None else {"alibi_slopes": slopes}
        )


def sequence_dim_of(qkv_format: Any) -> int:
    """The dimension of the sequence. ValueError for a format that is unknown."""
    return _SEQUENCE_DIMS[check_choice("qkv_format", qkv_format, LAYOUTS)]


def _type(call: AttentionCall) -> str:
    return f"{call.argument('attn_mask_type')}={call.mask_type!r}"


def _between_padding(
    sides: Sequence[str], ends: Sequence[Any], begins: Sequence[Any], alike: bool
) -> dict[str, torch.Tensor]:
    """Start of each side's sequences between padding, and their numbers of tokens."""
    found: dict[str, torch.Tensor] = {}
    for side, end, begin in zip(sides, ends, begins, strict=True):
        own = ends[0] if end is None else end
        found[f"seqlens_{side}"] = found["seqlens_q"] if found and own is ends[0] else own.diff()
        if side == "q" or not alike:
            found[f"cu_seqlens_{side}_padded"] = own if begin is None else begin
    return found


def _boolean(who: str, name: str, mask: Any) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{who}: {name} is a boolean tensor, True = hidden, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{who}: {name} is {mask.dtype}, and masks are boolean, True = hidden: of one that is added to the scores "
            f"give {name} < 0, of one where 1 means seen give {name} == 0"
        )
    return mask
