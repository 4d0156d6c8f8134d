"""Choice of a kernel's schedule: every one that fits is given a merit, and the best of them is picked.

A kernel of this kind waits for memory, so its merit is the share of the memory's bandwidth that it can be expected to
reach. The rules were fitted to some 4,000 timings on an H200; docs/lab/row-kernel-schedules.md has what they said.

- Without column sums each block does one row, or as many as its threads hold at once, and ends. With them the rows are
  shared out beforehand: sums must not depend on who was free first.
- Rows that wait in registers are to be 40 KiB or more on each multiprocessor, beside sums 36. A row that fits nowhere
  else waits in shared memory, with the next ones on their way.
- Where maxima are raised, more blocks are worth more than parameters in registers, and threads have two rows.
- Threads that own columns: small blocks, as many as fit; with column sums, 8 rows of 32 threads in a block. What stores
  nothing walks down columns likewise, from the last row on: the kernel behind it finds the first ones in L2.
- Tiles: a warp reads whole lines, and blocks are as small as their 128 rows allow, so that some load while others
  store.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from te_fuser.codegen.description import BLOCK, TOKENS, KernelDescription, item_size
from te_fuser.codegen.schedule import (
    Kind,
    Limits,
    Schedule,
    Sums,
    full_loads,
    instructions,
    passes,
    shared_bytes,
    split,
    static_bytes,
)
from te_fuser.formula.expr import Axes

_WARP = 32
_KIB = 1024
_ROWS_HELD = 40 * _KIB  # per multiprocessor, without column sums
_ROWS_SUMMED = 36 * _KIB  # with them
_ROW_THREADS = 128  # of a block whose threads do several rows
_COLUMN_THREADS = 256  # of a block that walks down columns to sum them
_COLUMN_BYTES = 32  # that one of its threads has on their way
_MEASURED_BYTES, _MEASURING_BLOCKS = 64, 5  # the same where nothing is stored; blocks on a multiprocessor
TILE_ROWS = 128  # of a tile: 128 bytes of each column, a line of what lies transposed
_TILE_AHEAD = 4  # rows of a thread at a time: a word of each column
_TILE_LANES, _TILE_SLOTS = 8, 4  # of a warp
_TILE_THREADS = 256
_TILE_SHARED = 64 * _KIB  # of a block
_MOST_TILES, _ENOUGH_TILES = 8, 4  # blocks on a multiprocessor
_MADE_IN = ("float32", "bfloat16", "float16")  # what waits to be quantized by blocks
_BLOCK_VECTORS, _BLOCK_AHEAD = (8, 4), (2, 4, 1)
_BLOCK_BYTES = 64
_BLOCK_REGISTERS = 64  # of a thread that quantizes by blocks
_BLOCK_SHARED = 160 * _KIB  # of a block whose values wait there
_LINE = 128  # bytes
# Vectors of a row per thread: with more, the compiler takes more registers than it is given.
_MOST_CHUNKS = {Kind.REGISTERS: 5, Kind.SHARED: 8}


def pick(description: KernelDescription, limits: Limits) -> Schedule | None:
    """The schedule for one kernel; None where its column sums need a kernel of their own."""
    return next(iter(candidates(description, limits)), None)


def candidates(description: KernelDescription, limits: Limits) -> list[Schedule]:
    """Every schedule that fits, the best first."""
    if description.is_by_tiles:
        return list(_tiles(description, limits))
    vector = _vector(description)
    if not description.reductions:
        return list(dict.fromkeys(_columns(description, vector, limits)))
    found = sorted(_rows(description, vector, limits), key=functools.partial(merit, description), reverse=True)
    found = list(dict.fromkeys(found))
    if not description.sums:  # any row can be read again for each pass
        lanes = min(512, max(_WARP, 1 << max(0, (description.width // vector).bit_length() - 1)))
        chunks = -(-description.width // (lanes * vector))
        slots = _COLUMN_THREADS // lanes if lanes <= _WARP else 1
        draft = Schedule(Kind.REREAD, vector, lanes, slots, chunks, 1, 1, Sums.NONE, rounds=0)
        blocks = max(1, min(2, resident(description, draft, limits)))
        found.append(dataclasses.replace(draft, blocks_per_multiprocessor=blocks))
    return found


def variants(description: KernelDescription, limits: Limits, most: int) -> list[tuple[Schedule, ...]]:
    """Schedules worth measuring, the picked one first: one, or two for stores and column sums apart."""
    whole = [(s,) for s in candidates(description, limits)[:most]]
    return [*whole, *([] if description.overwrites else apart(description, limits)[:1])]


def apart(description: KernelDescription, limits: Limits) -> list[tuple[Schedule, ...]]:
    """Schedules for stores and column sums in two kernels, best first; none where they are not in each other's way."""
    if not (description.sums and description.reductions):
        return []
    rows, columns = split(description)
    sums = pick(columns, limits)
    return [(s, sums) for s in candidates(rows, limits)] if sums else []


