"""A generated kernel as a task."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fuser import _native
from te_fuser.codegen import in_place
from te_fuser.codegen.description import sizes_in_blocks
from te_fuser.codegen.schedule import narrowed
from te_fuser.dtypes import STORED
from te_fuser.formula.evaluate import batch_layout
from te_fuser.formula.expr import Axes, add, leaf
from te_fuser.formula.reductions import substitute
from te_fuser.fuser.graph.refs import PARAMETER, PARAMETER_GRADIENT, SEED, Ref
from te_fuser.fuser.steps.step import Bench, Runner, Step, Task
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription, Layout, Store
    from te_fuser.distributed.shard import Share
    from te_fuser.formula.expr import Expr
    from te_fuser.ops.base import Spec


class KernelOutput(NamedTuple):
    """A tensor that a kernel makes, of (axes, width) or of a fixed shape (parameters)."""

    ref: Ref
    axes: Axes
    width: int
    dtype: str
    shape: tuple[int, ...] | None = None

    @property
    def layout(self) -> Layout:
        return self.ref.form.layout


@record()
class KernelTask(Task):
    """A generated kernel in its place: the description and what its tensors are.

    Attributes:
        aliases: (new name, the tensor it is).
        lead: a full-size tensor whose leading dimensions the outputs have.
        raised: the numbers that it raises to largest magnitudes, in the order of the description's maxima.
        share: what this rank has of what is drawn for; None: all.
    """

    what = "kernel"
    call = "kernel"
    own_memory = True

    description: KernelDescription = field()  # not the default of other tasks
    inputs: tuple[Ref, ...]
    outputs: tuple[KernelOutput, ...]
    streams: tuple[int, ...]
    batch_dim: int | None
    aliases: tuple[tuple[Ref, Ref], ...] = field()
    lead: Ref
    raised: tuple[Ref, ...] = ()
    share: Share | None = None

    @property
    def identity(self) -> Any:
        return replace(self, description=self.description.key)  # type: ignore[arg-type]

    @property
    def kernel(self) -> KernelTask:  # type: ignore[override]
        return self

    @property
    def computes(self) -> bool:
        """True where there is a kernel at all; else outputs are other names of inputs."""
        return bool(self.description.stores or self.description.sums or self.description.maxima)

    def overwritten(self) -> list[Ref]:
        names = {load for _, load in self.description.overwrites}
        return [ref for ref, load in zip(self.inputs, self.description.loads, strict=True) if load.name in names]

    def sizes(self, x: Spec) -> tuple[int, int, int] | None:
        return (x.rows, *batch_layout(x.shape, self.batch_dim)) if self.computes else None

    def storing_over(self, dying: Callable[[Ref, Ref, str], bool], arch: str) -> KernelTask:
        d = self.description
        found = {
            load.name
            for ref, load in zip(self.inputs, d.loads, strict=True)
            if self.inputs.count(ref) == 1 and dying(ref, self.lead, load.dtype)
        }
        pairs = in_place.pairs(d, found) if found else ()
        if not pairs or in_place.is_cut(d, arch):
            return self
        return replace(self, description=replace(d, overwrites=pairs))

    def storing(
        self, stores: Iterable[Store], outputs: Iterable[KernelOutput], aliases: tuple[tuple[Ref, Ref], ...]
    ) -> KernelTask:
        """The kernel with other stores, without loads and streams that it then does not need."""
        d = self.description
        less = narrowed(replace(d, stores=tuple(stores), overwrites=()))
        inputs = dict(zip([t.name for t in d.loads], self.inputs, strict=True))
        streams = dict(zip(d.streams, self.streams, strict=True))
        return replace(
            self,
            description=replace(less, shared=tuple([pair for pair in less.shared if pair[0] in less.streams])),
            inputs=tuple([inputs[t.name] for t in less.loads]),
            outputs=tuple(outputs),
            streams=tuple([streams[name] for name in less.streams]),
            aliases=aliases,
        )

    def adding(self, ref: Ref, parts: Sequence[Ref]) -> KernelTask | None:
        """The kernel with `parts` in the place of `ref`, one of its inputs: it reads their sum, in float32.

        None where it reads parts of that tensor's features, reads it twice, or passes it on by another name.
        """
        d, at = self.description, [k for k, r in enumerate(self.inputs) if r == ref]
        if len(at) != 1 or not self.computes or ref in {old for _, old in self.aliases}:
            return None
        load = d.loads[at[0]]
        read = leaf(load.name, load.axes, load.width)
        if load.axes != Axes.FULL or any(n.attrs[0] == load.name and n is not read for n in d.nodes if n.op == "input"):
            return None
        loads = [replace(load, name=f"{load.name}_{k}") for k in range(len(parts))]
        total = functools.reduce(add, [leaf(t.name, t.axes, t.width) for t in loads])
        roots = iter(substitute(d.roots, lambda n: total if n is read else None))
        outputs: Any = (d.stores, d.sums, d.maxima)

        def parts_of(item: Any) -> tuple[Expr, ...]:
            return tuple([next(roots) for _ in item.parts])

        stores, sums, maxima = ([replace(item, parts=parts_of(item)) for item in items] for items in outputs)
        before, behind = slice(0, at[0]), slice(at[0] + 1, None)
        return replace(
            self,
            description=replace(
                d,
                loads=(*d.loads[before], *loads, *d.loads[behind]),
                stores=tuple(stores),
                sums=tuple(sums),
                maxima=tuple(maxima),
                overwrites=(),
            ),
            inputs=(*self.inputs[before], *parts, *self.inputs[behind]),
            lead=parts[0] if self.lead == ref else self.lead,
        )

    def moved(self, move: Callable[[Ref], Ref], streams: int) -> KernelTask:
        """The kernel on other tensors, with other numbers of streams."""
        return KernelTask(
            self.description,
            tuple(map(move, self.inputs)),
            tuple([KernelOutput(move(o.ref), o.axes, o.width, o.dtype, o.shape) for o in self.outputs]),
            tuple([s + streams for s in self.streams]),
            self.batch_dim,
            tuple([(move(new), move(old)) for new, old in self.aliases]),
            move(self.lead),
            tuple(map(move, self.raised)),
            self.share,
        )

    def renamed(self, renames: Mapping[Ref, Ref]) -> KernelTask:
        outs = tuple(o._replace(ref=renames.get(o.ref, o.ref)) for o in self.outputs)
        aliases = tuple((renames.get(a, a), renames.get(b, b)) for a, b in self.aliases)
        return replace(self, outputs=outs, aliases=aliases)

    def runner(self, step: Step, bench: Bench) -> Runner:
        """A native step: inputs made contiguous, outputs allocated, or those that die, launched."""
        description, slots = self.description, bench.slots
        kernel = bench.kernels[description.key] if self.computes else None
        refs = [*self.inputs, *self.raised, *([SEED] if description.streams else [])]
        widest = max((o.width * STORED[o.dtype].itemsize for o in self.outputs if o.axes & Axes.OUTER), default=0)
        return _native.KernelStep(
            description.name,
            # The native kernel itself, where there is one: its Python front takes as long as launching it.
            getattr(kernel, "run", kernel),
            [slots[r] for r in refs],
            slots[self.lead],
            self.batch_dim,
            [
                (
                    slots[o.ref],
                    -1 if alike is None else alike,
                    _shape_rule(o.axes, o.layout),
                    sizes_in_blocks("blocks", 0, o.width)[1] if o.layout == "blocks" else o.width,
                    o.shape,
                    STORED[o.dtype],
                )
                for o, alike in zip(self.outputs, self._alike(len(refs)), strict=True)
            ],
            self._integers(),
            [(slots[new], slots[old]) for new, old in self.aliases],
            LARGE // widest if widest else sys.maxsize,
            prefer_huge_pages,
            [
                # How many elements it has to have.
                *[(_shape_rule(d.axes), d.width if d.axes & Axes.FEATURE else 1) for d in description.loads],
                *[_ANY_SIZE] * (len(refs) - len(self.inputs)),
            ],
            [slots[r] for r in self.overwritten() if slots[r] in bench.dying],
            None if self.share is None or self.share.rows is None else self.share.dim,
        )

    def _integers(self) -> tuple[int, ...]:
        """The run-time integers; where ranks share the rows, each call adds the last."""
        if self.share is None:
            return self.streams
        block = () if self.share.rows is not None else (1,)
        return *self.streams, *self.share.ranks, *block

    def _alike(self, inputs: int) -> list[int | None]:
        """Number, for each output, of the first tensor of its sizes and dtype, if any."""
        forms: dict[Any, int] = {}
        for k, (ref, load) in enumerate(zip(self.inputs, self.description.loads, strict=True)):
            if ref == self.lead:
                forms["rows", _ROWS, load.width, load.dtype] = k
            elif ref.kind is PARAMETER:
                forms[ref.index, load.dtype] = k
        found = []
        for k, o in enumerate(self.outputs, inputs):
            form: Any = (o.layout, _shape_rule(o.axes, o.layout), o.width, o.dtype)
            if not o.axes & Axes.OUTER:
                form = (o.ref, o.dtype)
            if o.ref.kind is PARAMETER_GRADIENT and not o.ref.term:
                form = (o.ref.index, o.dtype)
            found.append(forms.get(form))
            forms.setdefault(form, k)
        return found


# How an output's sizes follow from a call's; in the order of the native runtime.
_ROWS, _FIXED, _SAMPLES, _SAMPLE_ROWS, _TRANSPOSED, _TRANSPOSED_BLOCKS = range(6)
_LYING = {"rows": _ROWS, "blocks": _ROWS, "transposed": _TRANSPOSED, "transposed_blocks": _TRANSPOSED_BLOCKS}
_ANY_SIZE = (_FIXED, -1)


def _shape_rule(axes: Axes, layout: Layout = "rows") -> int:
    """Rule, by number, for the sizes of a tensor with these axes in a call."""
    if axes & Axes.OUTER:
        return _LYING[layout]
    if axes & Axes.BATCH:
        return _SAMPLE_ROWS if axes & Axes.FEATURE else _SAMPLES
    return _FIXED


# The C library gives blocks beyond 32 MiB back to the system as soon as they are free, so that each large tensor is
# made of pages that were never touched. A page fault for each 4 KiB of it takes longer than the kernel that fills it.
LARGE = 32 * 2**20  # bytes; glibc's largest threshold for giving back
_PAGE = 4096
_MADV_HUGEPAGE = 14


def prefer_huge_pages(t: torch.Tensor) -> None:
    """Ask for 2 MiB pages under a large tensor that nobody has written to yet."""
    madvise = _madvise()
    if madvise is None or t.nbytes < LARGE or t.device.type != "cpu":
        return
    start = -(-t.data_ptr() // _PAGE) * _PAGE
    madvise(start, (t.data_ptr() + t.nbytes - start) // _PAGE * _PAGE, _MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's call; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
