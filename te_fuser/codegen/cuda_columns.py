"""Functions of kernels whose threads own columns and walk down the rows, one by one or by tiles of 128."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from te_fuser.codegen.cuda_body import CudaKernelText
from te_fuser.codegen.cuda_text import CTYPES, part_role
from te_fuser.codegen.description import KernelDescription, Store, Sum, is_in_blocks, is_transposed, item_size
from te_fuser.codegen.schedule import Schedule, coming
from te_fuser.codegen.text import part_name
from te_fuser.formula.expr import Axes, Expr


class ColumnText(CudaKernelText):
    """No row reductions: a thread owns `kVector` columns and walks down the rows."""

    index, is_there = "base + ahead * step", "row < rows"  # of a row in flight
    coming: Mapping[int, str] = {}  # what comes by way of shared memory, and where a thread has its share

    def write(self) -> str:
        """The function."""
        with self.text.block(self.signature()):
            self.begin()
            self._prologue()
            with self.text.block("if (column < kWidth)") if self._ragged else contextlib.nullcontext():
                self._rows()
            self._epilogue()
        return self.finished()

    @property
    def _tiles(self) -> int:
        return self.s.tiles(self.d.width)

    @property
    def _ragged(self) -> bool:
        return self._tiles * self.s.covered != self.d.width

    @property
    def _group(self) -> tuple[str, str]:
        return ("group", "groups") if self._tiles > 1 else ("blockIdx.x", "gridDim.x")

    def _leaves(self, travelling: bool) -> list[Expr]:
        """Tensors that are read for each row, or those that stay while a thread walks down."""
        own = Axes.FEATURE if not self.per_sample else Axes.SAMPLE_FEATURES
        leaves = [n for n in self.d.nodes if n.op == "input" and n.axes & Axes.FEATURE]
        return [n for n in leaves if bool(n.axes & ~own) == travelling]

    @property
    def constants(self) -> dict[str, int]:
        """Numbers of the schedule that the text may use."""
        return {"kTiles": self._tiles, "kAhead": self.s.ahead, "kThreads": self.s.threads}

    def _prologue(self) -> None:
        text = self.text
        self.declare_threads(self.constants)
        if self._tiles > 1:
            text("const int tile = blockIdx.x % kTiles, group = blockIdx.x / kTiles, groups = gridDim.x / kTiles;")
        text(f"const int column = {'(tile * kLanes + lane)' if self._tiles > 1 else 'lane'} * kVector;")
        self.declare_range(*self._group)
        self.call_level()
        for t in self.d.sums:
            for k in range(len(t.parts)) if t.axes & Axes.FEATURE else ():
                text(f"float {self.sum_names[t.name, k]}[kVector] = {{}};")
        self.declare_scalar_sums()
        self.declare_largest()

    def _rows(self) -> None:
        self._load_what_stays()
        slot = " + slot" if self.s.slots > 1 else ""
        with self.text.block(f"for (long long base = first{slot}; base < count; base += step * kAhead)"):
            self._rows_ahead()

    def _load_what_stays(self) -> None:
        self._stays = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in self._leaves(False)}
        for n in self._leaves(False):
            self.text(f"const {self.vector_type(n)} {self._stays[id(n)]} = {self.load(n)};")

    def _rows_ahead(self) -> None:
        """The rows from `base` on that a thread has in flight."""
        text = self.text
        leaves = [n for n in self._leaves(True) if id(n) not in self.coming]
        travels = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in leaves}
        numbers = [n for n in self.d.nodes if n.op == "input" and n.axes == Axes.ROWS]
        self._numbers = {id(n): self.names.fresh(f"{n.attrs[0]}_ahead") for n in numbers}
        if travels or numbers:
            text("// All loads first, so that they are on their way together.")
            for n in leaves:
                text(f"{self.vector_type(n)} {travels[id(n)]}[kAhead];")
            for name in self._numbers.values():
                text(f"float {name}[kAhead];")
            with text.loop("ahead", "kAhead"), self._row():
                if any(n.axes & Axes.OUTER == 0 for n in leaves):
                    self._sample()
                for n in leaves:
                    text(f"{travels[id(n)]}[ahead] = {self.load(n)};")
                for n in numbers:
                    text(f"{self._numbers[id(n)]}[ahead] = {self._scalar_leaf(n)};")
        with text.loop("ahead", "kAhead"), self._row():
            vectors = {**self._stays, **{i: f"{name}[ahead]" for i, name in travels.items()}}
            # What is in shared memory is read where it is used: so it takes registers of one row alone.
            come = [n for n in self._leaves(True) if id(n) in self.coming]
            vectors |= {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in come}
            for n in come:
                text(f"const {self.vector_type(n)} {vectors[id(n)]} = {self.load(n)};")
            known = {**self.known, **{i: f"{name}[ahead]" for i, name in self._numbers.items()}}
            self._sample()
            self.row_level(0, known)
            self.last_pass(known, vectors, "")
            self.row_stores(known, "tile == 0 && lane == 0" if self._tiles > 1 else "lane == 0")

    @contextlib.contextmanager
    def _row(self) -> Iterator[None]:
        self.text(f"const long long row = {self.row_at(self.index)};")
        with self.text.block("if (row >= 0)" if self.backwards else f"if ({self.is_there})"):
            yield

    def _sample(self) -> None:
        if self.needs_sample and not self.per_sample:
            self.text("const int sample = te::sample_of(row, batch_inner, batch_size);")

    def _epilogue(self) -> None:
        group = f"static_cast<long long>({self._group[0]})"
        for t in self.d.sums:
            if t.axes & Axes.FEATURE:
                for k in range(len(t.parts)):
                    inside = " && column < kWidth" if self._ragged else ""
                    self.write_sums(self.sum_names[t.name, k], t, k * self.d.width, group, inside)
        first = "threadIdx.x == 0 && tile == 0" if self._tiles > 1 else "threadIdx.x == 0"
        self.write_scalar_sums(group, first)
        self.raise_largest()


class TileText(ColumnText):
    """Threads own `kVector` columns and walk down tiles of 128 rows: a kernel that stores transposed, or by blocks.

    A thread turns 8 bits of four rows in its registers and puts them into shared memory; when the whole tile is there,
    each thread stores 16 rows of a column at once. One of two such tiles is written while the other is read. Rows,
    column sums and maxima come from registers, as in other kernels: docs/lab/transposed-stores.md.

    By blocks of 128 a tile waits in shared memory until its scales are known; each thread reads there what it has put
    there itself. What it is made of comes to the same place, a whole tile at once. Where tiles have all their columns,
    the loop is there twice: a tile that has all its rows asks for none.
    """

    # Neighbours of a warp: 8 lanes, four times four rows. So words of 16 rows lie side by side, each in its own bank.
    lane = "threadIdx.x % 8 + threadIdx.x / 32 * 8 % kLanes"
    slot = "threadIdx.x / 8 % 4 + threadIdx.x / (4 * kLanes) * 4"
    slots = " * kRows"
    shared_sums = "kLanes * kSlots * (kVector < 4 ? 1 : kVector / 4)"  # of warps; one a thread of rows
    index, is_there = "base + ahead", "four * kAhead + ahead < left"

    def __init__(self, symbol: str, description: KernelDescription, schedule: Schedule, space: str) -> None:
        super().__init__(symbol, description, schedule, space)
        self.turned = {
            (s.name, k): self.names.fresh(f"{part_name(s.name, k, len(s.parts))}_rows")
            for s in description.transposed
            for k in range(len(s.parts))
        }
        self.shelf = {key: self.names.fresh(name.replace("_rows", "_tile")) for key, name in self.turned.items()}
        if description.in_blocks:
            self.is_there = f"{'' if self._ragged else 'whole || '}four + ahead < left"
        self.pairs: dict[tuple[object, ...], dict[str, Store]] = {}
        for s in description.in_blocks:
            self.pairs.setdefault(_value(s), {})[s.layout] = s
        self.waiting = {
            (value, k): self.names.fresh(f"{part_name(s.name, k, len(s.parts))}_waiting")
            for value, stores in self.pairs.items()
            for s in [next(iter(stores.values()))]
            for k in range(len(s.parts))
        }
        self.coming: dict[int, str] = {}
        self.found = {key: self.names.fresh(f"{name}_sizes") for key, name in self.waiting.items() if not self._ragged}

    def write(self) -> str:
        """The function."""
        text = self.text
        with text.block(self.signature()):
            self.begin()
            self._prologue()
            text("extern __shared__ uint4 shelves[];")
            text("int phase = 0;") if self.shelf else self._declare_waiting()
            self._load_what_stays()
            with text.block("for (long long start = first; start < count; start += step)"):
                text("const int left = static_cast<int>(rows - start < kRows ? rows - start : kRows);")
                self._declare_tiles()
                with self._inside(), self._by_rows_there():
                    self._fetch()
                    with self._turns():
                        self._four_rows()
                if self.shelf:
                    text("__syncthreads();")
                    self._store_columns()
                    text("phase ^= 1;")
                self._store_blocks()
            self._epilogue()
        return self.finished()

    @property
    def constants(self) -> dict[str, int]:
        return super().constants | {"kRows": self.s.rows, "kTurns": self.s.chunks, "kColumns": self.s.covered}

    def _inside(self) -> contextlib.AbstractContextManager[None]:
        """Block that is entered only by threads whose columns exist."""
        return self.text.block("if (column < kWidth)") if self._ragged else contextlib.nullcontext()

    def _load_what_stays(self) -> None:
        if not self._ragged:
            return super()._load_what_stays()
        leaves = self._leaves(False)
        self._stays = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in leaves}
        for n in leaves:
            self.text(f"{self.vector_type(n)} {self._stays[id(n)]} = {{}};")
        if leaves:
            with self._inside():
                for n in leaves:
                    self.text(f"{self._stays[id(n)]} = {self.load(n)};")

    def _declare_tiles(self) -> None:
        for number, name in enumerate(self.shelf.values()):
            at = f"({number} + phase * {len(self.shelf)}) * (kColumns * kRows / 4)"
            self.text(f"unsigned* const {name} = reinterpret_cast<unsigned*>(shelves) + {at};")
        for key, name in self.waiting.items():
            self.text(f"{'if (left < kRows) ' if key in self.found else ''}{name}.clear();")
        for (value, _), name in self.found.items():
            made_in = CTYPES[next(iter(self.pairs[value].values())).made_in]
            self.text(f"te::Magnitudes<{made_in}, kVector, kAhead, {self._sides(value)}> {name};")

    def _sides(self, value: tuple[object, ...]) -> str:
        """Template arguments of a value: stored by rows or not, and transposed or not."""
        return ", ".join([str(layout in self.pairs[value]).lower() for layout in ("blocks", "transposed_blocks")])

    def _declare_waiting(self) -> None:
        """Declare shared memory where values of a tile wait for its scales."""
        at, places = 0, []
        self.text(f"__shared__ te::BlockScales block_scales[{len(self.waiting)}];")
        self.text("for (te::BlockScales& scales : block_scales) scales.begin();")
        for (value, _), name in self.waiting.items():
            made_in = next(iter(self.pairs[value].values())).made_in
            places.append(at)
            at = self._declare_share(made_in, name, at)
        self._words = f"reinterpret_cast<unsigned*>(shelves + {at})"
        for n, place in coming(self.d, self.s):
            self.coming[id(n)] = self.names.fresh(f"{part_role(n)}_coming")
            end = self._declare_share(
                self.loads[n.attrs[0]].dtype, self.coming[id(n)], at if place is None else places[place]
            )
            at = end if place is None else at

    def _declare_share(self, dtype: str, name: str, at: int) -> int:
        """A thread's share of a tile that lies `at` so many pieces of 16 bytes; where it ends."""
        self.text(f"const te::Waiting<{CTYPES[dtype]}, kVector> {name}(shelves{f' + {at}' if at else ''});")
        return at + self.s.covered * self.s.rows * item_size(dtype) // 16

    @contextlib.contextmanager
    def _by_rows_there(self) -> Iterator[None]:
        """Write what follows twice: for tiles that have all rows, and for others."""
        if not self.found:
            yield
            return
        with self.text.block("if (left == kRows)"):
            self.text("constexpr bool whole = true;")
            before = len(self.text.lines)
            yield
            loop = self.text.lines[before:]
        with self.text.block("else"):
            self.text("constexpr bool whole = false;")
            self.text.lines += loop

    def _fetch(self) -> None:
        """All of the tile that goes by way of shared memory, a turn after the other."""
        if not self.coming:
            return
        with self.text.loop("turn", "kTurns"), self.names.scope():
            self._place_in_blocks()
            with self.text.loop("ahead", "kAhead"), self._row():
                for n in self._leaves(True):
                    if id(n) in self.coming:
                        source = self.address(self.load_pointer(n), n.axes, n.attrs[2], n.attrs[1])
                        self.text(f"te::fetch<kVector>(&{self._share(n)}, {source});")
            self.text("te::depart();")

    def _share(self, n: Expr) -> str:
        return f"{self.coming[id(n)]}.at(turn / kPart, early + ahead)"

    def load(self, e: Expr) -> str:
        return self._share(e) if id(e) in self.coming else super().load(e)

    def _place_in_blocks(self) -> None:
        """The first row of a turn: a thread has four rows here, too, but not all of them at work."""
        self.text("constexpr int kPart = 4 / kAhead;")
        self.text("const int early = turn % kPart * kAhead, four = 4 * (turn / kPart * kSlots + slot) + early;")
        self.text("const long long base = start + four;")

    @contextlib.contextmanager
    def _turns(self) -> Iterator[None]:
        """The four rows of each turn, by their number `four` within the tile."""
        several = self.s.chunks > 1
        with (
            self.text.loop("turn", "kTurns", "#pragma unroll 1") if several else contextlib.nullcontext(),
            self.names.scope(),
        ):
            if self.waiting:
                self._place_in_blocks()
            else:
                self.text(f"const int four = {'turn * kSlots + slot' if several else 'slot'};")
                self.text("const long long base = start + four * kAhead;")
            yield

    def _four_rows(self) -> None:
        if self.coming:
            self.text("te::arrived<kTurns - 1>();")
        for name in self.turned.values():
            self.text(f"te::FourRows<kVector> {name};")
        self._rows_ahead()
        for key, name in self.turned.items():
            self.text(f"te::put_columns({self.shelf[key]}, lane, four, {name});")
        for number, name in enumerate(self.found.values()):
            self.text(f"{name}.raise_rows(block_scales[{number}], four);")
        if self.coming:
            self.text("te::depart();")  # nothing: so that each turn waits for all but as many

    @property
    def stored_as_vectors(self) -> tuple[Store, ...]:
        """Stores that take the vectors of a row; of two stores of one value by blocks only the first."""
        others = [s for stores in self.pairs.values() for s in list(stores.values())[1:]]
        return tuple(s for s in super().stored_as_vectors if not any(s is other for other in others))

    def store_line(self, s: Store, k: int, name: str) -> str:
        if is_in_blocks(s):
            key = _value(s), k
            kept = f"{self.waiting[key]}.keep(turn / kPart, early + ahead, {name})"
            return f"{self.found[key]}.take(ahead, {kept});" if key in self.found else f"{kept};"
        if not is_transposed(s):
            return super().store_line(s, k, name)
        return f"te::put_row<{CTYPES[s.dtype]}>({self.turned[s.name, k]}, ahead, {name});"

    def _store_columns(self) -> None:
        for s in self.d.transposed:
            for k in range(len(s.parts)):
                to = self.pointer["store", s.name] + (f" + {k * self.d.width} * te::padded(rows)" if k else "")
                begin = "column - lane * kVector, kWidth, start, rows"
                self.text(f"te::store_columns<kThreads, kColumns, kVector>({to}, {self.shelf[s.name, k]}, {begin});")

    def write_sums(self, name: str, t: Sum, offset: int, group: str, inside: str) -> None:
        """Store the sums of the block's columns, added up over its rows."""
        begin = "column - lane * kVector"
        places = self.sum_places(t, group, f"{offset} + {begin}" if offset else begin)
        columns = f"kWidth - ({begin})"
        self.text(f"te::store_tile_sums<kThreads, kLanes>({places}, shared_sums, lane, {columns}, {name});")

    def _store_blocks(self) -> None:
        for number, ((value, k), name) in enumerate(self.waiting.items()):
            stores = self.pairs[value]
            first = next(iter(stores.values()))
            made, turned = stores.get("blocks"), stores.get("transposed_blocks")
            given = ", ".join([name, *[found for key, found in self.found.items() if key == (value, k)]])
            where = ", ".join(["nullptr" if s is None else self.pointer["store", s.name] for s in (made, turned)])
            words = self._words if turned else "nullptr"
            left = f"{k * self.d.width} + column - lane * kVector" if k else "column - lane * kVector"
            self.text(
                f"te::store_blocks<{self._sides(value)}, {CTYPES[first.dtype]}>({given}, block_scales[{number}], "
                f"{words}, lane, slot, {where}, {left}, {first.width}, start, rows);"
            )
        if any(place is None for _, place in coming(self.d, self.s)):
            self.text("__syncthreads();")  # what is transposed was read where the next tile's tensors come


def _value(s: Store) -> tuple[object, ...]:
    """Equal for stores of one value, whose blocks are looked for in the same tile."""
    return s.dtype, s.made_in, s.width, *[p.digest for p in s.parts]