def misfit(description: KernelDescription, schedules: Sequence[Schedule], limits: Limits) -> str:
    """Reason for which a kernel cannot have these schedules; empty when it can."""
    if len(schedules) == 2 and description.overwrites:
        return "two kernels would read again what the first of them has overwritten"
    parts = (description,) if len(schedules) == 1 else split(description) if description.sums else ()
    if len(parts) != len(schedules):
        return f"{len(schedules)} schedules, where {'one or two are' if description.sums else 'one is'} possible"
    return next((why for p, s in zip(parts, schedules, strict=True) if (why := _misfit(p, s, limits))), "")


def tile_refusal(description: KernelDescription, limits: Limits) -> str:
    """Reason for which a kernel cannot store by tiles as described, or ""."""
    if description.in_blocks:
        return _refusal_of_blocks(description, limits)
    if not description.transposed:
        return ""
    names = ", ".join(s.name for s in description.transposed)
    wide = [s for s in description.transposed if item_size(s.dtype) != 1]
    if wide:
        return f"{wide[0].name} is {wide[0].dtype}; only 8 bits are stored transposed: store it by rows"
    if description.reductions:
        return f"{names} cannot be stored transposed beside row sums: store it in a kernel that reads their results"
    if any(t.axes & Axes.BATCH for t in description.sums):
        return f"{names} cannot be stored transposed beside sums of samples: add these up in a kernel of their own"
    if not candidates(description, limits):
        return f"{names} cannot be stored transposed together: store fewer of them in one kernel"
    return ""


def _refusal_of_blocks(description: KernelDescription, limits: Limits) -> str:
    stores, width = description.in_blocks, description.width
    names = ", ".join(s.name for s in stores)
    how = f"{names} cannot be stored by blocks"
    for s in stores:
        if item_size(s.dtype) != 1 or s.made_in not in _MADE_IN:
            wanted = ", ".join(_MADE_IN)
            return f"{s.name} is {s.dtype} of {s.made_in or 'nothing'}; blocks are 8 bits of {wanted}: store it by rows"
        if s.width % TOKENS or (len(s.parts) > 1 and width % BLOCK):
            parts = f", in {len(s.parts)} parts," if len(s.parts) > 1 else ""
            return f"{how}: {s.width} features{parts} are no multiple of {BLOCK if parts else TOKENS}: store it by rows"
    if description.reductions:
        return f"{how} beside row sums: store it in a kernel that reads their results"
    if any(t.axes & Axes.BATCH for t in description.sums):
        return f"{how} beside sums of samples: add these up in a kernel of their own"
    if description.transposed:
        return f"{how} beside what is stored transposed: store that in a kernel of its own"
    return "" if candidates(description, limits) else f"{how} together: store fewer of them in one kernel"


def _misfit(description: KernelDescription, s: Schedule, limits: Limits) -> str:
    if (s.kind == Kind.TILE) != description.is_by_tiles:
        how = "by blocks" if description.in_blocks else "transposed"
        what = how if description.is_by_tiles else f"nothing {how}"
        return f"kind {s.kind.value} is not for a kernel that stores {what}"
    if description.in_blocks and (s.covered, s.threads) != (BLOCK, _TILE_THREADS):
        return f"tiles of blocks have {BLOCK} columns for {_TILE_THREADS} threads, which {s} has not"
    ahead = _BLOCK_AHEAD if description.in_blocks else (_TILE_AHEAD,)
    wrong = s.rows != TILE_ROWS or s.ahead not in ahead or s.lanes % _TILE_LANES or s.slots % _TILE_SLOTS
    if s.kind == Kind.TILE and wrong:
        return f"tiles have {TILE_ROWS} rows, four for a thread, and warps of 8 x 4 threads, which {s} has not"
    if s.owns_columns == bool(description.reductions):
        return f"kind {s.kind.value} is not for a kernel {'with' if description.reductions else 'without'} row sums"
    if (s.sums == Sums.NONE) == bool(description.sums) or (s.kind == Kind.REREAD and description.sums):
        return (
            f"column sums in {s.sums.value} with kind {s.kind.value}, where there are {len(description.sums)} of them"
        )
    counts = (s.vector, s.lanes, s.slots, s.chunks, s.ahead, s.blocks_per_multiprocessor)
    if min(counts) < 1 or s.rounds < 0 or (description.sums and s.rounds == 0 and s.kind != Kind.TILE):
        return f"a count is too small: {s}"
    if s.lanes & (s.lanes - 1) or (not s.owns_columns and s.lanes > _WARP and s.slots > 1):
        return f"{s.lanes} threads cannot share a row with {s.slots} rows at once"
    if s.held > 1 and (s.slots > 1 or s.rounds or description.sums or _has_samples(description)):
        return f"threads have {s.held} rows only in blocks of no others that end with them, beside no sums nor samples"
    if description.width % s.vector or s.tiles(description.width) * s.covered < description.width:
        return f"{description.width} features are not covered by {s}"
    shared = shared_bytes(description, s) + static_bytes(description, s)
    if s.threads * s.blocks_per_multiprocessor > limits.resident_threads or s.threads > 1024:
        return f"{s.threads} threads, {s.blocks_per_multiprocessor} times, are too many"
    return f"{shared} bytes of shared memory are too much" if shared > limits.shared_bytes else ""


