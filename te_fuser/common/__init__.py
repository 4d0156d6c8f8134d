"""te_fuser's recipes where Transformer Engine has its own: `from te_fuser.common.recipe import DelayedScaling`."""

from te_fuser.common import recipe

__all__ = ["recipe"]
