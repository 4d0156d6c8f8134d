// What tiles of rows add to te_cuda.cuh: 8 bits that are stored transposed, by way of shared memory.
//
// Where threads own columns, one has kCount neighbours of four rows at a time. Turned, each column is one word of four
// rows, and four words of different threads are the 16 bytes that another thread stores. Where threads share a row,
// rows lie in shared memory as they are, and who stores 16 bytes of four columns turns 16 words of different rows.
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
TE_DEVICE int place(int column, int piece) {
  return (column * kPieces + (piece ^ column / kCount % kPieces)) * 4;
}

// Of four neighbours of four rows, a word each, the words of the columns.
TE_DEVICE void turn(const unsigned (&rows)[4], unsigned (&columns)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // bytes 2 half and 2 half + 1 of two rows
    const unsigned first = __byte_perm(rows[0], rows[1], half ? 0x7362 : 0x5140);
    const unsigned last = __byte_perm(rows[2], rows[3], half ? 0x7362 : 0x5140);
    columns[2 * half] = __byte_perm(first, last, 0x5410);
    columns[2 * half + 1] = __byte_perm(first, last, 0x7632);
  }
}

// Writes the columns of a lane; `four` is the number of the four rows within the tile.
template <int kCount>
TE_DEVICE void put_columns(unsigned* tile, int lane, int four, const FourRows<kCount>& rows) {
  unsigned* const to = tile + place<kCount>(lane * kCount, four / 4) + four % 4;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    unsigned columns[4];
    turn({rows.words[0][i / 4], rows.words[1][i / 4], rows.words[2][i / 4], rows.words[3][i / 4]}, columns);
#pragma unroll
    for (int k = 0; k < 4 && i + k < kCount; ++k) to[(i + k) * kPieces * 4] = columns[k];
  }
}

// Stores the columns of a tile that begins at `column` and `row`, 16 rows at a time.
template <int kThreads, int kColumns, int kCount, class T>
TE_DEVICE void store_columns(T* to, const unsigned* tile, int column, int width, long long row, long long rows) {
  constexpr int kAll = kColumns * kPieces;
  const long long tokens = padded(rows);
#pragma unroll
  for (int first = 0; first < kAll; first += kThreads) {
    const int number = first + threadIdx.x, piece = number % kPieces, mine = number / kPieces;
    const long long from = row + piece * kPieceRows;
    if (number < kAll && column + mine < width && from < rows) {
      unsigned words[4];
      access::read<4>(words, tile + place<kCount>(mine, piece));
      access::write<4>(reinterpret_cast<unsigned*>(to + (column + mine) * tokens + from), words);
    }
  }
}

// ------------------------------------------------------------------------------------------ tiles of whole rows

// The row that a block does `later` rows after one of the tile at `start`, where its tiles begin `step` rows apart.
template <int kRows>
TE_DEVICE long long row_after(long long row, int later, long long start, long long step) {
  const long long found = row + later;
  return found - start < kRows ? found : found + step - kRows;
}

// The word of a tile of kRows rows that begins with column 4 * word. A row takes whole lines of banks, and the words
// that a warp reads together have different banks: of each piece of 16 rows as many neighbours as there are lanes.
template <int kRows, int kWidth>
TE_DEVICE int place_in_row(int row, int word) {
  constexpr int kLine = 32, kNeighbours = kLine * kPieceRows / kRows;
  return row * ((kWidth + 4 * kLine - 1) / (4 * kLine) * kLine) + (word ^ row / kPieceRows * kNeighbours);
}

// Rounds neighbours of one row of a tile.
template <class T, int kRows, int kWidth, int kCount>
TE_DEVICE void put_in_row(unsigned* tile, int row, int column, const float (&values)[kCount]) {
  store(reinterpret_cast<T*>(tile + place_in_row<kRows, kWidth>(row, column / 4)) + column % 4, values);
}

// Stores the columns of a tile of whole rows that begins at `row`, 16 rows at a time.
template <int kThreads, int kRows, int kWidth, class T>
TE_DEVICE void store_turned(T* to, const unsigned* tile, long long row, long long rows) {
  constexpr int kInTile = kRows / kPieceRows, kWords = (kWidth + 3) / 4;
  const long long tokens = padded(rows);
#pragma unroll 1
  for (int number = threadIdx.x; number < kWords * kInTile; number += kThreads) {
    const int piece = number % kInTile, word = number / kInTile;
    const long long from = row + piece * kPieceRows;
    if (from >= rows) continue;
    unsigned columns[kPieceRows / 4][4];
#pragma unroll
    for (int four = 0; four < kPieceRows / 4; ++four) {
      unsigned read[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int mine = 4 * four + r;
        read[r] = from + mine < rows ? tile[place_in_row<kRows, kWidth>(piece * kPieceRows + mine, word)] : 0u;
      }
      turn(read, columns[four]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned column[4] = {columns[0][k], columns[1][k], columns[2][k], columns[3][k]};
      if (4 * word + k < kWidth)
        access::write<4>(reinterpret_cast<unsigned*>(to + (4 * word + k) * tokens + from), column);
    }
  }
}

}  // namespace te
