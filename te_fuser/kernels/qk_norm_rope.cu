// One pass over heads: query and key heads are normalized and turned by angles that the call gives, or that is done
// backward, with the gradients of the norms' weights and the sums of columns on the way; values are copied.
//
// turned_heads.py writes the constants that this text reads in front of it:
//   Element, TableElement, WeightElement, Whole   storage types; Whole is that of starts and offsets
//   kGroups, kQueries, kKeys, kOthers   groups of heads one behind the other, and heads of each kind in a group
//   kHeadDim                            features of a head
//   kRotary                             features of a head that turn, the first ones; 0: none
//   kHalves                             whether pairs are halves of what turns, else neighbours
//   kPartner                            where a thread finds the partners of its vector: see below
//   kTables                             kAngles, kPair (of queries, of keys) or kCosSin
//   kTurnsQueries, kTurnsKeys           whether they turn
//   kStarts, kOffsets                   whether the call gives them
//   kPadded                             whether rows behind the last angles, or before the first, take those
//   kNorm, kNormLast                    kNone, kRms, kLayer or kL2; whether it comes behind the rotation
//   kWeights, kCentered                 whether the norm has weights, and whether these are what is added to 1
//   kBack                               backward: of the output's gradient, and of the input where there is a norm
//   kVector                             neighbours that a thread takes at once
//   kUnits, kWidth, kSlots              units of a head (below), threads of a head, units of a thread
//   kThreads, kBlocks, kTiles           threads of a block, blocks of a multiprocessor, blocks side by side in a row
//   kRows                               rows that a thread loads before it uses the first
//   kSumsColumns, kSumsWeights          whether columns are added up, whether gradients of weights are made
//   kScaled                             whether the result is scaled, and a number raised to its largest magnitude before
//   TE_SUMS(X)                          X(number, width, rows of a group, type) of each sum
//   TE_COLUMN_SUMS(X), TE_WEIGHT_SUMS(X), TE_BIAS_SUMS(X)   X(number, kind of head) of those sums
//
// The threads of a head are neighbours in a warp, and a thread has the same columns in all rows that its block walks over,
// so sums stay in registers. A unit is a vector, or with kSecond two: those of both partners, where half of what turns is a
// line of the cache or more. Partners lie in the same vector (kInside), in the unit (kSecond), or in the vector of another
// lane (kLane).

constexpr int kPerGroup = kQueries + kKeys + kOthers, kHeads = kGroups * kPerGroup, kFeatures = kHeads * kHeadDim;
constexpr int kHalf = kRotary / 2;
constexpr int kStride = kRotary > 0 ? (kRotary + 3) / 4 * 4 : 4;  // angles of a row, padded to 16 bytes
constexpr int kRoles = kTables == kPair ? 2 : 1;                  // tables of angles
constexpr bool kTwo = kPartner == kSecond;
constexpr int kPairs = kTwo ? kHalf / kVector : 0, kRest = kHeadDim / kVector - 2 * kPairs;
constexpr unsigned kLaneDistance = kPartner == kLane ? kHalf / kVector : 0;
constexpr int kHeadsOfBlock = kThreads / kWidth;
constexpr bool kNormed = kNorm != kNone;
constexpr bool kReads = kBack && kNormed;  // the forward's input, too
constexpr float kShare = 1.0f / kHeadDim;

static_assert(kHeadDim % kVector == 0, "vectors do not cross heads");
static_assert(kThreads % 32 == 0 && 32 % kWidth == 0 && kWidth * kSlots >= kUnits, "");
static_assert(kPartner != kInside || kRotary == 0 || (!kHalves && kVector % 2 == 0 && kRotary % kVector == 0), "");
static_assert(kPartner != kSecond || (kHalf % kVector == 0 && (kHalves || kVector == 1)), "");
static_assert(kPartner != kLane || (kSlots == 1 && kUnits == kWidth && kWidth % (2 * kLaneDistance) == 0), "");

