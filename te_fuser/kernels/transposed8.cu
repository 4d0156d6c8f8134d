// A matrix of bytes turned: y[feature][token] = x[token][feature], zeros behind the tokens up to a multiple of 16.
//
// A block turns 128 tokens by 128 features at a time, by loads and stores of 16 bytes, a row of which is a whole line.

#include "te_cuda_tile.cuh"

constexpr int kThreads = 256, kVector = 16, kLanes = 8;
constexpr int kColumns = kLanes * kVector, kBlocks = 6;  // features of a tile; blocks of a multiprocessor

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    transposed8(const unsigned char* x, unsigned char* y, long long tiles, int groups, int tokens, int features) {
  te::wait_for_earlier();
  __shared__ uint4 tile[te::kTileRows * kColumns / 16];
  unsigned* const words = reinterpret_cast<unsigned*>(tile);
  const int lane = threadIdx.x % kLanes, four = threadIdx.x / kLanes;
  const int across = (features + kColumns - 1) / kColumns;
  for (long long number = blockIdx.x; number < tiles; number += groups) {
    const long long token = number / across * te::kTileRows;
    const int feature = static_cast<int>(number % across) * kColumns, column = feature + kVector * lane;
    te::FourRows<kVector> rows;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const long long row = token + 4 * four + r;
      if (row < tokens && column < features)
        te::access::read<4>(rows.words[r], reinterpret_cast<const unsigned*>(x + row * features + column));
    }
    te::put_columns(words, lane, four, rows);
    __syncthreads();
    te::store_columns<kThreads, kColumns, kVector>(y, words, feature, features, token, tokens);
    __syncthreads();
  }
}
