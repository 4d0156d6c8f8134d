"""`te_fuser.recipe`, where Transformer Engine has its recipes."""

from te_fuser.recipe import *  # noqa: F403
from te_fuser.recipe import __all__ as __all__