// What a thread holds of a head: kVectors vectors, with kSecond those of a unit one behind the other.
constexpr int kOfUnit = kTwo ? 2 : 1, kVectors = kSlots * kOfUnit;

// From which feature of its head a vector comes; where there is none, its numbers are zeros.
struct Place {
  int feature;
  bool there;

  static __device__ __forceinline__ Place of(int unit, bool second) {
    const bool there = unit < kUnits;
    if (!kTwo) return {there ? unit * kVector : 0, there};
    if (unit < kPairs) return {(kHalves ? unit * kVector : 2 * unit) + (second ? kHalves ? kHalf : 1 : 0), true};
    const int other = unit - kPairs + (second ? (kRest + 1) / 2 : 0);
    return {there ? (2 * kPairs + other) * kVector : 0, there && other < kRest};
  }
};

using Places = Place[kVectors];
using Elements = te::Vector<Element, kVector>;

struct Numbers {
  float of[kVectors][kVector] = {};
};

// f(vector, number in it) for all that a thread holds.
template <class F>
TE_DEVICE void each(F f) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) f(v, i);
  }
}

struct Stored {
  Elements of[kVectors] = {};

  __device__ __forceinline__ void load(const Element* head, const Places& places) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (places[v].there) of[v] = te::load<kVector>(head + places[v].feature);
  }

  __device__ __forceinline__ void unpack(Numbers& to) const {
    each([&](int v, int i) { to.of[v][i] = te::get(of[v], i); });
  }
};

// ------------------------------------------------------------------------------------------------- angles

// Cosines and sines of kRows rows, of queries and keys or of both.
struct Angles {
  alignas(16) float cosine[kRoles][kRows][kStride], sine[kRoles][kRows][kStride];
};

// Reduced by quarters of a circle in float64, so right for angles below 2^48; polynomials of Cephes.
TE_DEVICE void cosine_and_sine(float angle, float& cosine, float& sine) {
  const double quarters = rint(angle * 0.63661977236758134);
  const double reduced = fma(-quarters, 6.123233995736766e-17, fma(-quarters, 1.5707963267948966, double(angle)));
  const float x = static_cast<float>(reduced), square = x * x;
  const float s = x + x * square * (-1.6666654611e-1f + square * (8.3321608736e-3f - square * 1.9515295891e-4f));
  const float fourth = 4.166664568298827e-2f + square * (-1.388731625493765e-3f + square * 2.443315711809948e-5f);
  const float c = 1.0f - 0.5f * square + square * square * fourth;
  const int turn = static_cast<int>(static_cast<long long>(quarters) & 3);
  const float first = turn % 2 == 0 ? c : s, second = turn % 2 == 0 ? s : c;
  cosine = turn == 1 || turn == 2 ? -first : first;
  sine = turn >= 2 ? -second : second;
}

// Where the angles of a call are, and how its rows find theirs; strides count elements.
struct Tables {
  const TableElement *first, *second;
  const Whole *starts, *offsets;
  int first_position, first_sample, second_position, second_sample, length, sequences;
  bool by_row;  // whether each row has its own, else each position

  // The row of a table for a position of a sample, or for a token; outside: whether there is none.
  __device__ __forceinline__ int row_of(int position, int sample, bool& outside) const {
    long long place = position;
    if (kOffsets) {
      int low = 0, high = sequences;  // how many sequences end at the token or before it
      while (low < high) {
        const int middle = (low + high) / 2;
        if (offsets[middle + 1] <= position) low = middle + 1;
        else high = middle;
      }
      place = low == sequences ? 0 : position - offsets[low] + (kStarts ? starts[low] : 0);
    } else if (kStarts) {
      place += starts[sample];
    }
    outside = place < 0 || place >= length;
    return static_cast<int>(place < 0 ? 0 : outside ? length - 1 : place);
  }

