// Tiles of 128 by 128 bytes: turned in shared memory, and made of wider numbers.
#pragma once

#include "te_cuda.cuh"

namespace te {

constexpr int kSide = 128;  // of a tile

// Four of the eight bytes of two registers (those of `low` are 0 to 3), by the four lowest digits of the selector.
TE_DEVICE unsigned chosen_bytes(unsigned low, unsigned high, unsigned selector) {
#if TE_PTX
  return __byte_perm(low, high, selector);
#else
  const unsigned long long both = low | static_cast<unsigned long long>(high) << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(both >> (selector >> 4 * i & 7u) * 8 & 0xffu) << 8 * i;
  return found;
#endif
}

// Four rows of four bytes become their columns.
TE_DEVICE void turn_four(unsigned (&words)[4]) {
  const unsigned even01 = chosen_bytes(words[0], words[1], 0x5140u), odd01 = chosen_bytes(words[0], words[1], 0x7362u);
  const unsigned even23 = chosen_bytes(words[2], words[3], 0x5140u), odd23 = chosen_bytes(words[2], words[3], 0x7362u);
  words[0] = chosen_bytes(even01, even23, 0x5410u), words[1] = chosen_bytes(even01, even23, 0x7632u);
  words[2] = chosen_bytes(odd01, odd23, 0x5410u), words[3] = chosen_bytes(odd01, odd23, 0x7632u);
}

// 128 rows of 128 bytes, brought by 256 threads as kBytes (4, 8, 16) neighbours of four rows, and taken as 16 neighbours
// of a column. In shared memory a column is 32 words of four rows each. Which of its places a word has depends on the
// column, so that the 32 threads of a warp bring words to different banks, and take whole columns of 128 bytes.
template <int kBytes>
struct TurnedTile {
  static constexpr int kThreads = 256;
  static constexpr int kLanes = kSide / kBytes;          // threads side by side
  static constexpr int kQuads = kThreads / kLanes;       // rows at once, in fours
  static constexpr int kPasses = kSide / 4 / kQuads;     // until all rows are brought
  static constexpr int kTakes = kSide * 8 / kThreads;    // until all columns are taken
  access::Four columns[kSide * 8];

  // Rows 4 * quad to 4 * quad + 3, at column kBytes * lane.
  __device__ __forceinline__ void bring(int lane, int quad, const unsigned (&rows)[4][kBytes / 4]) {
    unsigned* const words = reinterpret_cast<unsigned*>(columns);
    const int place = (quad / 4 ^ lane % 8) * 4 + (quad % 4 ^ lane / 8 * (kBytes / 4));
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      unsigned turned[4] = {rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
      turn_four(turned);
#pragma unroll
      for (int k = 0; k < 4; ++k) words[(kBytes * lane + 4 * i + k) * 32 + place] = turned[k];
    }
  }

  // Rows 16 * part to 16 * part + 15 of column 32 * take + thread / 8, where part is thread % 8.
  __device__ __forceinline__ access::Four take(int take, int thread) const {
    const int column = 32 * take + thread / 8;
    const access::Four found = columns[column * 8 + (thread % 8 ^ column / kBytes % 8)];
    const int moved = 4 * take / kBytes * (kBytes / 4) % 4;
    return {{found.words[0 ^ moved], found.words[1 ^ moved], found.words[2 ^ moved], found.words[3 ^ moved]}};
  }
};

// Blocks of a multiprocessor that make bytes of numbers; loads of four rows each that a thread has on their way before it
// uses the first. Rounding to 8 bits without an instruction takes more registers.
#if TE_PTX && __CUDA_ARCH__ < 890
constexpr int kQuantizingBlocks = 2, kAhead = 1;
#else
constexpr int kQuantizingBlocks = 3, kAhead = 2;
#endif

// Where a matrix of bytes goes, by rows and turned.
struct Bytes {
  unsigned char* rows;
  unsigned char* turned;
};

// Numbers in 8 bits, four in a register; raises the largest magnitude to theirs.
template <class T, int kVector>
TE_DEVICE void quantize_vector(const Vector<T, kVector>& numbers, float scale, unsigned (&words)[kVector / 4],
                        unsigned& largest) {
#pragma unroll
  for (int i = 0; i < kVector / 4; ++i) {
    float scaled[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float number = get(numbers, 4 * i + k);
      largest = larger(largest, number);
      scaled[k] = number * scale;
    }
    words[i] = packed(e4m3{}, scaled[0], scaled[1]) | packed(e4m3{}, scaled[2], scaled[3]) << 16;
  }
}

// Tile number `tile` of a matrix: 128 rows by 128 columns, as far as they are there, times a scale in E4M3. Gives the
// largest magnitude of what the thread read. Whoever does several tiles waits for the block in between.
template <class T, bool kByRows, bool kTurned>
TE_DEVICE unsigned quantize_tile(const T* elements, int rows, int columns, int tile, float scale, Bytes to,
                                 access::Four* shared) {
  constexpr int kVector = 16 / sizeof(T);
  using Turned = TurnedTile<kVector>;
  Turned& turned = *reinterpret_cast<Turned*>(shared);
  const int across = (columns + kSide - 1) / kSide, top = tile / across * kSide, left = tile % across * kSide;
  const int thread = threadIdx.x, lane = thread % Turned::kLanes, column = left + kVector * lane;
  unsigned largest = 0;
#pragma unroll 1
  for (int pass = 0; pass < Turned::kPasses; pass += kAhead) {
    Vector<T, kVector> read[kAhead][4] = {};
    const int first_quad = pass * Turned::kQuads + thread / Turned::kLanes;
#pragma unroll
    for (int p = 0; p < kAhead; ++p)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = top + 4 * (first_quad + p * Turned::kQuads) + r;
        if (row < rows && column < columns)
          read[p][r] = load<kVector>(elements + static_cast<long long>(row) * columns + column);
      }
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
      const int quad = first_quad + p * Turned::kQuads;
      unsigned words[4][kVector / 4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        quantize_vector(read[p][r], scale, words[r], largest);
        const int row = top + 4 * quad + r;
        if (kByRows && row < rows && column < columns)
          access::write<kVector / 4>(
              reinterpret_cast<unsigned*>(to.rows + static_cast<long long>(row) * columns + column), words[r]);
      }
      if constexpr (kTurned) turned.bring(lane, quad, words);
    }
  }
  if constexpr (!kTurned) return largest;
  __syncthreads();
  const int first = top + 16 * (thread % 8);
#pragma unroll
  for (int take = 0; take < Turned::kTakes; ++take) {
    const int row = left + 32 * take + thread / 8;
    if (first < rows && row < columns)
      *reinterpret_cast<access::Four*>(to.turned + static_cast<long long>(row) * rows + first) =
          turned.take(take, thread);
  }
  return largest;
}

}  // namespace te
