"""A step of a plan: what it reads and makes, what it takes, and the task that knows how it runs."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from te_fuser.record import record

if TYPE_CHECKING:
    import torch

    from te_fuser.codegen.cuda_source_kernel import WrittenKernel
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.graph.refs import Ref
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.op_tasks import RowProduct
    from te_fuser.fusions.match import ByBlocks, Cost
    from te_fuser.ops.base import Spec

Slots = list[Any]
Runner = Callable[[Slots], None]
# kernel(tensors: loads, seed if it draws, stores, sums; rows; batch_inner; batch_size; stream numbers)
KernelFunction = Callable[[tuple["torch.Tensor", ...], int, int, int, tuple[int, ...]], None]


@record(eq=False)
class Price:
    """Cost of a step as a question to cost models; steps that are alike share one."""

    method: str | Callable[..., Cost]  # of the model, or a function of it
    arguments: tuple[Any, ...]


class SlotMap:
    """Numbers for refs."""

    def __init__(self) -> None:
        self.numbers: dict[Ref, int] = {}

    def __getitem__(self, ref: Ref) -> int:
        return self.numbers.setdefault(ref, len(self.numbers))

    def __contains__(self, ref: Ref) -> bool:
        return ref in self.numbers

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class Bench:
    """Slots and kernels with which a task is made ready to run; `dying` slots nobody reads after it."""

    slots: SlotMap
    kernels: Mapping[str, KernelFunction]
    dying: Container[int] = ()


class Called(NamedTuple):
    """A plain function of tensors, and what it is called with."""

    function: Callable[..., Any]
    reads: tuple[Ref, ...]


class Task:
    """Work of a step; a class for each way to do it.

    Attributes:
        what: the word that explain() has for it.
        call: what its call costs the host, as `Host.calls` has it.
        compares: whether verify can hold what it makes against the reference; else it runs as it is.
        hangs: whether it may read what was computed again in backward, as a gradient of parameters alone may.
        own_memory: whether what it makes is memory of its own, and it keeps nothing of what it reads and runs on the
            current stream alone.
        description: the generated kernel that it launches, if it does.
        aliases: (new name, the tensor that it is).
        written: the kernels written by hand that it launches.
        notes: where it leaves what is no tensor for its own backward.
        waits: whether it ends what an earlier step has started.
        ops: those of the step that it is for, where these are not all.
        kernel: the task itself, where it is a generated kernel.
        takes_blocks: how it can take a tensor by blocks, where it does not yet.
        row_product: the native product of rows that it is, where it is one.
    """

    what: str = "op"
    call: str = "method"
    compares: bool = True
    hangs: bool = False
    own_memory: bool = False
    description: KernelDescription | None = None
    aliases: tuple[tuple[Ref, Ref], ...] = ()
    written: tuple[WrittenKernel, ...] = ()
    notes: Ref | None = None
    waits: bool = False
    ops: tuple[int, ...] = ()
    kernel: KernelTask | None = None
    takes_blocks: ByBlocks | None = None
    row_product: RowProduct | None = None

    @property
    def identity(self) -> Any:
        """Key, equal for tasks of equal steps that run alike, whatever their sizes."""
        return self

    def runner(self, step: Step, bench: Bench) -> Runner:
        raise NotImplementedError

    def called(self, step: Step) -> Called | None:
        """The function of tensors that the step comes to; None: it is more."""
        return None

    def sizes(self, x: Spec) -> tuple[int, int, int] | None:
        """Rows, batch_inner and samples of the generated kernel that it launches, if any."""
        return None

    def storing_over(self, dying: Callable[[Ref, Ref, str], bool], arch: str) -> Task:
        """The task with outputs stored over inputs; `dying`: f(input, lead, dtype) says which may be taken."""
        return self

    def phases(self, step: Step) -> tuple[Step, ...]:
        """Its step, or the two of one that starts something and waits for it later."""
        return (step,)

    def taking_blocks(self) -> Task:
        """The task with a tensor taken by blocks, where it can."""
        return self

    def giving_blocks(self, names: Sequence[str], blocks: ByBlocks) -> Task | None:
        """The task with the outputs of these names by blocks; None where it cannot."""
        return None

    def renamed(self, renames: Mapping[Ref, Ref]) -> Task:
        return self

    def at(self, node: Node) -> Task:
        return self

    def runs_by(self) -> str:
        """Description of what a library runs it by, as far as that is known; empty for all others."""
        return ""


@record()
class Step:
    """One entry of a plan, for the ops start..stop-1."""

    name: str  # the kernel or library call
    start: int
    stop: int
    inputs: tuple[tuple[str, Ref], ...]
    outputs: tuple[tuple[str, Ref], ...]
    task: Task
    cost: Cost
    seconds: float
    host: float = 0.0  # seconds of its call
    chain: bool = True  # in backward, the next step's gradient depends on it
    price: Price | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        takes, gives = (", ".join(name for name, _ in named) for named in (self.inputs, self.outputs))
        ops = f"op {self.start}" if self.stop == self.start + 1 else f"ops {self.start}-{self.stop - 1}"
        return f"<Step {self.name}, {ops}: {takes} -> {gives}>"

    @property
    def hangs(self) -> bool:
        """True for a step of backward that no later one waits for."""
        return self.task.hangs and not self.chain

    def reads(self) -> list[Ref]:
        return [r for _, r in self.inputs]

    def writes(self) -> list[Ref]:
        return [r for _, r in self.outputs]


def made_name(name: str) -> str:
    """Name that a method has for a gradient: a step's name for it without `d_`."""
    return name.removeprefix("d_")
