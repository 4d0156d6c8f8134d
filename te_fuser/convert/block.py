"""Block: a decoder layer of transformers whose forward runs lists of ops, bound to the parameters of its modules.

A layer is y = h + feed(h) with h = x + project(attend(q, k, v)) and q, k, v = front(x). Where all that is known of the
mask and the cache, it is one list. Else attention is a border, run by the model's own function, with the cache's update
before it; or the whole of the model's attention module is. Modules that are not what their class says (with hooks, or
wrapped by others) are borders as well.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from te_fuser import ops
from te_fuser.convert.call import LayerCall, argument_names, cache_name, scalars_of
from te_fuser.convert.layer_ops import LayerParts, become, has_own_forward, keeps_forward, why_left, why_shared
from te_fuser.guards import Facts, still_hold
from te_fuser.ops.hooks import GLOBAL_HOOKS, modules_as_they_are
from te_fuser.sequential import Sequential

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"te_fuser.convert takes models of transformers 5.17 or newer, got {transformers.__version__}")

_MODULE, _FUNCTION = "module", "function"  # who runs attention, where it is no op
_EAGER = "eager_attention_forward"  # the name of a family's function


@dataclass
class _Made:
    """Lists made for a layer's calls, valid while its modules are what they were."""

    facts: Facts
    left: dict[str, str]
    lists: dict[Hashable, Sequential] = field(default_factory=dict)
    now: _Now | None = None


@dataclass(frozen=True)
class _Now:
    """Settings by which a layer's attention runs, valid while they and its modules are what they were.

    Attributes:
        left: whether it runs by itself; nothing else is known of it then.
        knows: whether the op computes the same as the model's function.
        heads: numbers of heads of queries, keys and values; `head_dim` features each.
        key: settings that lists depend on, beside the modules.
    """

    facts: Facts
    attention: Any
    left: bool
    knows: bool = False
    is_eager: bool = False
    function: Any = None
    heads: tuple[int, int, int] = (0, 0, 0)
    head_dim: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    key: tuple[Hashable, ...] = ()
    lists: dict[Hashable, Sequential] = field(default_factory=dict)


