"""Settings of the process: where generated kernels are cached, with which compiler they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass
class Config:
    """Settings that every model shares; assign to `te_fuser.config`'s fields.

    Attributes:
        cache_dir: folder of compiled kernels and of what tune finds, made absolute; None: the user's cache folder.
        compiler: path or name of the C++ compiler; None: the one that CXX names, else the first found of c++, g++ and
            clang++.
        plans_kept: how many plans each group of ops keeps, those that were used last.
        shapes_kept: how many shapes it knows the plans of without looking for them, those that were used last.
        emulate_fp8: whether FP8 runs on GPUs without products of 8 bits too: emulated, slower than without FP8. CPUs
            emulate it anyway.
    """

    cache_dir: Path | None = None
    compiler: str | None = None
    plans_kept: int = 64
    shapes_kept: int = 256
    emulate_fp8: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        known = [f.name for f in fields(self)]
        if name not in known:
            raise AttributeError(f"te_fuser.config has no {name!r}; it has {', '.join(known)}")
        if name.endswith("_kept"):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"te_fuser.config.{name} is a whole number from 1 on, got {value!r}")
        elif name == "emulate_fp8":
            if not isinstance(value, bool):
                raise TypeError(f"te_fuser.config.{name} is True or False, got {value!r}")
        elif not (value is None or isinstance(value, (str, os.PathLike))):
            raise TypeError(f"te_fuser.config.{name} is a path or None, got {value!r}")
        elif value is not None:
            value = Path(value).expanduser().absolute() if name == "cache_dir" else os.fspath(value)
        super().__setattr__(name, value)


config = Config()
