// A tile of 128 by 128 numbers in 8 bits by a scale for each block of them, by rows or transposed or both: blocks are
// 128 numbers of a row of what is made, which are other numbers transposed, or the whole tile.
#pragma once

#include "te_cuda_quantize.cuh"

namespace te {

// Scales of a tile, by row and by column; while they are looked for, bits of the largest magnitudes.
struct alignas(16) BlockScales {
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

// The larger of two pairs of whole numbers of 16 bits.
TE_DEVICE unsigned larger_pair(unsigned a, unsigned b) {
#if TE_PTX && __CUDA_ARCH__ >= 900
  unsigned larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  const unsigned low = a << 16 > b << 16 ? a : b, high = a >> 16 > b >> 16 ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
#endif
}

// Quantizes tiles whose numbers wait in shared memory: each thread has those of four rows of kVector columns for itself,
// in several turns; zeros where there are none.
template <class Element, class Narrow, bool kByRows, bool kTurned, bool kSquare, int kVector, class Scale>
struct BlockTile {
  static constexpr int kLanes = kTileColumns / kVector, kSlots = kTileThreads / kLanes;
  static constexpr int kTurns = kTileRows / (4 * kSlots);
  static_assert(kTurns * kSlots * 4 == kTileRows && kTileThreads == 2 * kTileColumns);

  const Vector<Element, kVector>* held;  // as `Waiting` lays them out
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
    const float whole = kSquare ? scale_of(bits_of(scales.rows[0])) : 1.0f;
    settle(by_rows, turned, left, width, top, height);
    __syncthreads();
    put(by_rows, whole, left, width, top, height);
    __syncthreads();
    if constexpr (kTurned) store_columns<kTileThreads, kTileColumns, kVector>(turned.data, words, left, width, top, height);
  }

 private:
  __device__ __forceinline__ Vector<Element, kVector> at(int turn, int r) const {
    return held[(turn * 4 + r) * kTileThreads];
  }

  // Raises the magnitudes of the tile to those of what the thread holds.
  __device__ __forceinline__ void find() const {
    if constexpr (sizeof(Element) == 2) find_pairs();
    else find_each();
  }

  // By pairs, whose magnitudes are ordered as whole numbers of 16 bits, NaN above infinity.
  __device__ __forceinline__ void find_pairs() const {
    unsigned columns[kVector / 2] = {}, all = 0;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      unsigned rows[2] = {};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Vector<Element, kVector> read = at(turn, r);
        unsigned row = 0;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
          const unsigned sizes = read.words[i] & 0x7fff7fffu;
          row = larger_pair(row, sizes);
          if constexpr (!kSquare && kTurned) columns[i] = larger_pair(columns[i], sizes);
        }
        if constexpr (kSquare) all = larger_pair(all, row);
        else rows[r / 2] |= (larger_pair(row, row >> 16) & 0xffffu) << (16 * (r % 2));
      }
      if constexpr (kByRows && !kSquare) {
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          const unsigned found = among<4, 1>(rows[two]);  // eight neighbours have the same rows
          unsigned* const to = &scales.rows[4 * (turn * kSlots + slot) + 2 * two];
          if (threadIdx.x % 8 == 0) atomicMax(to, found & 0xffffu), atomicMax(to + 1, found >> 16);
        }
      }
    }
    if constexpr (kSquare) {
      all = among<16, 1>(all);
      if (threadIdx.x % 32 == 0) atomicMax(&scales.rows[0], larger_pair(all, all >> 16) & 0xffffu);
    } else if constexpr (kTurned) {  // four eights of a warp have the same columns
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        const unsigned found = among<16, 8>(columns[i]);
        unsigned* const to = &scales.columns[lane * kVector + 2 * i];
        if (threadIdx.x % 32 < 8) atomicMax(to, found & 0xffffu), atomicMax(to + 1, found >> 16);
      }
    }
  }

  // Of the lanes whose numbers differ by these distances.
  template <int kFirst, int kLast>
  static __device__ __forceinline__ unsigned among(unsigned pair) {
#pragma unroll
    for (int distance = kFirst; distance >= kLast; distance /= 2)
      pair = larger_pair(pair, as_bits(__shfl_xor_sync(kWarp, as_float(pair), distance)));
    return pair;
  }

  __device__ __forceinline__ void find_each() const {
    unsigned columns[kVector] = {}, all = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Vector<Element, kVector> read = at(turn, r);
        unsigned row = 0;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          row = larger(row, get(read, k));
          if constexpr (!kSquare && kTurned) columns[k] = larger(columns[k], get(read, k));
        }
        if constexpr (kSquare) {
          all = row > all ? row : all;
        } else if constexpr (kByRows) {
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
    } else if constexpr (kTurned) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
