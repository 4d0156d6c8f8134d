// Weights in 8 bits, by rows and turned, and the largest magnitude of each: many in one launch.
//
// quantize_weights.py writes in front of this text what it includes, and
//   Narrow                         which 8 bits these are
//   kScales                        whether a scale is made of each largest magnitude, among the numbers that are given
//   kMost, kEpsilon, kPowerOfTwo   of the scales

// The last weight that begins at this tile or before.
TE_DEVICE int weight_of(const te::WeightList& list, int count, int tile) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (list.weights[middle].first_tile <= tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

TE_DEVICE unsigned tiles_of(const te::WeightPlaces& weight) {
  return static_cast<unsigned>((weight.height + te::kTileRows - 1) / te::kTileRows) *
         static_cast<unsigned>((weight.width + te::kTileColumns - 1) / te::kTileColumns);
}

template <class T>
TE_DEVICE unsigned quantize(const te::WeightPlaces& weight, int tile, uint4* shared) {
  const te::LayoutsOf<Narrow> to{static_cast<Narrow*>(weight.rows), static_cast<Narrow*>(weight.turned)};
  const T* const elements = static_cast<const T*>(weight.elements);
  unsigned largest = 0;
  if (weight.rows == nullptr && weight.turned == nullptr)  // it is only measured
    te::quantize_tile<T, false, false, Narrow>(elements, weight.height, weight.width, tile, 1.0f, to, nullptr, largest);
  else
    te::quantize_tile<T, true, true>(elements, weight.height, weight.width, tile, *weight.scale, to, shared, largest);
  return largest;
}

extern "C" __global__ void __launch_bounds__(te::kTileThreads, te::kTileBlocks)
    quantize_weights(const te::WeightList list, int count) {
  te::wait_for_earlier();
  __shared__ uint4 shared[te::kTileRows * te::kTileColumns / 16];
  __shared__ float found[32];
  const int number = static_cast<int>(blockIdx.x);
  const te::WeightPlaces& weight = list.weights[weight_of(list, count, number)];
  const int tile = number - weight.first_tile;
  unsigned largest;
  if (weight.kind == 0) largest = quantize<float>(weight, tile, shared);
  else if (weight.kind == 1) largest = quantize<te::bf16>(weight, tile, shared);
  else largest = quantize<te::fp16>(weight, tile, shared);
  if (weight.amax == nullptr) return;
  te::raise<te::kTileThreads>(found, kScales ? weight.amax + 2 : weight.amax, largest);
  if constexpr (kScales) te::scale_of_all<kPowerOfTwo>(weight.amax, tiles_of(weight), kMost, kEpsilon);
}
