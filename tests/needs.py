"""Marks of tests that need what not every machine has."""

from __future__ import annotations

import pytest

from te_fuser import sequential
from te_fuser.codegen import nvrtc
from tests.fake_cuda import CXX


def has_nvrtc() -> bool:
    """True if CUDA text can be compiled here."""
    try:
        nvrtc.compiler_version()
    except nvrtc.CompilerMissing:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")
needs_compiler = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
needs_follower = pytest.mark.skipif(not sequential._FOLLOWED, reason="needs a compiler that follows references")
