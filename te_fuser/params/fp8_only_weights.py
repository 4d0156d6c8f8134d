"""Weights that are in 8 bits alone: parameters of float8_e4m3fn with a scale among their module's buffers.

A module that has some notes which of them have one scale. They load from checkpoints in 8 bits and from wide ones, and
so do wide weights from those in 8 bits; what converts a module moves them and leaves them in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
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
    """Note that weights of a module are now what its scales are of; those made in inference mode get a version.

    Args:
        moved: they were so before, of whichever module's scale.
    """
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
    """Reason for which a scale in this module is not that of its weight in 8 bits, in words; None where it is."""
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
    """Number of in-place writes to a tensor; NaN, which nothing equals, in inference mode, where none are counted."""
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

    Raises:
        ValueError: for some parameters of several that have one scale, and for 8 bits without their scale.
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
