// A matrix in 8 bits, by rows or turned or both, by the one scale that follows from its largest magnitude.
//
// It begins at the last tile: what was measured last is in the cache.
//
// own_scales.py writes the constants that this text reads in front of it:
//   Element, Narrow                 what the matrix is stored as, and the 8 bits
//   kByRows, kTurned                which of them are made
//   kMost, kEpsilon, kPowerOfTwo    of the scale

extern "C" __global__ void __launch_bounds__(te::kTileThreads, te::kTileBlocks)
    quantize_by_amax(const Element* elements, const float* amax, Narrow* rows, Narrow* turned, float* inverse,
                     long long tiles, int groups, int height, int width) {
  te::wait_for_earlier();
  __shared__ uint4 shared[te::kTileRows * te::kTileColumns / 16];
  unsigned unused = 0;
  const float scale = te::own_scale<kPowerOfTwo>(*amax, kMost, kEpsilon);
  if (blockIdx.x == 0 && threadIdx.x == 0) *inverse = 1.0f / scale;
  for (long long number = blockIdx.x; number < tiles; number += groups) {
    const int tile = static_cast<int>(tiles - 1 - number);
    te::quantize_tile<Element, kByRows, kTurned, Narrow>(elements, height, width, tile, scale, {rows, turned}, shared,
                                                         unused);
    __syncthreads();
  }
}
