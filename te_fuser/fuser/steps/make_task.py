"""What a maker makes of the parameters of a list, as a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fuser import _native
from te_fuser.fuser.steps.step import Bench, Runner, Step, Task
from te_fuser.record import record

if TYPE_CHECKING:
    import torch

    from te_fuser.codegen.written import WrittenKernel
    from te_fuser.fusions.registry import Maker, Wanted


@record()
class MakeTask(Task):
    """Makes parameters of others, before the segments of a call.

    Attributes:
        wanted: of each op that something is made for.
    """

    what = "before"
    call = "product"
    compares = False

    maker: Maker
    wanted: tuple[Wanted, ...]
    device: torch.device
    ops: tuple[int, ...]

    @property
    def identity(self) -> object:
        return self.maker, [(w.makes, w.again, tuple(w.given.values())) for w in self.wanted]

    @property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        return self.maker.written(self.wanted)

    def runner(self, step: Step, bench: Bench) -> Runner:
        reads, writes = ([bench.slots[r] for r in refs] for refs in (step.reads(), step.writes()))
        return _native.FunctionStep(step.name, self.maker.function(self.wanted, self.device), reads, writes)
