"""Traces of models, for Perfetto and for the viewers that read PyTorch's."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.utils import _pytree

from te_fuser.fuser.show.measure import undisturbed
from te_fuser.ops.checks import count, yes_or_no
from te_fuser.params.main_grad import spared

_profiler = threading.RLock()  # PyTorch's, of which a process has one


def profile(
    model: torch.nn.Module,
    *inputs: Any,
    path: str | os.PathLike[str] = "trace.json",
    steps: int = 3,
    backward: bool = True,
    **keywords: Any,
) -> Path:
    """Run a model a few times, write a trace in which each step of a plan has its name and its ops; return its path.

    The file opens in https://ui.perfetto.dev and in chrome://tracing. On a GPU the kernels of a step lie below its
    name. Plans are made and kernels compiled in a call before, which the trace does not have. Parameters, their
    `grad` and `main_grad`, buffers, and random generators stay as they are. Threads take turns, since a process has one
    profiler.

    Args:
        model: any module; modules that are not te_fuser's show PyTorch's operations.
        inputs, keywords: what the model is called with.
        path: the file to write; one that ends with ".gz" is compressed.
        steps: the number of runs.
        backward: compute gradients, too, of the sum of all outputs that require one.

    Raises:
        TypeError, ValueError: when `model` is no module, or no input is a tensor; for fewer than one step.
        OSError: when the file cannot be written: `FileNotFoundError` without its folder, `IsADirectoryError` for one.
        RuntimeError: within another profiler, whose events would be lost.

    Examples:
        >>> import torch, te_fuser
        >>> layer = te_fuser.LayerNormMLP(8, 32, device="cpu")
        >>> te_fuser.profile(layer, torch.randn(4, 8), path="trace.json").name
        'trace.json'
    """
    path, given = Path(path), _tensors_in((inputs, keywords))
    _check(model, given, steps, path, backward)
    wanted = [t for t in (*given, *model.parameters()) if t.requires_grad and backward]
    on_gpu = any(t.is_cuda for t in (*given, *model.parameters()))

    def step() -> None:
        with record_function("forward"):
            found = [t for t in _tensors_in(model(*inputs, **keywords)) if t.requires_grad]
        if wanted and found:
            with record_function("backward"):
                torch.autograd.grad(found, wanted, [torch.ones_like(t) for t in found], allow_unused=True)

    with _profiler, undisturbed(model, given[0]), spared(model.parameters()):
        if torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled():
            raise RuntimeError("profile runs PyTorch's profiler, and one runs already: call it outside of that")
        step()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with torch.profiler.profile(activities=activities) as trace:
            for _ in range(steps):
                step()
            if on_gpu:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:  # for PyTorch only logs that it cannot write a file
        made = Path(folder, "trace.json").with_suffix(path.suffix if path.suffix == ".gz" else ".json")
        trace.export_chrome_trace(str(made))
        shutil.copyfile(made, path)
    return path


def _check(model: Any, given: list[torch.Tensor], steps: int, path: Path, backward: bool) -> None:
    """Refuse what `profile` cannot run or write, before anything runs."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"profile takes a torch.nn.Module, got {type(model).__name__}")
    if not given:
        raise TypeError("profile takes what the model is called with, and got no tensor: profile(model, x)")
    count("profile", "steps", steps)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"profile writes {path}, and there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"profile writes a file, and {path} is a folder")
    yes_or_no("profile", "backward", backward)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Tensors in containers and dataclasses, at any depth."""
    found = []
    for leaf in _pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
    return found
