// One pass over packed queries, keys and values: gather them from three tensors or one, add a bias, turn queries and
// keys by their position (RoFormer, Su et al., 2021), store them packed, and add up each column.
//
// packed_heads.py writes the constants that this text reads in front of it:
//   Element, BiasElement, SumElement   storage types; OutElement: of the result
//   kQueries, kGroups, kHeadDim        query heads, key/value heads, features of a head
//   kBlocked                           [all queries | all keys | all values], else [queries..., key, value] of each group
//   kParts                             queries, keys and values come from three tensors
//   kRotary                            features of a head that turn, the first ones; 0: none
//   kDistance                          how far apart the two features of a pair are
//   kPartner                           where a thread finds the partners of its vector: see below
//   kDirection                         1: as the position says; -1: back
//   kVector                            neighbours that a thread takes at once
//   kBias, kSums                       whether a bias is added, whether columns are added up
//   kScaled                            whether the result is scaled, and a number raised to its largest magnitude before
//   kThreads, kBlocks, kTiles          threads of a block, blocks of a multiprocessor, blocks side by side in a row
//   kRows                              rows that a thread loads before it uses the first
//
// What is scaled is rounded to 8 bits; sums are those of what was neither.
//
// A thread has the same columns in all rows that its block walks over, so that sums stay in registers. The sines and
// cosines of the next rows come to shared memory while these are computed. What a warp loads at once should be whole lines
// of the cache, 128 bytes: loads of halves of lines cost up to twice the time.

// Partners lie in the same vector (kInside), in the thread's second vector (kSecond), where half a head is a line or more,
// or in the vector of another lane (kLane).

constexpr int kHeads = kQueries + 2 * kGroups, kPerGroup = kQueries / kGroups, kFeatures = kHeads * kHeadDim;
constexpr int kTable = kRotary / 2;                                  // angles of one position
constexpr int kStride = kTable > 0 ? (kTable + 3) / 4 * 4 : 4;       // the same, padded to 16 bytes
constexpr int kFetched = kTable % 4 == 0 ? 4 : 1;                    // angles that are copied at once
constexpr int kAngles = kPartner == kInside ? (kVector + 1) / 2 : kVector;  // of one vector
constexpr bool kTwo = kPartner == kSecond;                           // whether a thread has two vectors
// Of a head, where threads have two vectors: first those with partners, then the others in two halves.
constexpr int kPairs = kTwo ? kTable / kVector : 0, kOthers = (kHeadDim - 2 * kPairs * kVector) / kVector;
constexpr int kLanes = kTwo ? kPairs + (kOthers + 1) / 2 : kHeadDim / kVector;
constexpr unsigned kLaneDistance = kDistance / kVector;

static_assert(kHeadDim % kVector == 0, "vectors do not cross heads");
static_assert(kRotary == 0 || kPartner != kInside || (kDistance == 1 && kVector % 2 == 0 && kRotary % kVector == 0), "");
static_assert(kPartner != kSecond || kTable % kVector == 0, "");
static_assert(kPartner != kLane || (32 % kLanes == 0 && kLanes % (2 * kLaneDistance) == 0), "");

// Where a thread's vectors lie in their head.
struct Place {
  int first, second;
  bool has_second;