class DecoderBlock(ops.Together):
    """A layer of the class `was`, run by the lists that its family makes."""

    was: ClassVar[Any]
    attention: ClassVar[str] = "self_attn"  # the path of the attention module
    attention_class: ClassVar[Any]
    of_config: ClassVar[tuple[str, ...]] = ("_attn_implementation",)  # what is read there in calls
    arguments: ClassVar[tuple[str, ...]]  # of the class's forward, those that may be given by position
    cache: ClassVar[str]  # the one among them that is the cache of keys and values

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "was" in cls.__dict__:
            cls.arguments, cls.cache = argument_names(cls.was.forward)[1:], cache_name(cls.was.forward)

    @classmethod
    def why_not(cls, layer: Any) -> str | None:
        """Reason for which a layer cannot be one of these; None where it can."""
        return None

    # ------------------------------------------------------------------------------- what a family says

    def front(self, parts: LayerParts) -> list[nn.Module]:
        """Ops from x to packed [all queries | all keys | all values], turned by angles."""
        raise NotImplementedError

    def norm_before(self, parts: LayerParts) -> list[nn.Module]:
        """The norm of what attention reads."""
        raise NotImplementedError

    def project(self, parts: LayerParts) -> list[nn.Module]:
        """The projection of attention's output; a part of the attention module."""
        raise NotImplementedError

    def back(self, parts: LayerParts) -> list[nn.Module]:
        """Ops from attention's output to y; the layer's input is called "residual"."""
        raise NotImplementedError

    def attention_left(self) -> str | None:
        """Reason, beside those of `why_left`, why the attention module runs by itself."""
        return None

    def settings(self) -> dict[str, Any]:
        """Heads, their size and scale, dropout and soft cap, as they hold now."""
        raise NotImplementedError

    def function_options(self) -> dict[str, Any]:
        """Arguments of the model's attention function beside queries, keys, values and mask."""
        raise NotImplementedError

    def modes(self) -> tuple[Hashable, ...]:
        """Modes that lists depend on, beside their modules and the settings of attention."""
        return ()

    def settled_by(self) -> list[nn.Module]:
        """The modules whose numbers and flags these are."""
        return [self._attention()]

    def by_module(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Output of the attention module for x."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """y of x, [B, S, features], by lists, or by the layer's class."""
        names = self.arguments
        if self.cache == "cache" and "past_key_values" in keywords:  # its name before
            keywords.setdefault("cache", keywords.pop("past_key_values"))
        arguments = dict(zip(names, args, strict=False)) | keywords
        unturned = "position_embeddings" in names and arguments.get("position_embeddings") is None
        if unturned or len(arguments) != len(args) + len(keywords) or names[0] not in arguments:
            return self.was.forward(self, *args, **keywords)  # type: ignore[no-any-return]  # raises
        x = arguments.pop(names[0])
        call = LayerCall(arguments, self.cache)
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        traced = traced or type(x) not in (torch.Tensor, nn.Parameter)
        if traced or any(GLOBAL_HOOKS) or self._is_beyond_lists(call):
            return self.was.forward(self, x, **arguments)  # type: ignore[no-any-return]
        return self.run(x, call)

    def _is_beyond_lists(self, call: LayerCall) -> bool:
        """True for a call that says something of which lists of ops know nothing."""
        unknown = call.unknown()
        if unknown:
            words = f"called with {', '.join(unknown)}, which lists of ops know nothing of"
            self.__dict__["_te_fuser_unknown"] = f"it was {words}"
            warnings.warn(f"{type(self).__name__} is {words}: it runs as transformers has it", stacklevel=3)
        else:
            self.__dict__.pop("_te_fuser_unknown", None)
        return bool(unknown)

    def run(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """y of x, [B, S, features], by lists."""
        now = self._now()
        how = self._how(x, call, now)
        if how == _MODULE:
            attended = self.by_module(self._list(now, "norm")(x), call)
            return self._list(now, "behind")(attended, residual=x)  # type: ignore[no-any-return]
        if how == _FUNCTION:
            packed = self._list(now, "front")(x, **call.tables)
            query, key, value = _heads(packed, now)
            if call.past is not None:  # attention to what is in the cache too
                key, value = call.past.update(key, value, now.attention.layer_idx)
            options = {**now.options, **call.others}
            attended, _ = now.function(now.attention, query, key, value, call.mask, **options)
            attended = attended.reshape(*packed.shape[:2], -1)
            return self._list(now, "back")(attended, residual=x)  # type: ignore[no-any-return]
        whole, given = self._list(now, "whole", how), call.tables
        if how == "given":
            given["mask"] = _once(call.mask, torch.logical_not)  # True = hidden
        elif how == "added":
            given["mask"] = call.mask
            if call.mask.dtype == torch.float16:  # its lowest number would hide no key wholly among float32 scores
                lowest = torch.finfo(torch.float16).min, torch.finfo(torch.float32).min
                given["mask"] = _once(call.mask, lambda t: t.float().masked_fill(t == lowest[0], lowest[1]))
        if call.past is None:
            return whole(x, **given)  # type: ignore[no-any-return]
        y, packed = whole(x, outputs=("packed",), **given)
        _, key, value = _heads(packed, now)
        call.past.update(key, value, now.attention.layer_idx)
        return y  # type: ignore[no-any-return]

    def _how(self, x: torch.Tensor, call: LayerCall, now: _Now) -> str:
        """Way to run attention: by module, by function, or by the op with this mask."""
        if now.left or (now.attention._forward_hooks and _is_recorded(x)):
            return _MODULE
        if not now.knows or not _sees_itself(x, call, now):
            return _FUNCTION
        return _hides(x, call, now)

    # ------------------------------------------------------------------------------ how attention runs

    def _attention(self) -> Any:
        return self._modules[self.attention]

    def is_eager(self) -> bool:
        """True where the model computes attention by matrix products and a softmax."""
        return self._attention().config._attn_implementation == "eager"  # type: ignore[no-any-return]

    def knows_function(self) -> bool:
        """True where the op computes what the model's attention function does."""
        function, own = self._function(), self._eager() if self.is_eager() else sdpa_attention_forward
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        return function is own and package == "transformers"  # no other was put in its place there

    def _eager(self) -> Any:
        return sys.modules[self.was.__module__].eager_attention_forward  # type: ignore[attr-defined]

    def _function(self) -> Any:
        return ALL_ATTENTION_FUNCTIONS.get_interface(self._attention().config._attn_implementation, self._eager())

    # --------------------------------------------------------------------------------------- lists

    def left(self) -> dict[str, str]:
        """Path in the layer -> why the module there runs by itself."""
        now, left = self._now(), dict(self.__dict__["_te_fuser"].left)
        if has_own_forward(self) and not keeps_forward(self):
            left[""] = "it has a forward of its own"
        elif "_te_fuser_unknown" in self.__dict__:
            left[""] = self.__dict__["_te_fuser_unknown"]
        if not now.left and not now.knows:
            name = now.attention.config._attn_implementation
            left[self.attention] = f"attention is computed by its function, {name!r}"
        return left

    def _now(self) -> _Now:
        made = self.__dict__.get("_te_fuser")
        if made is not None and made.now is not None and still_hold(made.now.facts):
            return made.now  # type: ignore[no-any-return]
        if made is None or not still_hold(made.facts):
            made = self._make()
        made.now = self._settled(made)
        self.__dict__["_te_fuser"] = made
        return made.now

    def _make(self) -> _Made:
        parts, attention = LayerParts(self), self._attention()
        why = why_left(attention, self.attention_class) or why_shared(attention) or self.attention_left()
        self._look(parts)
        if why is not None:
            parts.left = {path: said for path, said in parts.left.items() if not path.startswith(f"{self.attention}.")}
            parts.left[self.attention] = why
        return _Made(Facts.of([modules_as_they_are(self), parts.facts()]), parts.left)

    def _look(self, parts: LayerParts) -> None:
        """Note of all parts what `LayerParts` notes."""
        if type(self._attention()).forward is self.attention_class.forward:
            self._ops(parts, "whole", "none")
            return
        for part in ("norm", "behind"):
            self._ops(parts, part, "")

    def _settled(self, made: _Made) -> _Now:
        attention, modes = self._attention(), self.modes()
        if self.attention in made.left:
            return _Now(Facts.of([made.facts, scalars_of(self.settled_by())]), attention, True, key=modes)
        settings = self.settings()
        return _Now(
            facts=Facts.of([made.facts, scalars_of(self.settled_by()), self._choice()]),
            attention=attention,
            left=False,
            knows=self.knows_function(),
            is_eager=self.is_eager(),
            function=self._function(),
            heads=(settings["heads"], settings["kv_heads"], settings["kv_heads"]),
            head_dim=settings["head_dim"],
            options=self.function_options(),
            key=(*settings.values(), *modes),
        )

    def _choice(self) -> Facts:
        """Facts that determine the model's attention function."""
        config, eager = self._attention().config, self._eager()
        name = config._attn_implementation
        items = ((vars(self._attention()), "config", config), (vars(sys.modules[self.was.__module__]), _EAGER, eager))
        found = functools.partial(ALL_ATTENTION_FUNCTIONS.get_interface, name, eager)
        asked = (functools.partial(getattr, config, option, None) for option in self.of_config)
        return Facts.of([Facts(items=items), Facts.of_answers(found, *asked)])

    def _list(self, now: _Now, part: str, hides: str = "") -> Sequential:
        found = now.lists.get((part, hides))
        if found is None:
            kept, key = self.__dict__["_te_fuser"].lists, (part, hides, *now.key)
            if (found := kept.get(key)) is None:
                options = self.__dict__.get("_te_fuser_options", {})
                found = kept[key] = Sequential(*self._ops(LayerParts(self), part, hides), **options)
            now.lists[part, hides] = found
        return found

    def _ops(self, parts: LayerParts, part: str, hides: str) -> list[nn.Module]:
        if part == "norm":
            return self.norm_before(parts)
        if part == "front":
            return self.norm_before(parts) + self.front(parts)
        if part == "behind":
            return self.back(parts)
        if part == "back":
            return self.project(parts) + self.back(parts)
        front = [ops.Fork("residual"), *self._ops(parts, "front", ""), ops.Output("packed")]
        return [*front, self._op(hides), *self._ops(parts, "back", "")]

    def _op(self, hides: str) -> nn.Module:
        """Attention to the layer's own positions."""
        settings = self.settings()
        bias = "mask" if hides == "added" else None
        scores = ops.AttentionScores(soft_cap=settings.pop("soft_cap", 0.0), bias=bias)
        mask = "none" if hides == "added" else hides
        layout: Any = {"layout": "batch_first", "packing": "blocked"}
        return ops.DotProductAttention(**settings, mask=mask, mask_name="mask", scores=scores, **layout)

    def keep_joined(self) -> None:
        """Lay weights and biases that one product reads in one buffer each."""
        parts = LayerParts(self)
        self._look(parts)
        for names in parts.joined:
            self.keep_together(*names)

    def restore(self) -> None:
        """Be of the class that this layer had, with parameters in memory of their own."""
        for name in itertools.chain(*self.__dict__.get("_kept_together", ())):
            for p in self._found((name,)):  # none where an adapter stands there now
                p.data = p.detach().clone()
        for name in ("_te_fuser", "_te_fuser_options", "_te_fuser_unknown", "_kept_together", "_wholes"):
            self.__dict__.pop(name, None)
        become(self, self.was)

    def __getstate__(self) -> dict[str, Any]:
        # Lists hold plans: a copy and a pickle of the model make their own.
        return {name: value for name, value in self.__dict__.items() if name != "_te_fuser"}

    def extra_repr(self) -> str:
        return "run by te_fuser"


def _sees_itself(x: torch.Tensor, call: LayerCall, now: _Now) -> bool:
    """True where the keys are those of x alone: the cache is empty yet."""
    past, number = call.past, now.attention.layer_idx
    if past is None:
        return True
    if type(past) is DynamicCache:
        known = type(past.layers[number]) if number < len(past.layers) else DynamicLayer
        return known in (DynamicLayer, DynamicSlidingWindowLayer) and past.get_seq_length(number) == 0
    # transformers leaves the mask of several positions away where they are the first; asking would wait for a GPU.
    return type(past) is StaticCache and call.mask is None and x.shape[1] > 1 and not now.is_eager


def _hides(x: torch.Tensor, call: LayerCall, now: _Now) -> str:
    """Kind of mask to the layer's own positions, or the model's function."""
    mask = call.mask
    if mask is None:
        asked = call.arguments.get("is_causal")
        causal = now.attention.is_causal if asked is None else asked
        return "causal" if causal and x.shape[1] > 1 and not now.is_eager else "none"
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[-1] != x.shape[1]:
        return _FUNCTION
    if mask.dtype == torch.bool:
        return _FUNCTION if now.is_eager else "given"  # eager attention adds booleans to scores too
    return "added" if mask.is_floating_point() else _FUNCTION


def _heads(packed: torch.Tensor, now: _Now) -> Iterable[torch.Tensor]:
    """Queries, keys and values, [B, heads, S, size of a head] each, all views."""
    heads = packed.view(*packed.shape[:2], sum(now.heads), now.head_dim).transpose(1, 2)
    return torch.split_with_sizes(heads, now.heads, 1)


def _is_recorded(x: torch.Tensor) -> bool:
    """True where the call asks for attention's probabilities, which hooks of its module record.

    No collector is active where checkpointing runs the layer again, in backward: there a mark on the same x tells.
    """
    asked = any("attentions" in name for name in output_capturing._active_collector.get() or {})
    if torch._C._current_graph_task_id() != -1:
        return asked or "_te_fuser_recorded" in x.__dict__
    if asked:
        x.__dict__["_te_fuser_recorded"] = True
    else:
        x.__dict__.pop("_te_fuser_recorded", None)
    return asked


def _once(mask: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return make(mask), cached on the mask, which all layers of a call are given."""
    if mask.is_inference():
        return make(mask)
    known = mask.__dict__.get("_te_fuser_made")
    if known is None or known[0] != mask._version:
        known = mask.__dict__["_te_fuser_made"] = mask._version, make(mask)
    return known[1]  # type: ignore[no-any-return]
