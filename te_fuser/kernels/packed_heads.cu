// One pass over packed queries, keys and values: gather them from three tensors or one, add a bias, turn queries and
// keys by their position (RoFormer, Su et al., 2021), store them packed, and add up each column.
//
// packed_heads.py writes the constants that this text reads in front of it:
//   Element, BiasElement, SumElement   storage types
//   kQueries, kGroups, kHeadDim        query heads, key/value heads, features of a head
//   kBlocked                           [all queries | all keys | all values], else [queries..., key, value] of each group
//   kParts                             queries, keys and values come from three tensors
//   kRotary                            features of a head that turn, the first ones; 0: none
//   kApart                             a feature's partner is kRotary / 2 features away, else it is its neighbour
//   kDirection                         1: as the position says; -1: back
//   kVector                            neighbours that a thread takes at once
//   kBias, kSums                       whether a bias is added, whether columns are added up
//   kThreads, kBlocks, kTiles          threads of a block, blocks of a multiprocessor, blocks side by side in a row
//
// A thread has two vectors of one head, in all rows that its block walks over: partners where these are apart. So sines
// and cosines, which neighbouring rows of one position share, and the sums stay in registers.

constexpr int kHeads = kQueries + 2 * kGroups, kPerGroup = kQueries / kGroups, kFeatures = kHeads * kHeadDim;
// Where partners are apart, or neighbours that one vector does not hold, a thread has one in each of its vectors.
constexpr bool kAcross = kRotary > 0 && (kApart || kVector == 1);
constexpr bool kWithin = kRotary > 0 && !kAcross;
constexpr int kPaired = kAcross ? kRotary : 0, kPairLanes = kPaired / 2 / kVector;
// The other vectors of a head: the second half of them are a thread's second ones.
constexpr int kOthers = (kHeadDim - kPaired) / kVector, kOtherLanes = (kOthers + 1) / 2;
constexpr int kLanes = kPairLanes + kOtherLanes;
constexpr int kAngles = kWithin ? kVector / 2 : kVector;  // of one vector
constexpr int kRows = 4;  // that a thread loads before it uses the first

static_assert(kHeadDim % kVector == 0 && kPaired % 2 == 0, "vectors do not cross heads");
static_assert(!kAcross || !kApart || kRotary / 2 % kVector == 0, "partners lie in two vectors");
static_assert(!kWithin || (kVector % 2 == 0 && kRotary % kVector == 0), "partners lie in one vector");

// Where a thread's two vectors lie in their head, and the angles of the first and the second.
struct Lane {
  int first, second;
  bool has_second;

  static __device__ __forceinline__ Lane of(int number) {
    if (number < kPairLanes) {
      const int first = kApart ? number * kVector : 2 * number;
      return {first, first + (kApart ? kRotary / 2 : 1), true};
    }
    const int other = number - kPairLanes;
    return {kPaired + other * kVector, kPaired + (other + kOtherLanes) * kVector, other + kOtherLanes < kOthers};
  }
};

// A head by its place in the packed row.
struct Head {
  int kind, index;  // 0: a query, 1: a key, 2: a value; its number among the groups
  int in_group;     // of a query

  static __device__ __forceinline__ Head of(int place) {
    if (kBlocked) {
      if (place < kQueries) return {0, place / kPerGroup, place % kPerGroup};
      const int other = place - kQueries;
      return {1 + other / kGroups, other % kGroups, 0};
    }
    const int inside = place % (kPerGroup + 2);
    return {inside < kPerGroup ? 0 : inside - kPerGroup + 1, place / (kPerGroup + 2), inside};
  }
};

// The vectors of one row.
struct Pair {
  te::Vector<Element, kVector> first, second;
};

struct Angles {
  float cosine[kAngles], sine[kAngles];
};

TE_DEVICE void set_angles(Angles& to, const float* cosines, const float* sines, int at) {
#pragma unroll
  for (int i = 0; i < kAngles; ++i) to.cosine[i] = cosines[at + i], to.sine[i] = kDirection * sines[at + i];
}

TE_DEVICE void turn(float& a, float& b, float cosine, float sine) {
  const float turned = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = turned;
}

