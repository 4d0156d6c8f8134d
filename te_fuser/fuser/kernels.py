"""Where kernels come from: generated C++ or CUDA where it can be had, PyTorch operations otherwise."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch

from te_fuser import _native
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.codegen.written import WrittenKernel
from te_fuser.config import config
from te_fuser.fuser.plan import FusionTask, Plan
from te_fuser.fuser.problem import Options, match_at
from te_fuser.fuser.program import KernelFunction
from te_fuser.kernels.column_sums import ColumnSumsKernel, column_sums
from te_fuser.kernels.matmul import problem as cublaslt_problem

GENERATED_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_LEAST_CAPABILITY = (8, 0)


def target_for(device: torch.device, dtype: torch.dtype, kernels: str) -> str:
    """Which target runs row kernels: "cpp" or "cuda" (generated), or "torch" (PyTorch operations, one for each node).

    Raises:
        RuntimeError: when generated kernels are demanded and cannot be had.
    """
    if kernels == "reference":
        return "torch"
    why = obstacle(device, dtype)
    if why is None:
        if device.type == "cuda":
            _check_products(kernels)
        return "cuda" if device.type == "cuda" else "cpp"
    if kernels == "generated" and dtype != torch.float64:
        raise RuntimeError(f"generated kernels were asked for, but {why}")
    if device.type == "cuda" and dtype in GENERATED_DTYPES:
        _warn_once(why)
    return "torch"


def _check_products(kernels: str) -> None:
    """Warn once where products and their epilogues cannot be cuBLASLt's, or raise where that was demanded."""
    why = cublaslt_problem()
    if why is None:
        return
    if kernels == "generated":
        raise RuntimeError(f"cuBLASLt's products were asked for, but {why}")
    _warn_once_of_products(why)


def target_on_gpu(dtype: torch.dtype, kernels: str) -> str:
    """Which target a GPU that is not at hand would run row kernels by."""
    return "cuda" if kernels != "reference" and dtype in GENERATED_DTYPES else "torch"


def missing_notes(target: str, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """What a plan for a device at hand has to do without, in words, where its kernels might have been generated."""
    if target == "torch":
        why = obstacle(device, dtype)
        if why is not None:
            yield f"row kernels are not generated: {why}"
    if device.type == "cuda":
        why = cublaslt_problem()
        if why is not None:
            yield f"products run by PyTorch, with nothing fused into them: {why}"


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why generated kernels cannot run on a device at hand, in words that say what to do; None if they can."""
    if dtype not in GENERATED_DTYPES:
        return f"{dtype} runs the reference"
    if device.type == "cuda":
        return _cuda_obstacle(device.index if device.index is not None else torch.cuda.current_device())
    return _cpp_obstacle() if device.type == "cpu" else f"there are no generated kernels for {device.type}"


def _cpp_obstacle() -> str | None:
    from te_fuser.codegen import compiler

    if compiler.find_compiler(config.compiler) is None:
        return "no C++ compiler was found (install g++ or clang++, or set te_fuser.config.compiler)"
    return None


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
    problem = _native.cuda_driver_problem()
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
def _warn_once_of_products(why: str) -> None:
    warnings.warn(
        f"te_fuser runs matrix products on the GPU by PyTorch, without fusing anything into them, because {why}. "
        "print(model.explain(x)) shows the plan; fallback='error' makes this an error.",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"te_fuser runs row operations on the GPU by PyTorch's kernels, one for each operation, because {why}. "
        "print(model.explain(x)) shows the plan; fallback='error' makes this an error.",
        RuntimeWarning,
        stacklevel=2,
    )


def written_kernels(plan: Plan) -> tuple[WrittenKernel, ...]:
    """The kernels written by hand that a plan launches, for its fusions and for its column sums, each once."""
    found: dict[WrittenKernel, None] = {}
    steps = [*plan.forward, *plan.backward]
    if any(s.sums() for s in steps):
        found[ColumnSumsKernel()] = None
    for step in steps:
        task = step.task
        if isinstance(task, FusionTask) and task.fusion.compiles is not None:
            match = match_at(plan.graph, Options(plan.device, plan.kernels), step.start, step.stop)
            found |= dict.fromkeys(task.fusion.compiles(match, task.direction, task.needed))
    return tuple(found)


def load_kernels(
    wanted: Sequence[KernelDescription],
    target: str,
    device: torch.device,
    rows: Mapping[str, int] | None = None,
    written: Sequence[WrittenKernel] = (),
) -> dict[str, KernelFunction]:
    """Description key -> kernel, for tensors on `device`.

    Args:
        rows: description key -> about how many rows the kernel will have.
        written: kernels written by hand that are compiled and loaded beside these, where the target is "cuda".
    """
    if target == "cpp":
        from te_fuser.codegen import compiler

        found = compiler.find_compiler(config.compiler)
        handles = compiler.load(wanted, cache_dir=config.cache_dir, compiler=found)
        return {d.key: h for d, h in zip(wanted, handles, strict=True)}
    if target == "cuda":
        from te_fuser.codegen import cuda_loader

        kernels = cuda_loader.load(wanted, device, rows=rows, cache_dir=config.cache_dir, written=written)
        return {d.key: k.run for d, k in zip(wanted, kernels, strict=True)}
    return {d.key: InterpretedKernel(d) for d in wanted}


def load_column_sums(target: str, device: torch.device) -> _native.ColumnSums | None:
    """What adds up the column sums of a program's kernels at its end; None where each does it at once."""
    return column_sums(device) if target == "cuda" else None
