"""Settings of the process: what they take, and what there is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from te_fuser.config import Config


def test_paths_may_be_texts() -> None:
    config = Config()
    config.cache_dir, config.compiler = "~/kernels", Path("/usr/bin/g++")  # type: ignore[assignment]
    assert (config.cache_dir, config.compiler) == (Path.home() / "kernels", "/usr/bin/g++")
    config.cache_dir = "kernels"  # type: ignore[assignment]
    assert config.cache_dir == Path.cwd() / "kernels"  # wherever the process goes
    config.cache_dir = config.compiler = None
    assert config == Config()


def test_a_setting_that_there_is_not_is_named() -> None:
    with pytest.raises(AttributeError, match="te_fuser.config has no 'cachedir'; it has cache_dir, compiler"):
        Config().cachedir = "/x"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "value"), [("cache_dir", 5), ("compiler", ["g++"])])
def test_what_is_no_path_is_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"te_fuser.config.{name} is a path or None, got"):
        setattr(Config(), name, value)


def test_fp8_is_emulated_or_not() -> None:
    config = Config()
    assert config.emulate_fp8 is False
    config.emulate_fp8 = True
    with pytest.raises(TypeError, match="te_fuser.config.emulate_fp8 is True or False, got 1"):
        config.emulate_fp8 = 1  # type: ignore[assignment]
    assert config.emulate_fp8
