"""Gradients and parameters that DistributedDataParallel and fully_shard exchange, by copy engines instead of NCCL."""

# No postponed annotations: DistributedDataParallel reads those of its hooks.
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from te_fuser.distributed.group import Group
from te_fuser.kernels import peers


def use_copy_engines(model: nn.Module) -> None:
    """Let a model's ranks exchange gradients and parameters by the copy engines of their GPUs.

    NCCL's kernels take multiprocessors from the backward that they run beside; copies take none. Gradients are added up
    in float32 and rounded once. Buffers that the ranks write to take three times what the largest exchange has on all
    ranks: the largest bucket of `DistributedDataParallel`, the largest module that `fully_shard` was called with.

    Args:
        model: one that `DistributedDataParallel` or `fully_shard` wraps, of the ranks of one host. Of `fully_shard`
            each module inside that it was called with goes alike; sums over replicas stay NCCL's.

    Raises:
        TypeError: for another model.
        RuntimeError: at the first exchange, where GPUs cannot write to one another, with the reason.
        ValueError: at the first exchange, for a sum with a factor (`set_reduce_scatter_divide_factor`).
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(_AllReduce(model.process_group), _AllReduce.start)  # type: ignore[arg-type]
        return
    shared = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not shared:
        raise TypeError(
            f"use_copy_engines takes a model that DistributedDataParallel or fully_shard wraps, got "
            f"{type(model).__name__}: wrap it first; models that parallelize has cut go by copy engines as they are"
        )
    for module in shared:
        module.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]


def _transport(process_group: dist.ProcessGroup, device: torch.device) -> peers.ByCopies:
    group = Group.of("use_copy_engines", process_group)
    why = peers.obstacle(group, device)
    if why is not None:
        raise RuntimeError(f"use_copy_engines: {why}; without it NCCL exchanges as before")
    return peers.PeersOf(group, device).transport()


class _Allocating:
    """Memory of an exchange from PyTorch's allocator, as fully_shard asks for it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocating):
    """What `FSDPModule.set_custom_all_gather` takes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        if group.size() == 1:
            output_tensor.copy_(input_tensor)
        else:
            _transport(group, output_tensor.device).gather(input_tensor, output_tensor).wait()


class _ReduceScatter(_Allocating):
    """What `FSDPModule.set_custom_reduce_scatter` takes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"use_copy_engines: gradients are added up or averaged, fully_shard asks for {op}: leave out "
                "set_reduce_scatter_divide_factor, or use_copy_engines"
            )
        by = _transport(group, output_tensor.device)
        by.scatter(input_tensor, output_tensor, mean=op == dist.ReduceOp.AVG).wait()


class _AllReduce:
    """The average of a bucket's gradients, as a communication hook of DistributedDataParallel.

    Each rank averages its block of the bucket, and all gather these, on a stream beside backward's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._stream: torch.cuda.Stream | None = None

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        if not whole.is_cuda:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(self._averaged(whole))
            return done
        if self._stream is None:
            self._stream = torch.cuda.Stream(whole.device)
        self._stream.wait_stream(torch.cuda.current_stream(whole.device))
        done = torch.futures.Future(devices=[whole.device])
        with torch.cuda.stream(self._stream):
            done.set_result(self._averaged(whole))
        return done

    def _averaged(self, whole: torch.Tensor) -> torch.Tensor:
        ranks = self._group.size()
        if ranks == 1:
            return whole
        by = _transport(self._group, whole.device)
        padded = nn.functional.pad(whole, (0, -whole.numel() % ranks)) if whole.numel() % ranks else whole
        own = padded.new_empty(padded.numel() // ranks)
        by.scatter(padded, own, mean=True).wait()
        by.gather(own, padded).wait()
        return whole if padded is whole else whole.copy_(padded[: whole.numel()])
