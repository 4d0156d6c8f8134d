// Weights in 8 bits, by rows and turned, and the largest magnitude of each: many in one launch.

#include "te_cuda_quantize.cuh"

// A row of the table that quantize_weights.py makes.
struct Weight {
  const void* elements;  // [rows, columns]
  long long first_tile;  // of those of all weights
  long long offset;      // of its bytes in both results
  long long rows, columns;
  long long kind;        // of elements: 0 float32, 1 bfloat16, 2 float16
  long long scale, amax; // where they stand among the scales and the amaxes
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

template <class T>
TE_DEVICE unsigned quantize(const Weight& weight, int tile, float scale, te::Layouts to, uint4* shared) {
  const int height = static_cast<int>(weight.rows), width = static_cast<int>(weight.columns);
  unsigned largest = 0;
  te::quantize_tile<T, true, true>(static_cast<const T*>(weight.elements), height, width, tile, scale, to, shared, largest);
  return largest;
}

extern "C" __global__ void __launch_bounds__(te::kTileThreads, te::kTileBlocks)
    quantize_weights(const Weight* weights, const float* scales, te::e4m3* rows, te::e4m3* turned, float* amaxes,
                     long long tiles, int groups, int count, int records) {
  te::wait_for_earlier();
  __shared__ uint4 shared[te::kTileRows * te::kTileColumns / 16];
  __shared__ float found[32];
  for (long long number = blockIdx.x; number < tiles; number += groups) {
    const Weight weight = weights[weight_of(weights, count, number)];
    const int tile = static_cast<int>(number - weight.first_tile);
    const te::Layouts to{rows + weight.offset, turned + weight.offset};
    const float scale = scales[weight.scale];
    unsigned largest;
    if (weight.kind == 0) largest = quantize<float>(weight, tile, scale, to, shared);
    else if (weight.kind == 1) largest = quantize<te::bf16>(weight, tile, scale, to, shared);
    else largest = quantize<te::fp16>(weight, tile, scale, to, shared);
    if (records) te::raise<te::kTileThreads>(found, amaxes + weight.amax, largest);
    __syncthreads();
  }
}
