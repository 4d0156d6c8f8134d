// A tile of 128 by 128 numbers in 8 bits by a scale for each block of them, by rows or transposed or both: blocks are
// 128 numbers of a row of what is made, which are other numbers transposed, or the whole tile.
#pragma once

#include "te_cuda_quantize.cuh"

namespace te {

// Of each row and of each column of a tile: the largest magnitude while it is looked for, and the scale that follows.
struct alignas(16) BlockScales {
  unsigned largest[2][kTileRows];
  float scales[2][kTileRows];

  // Before the first tile; whoever takes a magnitude clears it.
  __device__ __forceinline__ void begin() {
    largest[threadIdx.x / kTileRows][threadIdx.x % kTileRows] = 0;
    __syncthreads();
  }
};

// Where a matrix in 8 bits goes, and the numbers that it is multiplied by to be itself again: [blocks, rows] of what is
// made, or for whole tiles [blocks, blocks], `lead` numbers a row.
template <class Narrow>
struct InBlocks {
  Narrow* data;
  float* inverses;
  long long lead;
};

template <class Element>
inline constexpr bool kIsBf16 = false;
template <>
inline constexpr bool kIsBf16<bf16> = true;

// Bits of a word of elements that are not signs.
template <class Element>
inline constexpr unsigned kSizes = sizeof(Element) == 2 ? 0x7fff7fffu : 0x7fffffffu;

// The larger magnitudes of a word of one element of 32 bits or two of 16, NaN above infinity; signs mean nothing.
template <class Element>
TE_DEVICE unsigned larger_sizes(unsigned a, unsigned b) {
  const unsigned mine = a & kSizes<Element>, other = b & kSizes<Element>;
  if constexpr (sizeof(Element) == 4) {
    return mine > other ? mine : other;
  } else {
#if TE_PTX && __CUDA_ARCH__ >= 900
    unsigned larger;
    if constexpr (kIsBf16<Element>)
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    const unsigned low = mine << 16 > other << 16 ? mine : other, high = mine >> 16 > other >> 16 ? mine : other;
    return (high & 0xffff0000u) | (low & 0xffffu);
#endif
  }
}

// Largest magnitudes of what a thread has of a tile: of its columns, and of the kRows rows that it has at a time.
template <class Element, int kVector, int kRows, bool kByRows, bool kTurned>
struct Magnitudes {
  static constexpr int kWords = Vector<Element, kVector>::kWords;
  static constexpr bool kPairs = sizeof(Element) == 2;
  unsigned rows[kRows] = {}, columns[kWords] = {};

  __device__ __forceinline__ void take(int row, const Vector<Element, kVector>& read) {
    unsigned all = read.words[0];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (kByRows && i > 0) all = larger_sizes<Element>(all, read.words[i]);
      if constexpr (kTurned) columns[i] = larger_sizes<Element>(columns[i], read.words[i]);
    }
    rows[row] = all;
  }

  // Raises the rows from `first` on, of which eight neighbours have parts.
  __device__ __forceinline__ void raise_rows(BlockScales& scales, int first) {
    if constexpr (kByRows) {
      constexpr int kEach = kPairs && kRows > 1 ? 2 : 1;
      const int mine = threadIdx.x % 8;
      unsigned own = 0;
#pragma unroll
      for (int row = 0; row < kRows; row += kEach) {
        unsigned found = rows[row];
        if constexpr (kEach == 2) {
          const unsigned next = rows[row + 1];
          found = larger_sizes<Element>(__byte_perm(found, next, 0x5410), __byte_perm(found, next, 0x7632));
        } else if constexpr (kPairs) {
          found = larger_sizes<Element>(found, found >> 16);
        }
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) found = of_both(found, distance);
        if (mine / kEach == row / kEach) own = found;
      }
      if constexpr (kEach == 2) own >>= 16 * (mine % 2);
      if (mine < kRows) atomicMax(&scales.largest[0][first + mine], own & (kPairs ? 0x7fffu : 0x7fffffffu));
#pragma unroll
      for (int row = 0; row < kRows; ++row) rows[row] = 0;
    }
  }

  // Raises the columns of a lane, of which four eights of a warp have parts: each of them raises a share.
  __device__ __forceinline__ void raise_columns(BlockScales& scales, int lane) {
    if constexpr (kTurned) {
      int kept = kWords, first = 0;
#pragma unroll
      for (int distance = 16; distance >= 8; distance /= 2) {
        const bool upper = threadIdx.x & distance;
        if (kept == 1) {
          columns[0] = of_both(columns[0], distance);
          continue;
        }
        kept /= 2;
        first += upper ? kept : 0;
#pragma unroll
        for (int i = 0; i < kept; ++i) {
          const unsigned mine = upper ? columns[i + kept] : columns[i], other = upper ? columns[i] : columns[i + kept];
          columns[i] = larger_sizes<Element>(mine, exchanged(other, distance));
        }
      }
      unsigned* const to = &scales.largest[1][lane * kVector + (kPairs ? 2 : 1) * first];
#pragma unroll
      for (int i = 0; i < kept; ++i) {
        if constexpr (kPairs) {
          atomicMax(to + 2 * i, columns[i] & 0x7fffu);
          atomicMax(to + 2 * i + 1, columns[i] >> 16 & 0x7fffu);
        } else {
          atomicMax(to + i, columns[i] & 0x7fffffffu);
        }
      }
    }
  }

  // Raises one number to all that there is.
  __device__ __forceinline__ void raise_all(unsigned& largest) const {
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) all = larger_sizes<Element>(all, columns[i]);
    if constexpr (kPairs) all = larger_sizes<Element>(all, all >> 16);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) all = of_both(all, distance);
    if (threadIdx.x % 32 == 0) atomicMax(&largest, all & (kPairs ? 0x7fffu : 0x7fffffffu));
  }

 private:
  static __device__ __forceinline__ unsigned exchanged(unsigned word, int distance) {
    return as_bits(__shfl_xor_sync(kWarp, as_float(word), distance));
  }
  static __device__ __forceinline__ unsigned of_both(unsigned word, int distance) {
    return larger_sizes<Element>(word, exchanged(word, distance));
  }
};

