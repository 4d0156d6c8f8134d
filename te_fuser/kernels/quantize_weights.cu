// Many weights in 8 bits, by rows and turned, and the largest magnitude of each, in one launch.
//
// A tile of 128 rows by 128 features is a block's. It reads 16 bytes a thread, so that a warp reads whole lines; a row
// of the tile in 8 bits is one line, and so is a turned one.

#include "te_cuda_bytes.cuh"

constexpr int kSide = 128, kThreads = 256;
// Blocks of a multiprocessor; loads of four rows each that a thread has on their way before it uses the first. Rounding
// to 8 bits without an instruction takes more registers.
#if TE_PTX && __CUDA_ARCH__ < 890
constexpr int kBlocks = 2, kAhead = 1;
#else
constexpr int kBlocks = 3, kAhead = 2;
#endif

// A row of the table that quantize_weights.py makes.
struct Weight {
  const void* elements;  // [rows, columns]
  long long first_tile;  // of those of all weights
  long long offset;      // of its bytes in both results
  long long rows, columns;
  long long kind;        // of elements: 0 float32, 1 bfloat16, 2 float16
  long long scale, amax; // where they stand among the scales and the amaxes
};

struct Results {
  unsigned char* rows;
  unsigned char* turned;
};

// The last weight that begins at this tile or before.
TE_DEVICE int weight_of(const Weight* weights, int count, long long tile) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (weights[middle].first_tile <= tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Numbers in 8 bits, four in a register; raises the largest magnitude to theirs.
template <class T, int kVector>
TE_DEVICE void quantize(const te::Vector<T, kVector>& numbers, float scale, unsigned (&words)[kVector / 4],
                        unsigned& largest) {
#pragma unroll
  for (int i = 0; i < kVector / 4; ++i) {
    float scaled[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float number = te::get(numbers, 4 * i + k);
      largest = te::larger(largest, number);
      scaled[k] = number * scale;
    }
    words[i] = te::packed(te::e4m3{}, scaled[0], scaled[1]) | te::packed(te::e4m3{}, scaled[2], scaled[3]) << 16;
  }
}

template <class T>
TE_DEVICE unsigned quantize_tile(const Weight& weight, int tile, float scale, Results to, te::access::Four* shared) {
  constexpr int kVector = 16 / sizeof(T);
  using Turned = te::TurnedTile<kVector>;
  Turned& turned = *reinterpret_cast<Turned*>(shared);
  const T* const elements = static_cast<const T*>(weight.elements);
  const int rows = static_cast<int>(weight.rows), columns = static_cast<int>(weight.columns);
  const int across = (columns + kSide - 1) / kSide, top = tile / across * kSide, left = tile % across * kSide;
  const int thread = threadIdx.x, lane = thread % Turned::kLanes, column = left + kVector * lane;
  unsigned largest = 0;
#pragma unroll 1
  for (int pass = 0; pass < Turned::kPasses; pass += kAhead) {
    te::Vector<T, kVector> read[kAhead][4] = {};
    const int first_quad = pass * Turned::kQuads + thread / Turned::kLanes;
#pragma unroll
    for (int p = 0; p < kAhead; ++p)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = top + 4 * (first_quad + p * Turned::kQuads) + r;
        if (row < rows && column < columns)
          read[p][r] = te::load<kVector>(elements + static_cast<long long>(row) * columns + column);
      }
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
      const int quad = first_quad + p * Turned::kQuads;
      unsigned words[4][kVector / 4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        quantize(read[p][r], scale, words[r], largest);
        const int row = top + 4 * quad + r;
        if (row < rows && column < columns)
          te::access::write<kVector / 4>(
              reinterpret_cast<unsigned*>(to.rows + static_cast<long long>(row) * columns + column), words[r]);
      }
      turned.bring(lane, quad, words);
    }
  }
  __syncthreads();
  const int first = top + 16 * (thread % 8);
#pragma unroll
  for (int take = 0; take < Turned::kTakes; ++take) {
    const int row = left + 32 * take + thread / 8;
    if (first < rows && row < columns)
      *reinterpret_cast<te::access::Four*>(to.turned + static_cast<long long>(row) * rows + first) =
          turned.take(take, thread);
  }
  return largest;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    quantize_weights(const Weight* weights, const float* scales, unsigned char* rows, unsigned char* turned,
                     float* amaxes, long long tiles, int groups, int count, int records) {
  te::wait_for_earlier();
  __shared__ te::access::Four shared[kSide * 8];
  __shared__ float found[32];
  for (long long number = blockIdx.x; number < tiles; number += groups) {
    const Weight weight = weights[weight_of(weights, count, number)];
    const int tile = static_cast<int>(number - weight.first_tile);
    const Results to{rows + weight.offset, turned + weight.offset};
    const float scale = scales[weight.scale];
    unsigned largest;
    if (weight.kind == 0) largest = quantize_tile<float>(weight, tile, scale, to, shared);
    else if (weight.kind == 1) largest = quantize_tile<te::bf16>(weight, tile, scale, to, shared);
    else largest = quantize_tile<te::fp16>(weight, tile, scale, to, shared);
    if (records) te::raise<kThreads>(found, amaxes + weight.amax, largest);
    __syncthreads();
  }
}