// Strides count vectors; each tensor of heads has those of its positions, samples, groups and, queries, heads of a group.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) packed_heads(
    const Element* __restrict__ queries, const Element* __restrict__ keys, const Element* __restrict__ values,
    const float* __restrict__ cosines, const float* __restrict__ sines, const BiasElement* __restrict__ bias,
    Element* __restrict__ out, float* __restrict__ partial, long long rows, int samples, int groups,
    int out_position, int out_sample,
    int query_position, int query_sample, int query_group, int query_head,
    int key_position, int key_sample, int key_group,
    int value_position, int value_sample, int value_group) {
  const int tile = blockIdx.x % kTiles, group = blockIdx.x / kTiles;
  const int place = tile * kThreads + threadIdx.x;
  if (place >= kHeads * kLanes) return;
  const Head head = Head::of(place / kLanes);
  const Lane lane = Lane::of(place % kLanes);
  const int column = place / kLanes * kHeadDim;
  const bool turns_first = kRotary > 0 && head.kind < 2 && lane.first < kRotary;
  const bool turns_second = kRotary > 0 && head.kind < 2 && lane.second < kRotary;

  const Element* from = queries + column;
  long long by_position = query_position, by_sample = query_sample;
  if (kParts) {
    if (head.kind == 0) {
      from = queries + (static_cast<long long>(head.index) * query_group + head.in_group * query_head) * kVector;
    } else if (head.kind == 1) {
      from = keys + static_cast<long long>(head.index) * key_group * kVector;
      by_position = key_position, by_sample = key_sample;
    } else {
      from = values + static_cast<long long>(head.index) * value_group * kVector;
      by_position = value_position, by_sample = value_sample;
    }
  }
  by_position *= kVector, by_sample *= kVector;
  const long long to_position = static_cast<long long>(out_position) * kVector;
  const long long to_sample = static_cast<long long>(out_sample) * kVector;
  Element* to = out + column;

  float first_bias[kVector] = {}, second_bias[kVector] = {};
  if (kBias) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      first_bias[i] = te::number(bias[column + lane.first + i]);
      if (lane.has_second) second_bias[i] = te::number(bias[column + lane.second + i]);
    }
  }
  float first_sums[kVector] = {}, second_sums[kVector] = {};
  Angles first_angles, second_angles;
#pragma unroll
  for (int i = 0; i < kAngles; ++i) {
    first_angles.cosine[i] = second_angles.cosine[i] = 1.0f;
    first_angles.sine[i] = second_angles.sine[i] = 0.0f;
  }
  int known = -1;  // the position whose angles are there

  // Rows are counted position by position, so that neighbours share their angles.
  for (long long row = static_cast<long long>(group) * kRows; row < rows; row += static_cast<long long>(groups) * kRows) {
    int position[kRows], sample[kRows];
    position[0] = static_cast<unsigned>(row) / samples, sample[0] = static_cast<unsigned>(row) % samples;
#pragma unroll
    for (int i = 1; i < kRows; ++i) {
      const bool next = sample[i - 1] + 1 == samples;
      position[i] = position[i - 1] + next, sample[i] = next ? 0 : sample[i - 1] + 1;
    }
    Pair loaded[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i < rows) {
        const Element* source = from + position[i] * by_position + sample[i] * by_sample;
        loaded[i].first = te::load<kVector>(source + lane.first);
        if (lane.has_second) loaded[i].second = te::load<kVector>(source + lane.second);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i >= rows) break;
      if (kRotary > 0 && position[i] != known) {
        known = position[i];
        const long long angles = static_cast<long long>(known) * (kRotary / 2);
        const int step = kWithin ? 2 : 1;
        if (turns_first) {
          const int at = kAcross && !kApart ? lane.first / 2 : lane.first / step;
          set_angles(first_angles, cosines + angles, sines + angles, at);
        }
        if (kWithin && turns_second) set_angles(second_angles, cosines + angles, sines + angles, lane.second / step);
      }
      float first[kVector], second[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        first[e] = te::get(loaded[i].first, e) + first_bias[e];
        second[e] = lane.has_second ? te::get(loaded[i].second, e) + second_bias[e] : 0.0f;
      }
      if constexpr (kAcross) {
        if (turns_first) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) turn(first[e], second[e], first_angles.cosine[e], first_angles.sine[e]);
        }
      } else if constexpr (kWithin) {
#pragma unroll
        for (int e = 0; e + 1 < kVector; e += 2) {
          turn(first[e], first[e + 1], first_angles.cosine[e / 2], first_angles.sine[e / 2]);
          turn(second[e], second[e + 1], second_angles.cosine[e / 2], second_angles.sine[e / 2]);
        }
      }
      Element* target = to + position[i] * to_position + sample[i] * to_sample;
      te::store(target + lane.first, first);
      if (lane.has_second) te::store(target + lane.second, second);
      if (kSums) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) first_sums[e] += first[e], second_sums[e] += second[e];
      }
    }
  }
  if (kSums) {
    float* sums = partial + static_cast<long long>(group) * kFeatures + column;
    te::store(sums + lane.first, first_sums);
    if (lane.has_second) te::store(sums + lane.second, second_sums);
  }
}

// Adds up what the blocks found, in a fixed order.
extern "C" __global__ void __launch_bounds__(1024) packed_heads_finish(
    const float* __restrict__ partial, SumElement* __restrict__ sums, int groups) {
  __shared__ float found[32][33];
  te::finish<kFeatures>(found, partial, sums, 0, groups, blockIdx.x, 0);
}
