// Keys and values of packed heads go to their positions in caches, queries on to whoever reads them.
//
// key_value_cache.py writes the constants that this text reads in front of it:
//   kGroups, kPerGroup   heads of keys and of values, and query heads of each
//   kPieces              accesses of a head
//   kBlocked             whether a row is all queries, all keys, all values; else these lie group by group
//   kNan                 two numbers that are none
//   kThreads             threads of a block
//   kTiles               blocks that a row takes
// Whole is what starts and counts are stored in.

constexpr int kQueries = kGroups * kPerGroup, kHeads = kQueries + 2 * kGroups;
constexpr int kRow = kHeads * kPieces, kKept = kGroups * kPieces;

using te::access::Four;

// What a head of a row is: one of queries, of keys or of values, and which of these.
struct Head {
  int kind, which;
};

TE_DEVICE Head head_at(int place) {
  if (kBlocked) {
    if (place < kQueries) return {0, place};
    place -= kQueries;
    return {1 + place / kGroups, place % kGroups};
  }
  const int group = place / (kPerGroup + 2), own = place % (kPerGroup + 2);
  if (own < kPerGroup) return {0, group * kPerGroup + own};
  return {1 + own - kPerGroup, group};
}

// x [rows, kRow] of positions, times samples, or the other way round; caches by steps of 16 bytes.
extern "C" __global__ void __launch_bounds__(kThreads)
    key_value_cache(const Four* x, const Whole* starts, const Whole* counts, Four* key_cache, Four* value_cache, Four* y,
                    long long items, int blocks, int samples, int positions, int sequence_first, int last,
                    int position_step, int sample_step) {
  te::wait_for_earlier();
  for (long long item = blockIdx.x; item < items; item += blocks) {
    const int tile = static_cast<int>(item % kTiles);
    const long long row = item / kTiles;
    const long long sample = sequence_first ? row % samples : row / positions;
    const long long position = sequence_first ? row / samples : row % positions;
    const long long place = static_cast<long long>(starts[sample]) + position;
    const bool padding = position >= static_cast<long long>(counts[sample]);
    const bool lost = !padding && (place < 0 || place >= last);
    const bool nowhere = padding || lost;  // the last place becomes zeros: attention may multiply it by 0
    const long long kept = (nowhere ? last : place) * position_step + sample * sample_step;
    for (int i = tile * kThreads + static_cast<int>(threadIdx.x); i < kRow; i += kTiles * kThreads) {
      const Head head = head_at(i / kPieces);
      const int inside = head.which * kPieces + i % kPieces;
      const Four found = x[row * kRow + i];
      if (head.kind == 1) key_cache[kept + inside] = nowhere ? Four{} : found;
      else if (head.kind == 2) value_cache[kept + inside] = nowhere ? Four{} : found;
      else y[row * (kQueries * kPieces) + inside] = lost ? Four{{kNan, kNan, kNan, kNan}} : found;
    }
  }
}
