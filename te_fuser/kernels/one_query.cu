// Attention of one query a sample to keys and values that lie by position, such as caches: flash decoding (Dao et al.,
// 2023). Each block goes over a part of a sample's keys for the queries of one group; then the parts are merged.
//
// one_query.py writes the constants that this text reads in front of it:
//   Element     the storage type
//   kWidth      features of a head, a multiple of 8
//   kGroups     heads of keys and values
//   kPerGroup   query heads of each
//   kHeads      of these, how many a block takes at once
//   kTurns      blocks that a group takes for all
//   kLanes      neighbouring threads that read a key together, a power of two
//   kDeep       keys that a thread reads before it uses the first
//   kScale      of scores, times log2(e)
//   kLeft       keys that a query sees beside its own, the last; -1: all
//   kThreads    threads of a block

constexpr int kPieces = kWidth / 8, kKeys = 32 / kLanes, kWarps = kThreads / 32, kTeams = kWarps * kKeys;
constexpr int kStep = kKeys * kDeep;   // keys that a warp reads at once
constexpr int kPart = kWidth + 2;      // a head's part: what it mixes, the largest score, the sum of weights
constexpr int kColumns = (kWidth + 31) / 32;  // of a lane that merges parts
constexpr int kMerged = 8;             // parts that a warp reads at once

using Eight = te::Vector<Element, 8>;

struct Seen {
  int begin, end;
  bool wrong;
};

// Which keys the query of a sample sees. `given`: 1 lengths, 2 key lengths.
TE_DEVICE Seen seen_by(long long sample, const int* lengths, const int* key_lengths, int positions, int given) {
  const int count = given & 1 ? lengths[sample] : 1, filled = given & 2 ? key_lengths[sample] : positions;
  if (count < 0 || count > 1 || filled < 0 || filled > positions) return {0, 0, true};
  const int begin = kLeft < 0 || filled - 1 - kLeft < 0 ? 0 : filled - 1 - kLeft;
  return {begin, count == 0 ? begin : filled, false};
}

// queries [samples, kGroups * kPerGroup * kWidth]; keys and values by steps of 8 features; parts [items, kHeads, kPart].
// Items are samples, times groups, times turns, times parts of the keys.
extern "C" __global__ void __launch_bounds__(kThreads)
    one_query_parts(const Element* queries, const Element* keys, const Element* values, const int* lengths,
                    const int* key_lengths, float* parts, long long items, int blocks, int splits, int positions,
                    int position_step, int sample_step, int given) {
  te::wait_for_earlier();
  te::let_next_start();  // the one that merges
  __shared__ float shared[kTeams][kHeads][kPart];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, team = static_cast<int>(threadIdx.x) / kLanes;
  const int warp = static_cast<int>(threadIdx.x) / 32, among = team % kKeys;
  const bool reads = lane < kPieces;
  for (long long item = blockIdx.x; item < items; item += blocks) {
    const int split = static_cast<int>(item % splits), turn = static_cast<int>(item / splits % kTurns);
    const int group = static_cast<int>(item / splits / kTurns % kGroups);
    const long long sample = item / splits / kTurns / kGroups;
    const Seen seen = seen_by(sample, lengths, key_lengths, positions, given);
    const int each = (seen.end - seen.begin + splits - 1) / splits;
    const int begin = seen.begin + split * each, end = begin + each < seen.end ? begin + each : seen.end;
    float query[kHeads][8], most[kHeads], weight[kHeads], mixed[kHeads][8];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const int which = turn * kHeads + head;
      const bool there = reads && which < kPerGroup;
      most[head] = -te::infinity();
      weight[head] = 0.0f;
      Eight own{};
      if (there) {
        own = te::load<8>(queries + ((sample * kGroups + group) * kPerGroup + which) * kWidth + lane * 8);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        query[head][i] = kScale * te::get(own, i);
        mixed[head][i] = 0.0f;
      }
    }
    const long long start = sample * sample_step + group * kPieces + lane;
    for (int base = begin + warp * kStep; base < end; base += kWarps * kStep) {
      Eight key[kDeep], value[kDeep];
#pragma unroll
      for (int deep = 0; deep < kDeep; ++deep) {
        const int at = base + deep * kKeys + among;
        key[deep] = value[deep] = Eight{};
        if (at < end && reads) {
          const long long place = (start + static_cast<long long>(at) * position_step) * 8;
          key[deep] = te::load<8>(keys + place);
          value[deep] = te::load<8>(values + place);
        }
      }
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        float score[kDeep], top = most[head];
#pragma unroll
        for (int deep = 0; deep < kDeep; ++deep) {
          score[deep] = 0.0f;
#pragma unroll
          for (int i = 0; i < 8; ++i) score[deep] += query[head][i] * te::get(key[deep], i);
          te::reduce_lanes<kLanes, te::Sum>(score[deep]);
          if (base + deep * kKeys + among >= end) score[deep] = -te::infinity();
          top = te::maximum(top, score[deep]);
        }
        if (top == -te::infinity()) continue;  // no key was there
        const float fade = exp2f(most[head] - top);
        most[head] = top;
        weight[head] *= fade;
#pragma unroll
        for (int i = 0; i < 8; ++i) mixed[head][i] *= fade;
#pragma unroll
        for (int deep = 0; deep < kDeep; ++deep) {
          const float share = exp2f(score[deep] - top);
          weight[head] += share;
#pragma unroll
          for (int i = 0; i < 8; ++i) mixed[head][i] += share * te::get(value[deep], i);
        }
      }
    }
    __syncthreads();  // who merged the item before has read all
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (reads) {
#pragma unroll
        for (int i = 0; i < 8; ++i) shared[team][head][lane * 8 + i] = mixed[head][i];
      }
      if (lane == 0) {
        shared[team][head][kWidth] = most[head];
        shared[team][head][kWidth + 1] = weight[head];
      }
    }
    __syncthreads();
    for (int place = threadIdx.x; place < kHeads * kWidth; place += kThreads) {
      const int head = place / kWidth, column = place % kWidth;
      float top = -te::infinity();
      for (int other = 0; other < kTeams; ++other) top = te::maximum(top, shared[other][head][kWidth]);
      float sum = 0.0f, all = 0.0f;
      for (int other = 0; other < kTeams && top != -te::infinity(); ++other) {
        const float fade = exp2f(shared[other][head][kWidth] - top);
        all += fade * shared[other][head][kWidth + 1];
        sum += fade * shared[other][head][column];
      }
      float* part = parts + (item * kHeads + head) * kPart;
      part[column] = sum;
      if (column == 0) {
        part[kWidth] = seen.wrong ? te::as_float(0x7fffffffu) : top;
        part[kWidth + 1] = all;
      }
    }
  }
}