  static __device__ __forceinline__ Place of(int lane) {
    if (!kTwo) return {lane * kVector, 0, false};
    if (lane < kPairs) {
      const int first = kDistance == 1 ? 2 * lane : lane * kVector;
      return {first, first + kDistance, true};
    }
    const int other = lane - kPairs, second = other + (kOthers + 1) / 2;
    return {2 * kPairs * kVector + other * kVector, 2 * kPairs * kVector + second * kVector, second < kOthers};
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

// Cosines and sines of the positions of kRows rows.
struct Angles {
  alignas(16) float cosine[kRows][kStride], sine[kRows][kStride];
};

// Starts to copy those of the positions from `position` on.
TE_DEVICE void fetch(Angles& to, const float* cosines, const float* sines, int position, int positions) {
  using Piece = te::Vector<float, kFetched>;
  constexpr int kPieces = kTable / kFetched;
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, column = i % kPieces * kFetched;
    if (position + row >= positions) break;
    const long long at = static_cast<long long>(position + row) * kTable + column;
    te::fetch<kFetched>(reinterpret_cast<Piece*>(&to.cosine[row][column]), cosines + at);
    te::fetch<kFetched>(reinterpret_cast<Piece*>(&to.sine[row][column]), sines + at);
  }
  te::depart();
}

using Elements = te::Vector<Element, kVector>;
using Few = te::Vector<float, kAngles>;

// A vector with the bias added.
TE_DEVICE void numbers(float (&to)[kVector], const Elements& from, const float (&bias)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = te::get(from, i) + bias[i];
}

TE_DEVICE void read_bias(float (&to)[kVector], const BiasElement* from) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = te::number(from[i]);
}

// The vector of the lane that has the partners; all lanes of a warp call it together.
template <class Words>
TE_DEVICE Words exchanged(const Words& own) {
  Words other = own;
  if constexpr (kPartner == kLane) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(own) / 4); ++i)
      other.words[i] = te::as_bits(__shfl_xor_sync(te::kWarp, te::as_float(own.words[i]), kLaneDistance));
  }
  return other;
}

// (a, b) -> (a cos - b sin, b cos + a sin): the first of each pair becomes the first of the result, or the second does.
TE_DEVICE float turned(float own, float partner, float cosine, float sine, bool is_second) {
  return own * cosine + (is_second ? partner : -partner) * (kDirection * sine);
}

TE_DEVICE void turn(float (&first)[kVector], float (&second)[kVector], const float* cosines, const float* sines,
                    bool is_second) {
  const Few cosine = *reinterpret_cast<const Few*>(cosines), sine = *reinterpret_cast<const Few*>(sines);
#pragma unroll
  for (int i = 0; i < kAngles; ++i) {
    const float c = te::get(cosine, i), s = te::get(sine, i);
    if constexpr (kPartner == kInside && kVector > 1) {
      const float a = first[2 * i], b = first[2 * i + 1];
      first[2 * i] = turned(a, b, c, s, false), first[2 * i + 1] = turned(b, a, c, s, true);
    } else {
      const float a = first[i], b = second[i];
      first[i] = turned(a, b, c, s, is_second);
      if (kTwo) second[i] = turned(b, a, c, s, true);
    }
  }
}

