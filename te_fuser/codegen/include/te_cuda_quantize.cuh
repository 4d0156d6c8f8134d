// What kernels that make 8 bits of whole matrices have in common: tiles of 128 by 128, by rows and transposed.
#pragma once

#include "te_cuda_tile.cuh"

namespace te {

constexpr int kTileColumns = 128, kTileThreads = 256;

// Blocks of a multiprocessor; fours of rows that a thread has on their way before it uses the first. Rounding to 8 bits
// without an instruction takes more registers.
#if TE_PTX && __CUDA_ARCH__ < 890
constexpr int kTileBlocks = 2, kTileAhead = 1;
#else
constexpr int kTileBlocks = 3, kTileAhead = 2;
#endif

// Where a matrix in 8 bits goes, by rows and transposed; none: it is not made.
template <class Narrow>
struct LayoutsOf {
  Narrow* rows;
  Narrow* turned;
};
using Layouts = LayoutsOf<e4m3>;

// Tile number `tile` of a matrix, as far as it is there, times a scale in 8 bits. Raises the largest magnitude to those
// of what the thread read. Whoever does several tiles waits for the block in between.
template <class T, bool kByRows, bool kTurned, class Narrow = e4m3>
TE_DEVICE void quantize_tile(const T* elements, int height, int width, int tile, float scale, LayoutsOf<Narrow> to,
                             uint4* shared, unsigned& largest) {
  constexpr int kVector = 16 / sizeof(T), kLanes = kTileColumns / kVector, kSlots = kTileThreads / kLanes;
  const int across = (width + kTileColumns - 1) / kTileColumns;
  const int top = tile / across * kTileRows, left = tile % across * kTileColumns;
  // As TileText has it: a warp is 8 lanes by four fours.
  const int lane = threadIdx.x % 8 + threadIdx.x / 32 * 8 % kLanes;
  const int slot = threadIdx.x / 8 % 4 + threadIdx.x / (4 * kLanes) * 4;
  const int column = left + kVector * lane;
  unsigned* const words = reinterpret_cast<unsigned*>(shared);
#pragma unroll 1
  for (int turn = 0; turn < kTileRows / 4 / kSlots; turn += kTileAhead) {
    Vector<T, kVector> read[kTileAhead][4] = {};
#pragma unroll
    for (int ahead = 0; ahead < kTileAhead; ++ahead)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = top + 4 * ((turn + ahead) * kSlots + slot) + r;
        if (row < height && column < width)
          read[ahead][r] = load<kVector>(elements + static_cast<long long>(row) * width + column);
      }
#pragma unroll
    for (int ahead = 0; ahead < kTileAhead; ++ahead) {
      const int four = (turn + ahead) * kSlots + slot;
      FourRows<kVector> rows;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float scaled[kVector];
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float number = get(read[ahead][r], k);
          largest = larger(largest, number);
          scaled[k] = number * scale;
        }
        put_row<Narrow>(rows, r, scaled);
        const int row = top + 4 * four + r;
        if (kByRows && to.rows != nullptr && row < height && column < width)
          access::write<kVector / 4>(
              reinterpret_cast<unsigned*>(to.rows + static_cast<long long>(row) * width + column), rows.words[r]);
      }
      if constexpr (kTurned) put_columns(words, lane, four, rows);
    }
  }
  if constexpr (kTurned) {
    __syncthreads();
    if (to.turned != nullptr) {
      store_columns<kTileThreads, kTileColumns, kVector>(to.turned, words, left, width, top, height);
    }
  }
}

}  // namespace te
