"""Outputs of a generated CUDA kernel that may be stored over its inputs.

Every schedule keeps to one rule: the thread that stores the vector at `column` of a row (of each part of it) is the
only one that reads it there, and it has read all parts when it stores the first.

    columns      a thread loads the vectors of `ahead` rows of its own columns, then computes and stores them
    tile         the same; what is stored transposed or by blocks overwrites nothing
    registers    a thread loads its vectors of a row before the first pass, and stores them in the last
    shared       a thread copies what it will read itself; what is on its way meanwhile belongs to later rows
    reread       each pass reads a thread's own vectors again, the last one right before it stores them
    two kernels  the second reads again what the first would have overwritten: none (`schedule.split`)

Threads beyond the last row compute it once more, and neither store nor sum that. Shared numbers are never overwritten.
"""

from __future__ import annotations

import functools
from collections.abc import Container

from te_fuser.codegen import schedule_model
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import KernelDescription, Load, Store, axes_text, is_in_blocks, is_transposed
from te_fuser.codegen.schedule import limits_of
from te_fuser.formula.expr import Axes


def refusal(description: KernelDescription, store: Store, load: Load) -> str:
    """Reason for which a store cannot have a load's memory; empty when it can."""
    for tensor in (store, load):
        if tensor.axes != Axes.FULL:
            return f"{tensor.name} has no element for each row and feature ({axes_text(tensor.axes)})"
    if is_transposed(store):
        return f"{store.name} is stored transposed"
    if is_in_blocks(store):
        return f"{store.name} is stored by blocks"
    if store.dtype != load.dtype:
        return f"{store.name} is {store.dtype}, {load.name} is {load.dtype}"
    if store.width != load.width:
        return f"{store.name} has {store.width} features, {load.name} has {load.width}"
    for node in description.nodes:
        if node.op != "input" or node.attrs[0] != load.name:
            continue
        if node.axes != Axes.FULL or node.width != description.width or node.attrs[1] % description.width:
            return f"{load.name} is read by other threads than those that store its elements"
    return ""


def pairs(description: KernelDescription, dying: Container[str]) -> tuple[tuple[str, str], ...]:
    """(store, load) for outputs that can be stored over the loads `dying`, each once at most."""
    found: dict[str, str] = {}
    for store in description.stores:
        free = (t for t in description.loads if t.name in dying and t.name not in found.values())
        load = next((t for t in free if not refusal(description, store, t)), None)
        if load is not None:
            found[store.name] = load.name
    return tuple(found.items())


@functools.lru_cache(maxsize=256)
def is_cut(description: KernelDescription, arch: str) -> bool:
    """True where column sums need a kernel of their own; then it overwrites nothing."""
    if not (description.sums and description.reductions):
        return False
    return schedule_model.pick(rewrite(description), limits_of(arch)) is None
