// One weight in 8 bits, by rows or turned or both, and its largest magnitude.
//
// quantize_weight.py writes the constants that this text reads in front of it:
//   Element                   what the weight is stored as
//   kByRows, kTurned, kAmax   which of them are made

constexpr int kThreads = 256, kBlocks = te::kQuantizingBlocks;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    quantize_weight(const Element* elements, const float* scale, unsigned char* rows, unsigned char* turned, float* amax,
                    long long tiles, int groups, int height, int width) {
  te::wait_for_earlier();
  __shared__ te::access::Four shared[te::kSide * 8];
  __shared__ float found[32];
  for (long long tile = blockIdx.x; tile < tiles; tile += groups) {
    const unsigned largest = te::quantize_tile<Element, kByRows, kTurned>(
        elements, height, width, static_cast<int>(tile), *scale, {rows, turned}, shared);
    if constexpr (kAmax) te::raise<kThreads>(found, amax, largest);
    __syncthreads();
  }
}
