"""Scales of 8 bits among a module's buffers, and weights in 8 bits alone: float8_e4m3fn with a scale there.

Strict loads take scales and do without, and they stay in float32. A module with weights in 8 bits notes which of them
have one scale. These load from checkpoints in 8 bits and from wide ones, and so do wide weights from those in 8 bits;
what converts a module moves them and leaves them in 8 bits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from te_fuser.dtypes import FLOAT8, text_of
from te_fuser.formula.float8 import rounded

SCALE, HISTORY = "fp8_scale", "fp8_amax_history"
NARROW = "_fp8_only"  # attribute of a module: prefix of the scale -> names of the parameters that it is of
DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(torch.float32).max
_OF_WEIGHT = 1  # in a buffer of scales
# Parameter -> its version when it had the numbers that a scale is of, and among which parameters that module has it.
_scaled = WeakTensorKeyDictionary()

# -------------------------------------------------------------------------------------- weights in 8 bits alone


def is_narrow(t: torch.Tensor) -> bool:
    """True where a tensor is in 8 bits."""
    return t.dtype in FLOAT8.values()


def prefix_of(name: str) -> str:
    """Prefix of the names of a weight's buffers: "" of "weight", "fc1_" of "fc1_weight"."""
    parts = [part.removesuffix(".T").removesuffix("weight").strip("._") for part in name.split(", ")]
    said = "_".join(part.replace(".", "_") for part in parts if part)
    return f"{said}_" if said else ""