// Strides count vectors; each tensor of heads has those of its positions, samples, groups and, queries, heads of a group.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) packed_heads(
    const Element* __restrict__ queries, const Element* __restrict__ keys, const Element* __restrict__ values,
    const float* __restrict__ cosines, const float* __restrict__ sines, const BiasElement* __restrict__ bias,
    const float* __restrict__ scale, float* __restrict__ amax, OutElement* __restrict__ out,
    SumElement* __restrict__ sums, float* __restrict__ partial,
    long long rows, int samples, int groups, int out_position, int out_sample,
    int query_position, int query_sample, int query_group, int query_head,
    int key_position, int key_sample, int key_group,
    int value_position, int value_sample, int value_group) {
  te::wait_for_earlier();
  if (kSums) te::let_next_start();
  const int tile = blockIdx.x % kTiles, group = blockIdx.x / kTiles;
  const int number = tile * kThreads + threadIdx.x;
  const bool works = number < kHeads * kLanes;  // the others only help to copy angles
  const Head head = Head::of(works ? number / kLanes : 0);
  const Place place = Place::of(number % kLanes);
  const int column = works ? number / kLanes * kHeadDim : 0;
  const bool turns = kRotary > 0 && head.kind < 2 && place.first < kRotary;
  const bool is_second = kPartner == kLane && place.first >= kTable;
  const int angle = kDistance == 1 ? place.first / 2 : is_second ? place.first - kTable : place.first;

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
  from += place.first, by_position *= kVector, by_sample *= kVector;
  const int to_second = place.second - place.first;
  OutElement* to = out + column + place.first;
  const float factor = kScaled ? scale[0] : 1.0f;
  unsigned largest = 0u;

  // Of the first vector, and of the second or of the partners in another lane.
  float first_bias[kVector] = {}, second_bias[kVector] = {};
  if (kBias && works) {
    const BiasElement* own = bias + column;
    read_bias(first_bias, own + place.first);
    if (place.has_second) read_bias(second_bias, own + place.second);
    if (kPartner == kLane && turns) read_bias(second_bias, own + (is_second ? angle : angle + kTable));
  }
  float first_sums[kVector] = {}, second_sums[kVector] = {};

  // Rows are counted position by position, so that neighbours share their angles.
  __shared__ Angles staged[2];
  const int positions = static_cast<int>(rows / samples);
  const long long step = static_cast<long long>(groups) * kRows;
  int stage = 0;
  long long row = static_cast<long long>(group) * kRows;
  if (kRotary > 0 && row < rows) fetch(staged[0], cosines, sines, static_cast<unsigned>(row) / samples, positions);
  for (; row < rows; row += step, stage ^= 1) {
    int position[kRows], sample[kRows];
    position[0] = static_cast<unsigned>(row) / samples, sample[0] = static_cast<unsigned>(row) % samples;
#pragma unroll
    for (int i = 1; i < kRows; ++i) {
      const bool next = sample[i - 1] + 1 == samples;
      position[i] = position[i - 1] + next, sample[i] = next ? 0 : sample[i - 1] + 1;
    }
    Elements first[kRows] = {}, second[kTwo ? kRows : 1];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (works && row + i < rows) {
        const Element* source = from + position[i] * by_position + sample[i] * by_sample;
        first[i] = te::load<kVector>(source);
        if (kTwo && place.has_second) second[kTwo ? i : 0] = te::load<kVector>(source + to_second);
      }
    }
    if (kRotary > 0) {
      te::arrived<0>();
      __syncthreads();  // all angles of these rows are there, and nobody reads those of the last ones any more
      const long long later = row + step;
      if (later < rows) fetch(staged[stage ^ 1], cosines, sines, static_cast<unsigned>(later) / samples, positions);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i >= rows) break;
      const bool has_second = kTwo && place.has_second;
      float a[kVector], b[kVector] = {};
      numbers(a, first[i], first_bias);
      if (has_second) numbers(b, second[kTwo ? i : 0], second_bias);
      if constexpr (kPartner == kLane) numbers(b, exchanged(first[i]), second_bias);
      if (turns) {
        const Angles& here = staged[stage];
        const int of = position[i] - position[0];
        turn(a, b, &here.cosine[of][angle], &here.sine[of][angle], is_second);
      }
      if (!works) continue;
      OutElement* target = to + (position[i] * static_cast<long long>(out_position) +
                             sample[i] * static_cast<long long>(out_sample)) * kVector;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        first_sums[e] += a[e], second_sums[e] += b[e];
        if (kScaled) {
          largest = te::larger(largest, a[e]), a[e] *= factor;
          if (has_second) largest = te::larger(largest, b[e]), b[e] *= factor;
        }
      }
      te::store(target, a);
      if (has_second) te::store(target + to_second, b);
    }
  }
  if (kSums && works) {
    // Of one group of rows this is the whole.
    const int at = column + place.first;
    float* own = partial + static_cast<long long>(group) * kFeatures + at;
    te::store_sums(groups == 1, sums + at, own, first_sums);
    if (kTwo && place.has_second) te::store_sums(groups == 1, sums + at + to_second, own + to_second, second_sums);
  }
  if constexpr (kScaled) {
    __shared__ float raised[32];
    te::raise<kThreads>(raised, amax, largest);
  }
}

// Adds up what the blocks found, in a fixed order.
extern "C" __global__ void __launch_bounds__(te::kFinishThreads) packed_heads_finish(
    const float* __restrict__ partial, SumElement* __restrict__ sums, int groups) {
  te::wait_for_earlier();
  __shared__ float found[32][33];
  te::finish(found, partial, sums, 0, groups, blockIdx.x, 0, kFeatures);
}
