"""Keywords of presets for type checkers: `python -m tests.keyword_types` writes presets/keyword_types.py anew."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # a preset may name a class that the file does not have yet
    sys.modules["te_fuser.presets.keyword_types"] = mock.MagicMock()
import te_fuser
from te_fuser.presets.base import Preset
from te_fuser.presets.keyword_arguments import OPTIONS, PlacementArguments

WRITTEN = Path(te_fuser.__file__).parent / "presets" / "keyword_types.py"
_HEAD = '''\
"""Keywords of presets' constructors for type checkers and editors, written by `python -m tests.keyword_types`."""

# fmt: off
# ruff: noqa: E701, E702, I001
from __future__ import annotations
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict
import torch
from typing_extensions import Unpack as Unpack
from te_fuser.presets.keyword_arguments import Fill
'''


def makers() -> list[type[Preset]]:
    """The public presets, each once for its constructor: of two norms with one the class that has it."""
    public = (getattr(te_fuser, name) for name in te_fuser.__all__)
    presets = [p for p in public if inspect.isclass(p) and issubclass(p, Preset)]
    return list(dict.fromkeys(next(c for c in p.__mro__ if "__init__" in vars(c)) for p in presets))


def keywords(preset: type[Preset]) -> dict[str, str]:
    """The keywords that a constructor takes beside the arguments that it names -> their types, of its signature."""
    named = inspect.signature(preset.__init__).parameters
    parameters = inspect.signature(preset).parameters.values()
    return {p.name: p.annotation for p in parameters if p.name not in named}


def text() -> str:
    """The file: a TypedDict for each constructor, and one for each class of arguments above them."""
    presets = makers()
    last = [p.arguments for p in presets]
    shared: dict[type, dict[str, str]] = {}
    for kind in dict.fromkeys(c for p in presets for c in reversed(p.arguments.__mro__) if is_dataclass(c)):
        users = [keywords(p) for p in presets if issubclass(p.arguments, kind)]
        own = [*vars(kind)["__dataclass_fields__"], *(OPTIONS if kind is PlacementArguments else ())]
        above = {name for k, names in shared.items() if issubclass(kind, k) for name in names}
        if len(users) > 1 or kind not in last:
            shared[kind] = {n: users[0][n] for n in own if n not in above and all(n in user for user in users)}
    classes = [_class(kind.__name__.removesuffix("Arguments"), _bases(kind, shared), of) for kind, of in shared.items()]
    for preset in presets:
        had = {name for kind, names in shared.items() if issubclass(preset.arguments, kind) for name in names}
        rest = {name: of for name, of in keywords(preset).items() if name not in had}
        classes.append(_class(preset.__name__, _bases(preset.arguments, shared, itself=True), rest))
    return _HEAD + "".join(classes)


def _bases(kind: type, shared: Iterable[type], itself: bool = False) -> list[str]:
    """Names of the nearest shared ones above a class of arguments."""
    above = [k for k in shared if issubclass(kind, k) and (itself or k is not kind)]
    nearest = [k for k in above if not any(issubclass(other, k) and other is not k for other in above)]
    return [f"{k.__name__.removesuffix('Arguments')}Keys" for k in nearest]


def _class(name: str, bases: list[str], members: Mapping[str, Any]) -> str:
    glued = "; ".join(f"{member}: {of}".replace(" ", "\0") for member, of in members.items())  # breaks are between them
    lines = textwrap.wrap(glued, 116, break_long_words=False, break_on_hyphens=False)
    body = "".join(f"\n    {line.rstrip(';')}".replace("\0", " ") for line in lines)
    return f"class {name}Keys({', '.join(bases or ['TypedDict'])}, total=False):{body or ' ...'}\n"


if __name__ == "__main__":
    WRITTEN.write_text(text())
