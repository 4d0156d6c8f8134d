"""Public names and how they are called, as text: `python -m tests.public` writes tests/public.txt anew."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import te_fuser
from te_fuser import formula, fusions, ops, parallel, quantization, recipe, utils

WRITTEN = Path(__file__).with_suffix(".txt")
LISTED = {
    te_fuser.Sequential: {m for m in vars(te_fuser.Sequential) if m[0] != "_"}
}  # classes with methods of interest
MODULES = (te_fuser, ops, fusions, recipe, quantization, parallel, formula, utils)


def text() -> str:
    """A line for each public name, and one for `forward` and the methods that users call."""
    return "".join(f"{line}\n" for module in MODULES for line in _lines_of(module))


def _lines_of(module: Any) -> Iterator[str]:
    for name in sorted(module.__all__):
        thing, title = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.ismodule(thing):
            yield f"{title}: module"
        elif inspect.isclass(thing):
            yield f"{title}{_arguments(thing)}"
            methods = {m: f for m, f in vars(thing).items() if callable(f) and m in ("forward", *LISTED.get(thing, ()))}
            yield from (f"{title}.{m}{_arguments(f)}" for m, f in sorted(methods.items()))
        else:
            yield f"{title}{_arguments(thing) if callable(thing) else ': ' + type(thing).__name__}"


def _arguments(thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return "(...)"
    if isinstance(thing, enum.EnumMeta):
        return f": {', '.join(thing.__members__)}"  # its signature is another in other versions of Python
    signature = inspect.signature(thing)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    return re.sub(r" at 0x[0-9a-f]+", "", str(shown))


if __name__ == "__main__":
    WRITTEN.write_text(text())