def narrowed(parts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tensors in 8 bits and the one scale that they have, float32 [3], of which the second is theirs.

    The scale is the largest number of the format over the largest magnitude; 1 where that is not finite and above 0.
    """
    wide = [part.detach().float() for part in parts]
    scale = torch.ones(3, device=wide[0].device)
    if wide[0].is_meta:
        return [torch.empty_like(part, dtype=DTYPE) for part in wide], scale
    amax = torch.stack([part.abs().amax() if part.numel() else part.new_zeros(()) for part in wide]).amax()
    found = (torch.finfo(DTYPE).max / amax).clamp(max=LARGEST)
    scale[_OF_WEIGHT] = torch.where((amax > 0) & (amax <= LARGEST), found, 1.0)
    return [rounded(part * scale[_OF_WEIGHT], DTYPE) for part in wide], scale


def narrow(owner: torch.nn.Module, names: tuple[str, ...], prefix: str) -> None:
    """Put 8 bits in place of parameters of a module, with one scale for all of them."""
    parts = [owner.get_parameter(name) for name in names]
    found, scale = narrowed(parts)
    for name, part, data in zip(names, parts, found, strict=True):
        made = torch.nn.Parameter(data, requires_grad=False)
        made.__dict__.update(part.__dict__)
        owner._parameters[name] = made
    if not scale.is_meta:  # of what has no values yet, the checkpoint brings it
        owner._buffers[prefix + SCALE], owner._buffers[prefix + HISTORY] = scale, scale.new_zeros(1, 3)
    owner.__dict__.setdefault(NARROW, {})[prefix] = names
    note_scaled(owner)


def note_scaled(module: torch.nn.Module, moved: bool = False) -> None:
    """Note that a module's weights have scales; `moved`: they had before, of whichever module."""
    there = module._parameters
    for name in [name for names in module.__dict__.get(NARROW, {}).values() for name in names]:
        p = there[name]
        if p is not None:
            of = _scaled[p][1] if moved and p in _scaled else id(there)
            if p.is_inference():
                with torch.inference_mode(False):
                    made = torch.nn.Parameter(p.data.clone(), requires_grad=False)
                made.__dict__.update(p.__dict__)
                there[name] = p = made
            _scaled[p] = version_of(p), of


def not_scaled(p: torch.Tensor, there: Mapping[str, Any]) -> str | None:
    """Reason why a module's scale is not that of its weight in 8 bits."""
    if p not in _scaled:  # somebody's, who brings scale and numbers, as torch.func.functional_call does
        _scaled[p] = version_of(p), id(there)
    version, of = _scaled[p]
    if of != id(there):
        return "is another product's, too, which has a scale of its own: use one module in both places"
    if p.is_inference():
        return "is a tensor made in torch.inference_mode(), of which writes are not told: make it outside of that"
    if version != version_of(p):
        return "was written in place, which its scale knows nothing of: use load_state_dict, which brings both"
    return None


def version_of(p: torch.Tensor) -> float:
    """Number of in-place writes to a tensor; NaN, which nothing equals, in inference mode."""
    return math.nan if p.is_inference() else p._version


def staying_narrow(module: torch.nn.Module, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Function for `_apply`, which leaves numbers of 8 bits what they are."""

    def applied(t: torch.Tensor) -> Any:
        made = fn(t)
        return t.to(made.device) if is_narrow(t) and made.dtype != t.dtype else made

    return applied if NARROW in module.__dict__ else fn


def fit_checkpoint(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, together: Iterable[tuple[str, ...]] = ()
) -> None:
    """Have the weights in a checkpoint as a module keeps them: wide ones are quantized, those in 8 bits made wide.

    Args:
        state_dict: a copy, which is changed.
        together: names of parameters that may have one scale.
    """
    for own, names in module.__dict__.get(NARROW, {}).items():
        keys = [prefix + name for name in names]
        have = [module._buffers.get(own + name) for name in (SCALE, HISTORY)]
        _quantize(state_dict, keys, prefix + own, *have)
    groups = {name: prefix_of(", ".join(group)) for group in together for name in group}
    for name, p in module._parameters.items():
        found = state_dict.get(prefix + name)
        if isinstance(found, torch.Tensor) and is_narrow(found) and p is not None and not is_narrow(p):
            keys = [prefix + own + SCALE for own in (prefix_of(name), groups.get(name, prefix_of(name)))]
            scale = next((state_dict[key] for key in keys if key in state_dict), None)
            if scale is None:
                raise ValueError(_without_scale(prefix + name, keys[-1]))
            state_dict[prefix + name] = (found.float() / scale[_OF_WEIGHT].to(found.device)).to(p.dtype)


def _quantize(
    state_dict: dict[str, Any], keys: Sequence[str], own: str, have: torch.Tensor | None, history: torch.Tensor | None
) -> None:
    scale = own + SCALE
    found = {key: state_dict[key] for key in keys if isinstance(state_dict.get(key), torch.Tensor)}
    if not found:
        return
    kinds = {is_narrow(t) for t in found.values()}
    if len(found) < len(keys) or len(kinds) > 1:
        has = ", ".join(f"{key} in {text_of(t.dtype)}" for key, t in found.items())
        raise ValueError(
            f"{', '.join(keys)} have one scale: a checkpoint has all of them in 8 bits, or none (it has {has})"
        )
    if kinds == {True}:
        if scale not in state_dict:
            raise ValueError(_without_scale(keys[0], scale))
        return
    data, made = narrowed([found[key] for key in keys])
    state_dict.update(zip(keys, data, strict=True))
    others = state_dict.get(scale, have)
    if others is not None and not others.is_meta and not made.is_meta:
        made = torch.where(torch.arange(3, device=made.device) == _OF_WEIGHT, made, others.to(made))
    state_dict[scale] = made
    state_dict.setdefault(own + HISTORY, made.new_zeros(1, 3) if history is None else history)


def _without_scale(key: str, scale: str) -> str:
    return f"{key} is in 8 bits in the checkpoint, which has no {scale}: save the whole state_dict of its module"


# ----------------------------------------------------------------------------------------------- what is kept

STATES = "_fp8_states"  # what is kept beside them, an attribute of the module
RECORDED = "fp8_recorded"  # in the metadata that a state_dict has of a module: `States.recorded`

# (a state, whether it is saved by a state_dict and not copied) -> what that has in place of buffers, by their names.
saved_numbers: list[Callable[[Any, bool], dict[str, torch.Tensor]]] = []
_asides: weakref.WeakValueDictionary[int, Aside] = weakref.WeakValueDictionary()
some_wait = [False]  # whether there may be amaxes that wait in any `States`


class Aside:
    """Base of what others keep in an op, by attribute and buffers: no part of what it is."""

    def buffers(self) -> Collection[str]:
        """The names of buffers."""
        return ()

    def now(self) -> Any:
        """State for `put_back`, to undo what calls do meanwhile."""

    def put_back(self, then: Any) -> None:
        """Be as it was then; None: as a new one."""


class States(dict[str, Any], Aside):
    """The states of a module's weights, by their names; copies and pickles have none, but what these recorded.

    Attributes:
        waiting: by the prefix of buffers the amaxes of x, W and dy that a checkpoint or a copy brought, until the next
            region takes them.
    """

    def __init__(self, waiting: Mapping[str, list[float]] | None = None) -> None:
        super().__init__()
        self.waiting: dict[str, list[float]] = {}
        for prefix, amaxes in (waiting or {}).items():
            self.wait(prefix, amaxes)

    def wait(self, prefix: str, amaxes: list[float]) -> None:
        """Have the next region take amaxes."""
        self.waiting[prefix], some_wait[0] = amaxes, True

    def buffers(self) -> list[str]:
        return [state.prefix + name for state in self.values() for name in (SCALE, HISTORY)]

    def now(self) -> dict[str, Any]:
        return {name: state.now() for name, state in self.items()}

    def put_back(self, then: dict[str, Any] | None) -> None:
        for name, state in self.items():
            state.put_back((then or {}).get(name))

    def saved(self, saves: bool) -> dict[str, torch.Tensor]:
        """Tensors that a state_dict, or a copy, has in place of buffers."""
        made = [numbers(state, saves) for state in self.values() for numbers in saved_numbers]
        return {name: t for found in made for name, t in found.items()}

    def recorded(self, without: Collection[str] = ()) -> dict[str, list[float]]:
        """Amaxes of calls and those that wait, as `waiting`, but for buffers `without`."""
        with _disable_current_modes():
            found = {s.prefix: s.recorded() for s in self.values() if s.prefix + SCALE not in without}
            for prefix, amaxes in self.waiting.items():
                both = torch.tensor([amaxes, found.get(prefix) or amaxes], dtype=torch.float32, device="cpu")
                found[prefix] = both.amax(0).tolist()
        return {prefix: amaxes for prefix, amaxes in found.items() if any(amaxes)}

    def forget_recorded(self, buffer: str) -> None:
        """Have the product with a buffer of that name drop what was recorded."""
        self.waiting.pop(buffer.removesuffix(SCALE).removesuffix(HISTORY), None)
        for state in self.values():
            if buffer in (state.prefix + SCALE, state.prefix + HISTORY):
                state.forget_recorded()

    def __reduce__(self) -> Any:
        return States, (self.recorded(),)


def states_of(owner: torch.nn.Module) -> States:
    """States of a module's weights, which are saved and loaded with it."""
    if _save_recorded not in owner._state_dict_hooks.values():  # a copy has the hooks of what it is made of
        owner.register_state_dict_post_hook(_save_recorded)
        take_scales(owner)
    found: States = owner.__dict__.setdefault(STATES, States())
    _asides[id(found)] = found
    return found


def asides() -> list[Aside]:
    """List everything that is kept on modules and that calls change."""
    return list(_asides.values())


def _save_recorded(module: torch.nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Give a state_dict what was recorded since the last update, in buffers or beside them."""
    states = module.__dict__.get(STATES, States())
    numbers = states.saved(True)
    state_dict.update({prefix + name: t for name, t in numbers.items() if prefix + name in state_dict})
    if found := states.recorded(numbers):
        metadata[RECORDED] = found


class HoldsScales(torch.nn.Module):
    """A module that knows scales among its buffers: when it is loaded, converted, copied and pickled."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        fit_checkpoint(self, state_dict, prefix, self.__dict__.get("_kept_together", ()))
        before_loading(self, state_dict, prefix, *rest)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        note_scaled(self)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = {name: t for name, t in self._buffers.items() if t is not None and name.endswith((SCALE, HISTORY))}
        made = super()._apply(staying_narrow(self, fn), recurse)
        for name, kept in before.items():
            now = self._buffers[name]
            if now is not None and now.dtype != kept.dtype:
                self._buffers[name] = kept.to(now.device)
        note_scaled(self, moved=True)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        note_scaled(self)

    def reset_scales(self) -> None:
        """Begin anew, with scales of 1 and no amaxes, in other tensors: who saved the old ones keeps them."""
        if NARROW in self.__dict__:
            raise RuntimeError(
                f"{type(self).__name__} has its weights in 8 bits alone, and cannot fill them anew: load a checkpoint, "
                "or make another one"
            )
        for name, have in self._buffers.items():
            if have is not None and name.endswith((SCALE, HISTORY)):
                self._buffers[name] = torch.full_like(have, 1.0 if name.endswith(SCALE) else 0.0)
                _forget_recorded(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        states = self.__dict__.get(STATES)
        if not (states and (numbers := states.saved(False))):
            return made
        function, given, state, *rest = made
        own = {"_buffers": {**self._buffers, **numbers}, STATES: States(states.recorded(numbers))}
        return function, given, {**state, **own}, *rest


def before_loading(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Make a module ready for the scales in a checkpoint: it gets buffers for them, and those it has else stay.

    So do modules in it that load as torch.nn's, whose weights lists may read. Amaxes that were recorded of a product
    whose scales come are dropped. A hook for `register_load_state_dict_pre_hook`; `state_dict` is a copy, which each
    module of a load gets. Scales without their history, a history without scales, and numbers that calls cannot go by
    are errors of the load, `rest[-1]`.
    """
    found_there = [*_scales_in(module, state_dict, prefix)]
    there = {key: found for key, _, _, found in found_there}
    errors: list[str] = rest[-1] if rest else []
    for key, owner, name, found in found_there:
        both, buffers = (key, _other(key)), owner._buffers
        is_own = buffers.get(name) is not None and buffers.get(_other(name)) is None  # it is called so, and no scale
        if both[1] not in there and not is_own:
            errors.append(_ALONE.format(name=name, other=_other(name), who=type(owner).__name__))
        elif both[1] in there and any(_unsound(k, there[k]) for k in both):
            errors += filter(None, [_unsound(key, found)])
            del state_dict[key]  # neither of the two, which go together
        else:
            # Another tensor, even where there is one of that shape: who has saved the scales of now keeps them.
            device = next((p.device for p in owner.parameters()), found.device)
            buffers[name] = torch.zeros(found.shape, dtype=torch.float32, device=device)
            _forget_recorded(owner, name)
            if owner is not module:
                take_scales(owner)  # it is asked by itself then, with its metadata
    recorded: dict[str, list[float]] = rest[0].get(RECORDED, {}) if rest else {}
    for own, (x, weight, gradient) in recorded.items():
        if prefix + own + SCALE in there.keys() & state_dict.keys():
            is_narrow = own in module.__dict__.get(NARROW, {})  # the scale of such a weight stays
            states_of(module).wait(own, [x, 0.0 if is_narrow else weight, gradient])
    for name, have in module._buffers.items():
        if have is not None and name.endswith((SCALE, HISTORY)):
            state_dict.setdefault(prefix + name, have)


def _forget_recorded(owner: torch.nn.Module, name: str) -> None:
    """Drop the recorded amaxes of a product whose buffer is to be replaced."""
    states = owner.__dict__.get(STATES)
    if states is not None:
        states.forget_recorded(name)


_ALONE = (
    "{name} of {who} comes without {other}, or with one of another shape: the scales of a product, [3], and the amaxes "
    "they are made of, [calls, 3], go together; load both, or leave both out, which keeps what the module has"
)


def _unsound(key: str, found: torch.Tensor) -> str:
    """Message about a checkpoint's scales or history that calls cannot go by, if any."""
    if found.is_meta or isinstance(found, FakeTensor):  # without numbers
        return ""
    numbers, is_scale = found.float(), key.endswith(SCALE)
    wrong = numbers[~(numbers.isfinite() & ((numbers > 0) if is_scale else (numbers >= 0)))]
    if not len(wrong):
        return ""
    return (
        f"{key} has {float(wrong[0])} among its numbers, where {'scales' if is_scale else 'amaxes'} are finite and "
        f"{'above 0' if is_scale else 'at least 0'}: save it anew from a model that has none such, or leave it and "
        f"{_other(key)} out, which keeps what the module has"
    )


def _other(name: str) -> str:
    """The buffer that goes with one: scales with the history."""
    return name.removesuffix(SCALE) + HISTORY if name.endswith(SCALE) else name.removesuffix(HISTORY) + SCALE


def take_scales(module: torch.nn.Module) -> None:
    """Have a module that loads as torch.nn's take scales, and do without them."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    if loads_plainly(module) and before_loading not in hooks:
        module.register_load_state_dict_pre_hook(before_loading)


def drop_scales(module: torch.nn.Module) -> None:
    """Take scales and all that is kept with them from a module and those in it."""
    for m in module.modules():
        m.__dict__.pop(STATES, None)
        for name in [name for name in m._buffers if name.endswith((SCALE, HISTORY))]:
            del m._buffers[name]


def loads_plainly(module: torch.nn.Module) -> bool:
    """True where a module loads as those of torch.nn do; presets and ops know scales."""
    return type(module)._load_from_state_dict is torch.nn.Module._load_from_state_dict


def _scales_in(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Key, owner, name and tensor of scales in a checkpoint of a module."""
    for key, found in [*state_dict.items()]:
        path, _, name = key.removeprefix(prefix).rpartition(".")
        if not (key.startswith(prefix) and name.endswith((SCALE, HISTORY))):
            continue
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue  # which the load calls unexpected
        if not isinstance(found, torch.Tensor) or not (owner is module or loads_plainly(owner)):
            continue
        fits = found.shape == (3,) if name.endswith(SCALE) else found.dim() == 2 and found.shape[1] == 3
        if fits and any(p.dim() > 1 for p in owner.parameters()):  # as a module with products has it
            yield key, owner, name, found
