"""Where kernels come from: generated C++ where there is a compiler, PyTorch operations otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.config import config
from te_fuser.fuser.program import KernelFunction

_GENERATED_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def target_for(device: torch.device, dtype: torch.dtype, kernels: str) -> str:
    """Which target runs row kernels: "cpp" (generated), or "torch" (PyTorch operations, one for each node).

    Raises:
        RuntimeError: when generated kernels are demanded and cannot be had.
    """
    if kernels == "reference":
        return "torch"
    why = _obstacle(device, dtype)
    if why is None:
        return "cpp"
    if kernels == "generated" and dtype != torch.float64:
        raise RuntimeError(f"generated kernels were asked for, but {why}")
    return "torch"


def target_on_gpu(dtype: torch.dtype, kernels: str) -> str:
    """Which target a GPU that is not at hand would run row kernels by."""
    return "cuda" if kernels != "reference" and dtype in _GENERATED_DTYPES else "torch"


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in _GENERATED_DTYPES:
        return f"{dtype} runs the reference"
    if device.type != "cpu":
        return f"generated kernels are not launched on {device.type} yet"
    from te_fuser.codegen import compiler

    if compiler.find_compiler(config.compiler) is None:
        return "no C++ compiler was found (install g++ or clang++, or set te_fuser.config.compiler)"
    return None


def load_kernels(descriptions: Sequence[KernelDescription], target: str) -> dict[str, KernelFunction]:
    """Description key -> kernel."""
    if target == "cpp":
        from te_fuser.codegen import compiler

        handles = compiler.load(descriptions, cache_dir=config.cache_dir, compiler=compiler.find_compiler(config.compiler))
        return {d.key: h for d, h in zip(descriptions, handles, strict=True)}
    return {d.key: InterpretedKernel(d) for d in descriptions}
