"""The function of a kernel without row reductions: threads own columns and walk down the rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from te_fuser.codegen.cuda_body import CudaKernelText
from te_fuser.codegen.cuda_text import part_role
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
        tile = "(tile * kLanes + lane)" if self._tiles > 1 else "lane"
        text(f"const int column = {tile} * kVector;")
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
            there = {i: f"{name}[ahead]" for i, name in travels.items()}
            self._one_row({**self._stays, **there, **self._come()})

    def _come(self) -> dict[int, str]:
        """The vectors of a row in shared memory, read where they are used: so they take registers of one row alone."""
        come = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in self._leaves(True) if id(n) in self.coming}
        for n in self._leaves(True):
            if id(n) in come:
                self.text(f"const {self.vector_type(n)} {come[id(n)]} = {self.load(n)};")
        return come

    @contextlib.contextmanager
    def _row(self) -> Iterator[None]:
        self.text(f"const long long row = {self.row_at(self.index)};")
        with self.text.block("if (row >= 0)" if self.backwards else f"if ({self.is_there})"):
            yield

    def _sample(self) -> None:
        if self.needs_sample and not self.per_sample:
            self.text("const int sample = te::sample_of(row, batch_inner, batch_size);")

    def _one_row(self, vectors: Mapping[int, str]) -> None:
        known = {**self.known, **{i: f"{name}[ahead]" for i, name in self._numbers.items()}}
        self._sample()
        self.row_level(0, known)
        self.last_pass(known, vectors, "")
        self.row_stores(known, "tile == 0 && lane == 0" if self._tiles > 1 else "lane == 0")

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
