// Samples whose padding lies between tokens or before them: which these are, and their tokens moved together and back.
//
// moved_rows.py writes the constants that this text reads in front of it:
//   kThreads   threads of a block
//   kBehind    rows behind the last token that become zeros: kernels read whole blocks of keys, and may weigh them by 0

// Adds up `mine` of the threads before this one; sums[kThreads - 1] then has all of them.
TE_DEVICE int sum_before(int mine, int* sums) {
  const int thread = threadIdx.x;
  __syncthreads();
  sums[thread] = mine;
  for (int distance = 1; distance < kThreads; distance *= 2) {
    __syncthreads();
    const int other = thread >= distance ? sums[thread - distance] : 0;
    __syncthreads();
    sums[thread] += other;
  }
  __syncthreads();
  return sums[thread] - mine;
}

struct Tokens {
  int count;
  bool have_gaps;
};

// How many positions of a sample are tokens, where these stand, in order, and whether padding is before one of them.
TE_DEVICE Tokens find(const bool* hidden, int* places, int positions, int* sums) {
  const int each = (positions + kThreads - 1) / kThreads, first = static_cast<int>(threadIdx.x) * each;
  const int last = first + each < positions ? first + each : positions;
  int mine = 0, late = 0;
  for (int at = first; at < last; ++at) mine += !(hidden && hidden[at]);
  int next = sum_before(mine, sums);
  const int count = sums[kThreads - 1];
  for (int at = first; at < last; ++at) {
    if (hidden && hidden[at]) continue;
    places[next++] = at;
    late += at >= count;
  }
  sum_before(late, sums);
  return {count, sums[kThreads - 1] > 0};
}

// counts [4, samples]: tokens of queries and of keys where neither has gaps, else 0; and the same where one has.
extern "C" __global__ void __launch_bounds__(kThreads)
    find_tokens(const bool* hidden, const bool* key_hidden, int* places, int* key_places, int* counts, long long samples,
                int groups, int given, int positions, int keys) {
  te::wait_for_earlier();
  __shared__ int sums[kThreads];
  for (long long n = blockIdx.x; n < samples; n += groups) {
    const Tokens ours = find(given & 1 ? hidden + n * positions : nullptr, places + n * positions, positions, sums);
    const Tokens theirs = given & 2 ? find(given & 4 ? key_hidden + n * keys : nullptr, key_places + n * keys, keys, sums)
                                    : ours;
    const bool moves = ours.have_gaps || theirs.have_gaps;
    if (threadIdx.x != 0) continue;
    counts[n] = moves ? 0 : ours.count;
    counts[samples + n] = moves ? 0 : theirs.count;
    counts[2 * samples + n] = moves ? ours.count : 0;
    counts[3 * samples + n] = moves ? theirs.count : 0;
  }
}

// Rows of samples that move, one behind the other, or back from there, where they stand in pieces of `piece` accesses.
// Where no sample moves, a block only reads that.
extern "C" __global__ void __launch_bounds__(kThreads)
    move_rows(const int* offsets, const int* places, const te::access::Four* from, te::access::Four* to, long long rows,
              int groups, int samples, int positions, int sample_step, int position_step, int piece_step, int vectors, int piece,
              int back) {
  te::wait_for_earlier();
  const int all = offsets[samples];
  const long long end = back || all == 0 ? all : all + kBehind;
  for (long long row = blockIdx.x; row < end && row < rows; row += groups) {
    if (row >= all) {
      for (int i = threadIdx.x; i < vectors; i += kThreads) to[row * vectors + i] = {{0u, 0u, 0u, 0u}};
      continue;
    }
    int low = 0, high = samples;  // the sample of the row: how many end at it or before
    while (low < high) {
      const int middle = (low + high) / 2;
      if (offsets[middle + 1] <= row) low = middle + 1;
      else high = middle;
    }
    const long long place = places[static_cast<long long>(low) * positions + row - offsets[low]];
    const long long apart = static_cast<long long>(low) * sample_step + place * position_step;
    const te::access::Four* read = from + (back ? row * vectors : apart);
    te::access::Four* write = to + (back ? apart : row * vectors);
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      const int there = i / piece * piece_step + i % piece;
      write[back ? there : i] = read[back ? i : there];
    }
  }
}
