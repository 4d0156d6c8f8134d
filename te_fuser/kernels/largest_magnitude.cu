// A number raised to the largest magnitude of a matrix.
//
// own_scales.py writes the constant that this text reads in front of it:
//   Element   what the matrix is stored as

extern "C" __global__ void __launch_bounds__(te::kTileThreads, te::kTileBlocks)
    largest_magnitude(const Element* elements, float* amax, long long tiles, int groups, int height, int width) {
  te::wait_for_earlier();
  __shared__ float found[32];
  unsigned largest = 0;
  for (long long tile = blockIdx.x; tile < tiles; tile += groups)
    te::quantize_tile<Element, false, false>(elements, height, width, static_cast<int>(tile), 1.0f, te::Layouts{}, nullptr,
                                             largest);
  te::raise<te::kTileThreads>(found, amax, largest);
}
