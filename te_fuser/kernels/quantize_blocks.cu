// A matrix in E4M3 by a scale for each block of it, by rows or turned or both.
//
// own_scales.py writes the constants that this text reads in front of it:
//   Element, Narrow                 what the matrix is stored as, and the 8 bits
//   kByRows, kTurned                which of them are made
//   kSquare                         whether a block is 128 x 128, else 128 numbers of a row of what is made
//   kMost, kEpsilon, kPowerOfTwo    of the scales

constexpr int kSide = te::kTileRows, kVector = 16 / sizeof(Element), kLanes = kSide / kVector;
constexpr int kSlots = te::kTileThreads / kLanes, kTurns = kSide / 4 / kSlots;
// Of a multiprocessor: what is read stays in registers, and in float32 takes twice as many.
constexpr int kBlocks = sizeof(Element) == 4 && kByRows && kTurned && !kSquare ? 1 : te::kTileBlocks - 1;
static_assert(te::kTileColumns == kSide && te::kTileThreads >= 2 * kSide);

// Scales of a tile, by row and by column; while they are looked for, bits of the largest magnitudes.
struct Scales {
  unsigned rows[kSide], columns[kSide];
};

// Raises the magnitudes of a tile to those of what the thread has read.
TE_DEVICE void find(Scales& scales, const te::Vector<Element, kVector> (&read)[kTurns][4], int lane, int slot) {
  unsigned columns[kVector] = {}, all = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      unsigned row = 0;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float number = te::get(read[turn][r], k);
        row = te::larger(row, number);
        if constexpr (!kSquare && kTurned) columns[k] = te::larger(columns[k], number);
      }
      if constexpr (kSquare) {
        all = row > all ? row : all;
      } else if constexpr (kByRows) {  // eight neighbours have the same row
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2)
          row = te::larger(row, __shfl_xor_sync(te::kWarp, te::as_float(row), distance));
        if (threadIdx.x % 8 == 0) atomicMax(&scales.rows[4 * (turn * kSlots + slot) + r], row);
      }
    }
  if constexpr (kSquare) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      all = te::larger(all, __shfl_xor_sync(te::kWarp, te::as_float(all), distance));
    if (threadIdx.x % 32 == 0) atomicMax(&scales.rows[0], all);
  } else if constexpr (kTurned) {  // four eights of a warp have the same columns
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
#pragma unroll
      for (int distance = 16; distance >= 8; distance /= 2)
        columns[k] = te::larger(columns[k], __shfl_xor_sync(te::kWarp, te::as_float(columns[k]), distance));
      if (threadIdx.x % 32 < 8) atomicMax(&scales.columns[lane * kVector + k], columns[k]);
    }
  }
}

TE_DEVICE float scale_of(unsigned amax) { return te::own_scale<kPowerOfTwo>(te::as_float(amax), kMost, kEpsilon); }

// Turns magnitudes into scales, and stores what numbers of 8 bits are multiplied by.
TE_DEVICE void settle(Scales& scales, float* by_rows, float* by_columns, int top, int left, int height, int width, int lead,
                      int turned_lead) {
  const int mine = threadIdx.x % kSide;
  const bool second = threadIdx.x >= kSide;
  if constexpr (kSquare) {
    const float scale = scale_of(scales.rows[0]);
    if (kByRows && threadIdx.x == 0) by_rows[static_cast<long long>(top / kSide) * lead + left / kSide] = 1.0f / scale;
    if (kTurned && threadIdx.x == 0)
      by_columns[static_cast<long long>(left / kSide) * turned_lead + top / kSide] = 1.0f / scale;
  } else {
    unsigned& bits = second ? scales.columns[mine] : scales.rows[mine];
    const float scale = scale_of(bits);
    bits = te::as_bits(scale);
    if (kByRows && !second && top + mine < height)
      by_rows[static_cast<long long>(left / kSide) * lead + top + mine] = 1.0f / scale;
    if (kTurned && second && threadIdx.x < 2 * kSide && left + mine < width)
      by_columns[static_cast<long long>(top / kSide) * turned_lead + left + mine] = 1.0f / scale;
  }
}

extern "C" __global__ void __launch_bounds__(te::kTileThreads, kBlocks)
    quantize_blocks(const Element* elements, Narrow* by_rows, Narrow* by_columns, float* row_inverses,
                    float* column_inverses, long long tiles, int groups, int height, int width, int lead,
                    int turned_lead) {
  te::wait_for_earlier();
  __shared__ uint4 shared[kSide * kSide / 16];
  __shared__ Scales scales;
  unsigned* const words = reinterpret_cast<unsigned*>(shared);
  // As TileText has it: a warp is 8 lanes by four fours.
  const int lane = threadIdx.x % 8 + threadIdx.x / 32 * 8 % kLanes;
  const int slot = threadIdx.x / 8 % 4 + threadIdx.x / (4 * kLanes) * 4;
  const int across = (width + kSide - 1) / kSide;
  for (long long tile = blockIdx.x; tile < tiles; tile += groups) {
    const int top = static_cast<int>(tile / across) * kSide, left = static_cast<int>(tile % across) * kSide;
    const int column = left + kVector * lane;
    if (threadIdx.x < kSide) scales.rows[threadIdx.x] = scales.columns[threadIdx.x] = 0;
    te::Vector<Element, kVector> read[kTurns][4] = {};
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = top + 4 * (turn * kSlots + slot) + r;
        if (row < height && column < width)
          read[turn][r] = te::load<kVector>(elements + static_cast<long long>(row) * width + column);
      }
    __syncthreads();
    find(scales, read, lane, slot);
    __syncthreads();
    const float whole = kSquare ? scale_of(scales.rows[0]) : 1.0f;
    settle(scales, row_inverses, column_inverses, top, left, height, width, lead, turned_lead);
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int four = turn * kSlots + slot;
      te::FourRows<kVector> rows, columns;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float scale = kSquare ? whole : te::as_float(scales.rows[4 * four + r]);
        float scaled[kVector];
#pragma unroll
        for (int k = 0; k < kVector; ++k) scaled[k] = te::get(read[turn][r], k) * scale;
        te::put_row<Narrow>(rows, r, scaled);
        const int row = top + 4 * four + r;
        if (kByRows && row < height && column < width)
          te::access::write<kVector / 4>(
              reinterpret_cast<unsigned*>(by_rows + static_cast<long long>(row) * width + column), rows.words[r]);
        if constexpr (kTurned && !kSquare) {
#pragma unroll
          for (int k = 0; k < kVector; ++k)
            scaled[k] = te::get(read[turn][r], k) * te::as_float(scales.columns[lane * kVector + k]);
          te::put_row<Narrow>(columns, r, scaled);
        }
      }
      if constexpr (kTurned) te::put_columns(words, lane, four, kSquare ? rows : columns);
    }
    __syncthreads();
    if constexpr (kTurned)
      te::store_columns<te::kTileThreads, kSide, kVector>(by_columns, words, left, width, top, height);
    __syncthreads();
  }
}