  __device__ __forceinline__ void stage(Angles& to, long long row, long long rows, int samples) const {
    const int positions = static_cast<int>(rows / samples), sample_of_first = static_cast<unsigned>(row) % samples;
    const int count = by_row ? kRows : (sample_of_first + kRows - 1) / samples + 1;
    for (int i = threadIdx.x; i < count * kRotary; i += kThreads) {
      const int number = i / kRotary, feature = i % kRotary;
      const long long own = by_row ? row + number : row;
      if (own >= rows) break;
      const int position = static_cast<int>(static_cast<unsigned>(own) / samples) + (by_row ? 0 : number);
      if (position >= positions) break;
      bool outside;
      const int sample = static_cast<unsigned>(own) % samples, at = row_of(position, sample, outside);
      float a = read(first, at, first_position, sample, first_sample, feature);
      float b = kTables == kAngles ? 0.0f : read(second, at, second_position, sample, second_sample, feature);
      if (outside && !kPadded) a = b = te::as_float(0x7fc00000);  // NaN: nobody waits for the device to raise
      if (kTables == kCosSin) {
        to.cosine[0][number][feature] = a, to.sine[0][number][feature] = b;
      } else {
        cosine_and_sine(a, to.cosine[0][number][feature], to.sine[0][number][feature]);
        if (kTables == kPair) {
          constexpr int kKeyRole = kRoles - 1;
          cosine_and_sine(b, to.cosine[kKeyRole][number][feature], to.sine[kKeyRole][number][feature]);
        }
      }
    }
  }

  static __device__ __forceinline__ float read(const TableElement* table, int at, int by_position, int sample,
                                               int by_sample, int feature) {
    return te::number(table[static_cast<long long>(at) * by_position + static_cast<long long>(sample) * by_sample +
                            feature]);
  }
};

// (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b), and back (a cos_a + b sin_b, b cos_b - a sin_a).
template <bool kTurnsBack>
struct Turn {
  const float *cosine, *sine;

  static __device__ __forceinline__ int sine_of(int own, int partner) { return kTurnsBack ? partner : own; }

  __device__ __forceinline__ float turned(float own, float partner, float c, float s, bool is_second) const {
    return own * c + (is_second != kTurnsBack ? partner : -partner) * s;
  }

  __device__ __forceinline__ void operator()(Numbers& x, const Places& places, bool turns) const {
#pragma unroll
    for (int v = 0; v < kVectors; v += kOfUnit) {
      const int at = places[v].feature;
      const bool here = turns && places[v].there && at < kRotary;
      if constexpr (kPartner == kLane) across(x.of[v], at, here);
      if constexpr (kPartner == kInside) {
        if (here) inside(x.of[v], at);
      }
      if constexpr (kPartner == kSecond) {
        if (here) both(x.of[v], x.of[v + 1], at, places[v + 1].feature);
      }
    }
  }

 private:
  using Few = te::Vector<float, kVector>;

  __device__ __forceinline__ void inside(float (&x)[kVector], int at) const {
    const Few c = te::load<kVector>(cosine + at), s = te::load<kVector>(sine + at);
#pragma unroll
    for (int i = 0; i + 1 < kVector; i += 2) {
      const float a = x[i], b = x[i + 1];
      x[i] = turned(a, b, te::get(c, i), te::get(s, sine_of(i, i + 1)), false);
      x[i + 1] = turned(b, a, te::get(c, i + 1), te::get(s, sine_of(i + 1, i)), true);
    }
  }

  __device__ __forceinline__ void both(float (&first)[kVector], float (&second)[kVector], int at, int other) const {
    const Few c = te::load<kVector>(cosine + at), other_c = te::load<kVector>(cosine + other);
    const Few s = te::load<kVector>(sine + sine_of(at, other)), other_s = te::load<kVector>(sine + sine_of(other, at));
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float a = first[i], b = second[i];
      first[i] = turned(a, b, te::get(c, i), te::get(s, i), false);
      second[i] = turned(b, a, te::get(other_c, i), te::get(other_s, i), true);
    }
  }

  // All lanes of a warp come here together.
  __device__ __forceinline__ void across(float (&x)[kVector], int at, bool here) const {
    float partners[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) partners[i] = __shfl_xor_sync(te::kWarp, x[i], kLaneDistance);
    if (!here) return;
    const bool is_second = at >= kHalf;
    const Few c = te::load<kVector>(cosine + at);
    const Few s = te::load<kVector>(sine + sine_of(at, is_second ? at - kHalf : at + kHalf));
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = turned(x[i], partners[i], te::get(c, i), te::get(s, i), is_second);
  }
};

