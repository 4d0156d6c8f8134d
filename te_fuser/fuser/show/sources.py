"""The generated code of plans, each kernel once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    return {
        f"{d.name}: {'; '.join(few(users, 4))}": _WRITERS[plan.target](plan, d) for plan, d, users in found.values()
    }


def _cpp_source(plan: Plan, description: KernelDescription) -> str:
    from te_fuser.codegen.compiler import source_of

    return source_of(description)


def _cuda_source(plan: Plan, description: KernelDescription) -> str:
    from te_fuser.codegen.cuda import generate

    return generate(description, plan.device.arch).source


# What row kernels run as -> the text of one.
_WRITERS: dict[str, Callable[[Plan, KernelDescription], str]] = {
    "cpp": _cpp_source,
    "cuda": _cuda_source,
    "torch": lambda plan, description: str(description),
}
