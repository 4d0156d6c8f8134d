// A tile of 128 by 128 numbers in 8 bits by a scale for each block of them, by rows or transposed or both: blocks are
// 128 numbers of a row of what is made, which are other numbers transposed, or the whole tile.
#pragma once

#include "te_cuda_quantize.cuh"

namespace te {

// Scales of a tile, by row and by column; while they are looked for, bits of the largest magnitudes.
struct BlockScales {
  unsigned rows[kTileRows], columns[kTileColumns];
};

// Where a matrix in 8 bits goes, and the numbers that it is multiplied by to be itself again: [blocks, rows] of what is
// made, or for whole tiles [blocks, blocks], `lead` numbers a row.
template <class Narrow>
struct InBlocks {
  Narrow* data;
  float* inverses;
  long long lead;
};

// Quantizes tiles whose numbers the threads of a block hold, four rows of kVector columns in each of kTurns turns; zeros
// where there are none.
template <class Element, class Narrow, bool kByRows, bool kTurned, bool kSquare, int kVector, int kTurns, class Scale>
struct BlockTile {
  using Held = Vector<Element, kVector>[kTurns][4];
  static constexpr int kLanes = kTileColumns / kVector, kSlots = kTileThreads / kLanes;
  static_assert(kTurns * kSlots * 4 == kTileRows && kTileThreads == 2 * kTileColumns);

  const Held& held;
  BlockScales& scales;
  unsigned* words;  // a tile in shared memory; none where nothing is transposed
  int lane, slot;
  Scale scale_of;

  // The whole; `left` and `top` are its first column and row, within `width` columns and `height` rows.
  __device__ __forceinline__ void store(InBlocks<Narrow> by_rows, InBlocks<Narrow> turned, int left, int width, long long top,
                       long long height) const {
    if (threadIdx.x < kTileRows) scales.rows[threadIdx.x] = scales.columns[threadIdx.x] = 0;
    __syncthreads();
    find();
    __syncthreads();
    const float whole = kSquare ? scale_of(scales.rows[0]) : 1.0f;
    settle(by_rows, turned, left, width, top, height);
    __syncthreads();
    put(by_rows, whole, left, width, top, height);
    __syncthreads();
    if constexpr (kTurned) store_columns<kTileThreads, kTileColumns, kVector>(turned.data, words, left, width, top, height);
  }

