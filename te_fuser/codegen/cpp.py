"""C++ from a kernel description: readable text for a CPU core, and what the runtime must know to call it.

One function goes over the rows; with sums over rows, a second one adds up the partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from te_fuser.codegen.cpp_schedule import Loop
from te_fuser.codegen.cpp_scope import (
    ATOM,
    ELEMENTS,
    CppKernelText,
    CppNames,
    Fragment,
    LoopScope,
    Scope,
    plus,
)
from te_fuser.codegen.description import (
    PLACES,
    KernelDescription,
    Load,
    Store,
    Sum,
    axes_text,
    is_transposed,
    item_size,
)
from te_fuser.codegen.text import identifier, part_name
from te_fuser.formula.expr import Axes, Expr

_PADDING = 16  # floats: the widest vector
_ALIGNED = 32  # random bits of 16: those of the widest vector
_PREFETCH_FROM = 1024  # bytes: the next row of a tensor is fetched early when its rows are at least so long

# -------------------------------------------------------------------------------------- sums over rows


def _padded(count: int) -> int:
    """Whole vectors, in floats."""
    return -(-count // _PADDING) * _PADDING


@dataclass(frozen=True)
class RowsSum:
    """One part of a sum over rows, and its place in a worker's block, or a sample's share."""

    total: Sum
    part: Expr
    first: int  # the element of the stored tensor (or of its sample's row) where the part begins
    count: int
    offset: int
    name: str

    @property
    def per_sample(self) -> bool:
        """True where each sample has a sum of its own."""
        return bool(self.total.axes & Axes.BATCH)

    @property
    def has_features(self) -> bool:
        """True where each feature has a sum of its own."""
        return bool(self.total.axes & Axes.FEATURE)

    @property
    def partial(self) -> str:
        """The pointer to its partial sums."""
        return plus("sample_partial" if self.per_sample else "partial", self.offset)


def _place_sums(d: KernelDescription, names: CppNames) -> list[RowsSum]:
    """The parts of the sums, one behind the other in a worker's block or a sample's share."""
    placed: list[RowsSum] = []
    offsets = {False: 0, True: 0}  # per sample or not -> the floats given away
    for total in d.sums:
        count = d.width if total.axes & Axes.FEATURE else 1
        per_sample = bool(total.axes & Axes.BATCH)
        for index, part in enumerate(total.parts):
            name = names.fresh(part_name(total.name, index, len(total.parts)) + "_sum")
            placed.append(RowsSum(total, part, index * count, count, offsets[per_sample], name))
            offsets[per_sample] += 2 * _padded(count)
    return placed


# -------------------------------------------------------------------------------------------- the kernel


class Kernel(CppKernelText):
    """Writes the functions of one kernel."""

    def __init__(self, symbol: str, description: KernelDescription) -> None:
        super().__init__(description)
        self.symbol = symbol
        self.sums = _place_sums(description, self.names)
        self.largest = {m.name: self.names.fresh(f"{m.name}_largest") for m in description.maxima}
        self.partial_floats, self.partial_floats_per_sample = (
            sum(2 * _padded(s.count) for s in self.sums if s.per_sample == per_sample) for per_sample in (False, True)
        )
        self.scratch_floats = 0

    def write(self) -> str:
        """The text of the functions."""
        self.lines(f"// {self.d.name}, {self.d.width} features")
        for kind, items in (("load ", self.d.loads), ("store", self.d.stores), ("sum  ", self.d.sums)):
            for t in items:  # type: ignore[attr-defined]
                self.lines(f"//   {kind} {t.name}: {axes_text(t.axes)} x {t.width} {t.dtype}")
        for m in self.d.maxima:
            self.lines(f"//   max   {m.name}: full x {m.width}")
        with self.lines.block(_signature(self.symbol, "rows", "int64_t row_begin, int64_t row_end, int64_t worker")):
            self._rows_function()
        if self.sums:
            self.lines()
            with self.lines.block(_signature(self.symbol, "finish", "int64_t workers")):
                self._finish_function()
        return "\n".join(self.lines.lines) + "\n"

    def _rows_function(self) -> None:
        seeds = len(self.d.maxima) + bool(self.d.streams)
        for index, load in enumerate(self.d.loads):
            self._pointer(load, f"const {ELEMENTS[load.dtype]}", index)
        for index, store in enumerate(self.d.stores, len(self.d.loads) + seeds):
            self._pointer(store, ELEMENTS[store.dtype], index)
        self._stream_numbers()
        self._divide_scratch()
        scalars = Scope(self, self.schedule.scalar_roots, {})
        for e in self.schedule.call_constants():
            scalars.named(e)
        for s in self.sums:
            if s.has_features:
                self.lines(f"te::clear_block({s.name}, {_padded(s.count)});")
            elif not s.per_sample:
                self.lines(f"double {s.name} = 0.0;")
        for name in self.largest.values():
            self.lines(f"te::words {name}{{}};")
        if self.schedule.is_one_long_row:
            self._loop(self.schedule.loops[-1], scalars)
        elif self.sums:
            self._blocks_of_rows(scalars)
        else:
            with self.lines.block("for (int64_t row = row_begin; row < row_end; ++row)"):
                if self.schedule.uses_samples:
                    self._sample_pointers()
                self._row(scalars)
        for s in self.sums:
            if not s.has_features and not s.per_sample:
                self.lines(f"te::store_partial({s.partial}, {s.name});")
        for index, name in enumerate(self.largest.values(), len(self.d.loads)):
            self.lines(f"te::raise(te::tensor<float>(launch, {index}), {name});")
        for t in self.d.transposed:
            self.lines(f"if (row_end == launch->rows) te::clear_padding({self.tensors[id(t)]}, {t.width}, launch);")

    # -- pointers and scratch

    def _pointer(self, tensor: Load | Store, element: str, index: int) -> None:
        self.lines(f"{element}* const {self.tensors[id(tensor)]} = te::tensor<{element}>(launch, {index});")

    def _stream_numbers(self) -> None:
        self.streams = {name: self.names.fresh(f"{name}_stream") for name in self.d.streams}
        for number, variable in enumerate(self.streams.values()):
            seed = len(self.d.loads) + len(self.d.maxima)
            self.lines(f"const te::random_stream {variable} = te::stream_of(launch, {seed}, {number});")
        for number, name in enumerate(PLACES if self.d.shared else (), len(self.d.streams)):
            self.places[name] = self.names.fresh(name)
            self.lines(f"const int64_t {self.places[name]} = launch->integers[{number}];")

    def _divide_scratch(self) -> None:
        """Give row buffers, the blocks of the sums and the random bits their places."""
        if self.sums:
            self.lines("float* const partial = launch->partials[worker];")
        start = len(self.lines.lines)
        for loop in self.schedule.loops:
            for e in loop.buffered:
                self.buffers[id(e)] = self._scratch(f"{self.value_name(e)}_buffer", _padded(self.d.width))
        for s in self.sums:
            if s.has_features:
                self._scratch(s.name, _padded(s.count), fresh=False)
        for name, width in self.schedule.drawn_streams().items():
            groups = -(-width // 8) + (_PADDING if self.d.share_of(name) else 0)  # whole vectors from a later one on
            floats = _padded(groups) * 4 + _PADDING
            self.bits[name] = self._scratch(f"{name}_bits", floats, "uint16_t")
        if self.scratch_floats:
            self.lines.lines.insert(start, "  float* const scratch = launch->scratch[worker];")

    def _scratch(self, role: str, floats: int, element: str = "float", *, fresh: bool = True) -> str:
        name = self.names.fresh(role) if fresh else role
        place = plus("scratch", self.scratch_floats)
        self.lines(
            f"{element}* const {name} = {place};"
            if element == "float"
            else f"{element}* const {name} = reinterpret_cast<{element}*>({place});"
        )
        self.scratch_floats += floats
        return name

    # -- rows

    def _blocks_of_rows(self, scalars: Scope) -> None:
        end = "block_end_in_sample(row, row_end, launch)" if self.schedule.uses_samples else "block_end(row, row_end)"
        with self.lines.block("for (int64_t row = row_begin; row < row_end;)"):
            self.lines(f"const int64_t block_end = te::{end};")
            if self.schedule.uses_samples:
                self._sample_pointers()
            batch_sums = [s for s in self.sums if s.per_sample and not s.has_features]
            for s in batch_sums:
                self.lines(f"double {s.name} = 0.0;")
            with self.lines.block("for (; row < block_end; ++row)"):
                self._row(scalars)
            for s in self.sums:
                if s.has_features:
                    self.lines(f"te::flush_block<{_padded(s.count)}>({s.name}, {s.partial});")
            for s in batch_sums:
                self.lines(f"te::add_to_partial({s.partial}, {s.name});")

    def _sample_pointers(self) -> None:
        self.lines("const int64_t sample = te::sample_of(row, launch);")
        if self.partial_floats_per_sample:
            step = f"sample * {self.partial_floats_per_sample}"
            self.lines(f"float* const sample_partial = {plus('partial', self.partial_floats, step)};")
        for load in self.d.loads:
            if load.axes == Axes.SAMPLE_FEATURES:
                self._row_pointer_line(load, f"const {ELEMENTS[load.dtype]}", "sample")

    def _row_pointer_line(self, tensor: Load | Store, element: str, index: str) -> None:
        name = self.tensors[id(tensor)]
        self.lines(f"{element}* const {self.row_pointer(tensor)} = {name} + {index} * {tensor.width};")

    def _row(self, outer: Scope) -> None:
        for load in self.d.loads:
            if load.axes == Axes.FULL:
                self._row_pointer_line(load, f"const {ELEMENTS[load.dtype]}", "row")
        for store in self.d.stores:
            if store.axes == Axes.FULL and not is_transposed(store):
                self._row_pointer_line(store, ELEMENTS[store.dtype], "row")
        for name, width in self.schedule.drawn_streams().items():
            self._draw_row(name, width)
        for loop in self.schedule.loops:
            self._loop(loop, outer)
        for store in self.d.stores:
            if not store.axes & Axes.FEATURE:
                self.lines(f"te::store({self.tensors[id(store)]} + row, {outer.number(store.parts[0]).text});")
        for s in self.sums:
            if not s.has_features:
                self.lines(f"{s.name} += {outer.number(s.part).text};")

    def _draw_row(self, name: str, width: int) -> None:
        """The bits of a row, of whose columns a rank may have blocks."""
        shared, row, bits, stream = self.d.share_of(name), "row", self.bits[name], self.streams[name]
        if shared is None:
            self.lines(f"te::draw_row({bits}, row, {-(-width // 8)}, {stream});")
            return
        if shared.rows > 1:
            apart = shared.rows if shared.apart else 1
            row = f"te::whole_of(row, {self.places['row_block']}, {self.places['row_rank']}, {apart})"
        block, ranks, rank = width // shared.parts, shared.columns, self.places["column_rank"]
        groups = -(-width * ranks // 8)
        if ranks == 1:
            self.lines(f"te::draw_row({bits}, {row}, {groups}, {stream});")
        elif block % (8 if shared.parts == 1 else _ALIGNED):
            self.lines(f"te::draw_apart({bits}, {row}, {width}, {width * ranks}, {block}, {ranks}, {rank}, {stream});")
        else:
            for k in range(shared.parts):  # each writes whole vectors, and the next one over what is too much
                begin = f"{row} * {groups} + {block // 8} * ({rank} + {k * ranks})"
                self.lines(f"te::draw_groups({plus(bits, k * block)}, {begin}, {block // 8}, {stream});")

    # -- one loop over the features

    def _loop(self, loop: Loop, outer: Scope) -> None:
        for e in self.schedule.scalars_of(loop):
            outer.named(e)
        unroll = self.schedule.unroll(loop)
        parts = {id(r): self.names.fresh(f"{self.value_name(r)}_parts") for r in loop.reductions}
        for r in loop.reductions:
            self.lines(f"te::{r.op}<{unroll}> {parts[id(r)]};")
        head = f"te::features<{self.d.width}, {unroll}>("
        if self.schedule.is_one_long_row:
            head = f"te::elements(row_begin * {self.d.width}, row_end * {self.d.width}, "
        with self.lines.block(f"{head}[&](te::place at) TE_BODY", "});"):
            body = LoopScope(self, loop, outer.known)
            for r in loop.reductions:
                self.lines(f"{parts[id(r)]}.add({body.argument(r.args[0])}, at);")
            if loop.last:
                self._stores_and_sums(body)
                self._expect_next_row()
        for r in loop.reductions:
            self.lines(f"const float {self.value_name(r)} = {parts[id(r)]}.total();")
            outer.known[id(r)] = Fragment(self.value_name(r), ATOM, False, named=True)

    def _stores_and_sums(self, body: LoopScope) -> None:
        for store in self.d.stores:
            for index, part in enumerate(store.parts if store.axes & Axes.FEATURE else ()):
                value = body.number(part).text
                if is_transposed(store):
                    place = f"{self.tensors[id(store)]}, launch, row, {index * self.d.width}"
                    self.lines(f"te::store_transposed({place}, at, {value});")
                else:
                    to = plus(self.row_pointer(store), index * self.d.width)
                    self.lines(f"te::store({to}, at, {value});")
        for s in self.sums:
            if s.has_features:
                self.lines(f"te::add_to_buffer({s.name}, at, {body.number(s.part).text});")
        for m in self.d.maxima:
            for part in m.parts:
                self.lines(f"te::take_larger({self.largest[m.name]}, at, {body.argument(part)});")

    def _expect_next_row(self) -> None:
        tensors: list[Load | Store] = [*self.d.loads, *(s for s in self.d.stores if not is_transposed(s))]
        for t in () if self.schedule.is_one_long_row else tensors:
            if t.axes == Axes.FULL and t.width * item_size(t.dtype) >= _PREFETCH_FROM:
                for offset in range(t.width, 2 * t.width, self.d.width):
                    self.lines(f"te::expect({plus(self.row_pointer(t), offset)}, at);")

    # -- the second function

    def _finish_function(self) -> None:
        first = len(self.d.loads) + len(self.d.maxima) + bool(self.d.streams) + len(self.d.stores)
        for index, total in enumerate(self.d.sums, first):
            element = ELEMENTS[total.dtype]
            self.lines(f"{element}* const {self.tensors[id(total)]} = te::tensor<{element}>(launch, {index});")
        for s in self.sums:
            if not s.per_sample:
                self._finish_line(s, plus(self.tensors[id(s.total)], s.first), str(s.offset))
        if self.partial_floats_per_sample:
            with self.lines.block("for (int64_t sample = 0; sample < launch->batch_size; ++sample)"):
                share = plus(f"sample * {self.partial_floats_per_sample}", self.partial_floats)
                self.lines(f"const int64_t share = {share};")
                for s in self.sums:
                    if s.per_sample:
                        row = f"sample * {s.total.width}" if s.has_features else "sample"
                        self._finish_line(s, plus(self.tensors[id(s.total)], row, s.first), plus("share", s.offset))

    def _finish_line(self, s: RowsSum, to: str, offset: str) -> None:
        self.lines(f"te::finish_sum(launch, workers, {to}, {offset}, {s.count}, {_padded(s.count)});")


def _signature(symbol: str, suffix: str, arguments: str) -> str:
    return f'extern "C" void {symbol}_{suffix}(\n    const te_launch* launch, {arguments})'


@dataclass(frozen=True)
class CppKernel:
    """The text of one kernel, and what the runtime must know to call it.

    `source` defines `<symbol>_rows` and, when there are sums over rows, `<symbol>_finish`; it needs `te_cpu.h`.
    """

    description: KernelDescription
    symbol: str
    source: str
    dtypes: tuple[str, ...]  # of the tensors: loads, maxima, then the seed if there are random streams, stores, sums
    partial_floats: int
    partial_floats_per_sample: int
    scratch_floats: int
    row_elements: int  # how many plain elements the work on one row is worth


def generate(description: KernelDescription) -> CppKernel:
    """Write the kernel.

    Raises:
        ValueError: for a dtype that kernels do not know, float64 above all; for what is stored by blocks.
    """
    for tensor in description.tensors:
        if tensor.dtype not in ELEMENTS:
            raise ValueError(
                f"kernel {description.name}: {tensor.name} is {tensor.dtype}; "
                f"generated kernels know {', '.join(ELEMENTS)}"
            )
    if description.in_blocks:
        raise ValueError(f"kernel {description.name}: blocks of 8 bits are made by kernels of a GPU alone")
    symbol = symbol_of(description)
    kernel = Kernel(symbol, description)
    raised = ("float32",) * len(description.maxima)
    seed = ("int64",) if description.streams else ()
    return CppKernel(
        description=description,
        symbol=symbol,
        source=kernel.write(),
        dtypes=(*(t.dtype for t in description.loads), *raised, *seed, *(t.dtype for t in description.outputs)),
        partial_floats=kernel.partial_floats,
        partial_floats_per_sample=kernel.partial_floats_per_sample,
        scratch_floats=kernel.scratch_floats,
        row_elements=kernel.schedule.row_elements(),
    )


def symbol_of(description: KernelDescription) -> str:
    """The name in the library: role and digest."""
    return f"{identifier(description.name)}_{description.key}"
