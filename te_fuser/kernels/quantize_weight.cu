// One weight in 8 bits, by rows or turned or both, and its largest magnitude.
//
// quantize_weight.py writes the constants that this text reads in front of it:
//   Element                   what the weight is stored as
//   kByRows, kTurned, kAmax   which of them are made

extern "C" __global__ void __launch_bounds__(te::kTileThreads, te::kTileBlocks)
    quantize_weight(const Element* elements, const float* scale, te::e4m3* rows, te::e4m3* turned, float* amax,
                    long long tiles, int groups, int height, int width) {
  te::wait_for_earlier();
  __shared__ uint4 shared[te::kTileRows * te::kTileColumns / 16];
  __shared__ float found[32];
  unsigned largest = 0;
  for (long long tile = blockIdx.x; tile < tiles; tile += groups) {
    te::quantize_tile<Element, kByRows, kTurned>(elements, height, width, static_cast<int>(tile), *scale, {rows, turned},
                                                 shared, largest);
    __syncthreads();
  }
  if constexpr (kAmax) te::raise<te::kTileThreads>(found, amax, largest);
}
