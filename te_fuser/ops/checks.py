"""Checks of arguments and inputs with one wording for all, and errors that show the line to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
import keyword
import math
import operator
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, ValuesView
from numbers import Real
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import nn
from typing_extensions import Self

from te_fuser.dtypes import TABLE, text_of

if TYPE_CHECKING:
    from te_fuser.ops.base import FusableOperation, Spec


# Word of other constructors -> what says it here, the first whose argument there is; empty: nothing has to.
_OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "normalized_shape": ("features",),
    "num_features": ("features",),
    "dim": ("features", "head_dim"),
    "hidden_size": ("features",),
    "d_model": ("hidden_size", "features"),
    "embed_dim": ("hidden_size", "features"),
    "dim_feedforward": ("ffn_hidden_size",),
    "num_heads": ("heads", "num_attention_heads"),
    "nhead": ("heads", "num_attention_heads"),
    "num_attention_heads": ("heads",),
    "num_key_value_heads": ("kv_heads", "num_gqa_groups"),
    "num_gqa_groups": ("kv_heads",),
    "dropout_p": ("dropout", "p", "attention_dropout"),
    "is_causal": ('mask="causal"', 'attn_mask_type="causal"', 'self_attn_mask_type="causal"'),
    "causal": ('mask="causal"', 'attn_mask_type="causal"', 'self_attn_mask_type="causal"'),
    "batch_first": ('layout="batch_first"', 'attn_input_format="bshd"', 'qkv_format="bshd"'),
    "dtype": ("params_dtype",),
    "params_dtype": ("dtype",),
    "inplace": ("",),
}
# Kind of what stands where a module is taken -> what to do; {kind} is the list's class, {name} what was given.
_MODULES_OF: tuple[tuple[Any, str], ...] = (
    ((list, tuple, set, Iterator, ValuesView, nn.ModuleList), "write {kind}(*layers), one module after the other"),
    ((dict, nn.ModuleDict), "write {kind}(collections.OrderedDict(layers))"),
    (type, "a class is no module yet: write {name}(), with the arguments that it takes"),
    (Callable, "put it into a torch.nn.Module whose forward calls it"),
    (object, "give it ops of te_fuser.ops or any torch.nn.Module"),
)
# Kind of what stands where a tensor is taken -> what to do.
_TENSOR_OF = {
    "numpy.ndarray": "give torch.from_numpy(x)",
    "builtins.list": "give torch.tensor(x)",
    "builtins.tuple": "of a module that gives several values, put one into the list that gives the first",
}


class TakesArguments:
    """A module that says what its constructor takes, and that no script reads it."""

    def __new__(cls, *given: Any, **named: Any) -> Self:
        if (given or named) and not torch.compiler.is_compiling():
            check_arguments(cls, given, named)
        return super().__new__(cls)

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which calls this first; TypeError always."""
        raise TypeError(
            f"torch.jit.script reads Python that a {type(self).__name__} does not have: call it in torch.compile, or "
            "give torch.export or torch.jit.trace a module whose forward is model.reference(x): docs/works-with.md"
        )


_signature = functools.lru_cache(maxsize=512)(inspect.signature)


@functools.lru_cache(maxsize=512)
def _required(init: Any) -> tuple[str, ...]:
    """Names of the arguments without a default that may be given by position."""
    _, *takes = _signature(init).parameters.values()
    return tuple(p.name for p in takes if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty)


