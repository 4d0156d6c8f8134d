"""Symmetric memory: buffers of several GPUs that each of them reads, and products that exchange their rows through it.

The products are PyTorch's (`torch.ops.symm_mem.fused_*`): a product is cut along its rows into as many parts as there
are ranks, and copy engines move one part while another is computed. NVLink multicast is never used: it is switched off
before a group's ranks first meet, and each buffer is looked at.

Legend: R ranks, s rows of a rank, I = in, O = out features; s may stand for several leading dimensions.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from te_fuser.ops.group import Group

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
NATIVE = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"
_OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
_WITHOUT = "leave what uses it out by te_fuser.fusions.disabled, and NCCL exchanges as before"

# What captured CUDA graphs go by, which has to stay when a larger one takes its place; by its addresses.
_graphed: dict[tuple[int, ...], Any] = {}


# ------------------------------------------------------------------------------------------------ can it be used


def obstacle(group: Group, device: torch.device) -> str | None:
    """Why the ranks of a group have no symmetric memory on the device at hand, in words; None where nothing is known.

    It asks this process alone: what other ranks lack shows when a plan first runs.
    """
    if device.type != "cuda":
        return f"symmetric memory is of GPUs, the input is on {device.type}"
    why = _why_no_operators(device) or _why_multicast()
    if why is None and not group.is_here():
        why = f"torch.distributed knows no group {group.title!r} in this process"
    return why or _why_not_one_host(group) or _why_no_peers(group, device)


def _why_no_operators(device: torch.device) -> str | None:
    """Why PyTorch has no such products."""
    try:
        memory = _memory()
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        return f"this PyTorch has no torch.ops.symm_mem.{missing[0]}"
    backend = memory.get_backend(device)
    if backend != "CUDA":
        return f"PyTorch's symmetric memory is by {backend} here, and this takes that by CUDA: unset TORCH_SYMMMEM"
    if NATIVE in os.environ:
        return f"{NATIVE} is set, by which some of PyTorch's products go by another kernel, unchecked here: unset it"
    return None


def _why_multicast() -> str | None:
    """Why NVLink multicast would be used."""
    asked = os.environ.get(MULTICAST, "1")
    return None if asked == "1" else f"{MULTICAST}={asked} asks for NVLink multicast, which is not used here: unset it"


def _why_not_one_host(group: Group) -> str | None:
    """Why the ranks are not those of one host, as far as who started them says so."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or local == "0":
        return None
    ranks = torch.distributed.get_process_group_ranks(group.process_group())
    hosts = {rank // int(local) for rank in ranks}
    return None if len(hosts) == 1 else f"the ranks of {group.title} are on {len(hosts)} hosts"


def _why_no_peers(group: Group, device: torch.device) -> str | None:
    """Why the GPUs of this host are too few, or do not read one another's memory."""
    count, index = torch.cuda.device_count(), torch.cuda.current_device() if device.index is None else device.index
    if count < group.size and os.environ.get(OVERLAPPING) != "1":
        return (
            f"this process sees {count} GPU{'' if count == 1 else 's'}, and {group.title} has {group.size} ranks: let "
            "each process see all of them, and choose its own by torch.cuda.set_device"
        )
    others = [k for k in range(count) if k != index and not torch.cuda.can_device_access_peer(index, k)]
    return f"GPU {index} cannot access the memory of GPU {others[0]}" if others else None


# ------------------------------------------------------------------------------------------------------ buffers


def workspace(group: Group, size: int) -> None:
    """Have a buffer of so many bytes at least on each rank; where there is none yet, all ranks have to come.

    Raises:
        RuntimeError: where it cannot be had, or by NVLink multicast alone.
    """
    os.environ.setdefault(MULTICAST, "1")
    why = _why_multicast()
    if why is not None:
        raise RuntimeError(f"symmetric memory of {group.title} cannot be had: {why}")
    try:
        found = _memory().get_symm_mem_workspace(group.name, size)
    except RuntimeError as error:
        raise RuntimeError(
            f"symmetric memory of {group.title} cannot be had in {size} bytes ({error}): {_WITHOUT}"
        ) from error
    if found.multicast_ptr:
        raise RuntimeError(
            f"the symmetric memory of {group.title} was made with NVLink multicast, which is not used here: set "
            f"{MULTICAST}=1 before anything else makes it, or {_WITHOUT}"
        )
    if torch.cuda.is_current_stream_capturing():
        _graphed[tuple(found.buffer_ptrs)] = found


def _memory() -> Any:
    """PyTorch's module, which takes its time to be imported."""
    return importlib.import_module("torch.distributed._symmetric_memory")


# ----------------------------------------------------------------------------------------------------- products


def all_gather_matmul(x: torch.Tensor, b: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the rows of all ranks, and multiply them: (joined b, joined).

    Args:
        x: [s, I] of each rank, joined along its first dimension.
        b: [I, O], in any layout.

    Returns:
        [R s, O], and [R s, I].

    Raises:
        RuntimeError: as `workspace` does.
    """
    x = x.contiguous()
    if not x.numel() or not b.numel():
        joined = x.new_zeros(group.size * x.shape[0], *x.shape[1:])
        return joined @ b, joined
    workspace(group, x.numel() * x.element_size())
    # The joined rows are asked for in any case: without them small ones would go by NVLink multicast.
    joined, made = torch.ops.symm_mem.fused_all_gather_matmul(x, [b], 0, group.name)
    return made[0], joined


def matmul_reduce_scatter(x: torch.Tensor, b: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' x b; the terms are rounded, and added up in float32.

    Args:
        x: [R s, I] of each rank, cut along its first dimension.
        b: [I, O], in any layout.

    Returns:
        [s, O].

    Raises:
        RuntimeError: as `workspace` does.
    """
    x = x.contiguous()
    rows = x.shape[0] // group.size
    if not x.numel() or not b.numel():
        return x.new_zeros(rows, *x.shape[1:-1], b.shape[1])
    part = x[:rows].numel() // x.shape[-1] * b.shape[1] * x.element_size()
    workspace(group, 2 * part)  # one is read by others while the next is computed
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b, "sum", 0, group.name)  # type: ignore[no-any-return]
