"""A product as a task whose rows ranks exchange while it runs, by copy engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_fuser import _native
from te_fuser.fuser.steps.step import Task, made_name
from te_fuser.kernels.peers import PeersOf, closed
from te_fuser.record import record

if TYPE_CHECKING:
    import torch

    from te_fuser.codegen.cuda_source_kernel import WrittenKernel
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.steps.step import Bench, Runner, Step

BUFFER = "buffer"  # where parts of a sum lie
GATHERED = "gathered"  # what a step calls the rows of all ranks that it gives beside its product


@record()
class PeerProductTask(Task):
    """A native product of rows, of rows that are gathered, or scattered and added up.

    Attributes:
        product: the task of the product alone.
        scatters: whether it scatters what it makes; else it gathers the first tensor that it takes.
        group: the ranks, on `device`.
        adds: whether it adds up what was scattered; else it gives all ranks' parts, and the buffer they lie in.
    """

    what = "fusion"
    call = "product"

    product: Task
    scatters: bool
    group: Group
    device: torch.device
    adds: bool = True

    @property
    def identity(self) -> Any:
        return self.product.identity, self.scatters, self.group, self.device, self.adds

    @property
    def own_memory(self) -> bool:  # type: ignore[override]
        return self.adds

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.adds

    @property
    def hangs(self) -> bool:  # type: ignore[override]
        return self.product.hangs

    @property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        return self.product.written

    def runs_by(self) -> str:
        return self.product.runs_by()

    def runner(self, step: Step, bench: Bench) -> Runner:
        """A native step, which runs without the interpreter but for what PyTorch allocates."""
        product, peers = self.product.row_product, PeersOf(self.group, self.device)
        assert product is not None
        read, made = dict(step.inputs), {made_name(name): bench.slots[r] for name, r in step.outputs}
        inputs = [bench.slots[read[name]] for name in product.takes]
        if self.scatters:
            function = _native.MatmulScatter(product.make, peers, not self.adds)
            return _native.FunctionStep(step.name, function, inputs, [*made.values()])
        outputs = [made.get(name, -1) for name in product.gives]
        gives = GATHERED in made
        gather = _native.GatherMatmul(product.make, peers, gives)
        return _native.FunctionStep(step.name, gather, inputs, [*outputs, *([made[GATHERED]] if gives else [])])


@record()
class CloseTask(Task):
    """Gives back the buffer of a sum's parts, when these were read."""

    what = "torch"
    call = "torch"
    compares = False
    own_memory = True

    def runner(self, step: Step, bench: Bench) -> Runner:
        return _native.FunctionStep(step.name, closed, [bench.slots[dict(step.inputs)[BUFFER]]], [])
