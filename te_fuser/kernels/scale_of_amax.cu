// Scales and their reciprocals from largest magnitudes, which become zero again: as they were before they were raised.
//
// scale_of_amax.py writes the constants that this text reads in front of it: kMost, kEpsilon, kPowerOfTwo, of the scale.

extern "C" __global__ void __launch_bounds__(32)
    scale_of_amax(float* amaxes, float* scales, float* inverses, long long, int, int count, int apart) {
  te::wait_for_earlier();
  for (int k = threadIdx.x; blockIdx.x == 0 && k < count; k += 32) {
    const float scale = te::own_scale<kPowerOfTwo>(amaxes[k], kMost, kEpsilon);
    amaxes[k] = 0.0f;
    scales[k] = scale;
    inverses[k * apart] = 1.0f / scale;
  }
}
