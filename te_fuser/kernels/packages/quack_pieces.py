"""Pieces of epilogues in 8 bits, in the terms of quack-kernels and its language; imported where it is."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from quack.epilogue.ops import Scalar


def as_bfloat16(x: Any) -> Any:
    """x rounded as bfloat16 stores it."""
    return x.to(BFloat16).to(Float32)


class LargestMagnitude(Scalar):  # type: ignore[misc, unused-ignore]
    """Raises a number, float32 [], to the largest magnitude of what an epilogue gives under its name.

    Of non-negative numbers the bits have the same order, NaN's the last place: so NaN is kept, as other kernels do.
    """

    fn_port = "sink"

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        """(the largest so far, each number's place in the tile, rows and columns that are left)."""
        largest = cute.make_rmem_tensor(1, Float32)
        largest[0] = Float32(0.0)
        places = ctx.partition_for_epilogue_fn(cute.make_identity_tensor((ctx.tile_M, ctx.tile_N)))
        m, n, _, batch = ctx.tile_coord_mnkl
        return (
            largest,
            places,
            ctx.varlen_manager.len_m(batch) - m * ctx.tile_M,
            ctx.varlen_manager.len_n() - n * ctx.tile_N,
        )

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        """State of a part of the tile."""
        largest, places, rows, columns = state
        return largest, places[None, None, None, epi_coord[0], epi_coord[1]], rows, columns

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def fn_sink_flush(self, gemm: Any, state: Any, frag: Any) -> None:
        """Take a part of the tile in, but for what is beyond the matrix."""
        largest, places, rows, columns = state
        most = largest[0]
        if rows >= gemm.cta_tile_shape_mnk[0] and columns >= gemm.cta_tile_shape_mnk[1]:
            for k in cutlass.range_constexpr(cute.size(frag)):
                most = cute.arch.fmax(most, cute.math.absf(frag[k]), nan=True)
        else:
            for k in cutlass.range_constexpr(cute.size(frag)):
                if places[k][0] < rows and places[k][1] < columns:
                    most = cute.arch.fmax(most, cute.math.absf(frag[k]), nan=True)
        largest[0] = most

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def end(
        self,
        gemm: Any,
        param: Any,
        state: Any,
        epi_tile: Any,
        tiled_copy_t2r: Any,
        tiled_copy_r2s: Any,
        tile_coord_mnkl: Any,
        varlen_manager: Any,
        tidx: Any,
    ) -> None:
        """Raise the number in memory, once for each warp and tile."""
        bits = cute.recast_tensor(state[0], Int32)[0]
        most = cute.arch.warp_redux_sync(bits, "max")
        if cute.arch.lane_idx() == 0:
            cute.arch.atomic_max(cute.recast_ptr(param, dtype=Int32), most)