// -------------------------------------------------------------------------------------------------- norms

// A head's norm: x becomes (x - m) rstd, and then times the weight, plus the bias.
struct Norm {
  Numbers weight, bias;
  float eps;

  // All lanes of a warp come here together. Returns rstd.
  __device__ __forceinline__ float normalize(Numbers& x, const Places& places) const {
    if (kNorm == kLayer) {
      const float mean = kShare * total([&](int v, int i) { return x.of[v][i]; });
      each([&](int v, int i) { x.of[v][i] = places[v].there ? x.of[v][i] - mean : 0.0f; });
    }
    const float squares = total([&](int v, int i) { return x.of[v][i] * x.of[v][i]; });
    const float rstd = te::precise::rsqrt((kNorm == kL2 ? squares : kShare * squares) + eps);
    each([&](int v, int i) { x.of[v][i] *= rstd; });
    return rstd;
  }

  __device__ __forceinline__ void scale(Numbers& x) const {
    each([&](int v, int i) { x.of[v][i] = x.of[v][i] * weight.of[v][i] + (kNorm == kLayer ? bias.of[v][i] : 0.0f); });
  }

  // The gradient of what was normalized, of that of the result times the weight.
  __device__ __forceinline__ void back(Numbers& gradient, const Numbers& normed, float rstd) const {
    float along = total([&](int v, int i) { return gradient.of[v][i] * normed.of[v][i]; }), mean = 0.0f;
    if (kNorm != kL2) along *= kShare;
    if (kNorm == kLayer) mean = kShare * total([&](int v, int i) { return gradient.of[v][i]; });
    each([&](int v, int i) {
      gradient.of[v][i] = rstd * (gradient.of[v][i] - mean - normed.of[v][i] * along);
    });
  }

  // Of all numbers of a head.
  template <class F>
  static __device__ __forceinline__ float total(F f) {
    float sum = 0.0f;
    each([&](int v, int i) { sum += f(v, i); });
    te::reduce_lanes<kWidth, te::Sum>(sum);
    return sum;
  }
};

TE_DEVICE void read_weight(Numbers& to, const WeightElement* from, float more, const Places& places) {
  each([&](int v, int i) {
    if (places[v].there) to.of[v][i] = te::number(from[places[v].feature + i]) + more;
  });
}

// -------------------------------------------------------------------------------------------------- heads

constexpr int kQuery = 0, kKey = 1, kValue = 2;

TE_DEVICE int kind_of(int head) {
  const int inside = head % kPerGroup;
  return inside < kQueries ? kQuery : inside < kQueries + kKeys ? kKey : kValue;
}

// Adds up what the heads of a kind in the block summed, in their order, and stores it for each feature.
struct BlockSums {
  float* shared;  // [kHeadsOfBlock, kHeadDim]
  int tile, group;
  bool alone;

  // All threads of the block come here together.
  __device__ __forceinline__ void collect(const Numbers& sums, const Places& places) const {
    __syncthreads();
    float* own = shared + threadIdx.x / kWidth * kHeadDim;
    each([&](int v, int i) {
      if (places[v].there) own[places[v].feature + i] = sums.of[v][i];
    });
    __syncthreads();
  }

  template <class T>
  __device__ __forceinline__ void store(int kind, float* partial, T* total) const {
    const int first = tile * kHeadsOfBlock;
    for (int feature = threadIdx.x; feature < kHeadDim; feature += kThreads) {
      float sum = 0.0f;
      for (int head = 0; head < kHeadsOfBlock && first + head < kHeads; ++head)
        if (kind_of(first + head) == kind) sum += shared[head * kHeadDim + feature];
      if (alone) total[feature] = te::rounded<T>(sum);
      else partial[(static_cast<long long>(group) * kTiles + tile) * kHeadDim + feature] = sum;
    }
  }
};

