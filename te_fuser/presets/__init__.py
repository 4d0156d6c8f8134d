"""Transformer Engine's modules as lists of ops, under its names."""

from te_fuser.presets.linear import Linear

__all__ = ["Linear"]
