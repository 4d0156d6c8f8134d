// The amaxes of many products put into their histories, and scales made of these: all in one launch.

#include "te_cuda.cuh"

constexpr int kRoles = 3, kThreads = 192, kRows = kThreads / kRoles;
constexpr int kAhead = 8;  // rows of a history that a thread has on their way before it writes the first
constexpr float kLargest = 3.4028234663852886e38f;

// A row of the table that fold_amaxes.py makes.
struct Product {
  float* history;              // [length, 3], the newest first; none where a row has nothing to fold
  float* scale;                // [3]
  long long length;
  long long place;             // in the snapshot
  long long newest;            // whether the newest amax is taken, else the largest
  long long margin;            // powers of two
  long long forward, backward; // the largest numbers of the formats
};

// As PyTorch's amax: NaN is the largest.
TE_DEVICE float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// Shifts this thread's column of a history by one, with `amax` in front, and gives the largest of what it wrote. All
// threads of the block call it. It goes from the oldest to the newest, so nothing is written before it was read.
TE_DEVICE float shift(const Product& product, int role, float amax, bool moves) {
  const int length = static_cast<int>(product.length), first = threadIdx.x / kRoles;
  float largest = amax;
  for (int top = (length - 1) / (kRows * kAhead) * (kRows * kAhead); top >= 0; top -= kRows * kAhead) {
    float read[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int row = top + k * kRows + first;
      read[k] = moves && row > 0 && row < length ? product.history[static_cast<long long>(row - 1) * kRoles + role] : amax;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int row = top + k * kRows + first;
      if (!moves || row >= length) continue;
      product.history[static_cast<long long>(row) * kRoles + role] = read[k];
      largest = larger_or_nan(largest, read[k]);
    }
  }
  return largest;
}

// The largest of each column, for the first three threads.
TE_DEVICE float over_block(float* found, float largest) {
  found[threadIdx.x] = largest;
  for (int half = kThreads / 2; half >= kRoles; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) found[threadIdx.x] = larger_or_nan(found[threadIdx.x], found[threadIdx.x + half]);
  }
  return found[threadIdx.x];
}

TE_DEVICE float scale_of(const Product& product, int role, float amax, float before) {
  const float most = static_cast<float>(role == 2 ? product.backward : product.forward);
  const float power = te::as_float(static_cast<unsigned>(127 + product.margin) << 23);
  const float made = most / amax / power;
  const float scale = amax > 0.0f && amax <= kLargest && made > 0.0f ? made : before;
  return scale > kLargest ? kLargest : scale;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fold_amaxes(const Product* products, const float* seen, float* amaxes, long long* not_finite, float* snapshot,
                long long rows, int groups) {
  te::wait_for_earlier();
  __shared__ float found[kThreads];
  const int role = threadIdx.x % kRoles;
  for (long long row = blockIdx.x; row < rows; row += groups) {
    const Product product = products[row];
    const long long slot = row * kRoles + role;
    const float amax = seen[slot];
    const bool finite = amax <= kLargest && amax >= -kLargest, moves = finite && amax > 0.0f;
    __syncthreads();  // `seen` may be `amaxes`
    if (threadIdx.x < kRoles) {
      amaxes[slot] = 0.0f;
      if (!finite) ++not_finite[slot];
    }
    if (product.history == nullptr) continue;
    const float largest = over_block(found, shift(product, role, amax, moves));
    if (threadIdx.x < kRoles) {
      float scale = product.scale[role];
      if (moves) product.scale[role] = scale = scale_of(product, role, product.newest ? amax : largest, scale);
      float* const numbers = snapshot + (product.place * 2 * kRoles + role) * 4;
      numbers[0] = scale;
      numbers[4 * kRoles] = 1.0f / scale;
    }
    __syncthreads();
  }
}
