// Rows that no kernel has to write: of padding and of no sequence they become zeros, of sequences that cannot be so NaN.
//
// blank_rows.py writes the constants that this text reads in front of it:
//   kNan              two elements that are NaN
//   kThreads, kRows   threads of a block, rows that it looks at together
//
// The others are not touched, so that a full batch costs the reading of its lengths alone.

enum Row : unsigned char { kKept, kZero, kNoNumber };

// Which of the arguments are there.
enum Given { kOffsets = 1, kLengths = 2, kOtherOffsets = 4, kOtherLengths = 8, kSequenceFirst = 16 };

// One side of an attention: sequence n is rows offsets[n] up to offsets[n + 1], or sample n; lengths[n] of them are there.
struct Side {
  const int* offsets;
  const int* lengths;
  int positions;

  __device__ __forceinline__ int first(int n) const { return offsets ? offsets[n] : 0; }
  __device__ __forceinline__ int room(int n) const { return offsets ? offsets[n + 1] - offsets[n] : positions; }
  __device__ __forceinline__ int seen(int n) const { return lengths ? lengths[n] : room(n); }

  // Whether sequence n lies outside of what there is, or passes what kernels were told is the longest.
  __device__ __forceinline__ bool is_wrong(int n, int longest) const {
    if (seen(n) < 0 || seen(n) > room(n)) return true;
    if (!offsets) return false;
    return room(n) > longest || offsets[n + 1] > positions || offsets[n] < 0 || (n == 0 && offsets[0] != 0);
  }

  // The sequence of a row: how many end at it or before.
  __device__ __forceinline__ int sequence_of(int row, int sequences) const {
    int low = 0, high = sequences;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (offsets[middle + 1] <= row) low = middle + 1;
      else high = middle;
    }
    return low;
  }
};

TE_DEVICE Row kind_of(long long row, const Side& own, const Side& other, int sequences, int given, int longest) {
  int n, place;
  if (own.offsets) {
    n = own.sequence_of(static_cast<int>(row), sequences);
    if (n == sequences) return kZero;
    place = static_cast<int>(row) - own.first(n);
  } else {
    n = static_cast<int>(given & kSequenceFirst ? row % sequences : row / own.positions);
    place = static_cast<int>(given & kSequenceFirst ? row / sequences : row % own.positions);
  }
  if (own.is_wrong(n, longest) || other.is_wrong(n, longest)) return kNoNumber;
  return place >= own.seen(n) || other.seen(n) == 0 ? kZero : kKept;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    blank_rows(const int* offsets, const int* lengths, const int* other_offsets, const int* other_lengths,
               te::access::Four* out, long long rows, int groups, int given, int sequences, int positions,
               int other_positions, int longest, int vectors) {
  te::wait_for_earlier();
  __shared__ Row kinds[kRows];
  const Side own{given & kOffsets ? offsets : nullptr, given & kLengths ? lengths : nullptr, positions};
  const Side other{given & kOtherOffsets ? other_offsets : nullptr, given & kOtherLengths ? other_lengths : nullptr,
                   other_positions};
  const int thread = threadIdx.x;
  for (long long first = static_cast<long long>(blockIdx.x) * kRows; first < rows; first += groups * kRows) {
    if (thread < kRows) {
      const long long row = first + thread;
      kinds[thread] = row < rows ? kind_of(row, own, other, sequences, given, longest) : kKept;
    }
    __syncthreads();
    for (int r = 0; r < kRows; ++r) {
      if (kinds[r] == kKept) continue;
      const unsigned word = kinds[r] == kZero ? 0u : kNan;
      te::access::Four* to = out + (first + r) * vectors;
      for (int i = thread; i < vectors; i += kThreads) to[i] = {{word, word, word, word}};
    }
    __syncthreads();
  }
}