 private:
  // Raises the magnitudes of the tile to those of what the thread holds.
  __device__ __forceinline__ void find() const {
    unsigned columns[kVector] = {}, all = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        unsigned row = 0;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float number = get(held[turn][r], k);
          row = larger(row, number);
          if constexpr (!kSquare && kTurned) columns[k] = larger(columns[k], number);
        }
        if constexpr (kSquare) {
          all = row > all ? row : all;
        } else if constexpr (kByRows) {  // eight neighbours have the same row
#pragma unroll
          for (int distance = 4; distance > 0; distance /= 2)
            row = larger(row, __shfl_xor_sync(kWarp, as_float(row), distance));
          if (threadIdx.x % 8 == 0) atomicMax(&scales.rows[4 * (turn * kSlots + slot) + r], row);
        }
      }
    if constexpr (kSquare) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        all = larger(all, __shfl_xor_sync(kWarp, as_float(all), distance));
      if (threadIdx.x % 32 == 0) atomicMax(&scales.rows[0], all);
    } else if constexpr (kTurned) {  // four eights of a warp have the same columns
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
#pragma unroll
        for (int distance = 16; distance >= 8; distance /= 2)
          columns[k] = larger(columns[k], __shfl_xor_sync(kWarp, as_float(columns[k]), distance));
        if (threadIdx.x % 32 < 8) atomicMax(&scales.columns[lane * kVector + k], columns[k]);
      }
    }
  }

  // Turns magnitudes into scales, and stores what numbers of 8 bits are multiplied by.
  __device__ __forceinline__ void settle(InBlocks<Narrow> by_rows, InBlocks<Narrow> turned, int left, int width, long long top,
                        long long height) const {
    const int mine = threadIdx.x % kTileRows, across = left / kTileColumns;
    const long long down = top / kTileRows;
    const bool second = threadIdx.x >= kTileRows;
    if constexpr (kSquare) {
      const float scale = scale_of(scales.rows[0]);
      if (kByRows && threadIdx.x == 0) by_rows.inverses[down * by_rows.lead + across] = 1.0f / scale;
      if (kTurned && threadIdx.x == 0) turned.inverses[across * turned.lead + down] = 1.0f / scale;
    } else {
      unsigned& bits = second ? scales.columns[mine] : scales.rows[mine];
      const float scale = scale_of(bits);
      bits = as_bits(scale);
      if (kByRows && !second && top + mine < height) by_rows.inverses[across * by_rows.lead + top + mine] = 1.0f / scale;
      if (kTurned && second && left + mine < width) turned.inverses[down * turned.lead + left + mine] = 1.0f / scale;
    }
  }

  // Stores the rows, and puts what is transposed into shared memory.
  __device__ __forceinline__ void put(InBlocks<Narrow> by_rows, float whole, int left, int width, long long top, long long height) const {
    const int column = left + kVector * lane;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int four = turn * kSlots + slot;
      FourRows<kVector> rows, columns;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float scale = kSquare ? whole : as_float(scales.rows[4 * four + r]);
        float scaled[kVector];
#pragma unroll
        for (int k = 0; k < kVector; ++k) scaled[k] = get(held[turn][r], k) * scale;
        put_row<Narrow>(rows, r, scaled);
        const long long row = top + 4 * four + r;
        if (kByRows && row < height && column < width)
          access::write<kVector / 4>(reinterpret_cast<unsigned*>(by_rows.data + row * width + column), rows.words[r]);
        if constexpr (kTurned && !kSquare) {
#pragma unroll
          for (int k = 0; k < kVector; ++k)
            scaled[k] = get(held[turn][r], k) * as_float(scales.columns[lane * kVector + k]);
          put_row<Narrow>(columns, r, scaled);
        }
      }
      if constexpr (kTurned) put_columns(words, lane, four, kSquare ? rows : columns);
    }
  }
};

// The largest number of a format.
template <class Narrow>
inline constexpr float kLargest = 448.0f;
template <>
inline constexpr float kLargest<e5m2> = 57344.0f;

// How a scale follows from the largest magnitude of what it scales, in the recipe's own way.
template <class Narrow>
struct PowerOfTwo {
  __device__ __forceinline__ float operator()(unsigned amax) const {
    return own_scale<true>(as_float(amax), kLargest<Narrow>, 0.0f);
  }
};

// Keeps a vector as it would be stored.
template <class T, int kCount>
TE_DEVICE Vector<T, kCount> held(const float (&values)[kCount]) {
  Vector<T, kCount> made;
#pragma unroll
  for (int i = 0; i < made.kWords; ++i) {
    if constexpr (sizeof(T) == 4) made.words[i] = as_bits(values[i]);
    else made.words[i] = packed(T{}, values[2 * i], values[2 * i + 1]);
  }
  return made;
}

// Tiles of a generated kernel: what is not made has no address. Data and numbers of a tensor lie behind one another.
template <bool kByRows, bool kTurned, class Narrow, class Element, int kVector, int kTurns>
TE_DEVICE void store_blocks(const Vector<Element, kVector> (&held)[kTurns][4], BlockScales& scales, unsigned* words,
                            int lane, int slot, Narrow* by_rows, Narrow* turned, int left, int width, long long top,
                            long long height) {
  const BlockTile<Element, Narrow, kByRows, kTurned, false, kVector, kTurns, PowerOfTwo<Narrow>> tile{
      held, scales, words, lane, slot, {}};
  tile.store({by_rows, reinterpret_cast<float*>(by_rows + height * width), height},
             {turned, reinterpret_cast<float*>(turned + padded(height) * width), width}, left, width, top, height);
  if constexpr (!kTurned) __syncthreads();
}

}  // namespace te