#define TE_PARAMETERS(number, width, rows, type) , float* __restrict__ partial_##number, type* __restrict__ sums_##number

// Strides of heads count vectors, for positions and samples.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) turned_heads(
    const Element* __restrict__ from, const Element* __restrict__ read, const TableElement* __restrict__ first_table,
    const TableElement* __restrict__ second_table, const Whole* __restrict__ starts, const Whole* __restrict__ offsets,
    const WeightElement* __restrict__ weight, const WeightElement* __restrict__ bias,
    const WeightElement* __restrict__ key_weight, const WeightElement* __restrict__ key_bias,
    const float* __restrict__ scale, float* __restrict__ amax, OutElement* __restrict__ out, long long rows,
    int samples, int groups, int eps_bits, int out_position, int out_sample, int from_position, int from_sample,
    int read_position, int read_sample, int first_position, int first_sample, int second_position, int second_sample,
    int length, int sequences, int by_row TE_SUMS(TE_PARAMETERS)) {
  te::wait_for_earlier();
  if (kSumsColumns || kSumsWeights) te::let_next_start();
  const int tile = blockIdx.x % kTiles, group = blockIdx.x / kTiles;
  const int head = tile * kHeadsOfBlock + threadIdx.x / kWidth;
  const bool works = head < kHeads;
  const int kind = works ? kind_of(head) : kValue;
  const bool turns = kRotary > 0 && ((kind == kQuery && kTurnsQueries) || (kind == kKey && kTurnsKeys));
  const bool norms = kNormed && kind != kValue;
  const long long column = works ? head * kHeadDim : 0;
  Places places;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    places[v] = Place::of(threadIdx.x % kWidth + v / kOfUnit * kWidth, v % kOfUnit == 1);
    places[v].there = places[v].there && works;
  }

  Norm norm{{}, {}, te::as_float(eps_bits)};
  each([&](int v, int i) { norm.weight.of[v][i] = 1.0f; });
  if (kWeights && norms) {
    read_weight(norm.weight, kind == kQuery ? weight : key_weight, kCentered ? 1.0f : 0.0f, places);
    if (kNorm == kLayer && !kBack) read_weight(norm.bias, kind == kQuery ? bias : key_bias, 0.0f, places);
  }
  Numbers columns, of_weight, of_bias;  // sums over the rows of this block
  const float factor = kScaled ? scale[0] : 1.0f;
  unsigned largest = 0u;

  __shared__ Angles staged[kRotary > 0 ? 2 : 1];
  const Tables tables{first_table, second_table, starts, offsets, first_position, first_sample,
                      second_position, second_sample, length, sequences, by_row != 0};
  const int role = kRoles > 1 && kind == kKey ? kRoles - 1 : 0;
  const long long step = static_cast<long long>(groups) * kRows;
  int stage = 0;
  for (long long row = static_cast<long long>(group) * kRows; row < rows; row += step, stage ^= 1) {
    int position[kRows], sample[kRows];
    position[0] = static_cast<unsigned>(row) / samples, sample[0] = static_cast<unsigned>(row) % samples;
#pragma unroll
    for (int i = 1; i < kRows; ++i) {
      const bool next = sample[i - 1] + 1 == samples;
      position[i] = position[i - 1] + next, sample[i] = next ? 0 : sample[i - 1] + 1;
    }
    Stored stored[kRows], input[kReads ? kRows : 1];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i >= rows) break;
      stored[i].load(from + column + (position[i] * static_cast<long long>(from_position) +
                                      sample[i] * static_cast<long long>(from_sample)) * kVector, places);
      if (kReads && norms) {
        input[kReads ? i : 0].load(read + column + (position[i] * static_cast<long long>(read_position) +
                                                    sample[i] * static_cast<long long>(read_sample)) * kVector, places);
      }
    }
    if (kRotary > 0) {
      // Into what the rows before the last ones read, which everybody is done with.
      tables.stage(staged[stage], row, rows, samples);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i >= rows) break;
      const int of = by_row ? i : position[i] - position[0];
      const Angles& angles = staged[kRotary > 0 ? stage : 0];
      const Turn<false> turn{angles.cosine[role][of], angles.sine[role][of]};
      const Turn<true> turn_back{angles.cosine[role][of], angles.sine[role][of]};
      Numbers x;
      stored[i].unpack(x);
      if (!kBack) {
        if (kRotary > 0 && (!kNormed || kNormLast)) turn(x, places, turns);
        if (kNormed) {
          Numbers normed = x;
          norm.normalize(normed, places);
          norm.scale(normed);
          if (norms) x = normed;
        }
        if (kRotary > 0 && kNormed && !kNormLast) turn(x, places, turns);
      } else {
        if (kRotary > 0 && !kNormLast) turn_back(x, places, turns);
        if (kNormed) {
          Numbers normed, scaled = x;
          input[kReads ? i : 0].unpack(normed);
          if (kRotary > 0 && kNormLast) turn(normed, places, turns);
          const float rstd = norm.normalize(normed, places);
          if (kSumsWeights) {
            each([&](int v, int i) { of_weight.of[v][i] += x.of[v][i] * normed.of[v][i]; });
            if (kNorm == kLayer) each([&](int v, int i) { of_bias.of[v][i] += x.of[v][i]; });
          }
          norm.scale(scaled);
          norm.back(scaled, normed, rstd);
          if (norms) x = scaled;
        }
        if (kRotary > 0 && kNormLast) turn_back(x, places, turns);
      }
      OutElement* to = out + column + (position[i] * static_cast<long long>(out_position) +
                                       sample[i] * static_cast<long long>(out_sample)) * kVector;
      if (kSumsColumns) each([&](int v, int i) { columns.of[v][i] += x.of[v][i]; });
      if (kScaled) {
        each([&](int v, int i) {
          if (places[v].there) largest = te::larger(largest, x.of[v][i]);
          x.of[v][i] *= factor;
        });
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (places[v].there) te::store(to + places[v].feature, x.of[v]);
    }
  }
  const bool alone = groups == 1 && (kTiles == 1 || !kSumsWeights);
