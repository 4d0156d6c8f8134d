"""Where kernels come from: generated C++ or CUDA where it can be had, PyTorch operations otherwise."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch

from te_fuser import dtypes
from te_fuser.config import config
from te_fuser.fusions.library import libraries

_LEAST_CAPABILITY = (8, 0)
_PLACES = {"cuda": "GPU", "cpu": "CPU"}  # where kernels might have been generated


def target_for(device: torch.device, dtype: torch.dtype, kernels: str, fallback: str = "warn") -> str:
    """Which target runs row kernels: "cpp" or "cuda" (generated), or "torch" (PyTorch operations, one for each node).

    Raises:
        RuntimeError: when generated kernels are demanded and cannot be had.
    """
    if kernels == "reference":
        return "torch"
    why = obstacle(device, dtype)
    # What nobody generates, float64 above all, is no fallback from what a device lacks.
    demanded = kernels == "generated" or (fallback == "error" and dtype in dtypes.GENERATED)
    if why is None and device.type != "cuda":
        return "cpp"
    if why is None:
        for library in libraries():  # which fusions may have to do without
            lacking = library.obstacle(device)
            if lacking is not None and demanded:
                raise RuntimeError(_asked_for(library.kernels, lacking))
            if lacking is not None:
                _warn_once(library.runs_without, lacking)
        return "cuda"
    if demanded:
        raise RuntimeError(_asked_for("generated kernels", why))
    if device.type in _PLACES and dtype in dtypes.GENERATED:
        _warn_once(f"row operations on the {_PLACES[device.type]} by PyTorch's kernels, one for each operation", why)
    return "torch"


def _asked_for(what: str, why: str) -> str:
    return f"{what} were asked for, but {why}; kernels='auto' takes what there is"


def target_on_gpu(dtype: torch.dtype, kernels: str) -> str:
    """Which target a GPU that is not at hand would run row kernels by.

    Raises:
        RuntimeError: when generated kernels are demanded for a dtype that has none.
    """
    if kernels == "generated" and dtype not in dtypes.GENERATED:
        raise RuntimeError(_asked_for("generated kernels", f"{dtype} runs the reference"))
    return "cuda" if kernels != "reference" and dtype in dtypes.GENERATED else "torch"


def missing_notes(target: str, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """What a plan for a device at hand has to do without, in words, where its kernels might have been generated."""
    if target == "torch":
        why = obstacle(device, dtype)
        if why is not None:
            yield f"row kernels are not generated: {why}"
    for library in libraries():
        why = library.obstacle(device)
        if why is not None:
            yield f"{library.note_without}: {why}"


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why generated kernels cannot run on a device at hand, in words that say what to do; None if they can."""
    if dtype not in dtypes.GENERATED:
        return f"{dtype} runs the reference"
    if device.type == "cuda":
        return _cuda_obstacle(device.index if device.index is not None else torch.cuda.current_device())
    if device.type != "cpu":
        return f"there are no generated kernels for {device.type}"
    from te_fuser.codegen import compiler

    found = compiler.find_compiler(config.compiler)
    return compiler.why_no_compiler(config.compiler) if found is None else None


@functools.cache
def _cuda_obstacle(index: int) -> str | None:
    from te_fuser import _native
    from te_fuser.codegen import nvrtc

    if torch.version.hip is not None:
        return "generated kernels are for NVIDIA GPUs, and this PyTorch is built for AMD's"
    major, minor = torch.cuda.get_device_capability(index)
    who = f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}"
    if (major, minor) < _LEAST_CAPABILITY:
        return f"{who}, and generated kernels need 8.0 (Ampere) or newer"
    problem = _native.cuda_driver_refusal()
    if problem is not None:
        return problem
    try:
        version = ".".join(map(str, nvrtc.compiler_version()))
        if major * 10 + minor not in nvrtc.known_architectures():
            return f"{who}, which NVRTC {version} does not compile for; install a newer nvidia-cuda-nvrtc"
    except nvrtc.CompilerMissing as missing:
        return str(missing)
    return None


@functools.cache
def _warn_once(what: str, why: str) -> None:
    """Warn of what runs otherwise than it was to."""
    warnings.warn(
        f"te_fuser runs {what}, because {why}. "
        "print(model.explain(x)) shows the plan; fallback='error' makes this an error.",
        RuntimeWarning,
        stacklevel=2,
    )
