"""Errors for ops and lists that are made, called or scripted otherwise than they take it, with the line to write."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import torch
from torch import nn
from typing_extensions import Self  # PyTorch needs it too

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
    """A module that says what its constructor takes, where it is given something else, and that no script reads it."""

    def __new__(cls, *given: Any, **named: Any) -> Self:
        if (given or named) and not torch.compiler.is_compiling():
            check_arguments(cls, given, named)
        return super().__new__(cls)

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which calls this first.

        Raises:
            TypeError: always.
        """
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
    """Refuse arguments that the constructor of a class does not take.

    Raises:
        TypeError: naming the nearest, and what it takes.
    """
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
    """The error for what stands in a list of modules and is none, or none that can be called."""
    from te_fuser import ops

    name = getattr(given, "__name__", type(given).__name__)
    op = {known.lower(): known for known in ops.__all__ if hasattr(nn, known)}.get(name.replace("_", ""))
    to_do = next(words for of, words in _MODULES_OF if isinstance(given, of)).format(kind=kind, name=name)
    if op and not isinstance(given, type):
        to_do = f"take ops.{op} (docs/coming-from-torch.md says how it differs)"
    return TypeError(f"{kind} takes modules, got {name}: {to_do}")


def described(given: Any) -> str:
    """The words of an error for what was given: a tensor by its shape, a class as one, other objects by their class."""
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
