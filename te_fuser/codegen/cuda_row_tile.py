"""The function of a kernel with row reductions that stores transposed: blocks do tiles of whole rows, row after row.

What is stored transposed waits in shared memory, 8 bits of each row as they lie, until the tile is whole; then each
thread stores 16 rows of four columns.
"""

from __future__ import annotations

from te_fuser.codegen.cuda_rows import RowText
from te_fuser.codegen.cuda_text import CTYPES
from te_fuser.codegen.description import KernelDescription, Store, is_transposed
from te_fuser.codegen.schedule import Schedule


class RowTileText(RowText):
    """Row reductions, `kRows` rows of a block after one another, and their 8 bits in shared memory."""

    def __init__(self, symbol: str, description: KernelDescription, schedule: Schedule, space: str) -> None:
        super().__init__(symbol, description, schedule, space)
        self.tiles = {
            (s.name, k): self.names.fresh(f"{s.name}{f'_{k}' if len(s.parts) > 1 else ''}_tile")
            for s in description.transposed
            for k in range(len(s.parts))
        }
        self.first, self.count, self.step = "first", "rows", "kSlots" if schedule.slots > 1 else "1"
        self.stride = self.step
        self.loop = f"{self.index} = start; {self.index} < end; {self.index} += {self.step}"

    @property
    def constants(self) -> dict[str, int]:
        return super().constants | {"kRows": self.s.turned}

    def declare_range(self, group: str, groups: str) -> None:
        if self.d.sums:
            self.text(f"const bool alone = {groups} == 1;")
        self.text(f"const long long step = static_cast<long long>({groups}) * kRows;")
        self.text(f"const long long first = static_cast<long long>({group}) * kRows;")

    def after(self, rows: str) -> str:
        later = f"{rows} * {self.step}" if self.s.slots > 1 else rows
        return f"te::row_after<kRows>({self.index}, {later}, start, step)"

    def _rows(self) -> None:
        with self.text.block("for (long long start = first; start < rows; start += step)"):
            self.text("const long long end = start + kRows < rows ? start + kRows : rows;")
            super()._rows()
            self.text("__syncthreads();")
            for s in self.d.transposed:
                for k in range(len(s.parts)):
                    to = self.pointer["store", s.name] + (f" + {k * self.d.width} * te::padded(rows)" if k else "")
                    tile = self.tiles[s.name, k]
                    self.text(f"te::store_turned<kThreads, kRows, kWidth>({to}, {tile}, start, rows);")
            if self.s.lanes <= 32:  # else whoever writes the next row has met all others in its reductions
                self.text("__syncthreads();")

    def store_line(self, s: Store, k: int, name: str) -> str:
        if not is_transposed(s):
            return super().store_line(s, k, name)
        row = f"static_cast<int>(row - start), column, {name}"
        return f"te::put_in_row<{CTYPES[s.dtype]}, kRows, kWidth>({self.tiles[s.name, k]}, {row});"
