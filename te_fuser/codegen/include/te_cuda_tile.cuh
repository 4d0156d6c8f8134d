// What tiles of rows add to te_cuda.cuh: 8 bits that are stored transposed, by way of shared memory.
//
// A thread has kCount neighbours of four rows at a time. Turned, each column is one word of four rows, and four words
// of different threads are the 16 bytes that another thread stores.
#pragma once

#include "te_cuda.cuh"

namespace te {

constexpr int kTileRows = 128, kPieceRows = 16, kPieces = kTileRows / kPieceRows;

// Tokens of a tensor that lies transposed: the rows, and zeros behind them.
TE_DEVICE long long padded(long long rows) { return (rows + kPieceRows - 1) / kPieceRows * kPieceRows; }

// kCount neighbours of four rows in 8 bits; zeros where there is no row.
template <int kCount>
struct FourRows {
  static constexpr int kWords = (kCount + 3) / 4;
  unsigned words[4][kWords] = {};
};

// Rounds what a thread has of one row.
template <class T, int kCount>
TE_DEVICE void put_row(FourRows<kCount>& rows, int row, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    rows.words[row][0] = rounded<T>(values[0]).bits;
  } else if constexpr (kCount == 2) {
    rows.words[row][0] = packed(T{}, values[0], values[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      rows.words[row][i / 4] = packed(T{}, values[i], values[i + 1]) | packed(T{}, values[i + 2], values[i + 3]) << 16;
  }
}

// The word of a tile that begins the 16 rows of a piece of a column. Neighbours among the lanes that write together
// have different banks, and so have the pieces of a column, which are read together.
template <int kCount>
TE_DEVICE unsigned place(unsigned column, unsigned piece) {
  return (column * kPieces + (piece ^ column / kCount % kPieces)) * 4;
}

// Writes the columns of a lane; `four` is the number of the four rows within the tile.
template <int kCount>
TE_DEVICE void put_columns(unsigned* tile, int lane, int four, const FourRows<kCount>& rows) {
  unsigned* const to = tile + place<kCount>(lane * kCount, four / 4) + four % 4;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    unsigned first[2], last[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // bytes 2 half and 2 half + 1 of two rows
      first[half] = __byte_perm(rows.words[0][i / 4], rows.words[1][i / 4], half ? 0x7362 : 0x5140);
      last[half] = __byte_perm(rows.words[2][i / 4], rows.words[3][i / 4], half ? 0x7362 : 0x5140);
    }
#pragma unroll
    for (int k = 0; k < 4 && i + k < kCount; ++k)
      to[(i + k) * kPieces * 4] = __byte_perm(first[k / 2], last[k / 2], k % 2 ? 0x7632 : 0x5410);
  }
}

// Stores the columns of a tile that begins at `column` and `row`, 16 rows at a time.
template <int kThreads, int kColumns, int kCount, class T>
TE_DEVICE void store_columns(T* to, const unsigned* tile, int column, int width, long long row, long long rows) {
  constexpr int kAll = kColumns * kPieces;
  const long long tokens = padded(rows);
#pragma unroll
  for (unsigned first = 0; first < kAll; first += kThreads) {
    const unsigned number = first + threadIdx.x, piece = number % kPieces, mine = number / kPieces;
    const long long from = row + piece * kPieceRows;
    if (number < kAll && column + static_cast<int>(mine) < width && from < rows) {
      unsigned words[4];
      access::read<4>(words, tile + place<kCount>(mine, piece));
      access::write<4>(reinterpret_cast<unsigned*>(to + (column + static_cast<int>(mine)) * tokens + from), words);
    }
  }
}

// Adds up what the threads of a block, whose warps are 8 lanes by four fours, summed for the same columns, always in the
// same order, and stores it: where it belongs if no other block adds to it, else where `finish` finds it. `total` and
// `partial` begin at the first column of the block, from which on there are `columns`.
template <int kThreads, int kLanes, class T, int kCount>
TE_DEVICE void store_tile_sums(bool alone, T* total, float* partial, float* shared, int lane, int columns,
                               float (&sums)[kCount]) {
  constexpr int kColumns = kLanes * kCount, kBeside = kLanes / 8, kWarps = kThreads / 32 / kBeside;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] += __shfl_xor_sync(kWarp, sums[i], 8);
    sums[i] += __shfl_xor_sync(kWarp, sums[i], 16);
  }
  __syncthreads();
  if (threadIdx.x % 32 < 8)
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared[threadIdx.x / 32 / kBeside * kColumns + lane * kCount + i] = sums[i];
  __syncthreads();
#pragma unroll
  for (int column = threadIdx.x; column < kColumns; column += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp * kColumns + column];
    if (column < columns) {
      if (alone) total[column] = rounded<T>(sum);
      else partial[column] = sum;
    }
  }
}

}  // namespace te
