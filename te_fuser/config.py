"""Settings of the process: where generated kernels are cached, with which compiler they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Config:
    """Settings that every model shares; assign to `te_fuser.config`'s fields.

    Attributes:
        cache_dir: folder of compiled kernels; None: the user's cache folder.
        compiler: path or name of the C++ compiler; None: the first of c++, g++, clang++ that is found.
    """

    cache_dir: Path | None = None
    compiler: str | None = None


config = Config()


def user_cache_dir() -> Path:
    """te_fuser's own folder in the user's cache folder, where things are kept unless `config.cache_dir` is set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "te_fuser"
