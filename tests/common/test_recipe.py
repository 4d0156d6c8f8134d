"""Recipes under the name that Transformer Engine's have."""

import te_fuser
from te_fuser import recipe
from te_fuser.common import recipe as alias


def test_all_recipes_are_there() -> None:
    assert alias.__all__ == recipe.__all__ and te_fuser.recipe is recipe
    assert all(getattr(alias, name) is getattr(recipe, name) for name in recipe.__all__)