#pragma unroll
        for (int distance = 16; distance >= 8; distance /= 2)
          columns[k] = larger(columns[k], __shfl_xor_sync(kWarp, as_float(columns[k]), distance));
        if (threadIdx.x % 32 < 8) atomicMax(&scales.columns[lane * kVector + k], columns[k]);
      }
    }
  }

  // What a magnitude is, as the bits of a float.
  static __device__ __forceinline__ unsigned bits_of(unsigned magnitude) {
    if constexpr (sizeof(Element) == 2) return as_bits(number(Element{static_cast<unsigned short>(magnitude)}));
    else return magnitude;
  }

  // Turns magnitudes into scales, and stores what numbers of 8 bits are multiplied by.
  __device__ __forceinline__ void settle(InBlocks<Narrow> by_rows, InBlocks<Narrow> turned, int left, int width, long long top,
                        long long height) const {
    const int mine = threadIdx.x % kTileRows, across = left / kTileColumns;
    const long long down = top / kTileRows;
    const bool second = threadIdx.x >= kTileRows;
    if constexpr (kSquare) {
      const float scale = scale_of(bits_of(scales.rows[0]));
      if (kByRows && threadIdx.x == 0) by_rows.inverses[down * by_rows.lead + across] = 1.0f / scale;
      if (kTurned && threadIdx.x == 0) turned.inverses[across * turned.lead + down] = 1.0f / scale;
    } else {
      unsigned& bits = second ? scales.columns[mine] : scales.rows[mine];
      const float scale = scale_of(bits_of(bits));
      bits = as_bits(scale);
      if (kByRows && !second && top + mine < height) by_rows.inverses[across * by_rows.lead + top + mine] = 1.0f / scale;
      if (kTurned && second && left + mine < width) turned.inverses[down * turned.lead + left + mine] = 1.0f / scale;
    }
  }

  // Stores the rows, and puts what is transposed into shared memory.
  __device__ __forceinline__ void put(InBlocks<Narrow> by_rows, float whole, int left, int width, long long top,
                                      long long height) const {
    const int column = left + kVector * lane;
    float by_column[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      by_column[k] = kTurned && !kSquare ? as_float(scales.columns[lane * kVector + k]) : whole;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int four = turn * kSlots + slot;
      FourRows<kVector> rows, columns;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Vector<Element, kVector> read = at(turn, r);
        float scaled[kVector];
        if constexpr (kByRows || kSquare) {
          const float scale = kSquare ? whole : as_float(scales.rows[4 * four + r]);
#pragma unroll
          for (int k = 0; k < kVector; ++k) scaled[k] = get(read, k) * scale;
          put_row<Narrow>(rows, r, scaled);
        }
        const long long row = top + 4 * four + r;
        if (kByRows && row < height && column < width)
          access::write<kVector / 4>(reinterpret_cast<unsigned*>(by_rows.data + row * width + column), rows.words[r]);
        if constexpr (kTurned && !kSquare) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) scaled[k] = get(read, k) * by_column[k];
          put_row<Narrow>(columns, r, scaled);
        }
      }
      if constexpr (kTurned) put_columns(words, lane, four, kSquare ? rows : columns);
    }
  }
};

// Where a thread has its share of a tile in shared memory.
template <class Element, int kVector>
struct Waiting {
  static constexpr int kPieces = kTileRows * kTileColumns / kVector / kTileThreads;
  Vector<Element, kVector>* own;

  __device__ __forceinline__ explicit Waiting(void* tile)
      : own(static_cast<Vector<Element, kVector>*>(tile) + threadIdx.x) {}

  __device__ __forceinline__ Vector<Element, kVector>& at(int turn, int r) const {
    return own[(turn * 4 + r) * kTileThreads];
  }
  // Zeros for what will not come.
  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) own[piece * kTileThreads] = Vector<Element, kVector>{};
  }
  // Keeps a vector as it would be stored.
  __device__ __forceinline__ void keep(int turn, int r, const float (&values)[kVector]) const {
    Vector<Element, kVector> made;
#pragma unroll
    for (int i = 0; i < made.kWords; ++i) {
      if constexpr (sizeof(Element) == 4) made.words[i] = as_bits(values[i]);
      else made.words[i] = packed(Element{}, values[2 * i], values[2 * i + 1]);
    }
    at(turn, r) = made;
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

// Tiles of a generated kernel: what is not made has no address. Data and numbers of a tensor lie behind one another.
template <bool kByRows, bool kTurned, class Narrow, class Element, int kVector>
TE_DEVICE void store_blocks(const Waiting<Element, kVector>& waiting, BlockScales& scales, unsigned* words, int lane,
                            int slot, Narrow* by_rows, Narrow* turned, int left, int width, long long top,
                            long long height) {
  const BlockTile<Element, Narrow, kByRows, kTurned, false, kVector, PowerOfTwo<Narrow>> tile{
      waiting.own, scales, words, lane, slot, {}};
  tile.store({by_rows, reinterpret_cast<float*>(by_rows + height * width), height},
             {turned, reinterpret_cast<float*>(turned + padded(height) * width), width}, left, width, top, height);
  if constexpr (!kTurned) __syncthreads();
}

}  // namespace te
