"""Public names and signatures change on purpose alone: tests/public.txt is written anew in the commit that does."""

from __future__ import annotations

from tests.public import WRITTEN, text


def test_public_names_and_signatures() -> None:
    assert text().splitlines() == WRITTEN.read_text().splitlines(), "see tests/public.py"
