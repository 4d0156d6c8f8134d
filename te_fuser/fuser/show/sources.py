"""The generated code of plans, each kernel once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from te_fuser.fuser.show.words import few, range_of

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.plan.plan import Plan


def sources(plans: Sequence[Plan]) -> dict[str, str]:
    """Heading -> generated code, of each distinct kernel of the plans; equal kernels come once."""
    found: dict[str, tuple[Plan, KernelDescription, list[str]]] = {}
    for plan in plans:
        for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
            for step in steps:
                d = step.task.description
                if d is None or d.key not in plan.generated:
                    continue
                _, _, users = found.setdefault(d.key, (plan, d, []))
                users.append(f"{direction}, {range_of(step.start, step.stop - 1)}")
    return {f"{d.name}: {'; '.join(few(users, 4))}": _text(plan, d) for plan, d, users in found.values()}


def _text(plan: Plan, description: KernelDescription) -> str:
    """A row kernel as it runs: C++, CUDA, or its formula."""
    from te_fuser.codegen import compiler, cuda

    if plan.target == "cpp":
        return compiler.source_of(description)
    return cuda.generate(description, plan.device.arch).source if plan.target == "cuda" else str(description)
