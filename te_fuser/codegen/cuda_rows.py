"""The function of a kernel with row reductions: threads share a row and walk over it once for each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from te_fuser.codegen.cuda_body import CudaKernelText
from te_fuser.codegen.cuda_formulas import is_boolean
from te_fuser.codegen.cuda_text import bare, literal, number, part_role
from te_fuser.codegen.description import KernelDescription, Sum
from te_fuser.codegen.schedule import Kind, Pass, Schedule, Sums, above, kept, passes, shelves
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.functions import FUNCTIONS


class RowText(CudaKernelText):
    """Row reductions: `kLanes` threads share a row, and walk over it for each stage and to store."""

    def __init__(self, symbol: str, description: KernelDescription, schedule: Schedule, space: str) -> None:
        super().__init__(symbol, description, schedule, space)
        self.passes = passes(description, schedule.kind)
        leaves = [n for n in description.nodes if n.op == "input" and n.axes & Axes.FEATURE]
        self.full = [n for n in leaves if n.axes & Axes.OUTER]
        self.features = [n for n in leaves if not n.axes & Axes.OUTER]
        self.row_names = {id(n): self.names.fresh(f"{part_role(n)}_row") for n in self.full}
        self.vector_names = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in leaves}
        self.kept = kept(description, schedule)
        numbers = [n for n in description.nodes if n.op == "input" and n.axes == Axes.ROWS]
        travelling = numbers if schedule.kind == Kind.SHARED and schedule.ahead > 1 else []
        self.coming = {id(n): self.names.fresh(f"{n.attrs[0]}_coming") for n in travelling}
        values = {id(n): n for p in self.passes for n in p.waits if n.op != "input"}
        self.waiting = {i: self.names.fresh("waiting") for i in values}
        as_loaded = schedule.ends_soon and description.maxima and schedule.kind == Kind.REGISTERS
        waits = as_loaded and any(n.op == "input" for p in self.passes for n in p.waits)
        self.zeros = [self.names.fresh("zero") for _ in self.passes[1:]] if waits else []
        self.zero = ""
        self.ragged = schedule.covered != description.width
        self.held = "[held]" if schedule.held > 1 else ""  # of what each row of a thread has its own
        self.slots = " * kAhead" if schedule.held > 1 else " * kSlots"
        self.index = "row" if self.plain_rows else "base"
        self.first, self.count = ("blockIdx.x", "rows") if self.plain_rows else ("first", "count")
        self.step = "gridDim.x" if self.plain_rows else "step"
        self.loop = f"{self.index} = {self.first}; {self.index} < {self.count}; {self.index} += {self.step}"

    def write(self) -> str:
        text = self.text
        with text.block(self.signature()):
            self.begin()
            self._prologue()
            with text.block(f"for (long long {self.loop})"):
                self._row()
            self._epilogue()
        return self.finished()

    # ---- before the loop over rows

    def _prologue(self) -> None:
        text, s = self.text, self.s
        self.declare_threads({"kChunks": s.chunks, "kThreads": s.threads, "kAhead": s.ahead})
        self._declare_shelves()
        stages = [len(p.reductions) * s.held for p in self.passes if p.reductions]
        if s.lanes > 32:
            for count in sorted(set(stages)):
                text(f"__shared__ float exchange_{count}[2][{count}][32];")
            text("int phase = 0;")
        self.declare_range("blockIdx.x", "gridDim.x")
        self.call_level()
        self._declare_zeros()
        self._declare_sums()
        self._keep_features()
        if s.kind == Kind.SHARED:
            self._declare_fetch()

    def _declare_shelves(self) -> None:
        placed = shelves(self.d, self.s)
        if not placed:
            return
        self.text("extern __shared__ uint4 shelves[];")
        offset, sums = 0, iter(self._feature_sums())
        for node, size in placed:
            at = f"shelves + {offset // 16}"
            if node is None:
                self.text(f"float* const {self.sum_names[next(sums)]} = reinterpret_cast<float*>({at});")
            elif node.op == "input":
                kind = self.vector_type(node)
                self.text(f"{kind}* const {self.row_names[id(node)]} = reinterpret_cast<{kind}*>({at});")
            else:
                self.text(f"float* const {self.waiting[id(node)]} = reinterpret_cast<float*>({at});")
            offset += size

    def _feature_sums(self) -> list[tuple[str, int]]:
        return [(t.name, k) for t in self.d.sums if t.axes & Axes.FEATURE for k in range(len(t.parts))]

    def _declare_sums(self) -> None:
        for key in self._feature_sums():
            if self.s.sums == Sums.REGISTERS:
                self.text(f"float {self.sum_names[key]}[kChunks][kVector] = {{}};")
            else:
                with self.text.loop("chunk", "kChunks"):
                    self.text(
                        f"te::put<kThreads>({self.sum_names[key]}, chunk, threadIdx.x, te::Zeros<kVector>().values);"
                    )
        self.declare_scalar_sums()
        self.declare_largest()

    def _declare_zeros(self) -> None:
        if self.zeros:
            self.text("// A row waits as it was loaded: that these are zeros, the assembler does not know.")
        for k, name in enumerate(self.zeros):
            self.text(f"const unsigned {name} = te::unknown_zero<{k}>(rows);")

    def element(self, e: Expr, vector: str) -> str:
        hidden = self.zero and e.axes & Axes.OUTER
        return f"te::get({vector}, i, {self.zero})" if hidden else super().element(e, vector)

    def _keep_features(self) -> None:
        for n in self.kept:
            self.row_names[id(n)] = self.names.fresh(f"{part_role(n)}_vectors")
            self.text(f"{self.vector_type(n)} {self.row_names[id(n)]}[kChunks];")
        if self.kept:
            with self._chunks():
                for n in self.kept:
                    self.text(f"{self.row_names[id(n)]}[chunk] = {self.load(n)};")

    def _declare_fetch(self) -> None:
        text = self.text
        text("// Each thread copies what it will read itself, so that no barrier is needed.")
        with text.block(f"const auto fetch_row = [&](long long {self.index}, int turn)"):
            self._declare_row()
            with self._chunks():
                for n in self.full:
                    source = self.address(self.load_pointer(n), n.axes, n.attrs[2], n.attrs[1])
                    text(f"te::fetch(&{self._shelf(n)}, {source});")
        text.lines[-1] += ";"
        if self.coming:
            self._declare_fetch_numbers()
        if self.s.ahead > 1:
            text("int turn = 0;")
            with text.loop("early", "kAhead - 1"):
                text(f"const long long {self.index} = {self.first} + early * static_cast<long long>({self.step});")
                text(f"if ({self.index} < {self.count}) fetch_row({self.index}, early);")
                text("te::depart();")

    def _declare_fetch_numbers(self) -> None:
        """Declare the loads of numbers that a row has one of, done one row before they are needed."""
        text = self.text
        for name in self.coming.values():
            text(f"float {name} = 0.0f;")
        with text.block(f"const auto fetch_numbers = [&](long long {self.index})"):
            self._declare_row()
            for n in self.d.nodes:
                if id(n) in self.coming:
                    text(f"{self.coming[id(n)]} = {self._scalar_leaf(n)};")
        text.lines[-1] += ";"
        text(f"if ({self.first} < {self.count}) fetch_numbers({self.first});")

    def _shelf(self, n: Expr) -> str:
        turn = "turn * kChunks + chunk" if self.s.ahead > 1 else "chunk"
        return f"{self.row_names[id(n)]}[({turn}) * kThreads + threadIdx.x]"

    # ---- one row

    def _declare_row(self) -> None:
        """`row`; slots beyond the last row compute that one again, and `mine` keeps them from storing it."""
        if not self.plain_rows:
            index = "base + slot" if self.s.slots > 1 else "base + held" if self.held else "base"
            self.text(f"const long long wanted = {self.row_at(index)};")
            self.text(f"const bool mine = {'wanted >= 0' if self.backwards else 'wanted < rows'};")
            self.text(f"const long long row = mine ? wanted : {'0' if self.backwards else 'rows - 1'};")

    def _row(self) -> None:
        text, known = self.text, dict(self.known)
        if not self.held:
            self._declare_row()
        if self.needs_sample and not self.per_sample:
            text("const int sample = te::sample_of(row, batch_inner, batch_size);")
        if self.s.kind == Kind.SHARED:
            self._wait_for_row(known)
        if self.s.kind == Kind.REGISTERS:
            self._load_row()
        self._row_levels(0, known)
        for stage, p in enumerate(self.passes):
            if p.reductions:
                self._reducing_pass(stage, p, known)
                self._forget(p)
                self.zero = self.zeros[stage] if self.zeros else ""
                self._row_levels(stage + 1, known)
        with contextlib.nullcontext() if self.plain_rows or self.held else text.block("if (mine)"):
            self._storing_pass(known)
        if self.s.kind == Kind.SHARED and self.s.ahead > 1:
            text("turn = turn + 1 == kAhead ? 0 : turn + 1;")

    @contextlib.contextmanager
    def _each(self, stores: bool = False) -> Iterator[None]:
        if not self.held:
            yield
            return
        with self.text.loop("held", "kAhead"), self.names.scope():
            self._declare_row()
            with self.text.block("if (mine)") if stores else contextlib.nullcontext():
                yield

    def _row_levels(self, depth: int, known: dict[int, str]) -> None:
        """Write the values that are one number a row, in arrays where several rows are held."""
        if not self.held:
            return self.row_level(depth, known)
        before, start = set(known), len(self.text.lines)
        kinds = {id(n): "bool" if is_boolean(n) else "float" for n in self.d.nodes if n.op != "const"}
        declared = []
        with self.text.loop("held", "kAhead"):
            self._declare_row()
            self.row_level(depth, known)
            for i in [i for i in known if i in kinds and i not in before]:
                name = self.names.fresh("of_row")
                declared.append(f"{kinds[i]} {name}[kAhead];")
                self.text(f"{name}[held] = {known[i]};")
                known[i] = f"{name}[held]"
        loop, self.text.lines[start:] = self.text.lines[start:], []
        for line in declared:
            self.text(line)
        self.text.lines += loop if declared else []

    def _wait_for_row(self, known: dict[int, str]) -> None:
        text = self.text
        if self.s.ahead == 1:
            text(f"fetch_row({self.index}, 0);")
            text("te::depart();")
            text("te::arrived<0>();")
            return
        text("// Rows to come travel while this one is computed.")
        text(f"const long long later = {self.index} + (kAhead - 1) * static_cast<long long>({self.step});")
        text(f"if (later < {self.count}) fetch_row(later, turn == 0 ? kAhead - 1 : turn - 1);")
        text("te::depart();")
        for n in self.d.nodes:
            if id(n) in self.coming:
                known[id(n)] = self.names.fresh(f"{n.attrs[0]}_value")
                text(f"const float {known[id(n)]} = {self.coming[id(n)]};")
        if self.coming:
            following = f"{self.index} + {self.step}"
            text(f"if ({following} < {self.count}) fetch_numbers({following});")
        text("te::arrived<kAhead - 1>();")

    def _load_row(self) -> None:
        for n in self.full:
            self.text(f"{self.vector_type(n)} {self.row_names[id(n)]}[kChunks]{self._rows_each};")
        with self._chunks(), self._each():
            for n in self.full:
                self.text(f"{self.row_names[id(n)]}[chunk]{self.held} = {self.load(n)};")
        for name in self.waiting.values():
            self.text(f"float {name}[kChunks]{self._rows_each}[kVector];")

    @property
    def _rows_each(self) -> str:
        return "[kAhead]" if self.held else ""

    @contextlib.contextmanager
    def _chunks(self) -> Iterator[None]:
        fully = self.s.kind == Kind.REGISTERS or self.s.sums == Sums.REGISTERS
        unroll = "#pragma unroll" if fully else "#pragma unroll 2"
        with self.text.loop("chunk", "kChunks", unroll):
            self.text("const int column = (chunk * kLanes + lane) * kVector;")
            guard = self.text.block("if (column < kWidth)") if self.ragged else contextlib.nullcontext()
            with guard, self.names.scope():
                yield

    def _reducing_pass(self, stage: int, p: Pass, known: dict[int, str]) -> None:
        kinds = [FUNCTIONS[r.op] for r in p.reductions]
        names = [self.names.fresh(k.name) for k in kinds]
        for name, k in zip(names, kinds, strict=True):
            starts = ", ".join([literal(k.start)] * self.s.held)
            self.text(f"float {name}{self._rows_each} = {f'{{{starts}}}' if self.held else starts};")
        before = self.passes[stage - 1].waits if stage else ()
        new = [n for n in p.waits if n.op != "input" and all(n is not b for b in before)]
        with self._chunks(), self._each():
            shelved = self._shelved(new)

            def then(inner: dict[int, str]) -> None:
                for n in new:
                    self.text(f"{shelved[id(n)]}[i] = {bare(inner[id(n)])};")
                    inner[id(n)] = f"{shelved[id(n)]}[i]"
                for r, name, k in zip(p.reductions, names, kinds, strict=True):
                    value, joins = bare(number(r.args[0], inner)), FUNCTIONS[k.joins].cuda
                    name += self.held
                    self.text(f"{name} = {joins}({name}, {value});" if joins else f"{name} += {value};")

            self._chunk_elements([*new, *(r.args[0] for r in p.reductions)], before, known, then)
            if self.s.kind == Kind.SHARED:
                for n in new:
                    self.text(f"te::put<kThreads>({self.waiting[id(n)]}, chunk, threadIdx.x, {shelved[id(n)]});")
        self._reduce(names, [k.cuda for k in kinds])
        known.update({id(r): f"{name}{self.held}" for r, name in zip(p.reductions, names, strict=True)})

    def _reduce(self, names: Sequence[str], kinds: Sequence[str]) -> None:
        held = range(self.s.held)
        values = [f"{name}[{k}]" if self.held else name for name in names for k in held]
        joins, listed = ", ".join(kind for kind in kinds for _ in held), ", ".join(values)
        if self.s.lanes > 32:
            self.text(f"te::reduce_block<kThreads, {joins}>(exchange_{len(values)}[phase], {listed});")
            self.text("phase ^= 1;")
        elif self.s.lanes > 1:
            self.text(f"te::reduce_lanes<kLanes, {joins}>({listed});")

    def _forget(self, p: Pass) -> None:
        """Keep values that wait in registers in the dtype they were loaded in."""
        waiting = [n for n in self.full if any(n is w for w in p.waits)]
        held = [*(waiting if self.s.kind == Kind.REGISTERS else ()), *self.kept]
        narrow = [n for n in held if self.loads[n.attrs[0]].dtype != "float32"]
        if narrow:
            with self.text.loop("chunk", "kChunks"):
                for n in narrow:
                    rows = range(self.s.held) if self.held and n.axes & Axes.OUTER else [None]
                    for k in rows:
                        self.text(f"te::forget({self.row_names[id(n)]}[chunk]{'' if k is None else f'[{k}]'});")

    def _shelved(self, nodes: Sequence[Expr]) -> dict[int, str]:
        """Names of the elements of waiting values while a chunk is computed, by node."""
        if self.s.kind == Kind.REGISTERS:
            return {id(n): f"{self.waiting[id(n)]}[chunk]{self.held}" for n in nodes}
        found = {id(n): self.names.fresh("waiting_values") for n in nodes}
        for name in found.values():
            self.text(f"float {name}[kVector];")
        return found

    def _chunk_elements(
        self,
        targets: Sequence[Expr],
        waiting: Iterable[Expr],
        known: Mapping[int, str],
        then: Callable[[dict[int, str]], None],
    ) -> None:
        inner, vectors = self._chunk_inputs(targets, waiting, known)
        self.elements(targets, inner, vectors, then)

    def _chunk_inputs(
        self, targets: Sequence[Expr], waiting: Iterable[Expr], known: Mapping[int, str]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Vectors and waiting values that a chunk needs, read where they are."""
        inner = dict(known)
        values = [n for n in waiting if n.op != "input"]
        wanted = {id(n) for n in above(targets, [*known, *map(id, values)])}
        direct = {id(a) for n in above(targets, [*known, *map(id, values)]) for a in n.args} | set(map(id, targets))
        for n in values:
            if id(n) in direct:
                (name,) = self._shelved([n]).values()
                if self.s.kind == Kind.SHARED:
                    self.text(f"te::take<kThreads>({self.waiting[id(n)]}, chunk, threadIdx.x, {name});")
                inner[id(n)] = f"{name}[i]"
        vectors: dict[int, str] = {}
        for n in (*self.full, *self.features):
            if id(n) in wanted:
                vectors[id(n)] = self._vector(n)
        return inner, vectors

    def _vector(self, n: Expr) -> str:
        if (n.axes & Axes.OUTER and self.s.kind == Kind.REGISTERS) or n in self.kept:
            return f"{self.row_names[id(n)]}[chunk]{'' if n in self.kept else self.held}"
        source = self._shelf(n) if n.axes & Axes.OUTER and self.s.kind == Kind.SHARED else self.load(n)
        self.text(f"const {self.vector_type(n)} {self.vector_names[id(n)]} = {source};")
        return self.vector_names[id(n)]

    def _storing_pass(self, known: dict[int, str]) -> None:
        text = self.text
        waiting = self.passes[-2].waits
        targets = [p for p in self.d.roots if p.axes & Axes.FEATURE] + self._broadcast()
        if targets:
            with self._chunks(), self._each(stores=True):
                inner, vectors = self._chunk_inputs(targets, waiting, known)
                chunk = "[chunk]" if self.s.sums == Sums.REGISTERS else ""
                if self.s.sums == Sums.SHARED:
                    kept = {key: self.sum_names[key] for key in self._feature_sums()}
                    for key, shelf in kept.items():
                        self.sum_names[key] = self.names.fresh(f"{shelf}_chunk")
                        text(f"float {self.sum_names[key]}[kVector];")
                        text(f"te::take<kThreads>({shelf}, chunk, threadIdx.x, {self.sum_names[key]});")
                self.last_pass(inner, vectors, chunk)
                if self.s.sums == Sums.SHARED:
                    for key, shelf in kept.items():
                        text(f"te::put<kThreads>({shelf}, chunk, threadIdx.x, {self.sum_names[key]});")
                        self.sum_names[key] = shelf
        with self._each(stores=True):
            self.row_stores(known, "lane == 0")

    def _broadcast(self) -> list[Expr]:
        """Numbers of a row that are stored or summed for every feature."""
        whole = (*(t for t in self.d.outputs if t.axes & Axes.FEATURE), *self.d.maxima)
        return [p for t in whole for p in t.parts if not p.axes & Axes.FEATURE]

    # ---- after the loop

    def _epilogue(self) -> None:
        group = "static_cast<long long>(blockIdx.x)"
        sums = [t for t in self.d.sums if t.axes & Axes.FEATURE]
        if sums:
            with self.text.loop("chunk", "kChunks"):
                self.text("const int column = (chunk * kLanes + lane) * kVector;")
                for t in sums:
                    for k in range(len(t.parts)):
                        self._write_sum(t, k, group)
        self.write_scalar_sums(group, "threadIdx.x == 0")
        self.raise_largest()

    def _write_sum(self, t: Sum, k: int, group: str) -> None:
        name = self.sum_names[t.name, k]
        if self.s.sums == Sums.SHARED:
            shelf, name = name, self.names.fresh(f"{name}_chunk")
            self.text(f"float {name}[kVector];")
            self.text(f"te::take<kThreads>({shelf}, chunk, threadIdx.x, {name});")
        else:
            name = f"{name}[chunk]"
        self.write_sums(name, t, k * self.d.width, group, " && column < kWidth" if self.ragged else "")