// Whether a tile is there as a whole, as an argument.
template <bool kIs>
struct Whole {
  static constexpr bool value = kIs;
};

// Quantizes tiles whose numbers wait in shared memory: each thread has those of four rows of kVector columns for
// itself, in several turns; zeros where there are none.
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

  // Raises the magnitudes of the tile to those of what the thread holds.
  __device__ __forceinline__ void find() const {
    Magnitudes<Element, kVector, 4, kByRows && !kSquare, kTurned || kSquare> found;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int r = 0; r < 4; ++r) found.take(r, at(turn, r));
      found.raise_rows(scales, 4 * (turn * kSlots + slot));
    }
    if constexpr (kSquare) found.raise_all(scales.largest[0][0]);
    else found.raise_columns(scales, lane);
  }

  // What is left to do when the block has raised the magnitudes; `left` and `top` are the tile's first column and row,
  // within `width` columns and `height` rows.
  __device__ __forceinline__ void store(InBlocks<Narrow> by_rows, InBlocks<Narrow> turned, int left, int width,
                                        long long top, long long height) const {
    if (left + kTileColumns <= width && top + kTileRows <= height)
      store(by_rows, turned, left, width, top, height, Whole<true>{});
    else
      store(by_rows, turned, left, width, top, height, Whole<false>{});
  }

 private:
  template <class IsWhole>
  __device__ __forceinline__ void store(InBlocks<Narrow> by_rows, InBlocks<Narrow> turned, int left, int width,
                                        long long top, long long height, IsWhole whole) const {
    __syncthreads();
    const float scale = settle(by_rows, turned, left, width, top, height, whole);
    __syncthreads();
    put(by_rows, scale, left, width, top, height, whole);
    if constexpr (kTurned || kSquare) __syncthreads();
    if constexpr (kTurned) store_turned(turned.data, left, width, top, height, whole);
  }

  __device__ __forceinline__ Vector<Element, kVector> at(int turn, int r) const {
    return held[(turn * 4 + r) * kTileThreads];
  }

  // What a magnitude is, as the bits of a float.
  static __device__ __forceinline__ unsigned bits_of(unsigned magnitude) {
    if constexpr (sizeof(Element) == 2) return as_bits(number(Element{static_cast<unsigned short>(magnitude)}));
    else return magnitude;
  }

  // Makes scales of magnitudes, and stores what numbers of 8 bits are multiplied by; gives that of a whole tile.
  template <class IsWhole>
  __device__ __forceinline__ float settle(InBlocks<Narrow> by_rows, InBlocks<Narrow> turned, int left, int width,
                                          long long top, long long height, IsWhole) const {
    const int across = left / kTileColumns, mine = threadIdx.x % kTileRows;
    const long long down = top / kTileRows;
    if constexpr (kSquare) {
      const float scale = scale_of(bits_of(scales.largest[0][0]));
      if (kByRows && threadIdx.x == 0) by_rows.inverses[down * by_rows.lead + across] = Scale::inverse(scale);
      if (kTurned && threadIdx.x == 0) turned.inverses[across * turned.lead + down] = Scale::inverse(scale);
      return scale;
    }
    const bool second = threadIdx.x >= kTileRows;
    if (second ? kTurned : kByRows) {
      const float scale = scale_of(bits_of(scales.largest[second][mine]));
      scales.largest[second][mine] = 0;
      scales.scales[second][mine] = scale;
      const long long place = (second ? left : top) + mine;
      const long long numbers = second ? down * turned.lead : across * by_rows.lead;
      if (IsWhole::value || place < (second ? width : height))
        (second ? turned : by_rows).inverses[numbers + place] = Scale::inverse(scale);
    }
    return 1.0f;
  }

  // Stores the rows, and puts what is transposed into shared memory.
  template <class IsWhole>
  __device__ __forceinline__ void put(InBlocks<Narrow> by_rows, float scale, int left, int width, long long top,
                                      long long height, IsWhole) const {
    if (kSquare && threadIdx.x == 0) scales.largest[0][0] = 0;
    const int column = left + kVector * lane;
    unsigned by_row[4], by_column[kVector];
    if constexpr (kTurned && !kSquare)
      access::read<kVector>(by_column, reinterpret_cast<const unsigned*>(&scales.scales[1][lane * kVector]));
    Narrow* to = kByRows ? by_rows.data + (top + 4 * slot) * width + column : nullptr;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int four = turn * kSlots + slot;
      FourRows<kVector> rows, columns;
      if constexpr (kByRows && !kSquare)
        access::read<4>(by_row, reinterpret_cast<const unsigned*>(&scales.scales[0][4 * four]));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Vector<Element, kVector> read = at(turn, r);
        float scaled[kVector];
        if constexpr (kByRows || kSquare) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) scaled[k] = get(read, k) * (kSquare ? scale : as_float(by_row[r]));
          put_row<Narrow>(rows, r, scaled);
        }
        if (kByRows && (IsWhole::value || (top + 4 * four + r < height && column < width)))
          access::write<kVector / 4>(reinterpret_cast<unsigned*>(to + static_cast<long long>(r) * width),
                                     rows.words[r]);
        if constexpr (kTurned && !kSquare) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) scaled[k] = get(read, k) * as_float(by_column[k]);
          put_row<Narrow>(columns, r, scaled);
        }
      }
      if constexpr (kTurned) put_columns(words, lane, four, kSquare ? rows : columns);
      if constexpr (kByRows) to += 4 * kSlots * static_cast<long long>(width);
    }
  }

  template <class IsWhole>
  __device__ __forceinline__ void store_turned(Narrow* to, int left, int width, long long top, long long height,
                                               IsWhole) const {
    if constexpr (IsWhole::value) {
      constexpr int kStep = kTileThreads / kPieces;
      const unsigned piece = threadIdx.x % kPieces, mine = threadIdx.x / kPieces;
      const long long tokens = padded(height);
      to += (left + mine) * tokens + top + piece * kPieceRows;
#pragma unroll
      for (unsigned ahead = 0; ahead < kTileColumns; ahead += kStep, to += kStep * tokens) {
        unsigned found[4];
        access::read<4>(found, words + place<kVector>(mine + ahead, piece));
        access::write<4>(reinterpret_cast<unsigned*>(to), found);
      }
    } else {
      store_columns<kTileThreads, kTileColumns, kVector>(to, words, left, width, top, height);
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
  // Keeps a vector as it would be stored, and gives that.
  __device__ __forceinline__ Vector<Element, kVector> keep(int turn, int r, const float (&values)[kVector]) const {
    Vector<Element, kVector> made;
#pragma unroll
    for (int i = 0; i < made.kWords; ++i) {
      if constexpr (sizeof(Element) == 4) made.words[i] = as_bits(values[i]);
      else made.words[i] = packed(Element{}, values[2 * i], values[2 * i + 1]);
    }
    return at(turn, r) = made;
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
  static __device__ __forceinline__ float inverse(float scale) { return inverse_of<true>(scale); }
};

// Tiles of a generated kernel: what is not made has no address. Data and numbers of a tensor lie behind one another.
template <bool kByRows, bool kTurned, class Narrow, class Element, int kVector>
struct MadeTile : BlockTile<Element, Narrow, kByRows, kTurned, false, kVector, PowerOfTwo<Narrow>> {
  __device__ __forceinline__ void store(Narrow* by_rows, Narrow* turned, int left, int width, long long top,
                                        long long height) const {
    BlockTile<Element, Narrow, kByRows, kTurned, false, kVector, PowerOfTwo<Narrow>>::store(
        {by_rows, reinterpret_cast<float*>(by_rows + height * width), height},
        {turned, reinterpret_cast<float*>(turned + padded(height) * width), width}, left, width, top, height);
  }
};

// Those whose magnitudes were not looked for while they were made.
template <bool kByRows, bool kTurned, class Narrow, class Element, int kVector>
TE_DEVICE void store_blocks(const Waiting<Element, kVector>& waiting, BlockScales& scales, unsigned* words, int lane,
                            int slot, Narrow* by_rows, Narrow* turned, int left, int width, long long top,
                            long long height) {
  const MadeTile<kByRows, kTurned, Narrow, Element, kVector> tile{{waiting.own, scales, words, lane, slot, {}}};
  tile.find();
  tile.store(by_rows, turned, left, width, top, height);
}

// Those whose magnitudes the thread has found.
template <bool kByRows, bool kTurned, class Narrow, class Element, int kVector, int kRows>
TE_DEVICE void store_blocks(const Waiting<Element, kVector>& waiting,
                            Magnitudes<Element, kVector, kRows, kByRows, kTurned>& found, BlockScales& scales,
                            unsigned* words, int lane, int slot, Narrow* by_rows, Narrow* turned, int left, int width,
                            long long top, long long height) {
  const MadeTile<kByRows, kTurned, Narrow, Element, kVector> tile{{waiting.own, scales, words, lane, slot, {}}};
  found.raise_columns(scales, lane);
  tile.store(by_rows, turned, left, width, top, height);
}

}  // namespace te
