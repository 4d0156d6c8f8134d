"""Keywords of presets as type checkers see them: those of the signatures at run time; mypy reads typed_presets.py."""

from __future__ import annotations

import inspect
import typing

import pytest

from te_fuser.presets import keyword_arguments, keyword_types
from te_fuser.presets.base import Preset
from tests.keyword_types import WRITTEN, keywords, makers, text


def test_the_file_is_what_the_signatures_say() -> None:
    assert text().splitlines() == WRITTEN.read_text().splitlines(), "see tests/keyword_types.py"


@pytest.mark.parametrize("preset", makers())
def test_a_constructor_takes_its_keywords_with_their_types(preset: type[Preset]) -> None:
    own, known = f"{preset.__name__}Keys", {**vars(keyword_arguments), **vars(keyword_types)}
    assert inspect.signature(preset.__init__).parameters["keywords"].annotation == f"Unpack[{own}]"
    hints = typing.get_type_hints(getattr(keyword_types, own))
    assert hints == {name: eval(of, known) for name, of in keywords(preset).items()}
    assert {"device", "params_dtype", "memory", "verify"} < hints.keys()
