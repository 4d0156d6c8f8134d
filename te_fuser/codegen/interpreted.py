"""A kernel description run by PyTorch operations: float64, and devices without a generated kernel."""

from __future__ import annotations

import functools

import torch

from te_fuser.codegen.description import KernelDescription, Store, Sum, is_transposed, padded
from te_fuser.dtypes import FLOAT8
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.expr import Axes
from te_fuser.formula.float8 import rounded
from te_fuser.formula.random import RandomStream, RankPlacement


class InterpretedKernel:
    """Called like a generated kernel: (tensors, rows, batch_inner, batch_size, integers)."""

    def __init__(self, description: KernelDescription) -> None:
        if description.in_blocks:
            raise ValueError(f"kernel {description.name}: blocks of 8 bits are made by kernels of a GPU alone")
        self.description = description

    def __call__(
        self, tensors: tuple[torch.Tensor, ...], rows: int, batch_inner: int, batch_size: int, streams: tuple[int, ...]
    ) -> None:
        d = self.description
        loads = {load.name: self._shaped(load.axes, load.width, t) for load, t in zip(d.loads, tensors, strict=False)}
        slots, rest = tensors[len(d.loads) : len(d.loads) + len(d.maxima)], tensors[len(d.loads) + len(d.maxima) :]
        numbers = self._streams(rest[0], streams) if d.streams else {}
        outputs = rest[1:] if d.streams else rest
        like = outputs[0] if outputs else tensors[0]
        if any(t.dtype == torch.float64 for t in (*loads.values(), *outputs)):
            like = like.new_empty(0, dtype=torch.float64)
        machine = Interpreter(loads, numbers, rows, like, (batch_inner, batch_size))
        found = machine.run(d.roots)
        at = 0
        for item, out in zip(d.outputs, outputs, strict=True):
            parts = found[at : at + len(item.parts)]
            at += len(item.parts)
            self._write(item, parts, out, (rows, batch_inner, batch_size))
        for maximum, slot in zip(d.maxima, slots, strict=True):
            largest = [slot, *(p.abs().amax().to(slot.dtype) for p in found[at : at + len(maximum.parts)] if p.numel())]
            at += len(maximum.parts)
            slot.copy_(functools.reduce(torch.maximum, largest))

    def _shaped(self, axes: Axes, width: int, t: torch.Tensor) -> torch.Tensor:
        if axes & Axes.FEATURE:
            return t.reshape(-1, width) if axes & Axes.ROWS else t.reshape(width)
        return t.reshape(-1) if axes & Axes.ROWS else t.reshape(())

    def _streams(self, seed: torch.Tensor, numbers: tuple[int, ...]) -> dict[str, RandomStream]:
        value, offset = seed.tolist()
        names, shared = self.description.streams, dict(self.description.shared)
        places = numbers[len(names) :]
        return {
            name: RandomStream(
                value, offset, k, placed=RankPlacement(shared[name], *places) if name in shared else None
            )
            for name, k in zip(names, numbers, strict=False)
        }

    def _write(
        self, item: Store | Sum, parts: list[torch.Tensor], out: torch.Tensor, layout: tuple[int, int, int]
    ) -> None:
        if len(parts) > 1:  # a part without features fills its place
            parts = [p.expand(-1, self.description.width) for p in parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        rows, inner, samples = layout
        if item.axes & Axes.FEATURE:
            whole = whole.expand(rows, item.width)
        if isinstance(item, Sum):
            if item.axes & Axes.BATCH:
                index = (torch.arange(rows, device=out.device) // inner) % samples
                total = torch.zeros(samples, item.width, dtype=whole.dtype, device=out.device)
                whole = total.index_add_(0, index, whole.contiguous())
            else:
                whole = whole.sum(0) if item.axes & Axes.FEATURE else whole.sum()
        elif is_transposed(item):
            whole = torch.nn.functional.pad(whole.mT, (0, padded(rows) - rows))
        whole = whole.reshape(out.shape)
        out.copy_(rounded(whole, out.dtype) if out.dtype in FLOAT8.values() else whole)
