"""Arguments that all presets share: those with an effect, those that do nothing here, and the messages about others."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from te_fuser.fused_regions import names_read
from te_fuser.ops.checks import check_parameters_dtype, check_probability, described, meant, whole_number

Fill = Callable[[torch.Tensor], Any]
Arguments = TypeVar("Arguments", bound="PlacementArguments")

normal: Fill = functools.partial(torch.nn.init.normal_, mean=0.0, std=0.023)
# Of every list -> its type.
OPTIONS = {"memory": "str | int | None", "kernels": "str | None", "fallback": "str | None", "verify": "bool | None"}

# Keyword of Transformer Engine's that does nothing here -> the values of it that ask for nothing; None: all do.
WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "name": None,
    "ub_name": None,
    "save_original_input": None,
    "cp_comm_type": None,
    "cp_group": (None,),
    "cp_global_ranks": (None,),
    "cp_stream": (None,),
    "delay_wgrad_compute": (False, None),
    "symmetric_ar_type": (None,),
}
# Arguments that the ops of a list have, each for itself: attributes of presets, to be read alone.
_SETTLED = """
    activation activation_params apply_residual_connection_post_layernorm attention_dropout attention_type
    attn_input_format attn_mask_type bottom_right_diagonal delay_wgrad_compute drop_path_rate enc_dec_attn_mask_type
    enc_dec_bottom_right_diagonal enc_dec_window_size eps hidden_dropout input_layernorm layer_type layernorm_epsilon
    normalization output_layernorm parallel_attention_mlp qk_norm_before_rope qk_norm_eps qk_norm_type qkv_format
    return_layernorm_output return_layernorm_output_gathered rotary_pos_interleaved self_attn_mask_type
    set_parallel_mode softcap softmax_scale softmax_type window_size zero_centered_gamma
"""
SETTLED = frozenset(_SETTLED.split())


def check_flag(name: str, value: Any) -> bool:
    """A yes or no; None is no. TypeError for anything else."""
    if not (value is None or isinstance(value, bool)):
        raise TypeError(f"{name} is True or False, got {described(value)}")
    return bool(value)


def check_size(name: str, value: Any) -> int:
    """A whole number from 1 on, once checked."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} is a whole number from 1 on, got {value}")
    return value


def check_epsilon(name: str, value: Any) -> float:
    """A norm's epsilon, once checked."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise ValueError(f"{name} is a number from 0 on, added to the variance, got {value!r}: 1e-5, say")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """One of several words, in any case, once checked."""
    found = {c.lower(): c for c in choices}.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        near = meant(value, list(choices)) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}{near}")
    return found


def check_drop(name: str, value: Any) -> float:
    """A drop probability. TypeError or ValueError for anything else."""
    return check_probability(value, name)


def check_function(name: str, value: Any) -> Any:
    """A function. TypeError for what cannot be called."""
    if not callable(value):
        raise TypeError(f"{name} is a function, got {value!r}: give one, or leave it out")
    return value


def checked(default: Any, check: Callable[[str, Any], Any] | Iterable[str]) -> Any:
    """Field of arguments with a check of name and value, or the words that it takes."""
    takes = check if callable(check) else functools.partial(check_choice, choices=tuple(check))
    return field(default=default, metadata={"check": takes})


@dataclass(frozen=True)
class PlacementArguments:
    """Placement arguments that every preset takes: dtype, device and ranks of its parameters.

    Attributes:
        params_dtype: the parameters'; None: torch's default.
        device: the parameters'; None: torch's default where it was set, else the GPU where there is one, else the CPU.
        sequence_parallel: whether ranks cut the sequence between products, so that each has its part of x's rows.
        sequence_dim: the dimension of x that they cut; attention's layout, where it gives one, takes precedence.
        tp_group: the group of ranks that share the weights: a ProcessGroup, or a dimension of a DeviceMesh.
        tp_size: the number of ranks, where the group comes later, by `set_tensor_parallel_group`.

    Raises:
        TypeError, ValueError: naming the argument, what it got, and what to do: by the check that stands at its field,
            None where it is the default excepted; of one that is True or False by default by `check_flag`.
    """

    params_dtype: torch.dtype | None = checked(None, check_parameters_dtype)
    device: torch.device | str | None = None
    sequence_parallel: bool | None = False
    tp_group: Any = None
    tp_size: int = checked(1, check_size)
    sequence_dim: int = checked(0, functools.partial(whole_number, "a preset"))
    # Of arguments for user buffers (`ub_*`) the one without which the others ask for nothing, where there is one.
    overlap_switch: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value, check = getattr(self, f.name), f.metadata.get("check")
            if isinstance(f.default, bool):
                check_flag(f.name, value)
            elif check is not None and not (value is None and f.default is None):
                found = check(f.name, value)
                if isinstance(found, str):
                    object.__setattr__(self, f.name, found)


@dataclass(frozen=True)
class RandomState:
    """`with state():` draws from a tracker's random state of that name; None: its default."""

    tracker: Callable[[], Any]
    name: str | None

    def __call__(self) -> AbstractContextManager[Any]:
        tracker = self.tracker()
        return tracker.fork() if self.name is None else tracker.fork(self.name)  # type: ignore[no-any-return]

    @staticmethod
    def of(given: Any) -> RandomState | None:
        """Random state of the tracker that a preset's arguments name; None where they name none."""
        return given.get_rng_state_tracker and RandomState(given.get_rng_state_tracker, given.rng_tracker_name)