def check_arguments(kind: type, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse arguments that the constructor of a class does not take."""
    signature = _signature(kind.__init__)  # type: ignore[misc]
    if not named and len(given) == len(_required(kind.__init__)):  # type: ignore[misc]
        return
    try:
        signature.bind(kind, *given, **named)
    except TypeError as error:
        _, *takes = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        names, positions = [p.name for p in takes], sum(p.kind <= p.POSITIONAL_OR_KEYWORD for p in takes)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in takes)
        unknown = [] if takes_any else [name for name in named if name not in names]
        why = f"cannot be made: {error}"
        says = getattr(kind.__init__, "says", {})  # type: ignore[misc]
        if unknown:
            why = f"takes no argument {unknown[0]!r}{meant(unknown[0], names)}"
        elif len(given) > positions:
            twin = getattr(nn, kind.__name__, None)
            in_torch = [*_signature(twin.__init__).parameters][1:] if isinstance(twin, type) else []  # type: ignore[misc]
            others = zip(in_torch[positions:], given[positions:], strict=False)
            said = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in others if name in names)
            why = f"takes {positions} arguments by position, got {len(given)}: "
            why += f"write {said}" if said else "name the others, or leave them out"
        elif not named.keys() >= says.keys():
            return  # the constructor says what to give
        raise TypeError(f"{kind.__name__}() {why}\n  {kind.__name__}{inspect.Signature(takes)}") from None


def meant(word: str, names: Collection[str]) -> str:
    """Hint at the argument that an unknown word may have meant; empty where nothing is near."""
    if word in _OTHER_WORDS:
        for said in _OTHER_WORDS[word]:
            if not said:
                return "; leave it out"
            if said.partition("=")[0] in names:
                return f"; here that is {said}"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def no_module(kind: str, given: Any) -> TypeError:
    """The error for what is no module in a list, or none that can be called."""
    from te_fuser import ops

    name = getattr(given, "__name__", type(given).__name__)
    op = {known.lower(): known for known in ops.__all__ if hasattr(nn, known)}.get(name.replace("_", ""))
    to_do = next(words for of, words in _MODULES_OF if isinstance(given, of)).format(kind=kind, name=name)
    if op and not isinstance(given, type):
        to_do = f"take ops.{op} (docs/coming-from-torch.md says how it differs)"
    return TypeError(f"{kind} takes modules, got {name}: {to_do}")


def described(given: Any) -> str:
    """Words for what was given: a tensor by its shape, others by their class."""
    kind = type(given)
    if isinstance(given, torch.Tensor):
        return f"a {kind.__name__} of shape {list(given.shape)}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if given is None or isinstance(given, (str, int, float)):
        return reprlib.repr(given)
    return f"a {kind.__name__ if kind.__module__ == 'builtins' else f'{kind.__module__}.{kind.__qualname__}'}"


def no_tensor(taker: str, given: Any) -> TypeError:
    """The error for what stands where a tensor is taken."""
    kind = type(given)
    to_do = _TENSOR_OF.get(f"{kind.__module__}.{kind.__name__}")
    return TypeError(f"{taker} takes a torch.Tensor, got {kind.__name__}{f': {to_do}' if to_do else ''}")


_TAKEN = ("self", "x", "outputs")

_P = ParamSpec("_P")


def feature_size(features: int | Sequence[int], name: str = "features") -> int:
    """The size of the last dimension from an int or a sequence of one, as torch.nn takes it."""
    sizes = tuple(features) if isinstance(features, (tuple, list, torch.Size)) else (features,)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"{name} is a whole number, got {features!r}")
    if len(sizes) != 1:
        raise ValueError(f"{name} is the size of the last dimension alone, got {list(sizes)}: flatten the others first")
    if sizes[0] < 0:
        raise ValueError(f"{name} is a size, got {sizes[0]}")
    return sizes[0]


def may_look(device: torch.device) -> bool:
    """True where an op may look at values: on a CPU, where nothing traces it."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def check_floating(x: Spec, takes: str = "te_fuser ops take") -> None:
    """Refuse integers and booleans."""
    if not x.dtype.is_floating_point:
        may_be_ids = not x.dtype.is_complex and x.dtype != torch.bool
        ids = "put a torch.nn.Embedding before it where these are ids of tokens, else " if may_be_ids else ""
        raise TypeError(f"{takes} floating-point tensors, got {text_of(x.dtype)}: {ids}convert with .float()")


def must_say(**choices: str) -> Callable[[Callable[Concatenate[Any, _P], None]], Callable[Concatenate[Any, _P], None]]:
    """Decorator of a constructor: the error for a missing keyword says its choices."""

    def around(init: Callable[Concatenate[Any, _P], None]) -> Callable[Concatenate[Any, _P], None]:
        @functools.wraps(init)
        def checked(self: Any, /, *args: _P.args, **given: _P.kwargs) -> None:
            missing = [f"give {name}={words}" for name, words in choices.items() if name not in given]
            if missing:
                raise TypeError(f"{type(self).__name__} has to be told: {'; '.join(missing)}")
            init(self, *args, **given)

        checked.says = choices  # type: ignore[attr-defined]
        return checked

    return around


def check_features(op: FusableOperation, x: Spec, features: int) -> None:
    """Refuse an input whose last dimension is not `features`."""
    name = type(op).__name__
    if not x.shape:
        raise ValueError(f"{name} takes [..., {features}], got a scalar")
    if x.features != features:
        raise ValueError(
            f"{name} was made for {features} features, got {x.features} (input shape {list(x.shape)}): "
            f"give it [..., {features}] or make it with {x.features}"
        )


def check_probability(p: float, name: str | None = None) -> float:
    """A drop probability as a float; `name` is what the caller calls it."""
    what = "a drop probability" if name is None else f"{name}, a drop probability,"
    if not isinstance(p, (int, float)):
        raise TypeError(f"{what} is a number in [0, 1], got {p!r}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{what} lies in [0, 1], got {p}")
    return float(p)


def check_eps(op: FusableOperation, eps: float) -> float:
    """The eps of a norm, once checked."""
    found = real_number(type(op).__name__, "eps", eps)
    if not 0.0 <= found < math.inf:
        raise ValueError(f"{type(op).__name__}: eps is a small number, such as 1e-5, got {eps!r}")
    return found


def real_number(op: str, name: str, value: Any) -> float:
    """An argument of an op that is a number; TypeError when it is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op} takes a number as {name}, got {value!r}")
    return float(value)


def finite_number(op: str, name: str, value: Any) -> float:
    """Argument of an op, as a finite number."""
    found = real_number(op, name, value)
    if not math.isfinite(found):
        raise ValueError(f"{op} takes a finite number as {name}, got {value}")
    return found


def whole_number(op: str, name: str, value: int) -> int:
    """An argument of an op that is a whole number; TypeError when it is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{op} takes a whole number as {name}, got {value!r}")
    return operator.index(value)


def count(op: str, name: str, value: int, least: int = 1) -> int:
    """An argument of an op that counts something."""
    found = whole_number(op, name, value)
    if found < least:
        raise ValueError(f"{op} takes a whole number from {least} on as {name}, got {value}")
    return found


def yes_or_no(op: str, name: str, value: bool) -> bool:
    """An argument of an op that is True or False; TypeError when it is neither."""
    if not isinstance(value, bool):
        raise TypeError(f"{op} takes True or False as {name}, got {described(value)}")
    return value


def function_or_none(op: str, name: str, value: Any) -> Any:
    """Argument of an op that is a function or None."""
    if not (value is None or callable(value)):
        raise TypeError(f"{op} takes a function as {name}, or None, got {value!r}")
    return value


def check_last(op: FusableOperation, dim: int) -> None:
    """Take the `dim` that torch.nn's module of that name has, where it is the last one."""
    if dim != -1:
        name = type(op).__name__
        raise ValueError(
            f"{name} goes over the features of each row, dim=-1, got dim={dim!r}: put torch.nn.{name}({dim!r}) into "
            "the list, which runs by itself"
        )


def check_batch_dim(op: FusableOperation, x: Spec, batch_dim: int) -> None:
    """Refuse an input without that dimension, or whose features it is."""
    dims = len(x.shape)
    if not -dims <= batch_dim < dims - 1 or batch_dim == -1:
        raise ValueError(
            f"{type(op).__name__} counts samples along dimension {batch_dim}, which is no dimension before the "
            f"features of an input of shape {list(x.shape)}: give batch_dim in [0, {max(dims - 2, 0)}]"
        )


def check_name(name: str) -> str:
    """A name that a call can give as a keyword; ValueError when it cannot be one."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"a name must be usable as a keyword argument, like 'skip'; got {name!r}")
    if name in _TAKEN:
        raise ValueError(f"{name!r} is an argument of every call, model(x, outputs=...): choose another name")
    return name


def check_parameters_dtype(name: str, dtype: Any) -> None:
    """Refuse what is no dtype for parameters, by the argument's name; None is torch's default."""
    if not (dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        use = f"torch.{dtype}" if str(dtype) in TABLE else "torch.bfloat16, say"
        raise TypeError(f"{name} is a floating-point dtype of torch's, got {dtype!r}: use {use}")


def resolve_shape(shape: Sequence[int], elements: int) -> tuple[int, ...]:
    """`shape` with its -1, if any, replaced so that it holds that many elements."""
    known = math.prod(size for size in shape if size != -1)
    if -1 not in shape:
        if known != elements:
            raise ValueError(f"shape {list(shape)} holds {known} elements, got {elements}")
        return tuple(shape)
    if not known or elements % known:
        raise ValueError(f"no size in place of -1 makes shape {list(shape)} hold {elements} elements")
    return tuple(elements // known if size == -1 else size for size in shape)
