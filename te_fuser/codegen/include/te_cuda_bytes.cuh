// Matrices of bytes that are stored the other way round: tiles of 128 by 128, turned in shared memory.
#pragma once

#include "te_cuda.cuh"

namespace te {

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
  static constexpr int kSide = 128, kThreads = 256;
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

}  // namespace te