@dataclass(frozen=True)
class Common(PlacementArguments):
    """Arguments of presets with weights, beside those of placement.

    Attributes:
        init_method: called with a weight to fill it; None: normally distributed, mean 0 and standard deviation 0.023.
        output_layer_init_method: the same, for the last weight of a block.
        get_rng_state_tracker: gives the tracker whose random state weights are filled from, and from which a library's
            attention draws, but in a graph's capture: `with tracker.fork():`.
        rng_tracker_name: which of its states; None: the tracker's default.
        fuse_wgrad_accumulation: weights' gradients are added to their `main_grad`, see `te_fuser.params.main_grad`.
        delay_wgrad_compute: weights' gradients are left to `backward_dw()`; None: False.
    """

    init_method: Fill | None = checked(None, check_function)
    output_layer_init_method: Fill | None = checked(None, check_function)
    get_rng_state_tracker: Callable[[], Any] | None = checked(None, check_function)
    rng_tracker_name: str | None = None
    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool | None = False

    def fill(self, output_layer: bool = False) -> Fill:
        """Initializer of a weight, `output_layer_init_method` for the last one of a block."""
        return (self.output_layer_init_method if output_layer else self.init_method) or normal


def taken(preset: type, arguments: type[Arguments], keywords: Mapping[str, Any]) -> Arguments:
    """The arguments that keywords of a preset's constructor give."""
    known = {f.name for f in fields(arguments)}
    for name in [name for name in keywords if name not in known]:
        if name not in WITHOUT_EFFECT and not name.startswith("ub_"):
            names = sorted(inspect.signature(preset).parameters)
            near = meant(name, names) or f"; it takes {', '.join(names)}"
            raise TypeError(f"{preset.__name__}() takes no argument {name!r}{near}")
        if not _asks_nothing(arguments, name, keywords):
            what = "user buffers, which" if name.startswith("ub_") else "what"
            raise NotImplementedError(
                f"{preset.__name__}: {name}={keywords[name]!r} asks for {what} te_fuser does not have; leave {name} out"
            )
        level = stacklevel_of_user()
        warnings.warn(
            f"{preset.__name__}: {name} does nothing here; leave it out", DeprecationWarning, stacklevel=level
        )
    return arguments(**{name: value for name, value in keywords.items() if name in known})


def check_call(preset: Any, call: Mapping[str, Any], names: Collection[str] | None = None) -> None:
    """Refuse keywords of a call that are none of `names`, or of ops."""
    if names is None:
        parts = preset._prepared() if call.keys() - {"outputs"} else ()
        names = {"outputs", *(name for part in parts for name in names_read(part))}
    for name in call:
        if name not in names:
            near = meant(name, [*inspect.signature(preset.forward).parameters, *sorted(names)])
            raise TypeError(f"{type(preset).__name__} takes no argument {name!r} in a call{near}")


def constructor_keywords(arguments: type[PlacementArguments], constructor: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a preset, of the `locals()` of its constructor."""
    named = {f.name: constructor[f.name] for f in fields(arguments) if f.name in constructor}
    return {**named, **constructor["keywords"]}


_PRESETS = (str(__package__), "torch.nn.modules.module")  # whose __call__ is between


def stacklevel_of_user() -> int:
    """Level for `warnings.warn` in the calling function: the caller of a preset."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals["__name__"].startswith(_PRESETS):
        frame, level = frame.f_back, level + 1
    return level


def _asks_nothing(arguments: type[PlacementArguments], name: str, keywords: Mapping[str, Any]) -> bool:
    """True for a value of an argument without effect that asks for nothing."""
    nothing = WITHOUT_EFFECT.get(name, (False, None))
    if nothing is None or any(keywords[name] is n for n in nothing):
        return True
    switch, several = arguments.overlap_switch, keywords.get("tp_size", 1) != 1 or keywords.get("tp_group") is not None
    overlaps = several and keywords.get("sequence_parallel") and (switch is None or keywords.get(switch))
    return name.startswith("ub_") and not overlaps


class ClassSignature:
    """`__signature__` of a class, for help(); its objects have that of their calls."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        return self.signature


def signature_of(preset: type, arguments: type[PlacementArguments]) -> inspect.Signature:
    """Signature of a constructor, with its `**keywords` written out."""
    signature = inspect.signature(preset.__init__)  # type: ignore[misc]
    _, *own = signature.parameters.values()
    if not own or own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return signature.replace(parameters=own)
    there = {parameter.name for parameter in own}
    typed = str(own[-1].annotation).startswith("Unpack")  # all that it takes
    above = () if typed else inspect.signature(preset.__mro__[1]).parameters.values()
    said = [(p.name, p.default, p.annotation) for p in above if p.kind is p.POSITIONAL_OR_KEYWORD]
    said += [(f.name, f.default, f.type) for f in fields(arguments) if f.name not in {name for name, *_ in said}]
    said += [(name, None, kind) for name, kind in OPTIONS.items()]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, default, kind in said
        if name not in there
    ]
    return signature.replace(parameters=[*own[:-1], *keywords])


def check_positions(preset: type, args: tuple[Any, ...]) -> None:
    """Refuse more arguments by position than a preset's constructor takes so."""
    kinds = inspect.Parameter
    known = list(inspect.signature(preset).parameters.values())
    names = [p.name for p in known if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(names) and not any(p.kind is kinds.VAR_POSITIONAL for p in known):
        raise TypeError(
            f"{preset.__name__}() takes {', '.join(names)} by position, got {args[len(names)]!r} behind them: give it "
            "by its keyword"
        )


def default_device(device: torch.device | str | None) -> torch.device:
    """`device`; by default torch's, if one was set, else the GPU if there is one, else the CPU."""
    if device is not None:
        return torch.device(device)
    was_set = any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    return torch.get_default_device() if was_set or not torch.cuda.is_available() else torch.device("cuda")