#define TE_STORE_COLUMNS(number, kind)                                                              \
  for (int v = 0; v < kVectors; ++v) {                                                              \
    if (!places[v].there) continue;                                                                 \
    const long long at = column + places[v].feature, of_group = static_cast<long long>(group) * kFeatures; \
    te::store_sums(alone, sums_##number + at, partial_##number + of_group + at, columns.of[v]);     \
  }
#pragma unroll
  TE_COLUMN_SUMS(TE_STORE_COLUMNS)
  if (kSumsWeights) {
    __shared__ float collected[kSumsWeights ? kHeadsOfBlock * kHeadDim : 1];
    const BlockSums sums{collected, tile, group, alone};
#define TE_STORE_WEIGHT(number, kind) sums.store(kind, partial_##number, sums_##number);
    sums.collect(of_weight, places);
    TE_WEIGHT_SUMS(TE_STORE_WEIGHT)
    if (kNorm == kLayer) {
      sums.collect(of_bias, places);
      TE_BIAS_SUMS(TE_STORE_WEIGHT)
    }
  }
  if constexpr (kScaled) {
    __shared__ float raised[32];
    te::raise<kThreads>(raised, amax, largest);
  }
}

// Adds up what the blocks found, in a fixed order.
extern "C" __global__ void __launch_bounds__(te::kFinishThreads) turned_heads_finish(int groups TE_SUMS(TE_PARAMETERS)) {
  te::wait_for_earlier();
  __shared__ float found[32][33];
  int block = blockIdx.x;
#define TE_ADD_UP(number, width, rows, type)                                                      \
  if (block >= 0 && block < (width + 31) / 32)                                                    \
    te::finish(found, partial_##number, sums_##number, 0, groups * rows, block, 0, width);        \
  block -= (width + 31) / 32;
  TE_SUMS(TE_ADD_UP)
}