def _vector(description: KernelDescription) -> int:
    """Elements of one access: 16 bytes of the narrowest full-size tensor, less where the width forbids it.

    Where threads share a row, stores in 8 bits do not count: loads of 32 bytes from each took up to 9% longer. With
    draws it is 8 where it can be: one call of the generator gives 8.
    """
    full = [t for t in description.tensors if t.axes & Axes.FEATURE and t.axes & Axes.OUTER]
    least = {id(t): 2 for t in description.stores} if description.reductions else {}
    sizes = [max(least.get(id(t), 1), item_size(t.dtype)) for t in full] or [4]
    vector = 8 if _draws(description) else 16 // min(sizes)
    while description.width % vector:
        vector //= 2
    return vector


# ------------------------------------------------------------------------------------------------ what there is


def _columns(description: KernelDescription, vector: int, limits: Limits) -> Iterator[Schedule]:
    """Threads that own columns, the best first."""
    vectors = -(-description.width // vector)
    if description.sums:
        lanes = min(_WARP, 1 << (vectors - 1).bit_length())
        bytes_ahead = max(1, _travelling_bytes(description) * vector)
        ahead = max(1, min(4, _COLUMN_BYTES // bytes_ahead))
        for lanes_now, n in ((lanes, ahead), (lanes, 1), (lanes, 2), (min(2 * lanes, 2 * vectors), ahead)):
            draft = Schedule(Kind.COLUMNS, vector, lanes_now, _COLUMN_THREADS // lanes_now, 1, n, 1, Sums.REGISTERS)
            blocks = max(1, min(4, resident(description, draft, limits)))
            yield dataclasses.replace(draft, blocks_per_multiprocessor=blocks)
    elif not description.outputs:  # it reads alone: one block after the other would raise its maxima
        lanes = min(_WARP, 1 << (vectors - 1).bit_length())
        most = max(1, min(4, _MEASURED_BYTES // max(1, _travelling_bytes(description) * vector)))
        for ahead in dict.fromkeys((most, 1, 2)):
            draft = Schedule(Kind.COLUMNS, vector, lanes, _COLUMN_THREADS // lanes, 1, ahead, 1, Sums.NONE)
            blocks = max(1, min(_MEASURING_BLOCKS, resident(description, draft, limits)))
            yield dataclasses.replace(draft, blocks_per_multiprocessor=blocks)
    else:
        lanes = min(_ROW_THREADS, 1 << (vectors - 1).bit_length())
        for ahead in (1, 2, 4):
            draft = Schedule(Kind.COLUMNS, vector, lanes, _ROW_THREADS // lanes, 1, ahead, 1, Sums.NONE, rounds=0)
            blocks = max(1, min(16, resident(description, draft, limits)))
            yield dataclasses.replace(draft, blocks_per_multiprocessor=blocks)


def _tiles(description: KernelDescription, limits: Limits) -> Iterator[Schedule]:
    """Tiles of what is stored transposed, the best first."""
    # Elements of one read: 16 bytes of the narrowest, less where the width forbids it; 8 with random draws.
    narrowest = min((description.load_bytes[n.attrs[0]] for n in full_loads(description)), default=4)
    most = 8 if _draws(description) or (description.in_blocks and narrowest == 1) else 16 // narrowest
    vector = math.gcd(most, description.width)
    while vector:
        vectors = 1 << (-(-description.width // vector) - 1).bit_length()
        side = max(_TILE_LANES, min(_WARP, vectors, _LINE // (vector * narrowest)))
        # Threads side by side: a line of 128 bytes of what is read, or two; those of a block.
        lanes: tuple[int, ...] = (side, 2 * side) if side < vectors else (side,)
        ahead = [_TILE_AHEAD]  # rows of a tile that a thread does at once
        if description.in_blocks:  # where none is put together by fours, 64 bytes were best
            row = vector * _travelling_bytes(description)
            off = {n: (n * row < _BLOCK_BYTES, abs(n * row - _BLOCK_BYTES)) for n in _BLOCK_AHEAD}
            ahead = sorted(_BLOCK_AHEAD, key=off.__getitem__)
            lanes = (BLOCK // vector,) if vector in _BLOCK_VECTORS else ()
        ways = itertools.product((0, 1), ahead, lanes)
        found = [s for way in ways for s in _tiles_of(description, vector, *way, limits)]
        yield from sorted(found, key=lambda s: -_busy(description, s)) if description.sums else found
        vector //= 2


def _tiles_of(
    description: KernelDescription, vector: int, rounds: int, ahead: int, lanes: int, limits: Limits
) -> list[Schedule]:
    """Blocks of 256 threads, or of half where few of those fit a multiprocessor."""
    found = []
    small = bool(description.sums) and not description.in_blocks and not rounds
    sums = Sums.REGISTERS if description.sums else Sums.NONE
    least = max(_TILE_THREADS // 2, _TILE_SLOTS * lanes)
    for threads in dict.fromkeys((_TILE_THREADS, least)) if small else (_TILE_THREADS,):
        slots = threads // lanes
        draft = Schedule(Kind.TILE, vector, lanes, slots, TILE_ROWS // (slots * ahead), ahead, 1, sums, rounds)
        shared = shared_bytes(description, draft) + static_bytes(description, draft)
        most = _BLOCK_SHARED if description.in_blocks else _TILE_SHARED
        blocks = min(_MOST_TILES, resident(description, draft, limits)) if shared <= most else 0
        found += [dataclasses.replace(draft, blocks_per_multiprocessor=blocks)] if blocks else []
    few = found and found[0].threads == _TILE_THREADS and found[0].blocks_per_multiprocessor < _ENOUGH_TILES
    return found[::-1] if few else found


def _busy(description: KernelDescription, s: Schedule) -> float:
    """The share of the GPU's places that blocks have, where each walks over as many rows as any other."""
    if not s.rounds:  # places are given as they become free
        return 1.0
    room, tiles = s.blocks_per_multiprocessor * _MULTIPROCESSORS, s.tiles(description.width)
    blocks = tiles * max(1, room // tiles)
    return blocks / (-(-blocks // room) * room)


def _draws(description: KernelDescription) -> bool:
    return any(n.op == "keep" and n.axes & Axes.FEATURE for n in description.nodes)


def _rows(description: KernelDescription, vector: int, limits: Limits) -> Iterator[Schedule]:
    """Threads that share a row: every schedule that fits."""
    vectors = -(-description.width // vector)
    for lanes in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        chunks = -(-vectors // lanes)
        scattered = lanes < min(vectors, _WARP)  # neighbours of a warp should read neighbours in memory
        if scattered or (lanes > 1 and lanes >= 2 * vectors):
            continue
        several = (_ROW_THREADS // lanes, 2 * _ROW_THREADS // lanes) if lanes <= _WARP else (1,)
        drafts = [d for slots in several for d in _drafts(description, vector, lanes, slots, chunks)]
        for draft in drafts:
            if chunks > _MOST_CHUNKS[draft.kind]:
                continue
            # As many blocks as fit; with column sums, fewer as well.
            most = min(resident(description, draft, limits), 1024 // draft.threads if description.sums else 32)
            least = min(most, max(1, 256 // draft.threads)) if description.sums else most
            for blocks in range(max(1, least), most + 1):
                yield dataclasses.replace(draft, blocks_per_multiprocessor=blocks)


def _drafts(description: KernelDescription, vector: int, lanes: int, slots: int, chunks: int) -> Iterator[Schedule]:
    row = functools.partial(Schedule, vector=vector, lanes=lanes, slots=slots, chunks=chunks)
    if description.sums:
        for ahead in (3, 2, 1):
            for sums in (Sums.REGISTERS, Sums.SHARED):
                yield row(Kind.SHARED, ahead=ahead, blocks_per_multiprocessor=1, sums=sums, keeps=True)
        yield row(Kind.REGISTERS, ahead=1, blocks_per_multiprocessor=1, sums=Sums.REGISTERS, keeps=True)
        return
    for keeps in (True, False):  # what stores nothing raises its maxima once for all rows of a block
        rounds = 0 if description.outputs else 1
        yield row(Kind.REGISTERS, ahead=1, blocks_per_multiprocessor=1, sums=Sums.NONE, rounds=rounds, keeps=keeps)
    if not description.outputs:
        return
    # Threads had better have two rows where maxima are raised and rows wait in 16 bits, beside no sample's numbers.
    narrow = description.maxima and _waiting_words(description) <= 0.5
    if slots == 1 and chunks >= _HELD_CHUNKS and narrow and not _has_samples(description):
        yield row(Kind.REGISTERS, ahead=2, blocks_per_multiprocessor=1, sums=Sums.NONE, rounds=0, keeps=True)
    yield row(Kind.SHARED, ahead=1, blocks_per_multiprocessor=1, sums=Sums.NONE, rounds=0)
    for ahead in (3, 2):
        yield row(Kind.SHARED, ahead=ahead, blocks_per_multiprocessor=1, sums=Sums.NONE)


def _has_samples(description: KernelDescription) -> bool:
    """True where some node has one value, or one row, for each sample."""
    return any(n.axes & Axes.BATCH and not n.axes & Axes.OUTER for n in description.nodes)


# ------------------------------------------------------------------------------------------------ how good it is


def merit(description: KernelDescription, s: Schedule) -> float:
    """The share of the bandwidth that a schedule with row reductions can be expected to reach."""
    rows = s.blocks_per_multiprocessor * s.rows
    held = rows * description.width * _loaded_bytes(description)
    idle = description.width / s.covered  # lanes beyond the row's end take registers and do nothing
    shape = idle**0.2 * _CHUNKS.get(s.chunks, 0.94)
    if description.sums:
        return shape * _merit_of_sums(description, s, held)
    if s.kind == Kind.SHARED:
        coming = min(1.0, s.ahead * held / (96 * _KIB)) ** 0.45
        return shape * 0.8 * (coming if s.ahead > 1 else _filling(rows, held))
    return shape * _filling(rows, held) * (_KEEPING[bool(description.maxima)] if s.keeps else 1.0)


# Parameters in registers; what also raises maxima had better have more blocks, as each of them lives longer.
_KEEPING = {False: 1.06, True: 1.005}
_HELD_CHUNKS = 4  # vectors of a row per thread from which on it may have two rows
# By vectors of a row per thread: fewer threads meet at cheaper barriers, more have less to do between them.
_CHUNKS = {1: 0.98, 2: 1.0, 3: 0.99, 4: 0.985, 5: 0.98}


def _filling(rows: int, held: float) -> float:
    """Factor of the merit by rows that a multiprocessor holds."""
    return min(1.0, held / _ROWS_HELD) ** 0.45 * (1 - 0.2 / rows)


_TYPICAL_ROWS = 8192
_MULTIPROCESSORS = 132


def _merit_of_sums(description: KernelDescription, s: Schedule, held: float) -> float:
    filling = (held / _ROWS_SUMMED) ** 0.5 if held < _ROWS_SUMMED else (_ROWS_SUMMED / held) ** 0.4
    busy = min(1.0, s.blocks_per_multiprocessor * s.threads / 512) ** 0.1
    # Partial sums are written and read once more, mostly in L2.
    parts = sum(len(t.parts) for t in description.sums if t.axes & Axes.FEATURE)
    partial = 8 * parts * s.blocks_per_multiprocessor * _MULTIPROCESSORS
    stored = sum(item_size(t.dtype) * len(t.parts) for t in description.stores if t.axes & Axes.FEATURE)
    moved = _TYPICAL_ROWS * max(1, _loaded_bytes(description) + stored)  # bytes of each feature
    where = 1.0 if s.sums == Sums.REGISTERS else 0.85
    return filling * busy * _ahead(description, s) * where * (1 - 0.5 * partial / moved)


def _ahead(description: KernelDescription, s: Schedule) -> float:
    """Copies of rows to come: where only one or two rows are at work, they hide less of each other's barriers.

    Beside stores in 8 bits fewer reads are to be on their way: two rows at once, not three.
    """
    if s.kind != Kind.SHARED or s.ahead == 1:
        return 0.8 if s.kind == Kind.SHARED else 0.75
    narrow = any(item_size(t.dtype) == 1 for t in description.stores)
    few = s.blocks_per_multiprocessor * s.slots < 3 and not narrow
    return 1.0 if (s.ahead == 3) == few else 0.96 if few else 0.985


def _loaded_bytes(description: KernelDescription) -> int:
    """Bytes that are read for each feature of a row."""
    return sum(description.load_bytes[n.attrs[0]] for n in full_loads(description))


def _travelling_bytes(description: KernelDescription) -> int:
    """Bytes that kind `columns` reads for each feature of a row, without the parameters."""
    owned = any(t.axes & Axes.BATCH for t in description.sums)
    stays = Axes.SAMPLE_FEATURES if owned else Axes.FEATURE
    return sum(
        description.load_bytes[n.attrs[0]]
        for n in description.nodes
        if n.op == "input" and n.axes & Axes.FEATURE and n.axes & ~stays
    )


# ------------------------------------------------------------------------------------------------ what fits


def resident(description: KernelDescription, s: Schedule, limits: Limits) -> int:
    """Blocks of this schedule that fit a multiprocessor at once; 0 where one block is too much."""
    registers = registers_of(description, s)
    shared = shared_bytes(description, s) + static_bytes(description, s)
    if registers > 255 or shared > limits.shared_bytes or s.threads > limits.resident_threads:
        return 0
    by_registers = limits.registers // (-(-registers // 8) * 8 * s.threads)
    by_shared = (limits.shared_bytes + 1024) // (shared + 1024)
    return min(by_registers, by_shared, limits.resident_threads // s.threads)


def registers_of(description: KernelDescription, s: Schedule) -> int:
    """An estimate of the registers that a thread needs, fitted to what the assembler took without spilling.

    16-bit elements that wait count as half a register each: the compiler is kept from holding them converted.
    """
    own = s.vector * s.chunks
    draws = 8 if description.streams else 0
    parameters = [n for n in description.nodes if n.op == "input" and n.axes == Axes.FEATURE]
    features = sum(description.load_bytes[n.attrs[0]] for n in parameters) / 4  # words per column
    sums = sum(len(t.parts) for t in description.sums if t.axes & Axes.FEATURE) if s.sums == Sums.REGISTERS else 0
    arithmetic = sum(bool(n.axes & Axes.FEATURE) for n in description.nodes) / 16
    if s.kind == Kind.TILE:
        stored = sum(len(t.parts) for t in description.transposed)
        numbers = sum(n.op == "input" and n.axes == Axes.ROWS for n in description.nodes) + 6 * (s.chunks > 1)
        words = _travelling_bytes(description) / 4 * s.ahead + features + stored + sums
        least = _BLOCK_REGISTERS if description.in_blocks else 0
        return max(
            least,
            math.ceil(26 + draws * 0.375 + numbers + s.vector * words + max(0.0, instructions(description) - 6) / 2),
        )
    if s.kind == Kind.COLUMNS:
        words = _travelling_bytes(description) / 4 * s.ahead + features
        results = sum(len(t.parts) for t in description.stores if t.axes & Axes.FEATURE)
        words += 1.5 * sums + max(0, results - 2)
        base = 20.0 + draws if sums else 16 + draws / 4 + max(0.0, instructions(description) - 13) / 2
        return math.ceil(base + s.vector * words)
    if s.kind == Kind.REREAD:
        return math.ceil(32 + draws + s.vector * (_loaded_bytes(description) / 4 + arithmetic))
    if description.sums:
        waiting = _waiting_words(description) if s.kind == Kind.REGISTERS else 0.0
        return math.ceil(24 + draws + own * (sums + waiting + 0.5 + features) + s.vector * arithmetic / 4)
    if s.kind == Kind.SHARED:
        return math.ceil(32 + draws + s.vector * arithmetic)
    share = features if s.keeps else features / 2
    if s.held > 1:
        return math.ceil(16 + draws * 0.75 + own * (_waiting_words(description) * s.held + share))
    return math.ceil(24 + draws * 0.75 + 1.15 * own * (_waiting_words(description) + share))


def _waiting_words(description: KernelDescription) -> float:
    """32-bit words per element that a thread holds between its loads and its stores."""
    waits = [full_loads(description), *(p.waits for p in passes(description, Kind.REGISTERS))]
    return max(sum(description.load_bytes[n.attrs[0]] / 4 if n.op == "input" else 1.0 for n in w) for w in waits)