// output [samples, kGroups * kPerGroup * kWidth]; a block merges the parts of a head, its warps some of them each.
extern "C" __global__ void __launch_bounds__(kThreads)
    one_query_merged(const float* parts, Element* output, long long items, int blocks, int splits) {
  te::wait_for_earlier();
  te::let_next_start();
  __shared__ float shared[kWarps][kPart];
  const long long heads = items / splits * kHeads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (long long row = blockIdx.x; row < heads; row += blocks) {
    const int head = static_cast<int>(row % kHeads);
    const long long place = row / kHeads, group = place / kTurns;
    const int which = static_cast<int>(place % kTurns) * kHeads + head;
    if (which >= kPerGroup) continue;
    float top = -te::infinity(), all = 0.0f, sums[kColumns] = {};
    for (int base = warp; base < splits; base += kWarps * kMerged) {
      float tops[kMerged], weights[kMerged], mixed[kMerged][kColumns];
#pragma unroll
      for (int k = 0; k < kMerged; ++k) {
        const int split = base + k * kWarps;
        const float* from = parts + ((place * splits + split) * kHeads + head) * kPart;
        tops[k] = split < splits ? from[kWidth] : -te::infinity();
        weights[k] = split < splits ? from[kWidth + 1] : 0.0f;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          mixed[k][i] = split < splits && lane + 32 * i < kWidth ? from[lane + 32 * i] : 0.0f;
        }
      }
      float highest = top;
#pragma unroll
      for (int k = 0; k < kMerged; ++k) highest = te::maximum(highest, tops[k]);
      if (highest == -te::infinity()) continue;  // no key was there
      const float fade = exp2f(top - highest);
      top = highest;
      all *= fade;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] *= fade;
#pragma unroll
      for (int k = 0; k < kMerged; ++k) {
        const float share = exp2f(tops[k] - top);
        all += share * weights[k];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[i] += share * mixed[k][i];
      }
    }
    __syncthreads();  // who merged the head before has read all
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (lane + 32 * i < kWidth) shared[warp][lane + 32 * i] = sums[i];
    }
    if (lane == 0) shared[warp][kWidth] = top, shared[warp][kWidth + 1] = all;
    __syncthreads();
    float highest = -te::infinity(), total = 0.0f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) highest = te::maximum(highest, shared[other][kWidth]);
    float shares[kWarps];
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      shares[other] = highest == -te::infinity() ? 0.0f : exp2f(shared[other][kWidth] - highest);
      total += shares[other] * shared[other][kWidth + 1];
    }
    for (int column = threadIdx.x; column < kWidth; column += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) sum += shares[other] * shared[other][column];
      const float value[1] = {highest == -te::infinity() ? 0.0f : sum / total};
      te::store(output + (group * kPerGroup + which) * kWidth + column, value);
    }
  }
}
