"""Models of transformers, their layers run by lists of ops: a file for families that are alike."""

from te_fuser.convert.conversion import Conversion, convert, revert

__all__ = ["Conversion", "convert", "revert"]
