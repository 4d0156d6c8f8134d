// A matrix of bytes turned: y[feature][token] = x[token][feature], zeros behind the tokens up to a multiple of 16.
//
// A block turns 128 tokens by 128 features at a time, by loads and stores of 16 bytes, a row of which is a whole line.

#include "te_cuda_bytes.cuh"

using Tile = te::TurnedTile<16>;
constexpr int kBlocks = 6;  // of a multiprocessor

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
    transposed8(const unsigned char* x, unsigned char* y, long long tiles, int groups, int tokens, int padded,
                int features) {
  te::wait_for_earlier();
  __shared__ Tile tile;
  const int thread = threadIdx.x, lane = thread % Tile::kLanes, quad = thread / Tile::kLanes;
  const int across = (features + te::kSide - 1) / te::kSide;
  for (long long number = blockIdx.x; number < tiles; number += groups) {
    const long long token = number / across * te::kSide;
    const int feature = static_cast<int>(number % across) * te::kSide, column = feature + 16 * lane;
    unsigned rows[4][4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const long long row = token + 4 * quad + r;
      if (row < tokens && column < features)
        te::access::read<4>(rows[r], reinterpret_cast<const unsigned*>(x + row * features + column));
    }
    tile.bring(lane, quad, rows);
    __syncthreads();
    const long long first = token + 16 * (thread % 8);
#pragma unroll
    for (int take = 0; take < Tile::kTakes; ++take) {
      const int row = feature + 32 * take + thread / 8;
      if (first < padded && row < features)
        *reinterpret_cast<te::access::Four*>(y + static_cast<long long>(row) * padded + first) = tile.take(take, thread);
    }
    __syncthreads();
  }
}
