/* What generated CPU kernels are written with: one vector type, loads and stores that convert, the functions of the
 * formula language, row and column sums, and the random bits. C++17 for g++ and clang++; it includes next to nothing,
 * because every kernel pays for it at each compilation.
 *
 * NaN and infinity behave as in torch. Functions are within about 2 units in the last place of float32; their
 * polynomials are minimax fits made for this file.
 */
#ifndef TE_CPU_H
#define TE_CPU_H

#include <stdint.h>

#include "te_kernel_abi.h"

#define TE_INLINE static inline __attribute__((always_inline))
#define TE_MEMBER inline __attribute__((always_inline))
#define TE_BODY __attribute__((always_inline)) /* marks the lambda that is a loop's body */

#if defined(__GNUC__) && !defined(__clang__)
#define TE_GCC 1
#else
#define TE_GCC 0
#endif

namespace te {

// ---- vectors -----------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float vec __attribute__((vector_size(lanes * 4)));
typedef int32_t mask __attribute__((vector_size(lanes * 4)));  // of a comparison of vecs: 0 or -1 in each lane
typedef uint32_t words __attribute__((vector_size(lanes * 4)));
typedef uint64_t doublewords __attribute__((vector_size(lanes * 4)));
typedef double doubles __attribute__((vector_size(lanes * 8)));  // two registers
typedef uint16_t halves __attribute__((vector_size(lanes * 2)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr float infinity = __builtin_inff(), not_a_number = __builtin_nanf("");

TE_INLINE vec splat(float x) { return x - vec{}; }
TE_INLINE vec splat(vec x) { return x; }
TE_INLINE words splat_word(uint32_t x) { return x + words{}; }
TE_INLINE words bits_of(vec x) { return reinterpret_cast<words>(x); }
TE_INLINE vec as_float(words x) { return reinterpret_cast<vec>(x); }

TE_INLINE vec where(mask condition, vec a, vec b) { return condition ? a : b; }
TE_INLINE vec where(bool condition, vec a, vec b) { return condition ? a : b; }
TE_INLINE float where(bool condition, float a, float b) { return condition ? a : b; }

// A comparison as a number.
TE_INLINE vec truth(mask condition) { return as_float(reinterpret_cast<words>(condition) & 0x3f800000u); }
TE_INLINE float truth(bool condition) { return condition ? 1.0f : 0.0f; }

// Lane i of the result is lane order[i] of a followed by b.
#if TE_GCC
TE_INLINE words shuffle(words a, words b, words order) { return __builtin_shuffle(a, b, order); }
#else
TE_INLINE words shuffle(words a, words b, words order) {
  words result;
  for (int i = 0; i < lanes; ++i) result[i] = order[i] < lanes ? a[order[i]] : b[order[i] - lanes];
  return result;
}
#endif

TE_INLINE words lane_numbers() {
  words result{};
  for (int i = 0; i < lanes; ++i) result[i] = static_cast<uint32_t>(i);
  return result;
}

TE_INLINE bool any(mask condition) {
  words found = reinterpret_cast<words>(condition);
#pragma GCC unroll 4
  for (uint32_t half = lanes / 2; half > 0; half /= 2) found |= shuffle(found, found, lane_numbers() ^ half);
  return found[0] != 0;
}

// ---- loops over the features -------------------------------------------------------------------------------------

// Where a loop stands: `count` lanes from feature `index` on; `slot` tells the accumulators of an unrolled loop apart.
// `count` and `slot` are constants once the body is inlined.
struct place {
  int64_t index;
  int count;
  int slot;
};

// Calls body(place) for every vector of a row of `width` features, the last one perhaps partly filled.
template <int width, int unroll, class Body>
TE_INLINE void features(const Body& body) {
  static_assert(unroll == 1 || unroll == 2 || unroll == 4, "one line for each slot below");
  constexpr int64_t step = unroll * lanes, stepped = width / step * step, whole = width / lanes * lanes;
#pragma GCC unroll 1
  for (int64_t i = 0; i < stepped; i += step) {
    body(place{i, lanes, 0});
    if constexpr (unroll > 1) body(place{i + lanes, lanes, 1});
    if constexpr (unroll > 2) body(place{i + 2 * lanes, lanes, 2});
    if constexpr (unroll > 2) body(place{i + 3 * lanes, lanes, 3});
  }
  if constexpr (stepped < whole) {
#pragma GCC unroll 1
    for (int64_t i = stepped; i < whole; i += lanes) body(place{i, lanes, 0});
  }
  if constexpr (whole < width) body(place{whole, width - whole, 0});
}

// The same for a row whose length is known at run time only.
template <class Body>
TE_INLINE void elements(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
#pragma GCC unroll 1
  for (; i + lanes <= end; i += lanes) body(place{i, lanes, 0});
  if (i < end) body(place{i, static_cast<int>(end - i), 0});
}

// Keeps the lanes of `at`; the others become `other`.
TE_INLINE vec only(vec x, place at, float other) {
  if (at.count == lanes) return x;
  return reinterpret_cast<mask>(lane_numbers()) < at.count ? x : splat(other);
}

// ---- loads and stores --------------------------------------------------------------------------------------------

// `Vector` at any address of its element type.
template <class Vector, class Element>
TE_INLINE Vector read(const Element* from, place at) {
  typedef Vector unaligned __attribute__((aligned(sizeof(Element)), may_alias));
  if (at.count == lanes) return *reinterpret_cast<const unaligned*>(from + at.index);
  Vector result{};
  __builtin_memcpy(&result, from + at.index, static_cast<uint64_t>(at.count) * sizeof(Element));
  return result;
}

template <class Vector, class Element>
TE_INLINE void write(Element* to, place at, Vector value) {
  typedef Vector unaligned __attribute__((aligned(sizeof(Element)), may_alias));
  if (at.count == lanes) {
    *reinterpret_cast<unaligned*>(to + at.index) = value;
  } else {
    __builtin_memcpy(to + at.index, &value, static_cast<uint64_t>(at.count) * sizeof(Element));
  }
}

TE_INLINE words widen(halves x) {
#if TE_GCC && defined(__AVX512F__)
  typedef int16_t shorts __attribute__((vector_size(32)));
  typedef int32_t ints __attribute__((vector_size(64)));
  return reinterpret_cast<words>(__builtin_ia32_pmovzxwd512_mask(reinterpret_cast<shorts>(x), ints{}, 0xffff));
#else
  return __builtin_convertvector(x, words);
#endif
}

TE_INLINE vec decode(halves x, bf16) { return as_float(widen(x) << 16); }

// Rounds to nearest even; every NaN becomes the one that torch writes.
TE_INLINE halves encode(vec x, bf16) {
  const words bits = bits_of(x);
  const words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(x == x ? rounded : splat_word(0x7fc0u), halves);
}

// The multiplication by 2**112 moves the exponent, and makes float16's denormals what they stand for.
TE_INLINE vec decode(halves x, f16) {
  const words bits = widen(x), magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  const words finite = bits_of(as_float(magnitude) * 0x1p112f);
  return as_float((magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite) | sign);
}

// Rounds to nearest even. Denormals are rounded by an addition whose sum has their unit as its last place.
TE_INLINE halves encode(vec x, f16) {
  const words bits = bits_of(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  const words normal = (magnitude - 0x37fff001u + ((magnitude >> 13) & 1u)) >> 13;
  const words denormal = bits_of(as_float(magnitude) + 0.5f) - 0x3f000000u;
  words result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x477ff000u ? splat_word(0x7c00u) : result;
  result = magnitude > 0x7f800000u ? splat_word(0x7e00u) : result;
  return __builtin_convertvector(result | sign, halves);
}

TE_INLINE vec load(const float* from, place at) { return read<vec>(from, at); }
TE_INLINE void store(float* to, place at, vec value) { write(to, at, value); }

template <class Element>
TE_INLINE vec load(const Element* from, place at) {
  return decode(read<halves>(&from->bits, at), Element{});
}
template <class Element>
TE_INLINE void store(Element* to, place at, vec value) {
  write(&to->bits, at, encode(value, Element{}));
}
template <class Element>
TE_INLINE void store(Element* to, place at, float value) {
  store(to, at, splat(value));
}

template <class Element>
TE_INLINE float load(const Element* from) {
  return load(from, place{0, 1, 0})[0];
}
template <class Element>
TE_INLINE void store(Element* to, float value) {
  store(to, place{0, 1, 0}, splat(value));
}

// Rows in a worker's own memory are padded to whole vectors and aligned: no lane needs care.
TE_INLINE vec load_buffer(const float* from, place at) { return *reinterpret_cast<const vec*>(from + at.index); }
TE_INLINE void store_buffer(float* to, place at, vec value) { *reinterpret_cast<vec*>(to + at.index) = value; }
TE_INLINE void add_to_buffer(float* to, place at, vec value) { *reinterpret_cast<vec*>(to + at.index) += value; }
TE_INLINE void add_to_buffer(float* to, place at, float value) { *reinterpret_cast<vec*>(to + at.index) += value; }

// Fetches what the next row will need while this row is computed: rows begin new pages, which the processor's own
// prefetching does not foresee.
template <class Element>
TE_INLINE void expect(const Element* from, place at) {
  __builtin_prefetch(from + at.index);
}
template <class Element>
TE_INLINE void expect(Element* to, place at) {
  __builtin_prefetch(to + at.index, 1);
}

template <class Element>
TE_INLINE Element* tensor(const te_launch* launch, int index) {
  return static_cast<Element*>(launch->tensors[index]);
}

// ---- functions ---------------------------------------------------------------------------------------------------

TE_INLINE vec abs(vec x) { return as_float(bits_of(x) & 0x7fffffffu); }
TE_INLINE vec copy_sign(vec magnitude, vec sign) {
  return as_float((bits_of(magnitude) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

// Written so that a NaN passes, from either side.
TE_INLINE vec maximum(vec a, vec b) { return ((a > b) | (a != a)) ? a : b; }
TE_INLINE vec minimum(vec a, vec b) { return ((a < b) | (a != a)) ? a : b; }
TE_INLINE vec at_least(vec x, float low) { return x < low ? splat(low) : x; }
TE_INLINE vec at_most(vec x, float high) { return x > high ? splat(high) : x; }
TE_INLINE vec clamp(vec x, float low, float high) { return at_most(at_least(x, low), high); }
TE_INLINE vec relu(vec x) { return at_least(x, 0.0f); }

TE_INLINE vec sqrt(vec x) {
  vec result;
  for (int i = 0; i < lanes; ++i) result[i] = __builtin_sqrtf(x[i]);  // becomes one instruction
  return result;
}
TE_INLINE vec rsqrt(vec x) { return 1.0f / sqrt(x); }

// x * 2**n for a whole number n between -252 and 252; rounds once.
TE_INLINE vec scale_by_power(vec x, vec n) {
#if defined(__AVX512F__)
  return __builtin_ia32_scalefps512_mask(x, n, vec{}, static_cast<short>(-1), 4);
#else
  const mask whole = __builtin_convertvector(n, mask), half = whole >> 1;
  const mask first = (half + 127) << 23, second = (whole - half + 127) << 23;
  return x * reinterpret_cast<vec>(first) * reinterpret_cast<vec>(second);
#endif
}

// x = n log 2 + r with n whole and |r| <= log(2) / 2; `rounded` holds n in its lowest bits.
struct reduced {
  vec rounded, n, r;
};

TE_INLINE reduced reduce(vec x) {
  constexpr float shift = 0x1.8p23f;  // adding it rounds to a whole number
  const vec rounded = x * 1.44269502f + shift, n = rounded - shift;
  return {rounded, n, x - n * 0x1.62e4p-1f - n * 1.42860677e-06f};
}

// (exp(r) - 1 - r) / r**2
TE_INLINE vec exp_tail(vec r) {
  vec p = r * 0.00138145709f + 0.00836872961f;
  p = p * r + 0.0416683890f;
  p = p * r + 0.166665211f;
  return p * r + 0.499999940f;
}

// exp(x) = 2**n exp(r). Beyond [-104, 89] nothing changes any more.
TE_INLINE vec exp(vec x) {
  const reduced at = reduce(clamp(x, -104.0f, 89.0f));
  return scale_by_power((exp_tail(at.r) * at.r + 1.0f) * at.r + 1.0f, at.n);
}

// exp(x) - 1 for |x| < 80, accurate near 0.
TE_INLINE vec exp_minus_one(vec x) {
  const reduced at = reduce(x);
  const vec power = as_float((bits_of(at.rounded) << 23) + 0x3f800000u);
  return (exp_tail(at.r) * at.r * at.r + at.r) * power + (power - 1.0f);
}

// log(x) = e log 2 + log(1 + f), with 1 + f in [sqrt(1/2), sqrt(2)).
TE_INLINE vec log(vec x) {
  const mask tiny = x < 0x1p-126f;
  const words bits = bits_of(tiny ? x * 0x1p25f : x);
  const mask exponent = reinterpret_cast<mask>(bits - 0x3f3504f3u) >> 23;
  const vec e = __builtin_convertvector(exponent, vec) - (tiny ? splat(25.0f) : vec{});
  const vec f = as_float(bits - (reinterpret_cast<words>(exponent) << 23)) - 1.0f;
  vec p = f * -0.0763561428f + 0.127633110f;
  p = p * f - 0.131605908f;
  p = p * f + 0.142015561f;
  p = p * f - 0.166232973f;
  p = p * f + 0.200012326f;
  p = p * f - 0.250008225f;
  p = p * f + 0.333333313f;
  const vec square = f * f;
  const vec small = p * (square * f) + e * 1.42860677e-06f - square * 0.5f;
  const vec result = e * 0x1.62e4p-1f + (f + small);
  const vec rare = x == 0.0f ? splat(-infinity) : (x > 0.0f ? x : splat(not_a_number));
  return ((x > 0.0f) & (x < infinity)) ? result : rare;
}

// What 1 + x was rounded by is added as log's slope has it.
TE_INLINE vec log1p(vec x) {
  const vec sum = 1.0f + x, plain = log(sum);
  return ((sum > 0.0f) & (sum < infinity)) ? plain + (x - (sum - 1.0f)) / sum : plain;
}

// max(x, 0) + log(1 + exp(-|x|)), where nothing overflows, nor is lost for large negative x.
TE_INLINE vec softplus(vec x) { return relu(x) + log1p(exp(-abs(x))); }

// exp of the negative magnitude does not overflow, and keeps the small values for large negative x.
TE_INLINE vec sigmoid(vec x) {
  const vec e = exp(-abs(x));
  return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// tanh(x) = e / (e + 2), e = exp(2x) - 1; it is 1 from 9.02 on.
TE_INLINE vec tanh(vec x) {
  const vec e = exp_minus_one(at_most(abs(x), 9.02f) * 2.0f);
  return copy_sign(e / (e + 2.0f), x);
}

// erf(x) = 1 - exp(-g(x)), with a polynomial for g(x) = -log(1 - erf(x)); it is 1 from 3.95 on.
TE_INLINE vec erf(vec x) {
  const vec y = at_most(abs(x), 3.95f);
  const vec first = y * 1.12837923f;  // 2 / sqrt(pi) lies half-way between two floats: the rest of it comes below
  vec g = y * -9.25627774e-06f + 0.000117641379f;
  g = g * y - 0.000632837240f;
  g = g * y + 0.00166702806f;
  g = g * y - 0.000160396667f;
  g = g * y - 0.0191530641f;
  g = g * y + 0.102777831f;
  g = g * y + 0.636619389f;
  g = g * y - 5.86e-08f;
  return copy_sign(exp_minus_one(-(first + g * y)), x);
}

// x = n pi / 2 + r with n whole, in the lowest bits of `quarter`, and |r| <= 0.8; up to |x| = 2**17. In double precision:
// near a root of sine or cosine all that is left of x is what float's pi lacks.
struct turned {
  words quarter;
  vec r;
};

TE_INLINE turned quarter_turns(vec x) {
  constexpr float shift = 0x1.8p23f;  // adding it rounds to a whole number
  const vec rounded = x * 0.636619747f + shift;
  const doubles n = __builtin_convertvector(rounded - shift, doubles);
  const doubles r = __builtin_convertvector(x, doubles) - n * 0x1.921fb54p+0 - n * 0x1.10b4611a62633p-30;
  return {bits_of(rounded), __builtin_convertvector(r, vec)};
}

// The sine of so many quarter turns and r: that or the cosine of r, with either sign.
TE_INLINE vec sine(words quarter, vec r) {
  const vec square = r * r;
  vec s = square * -0.000195030691f + 0.00833207089f;
  s = (s * square - 0.166666538f) * (square * r) + r;
  vec c = square * 2.44191961e-05f - 0.00138871942f;
  c = (c * square + 0.0416666418f) * (square * square) + (1.0f - square * 0.5f);
  return as_float(bits_of((quarter & 1u) == 0u ? s : c) ^ ((quarter & 2u) << 30));
}

// Where an argument is beyond quarter_turns, infinite or no number, the C library computes it.
template <class Plain>
TE_INLINE vec with_large(vec x, vec result, const Plain& plain) {
  const mask large = ~(abs(x) <= 0x1p17f);
  if (any(large)) {
#pragma GCC unroll 1
    for (int i = 0; i < lanes; ++i) result[i] = large[i] ? plain(x[i]) : result[i];
  }
  return result;
}

TE_INLINE vec sin(vec x) {
  const turned at = quarter_turns(x);
  return with_large(x, sine(at.quarter, at.r), [](float one) TE_BODY { return __builtin_sinf(one); });
}

TE_INLINE vec cos(vec x) {
  const turned at = quarter_turns(x);
  return with_large(x, sine(at.quarter + 1u, at.r), [](float one) TE_BODY { return __builtin_cosf(one); });
}

// The same for one number, as rows have them.
#define TE_SCALAR(function) \
  TE_INLINE float function(float x) { return function(splat(x))[0]; }
TE_SCALAR(exp)
TE_SCALAR(log)
TE_SCALAR(log1p)
TE_SCALAR(softplus)
TE_SCALAR(sigmoid)
TE_SCALAR(tanh)
TE_SCALAR(erf)
TE_SCALAR(sin)
TE_SCALAR(cos)
TE_SCALAR(abs)
TE_SCALAR(relu)
#undef TE_SCALAR
TE_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
TE_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
TE_INLINE float maximum(float a, float b) { return a > b || a != a ? a : b; }
TE_INLINE float minimum(float a, float b) { return a < b || a != a ? a : b; }
TE_INLINE float clamp(float x, float low, float high) { return clamp(splat(x), low, high)[0]; }

// ---- sums and maxima over the features of a row ------------------------------------------------------------------

// Combines the lanes of a vector: the upper half with the lower one, until one lane is left.
template <class Combine>
TE_INLINE float fold(vec x, const Combine& combine) {
#pragma GCC unroll 4
  for (uint32_t half = lanes / 2; half > 0; half /= 2) {
    const words other = lane_numbers() ^ half;
    x = combine(x, as_float(shuffle(bits_of(x), bits_of(x), other)));
  }
  return x[0];
}

// Several sums side by side, because one would wait for the previous addition each time.
template <int slots>
struct row_sum {
  vec parts[slots] = {};

  TE_MEMBER void add(vec x, place at) { parts[at.slot] += only(x, at, 0.0f); }
  TE_MEMBER float total() const {
    vec sum = parts[0];
    if constexpr (slots == 2) sum = parts[0] + parts[1];
    if constexpr (slots == 4) sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    return fold(sum, [](vec a, vec b) TE_BODY { return a + b; });
  }
};

template <int slots>
struct row_max {
  vec parts[slots];

  TE_MEMBER row_max() {
    for (int i = 0; i < slots; ++i) parts[i] = splat(-infinity);
  }
  TE_MEMBER void add(vec x, place at) { parts[at.slot] = maximum(only(x, at, -infinity), parts[at.slot]); }
  TE_MEMBER float total() const {
    vec best = parts[0];
    for (int i = 1; i < slots; ++i) best = maximum(best, parts[i]);
    return fold(best, [](vec a, vec b) TE_BODY { return maximum(a, b); });
  }
};

template <int slots>
struct row_min {
  row_max<slots> negated;

  TE_MEMBER void add(vec x, place at) { negated.add(-x, at); }
  TE_MEMBER float total() const { return -negated.total(); }
};

// ---- sums over the rows ------------------------------------------------------------------------------------------

// A few rows are added up plainly (a block), then blocks with Kahan's compensation: many rows cost no accuracy.
constexpr int64_t rows_per_block = 32;
constexpr int partial_padding = 16;  // floats: the widest vector

TE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Where the block that begins at `row` ends.
TE_INLINE int64_t block_end(int64_t row, int64_t row_end) { return least(row + rows_per_block, row_end); }

// The same where a block must not leave its sample.
TE_INLINE int64_t block_end_in_sample(int64_t row, int64_t row_end, const te_launch* launch) {
  return least(block_end(row, row_end), (row / launch->batch_inner + 1) * launch->batch_inner);
}

TE_INLINE int64_t sample_of(int64_t row, const te_launch* launch) {
  return row / launch->batch_inner % launch->batch_size;
}

// A worker's partial sums lie side by side: `padded` sums, then what was lost in adding them. Per-sample sums follow
// the others, sample after sample.
template <class Number>
TE_INLINE void add_compensated(Number& sum, Number& lost, Number x) {
  const Number corrected = x - lost, next = sum + corrected;
  lost = (next - sum) - corrected;
  sum = next;
}

TE_INLINE void clear_block(float* block, int64_t padded) {
  __builtin_memset(block, 0, static_cast<uint64_t>(padded) * sizeof(float));
}

// Adds a block to the partial sums, and clears it.
template <int64_t padded>
TE_INLINE void flush_block(float* block, float* partial) {
  features<padded, 1>([&](place at) TE_BODY {
    vec sum = load_buffer(partial, at), lost = load_buffer(partial + padded, at);
    add_compensated(sum, lost, load_buffer(block, at));
    store_buffer(partial, at, sum);
    store_buffer(partial + padded, at, lost);
    store_buffer(block, at, vec{});
  });
}

// The same for one number: added up in double precision, of which the partial sum keeps the float that was lost, too.
TE_INLINE void store_partial(float* partial, double total) {
  partial[0] = static_cast<float>(total);
  partial[partial_padding] = static_cast<float>(partial[0] - total);
}
TE_INLINE void add_to_partial(float* partial, double total) {
  add_compensated(partial[0], partial[partial_padding], static_cast<float>(total));
}

// Adds the workers' partial sums at `offset` up, and stores them.
template <class Element>
TE_INLINE void finish_sum(const te_launch* launch, int64_t workers, Element* to, int64_t offset, int64_t count,
                          int64_t padded) {
  elements(0, count, [&](place at) TE_BODY {
    vec total{};
    for (int64_t worker = 0; worker < workers; ++worker) {
      const float* partial = launch->partials[worker] + offset;
      total += load_buffer(partial, at) - load_buffer(partial + padded, at);
    }
    store(to, at, total);
  });
}

// ---- random bits -------------------------------------------------------------------------------------------------

// Philox4x32 with 7 rounds (Salmon et al., 2011); one call gives 16 bits for each of 8 elements.
// key = seed; counter = (group low, group high, stream, offset), group = row * ceil(width / 8) + column / 8.

// The products of the even lanes with `by`, 64 bits each.
TE_INLINE doublewords multiply_even(doublewords x, uint32_t by) {
#if TE_GCC && defined(__AVX512F__)
  typedef int32_t ints __attribute__((vector_size(64)));
  typedef long long longs __attribute__((vector_size(64)));
  const ints factor = reinterpret_cast<ints>(splat_word(by));
  return reinterpret_cast<doublewords>(
      __builtin_ia32_pmuludq512_mask(reinterpret_cast<ints>(x), factor, longs{}, static_cast<char>(-1)));
#else
  return (x & 0xffffffffu) * static_cast<uint64_t>(by);
#endif
}

template <class Word>
struct product {
  Word low, high;
};

TE_INLINE product<words> multiply(words x, uint32_t by) {
  constexpr uint64_t lower = 0xffffffffu;
  const doublewords even = multiply_even(reinterpret_cast<doublewords>(x), by);
  const doublewords odd = multiply_even(reinterpret_cast<doublewords>(x) >> 32, by);
  return {reinterpret_cast<words>((even & lower) | (odd << 32)), reinterpret_cast<words>((even >> 32) | (odd & ~lower))};
}

TE_INLINE product<uint32_t> multiply(uint32_t x, uint32_t by) {
  const uint64_t both = static_cast<uint64_t>(x) * by;
  return {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)};
}

template <class Word>
TE_INLINE void philox(Word (&counter)[4], int64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
    const product<Word> a = multiply(counter[0], 0xd2511f53u), b = multiply(counter[2], 0xcd9e8d57u);
    counter[0] = b.high ^ counter[1] ^ key0;
    counter[1] = b.low;
    counter[2] = a.high ^ counter[3] ^ key1;
    counter[3] = a.low;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// One op's draws: the seed and offset of the call, and the op's own number.
struct random_stream {
  int64_t seed;
  uint32_t offset, number;
};

TE_INLINE random_stream stream_of(const te_launch* launch, int seed_tensor, int number) {
  const int64_t* seed = tensor<int64_t>(launch, seed_tensor);
  return {seed[0], static_cast<uint32_t>(seed[1]), static_cast<uint32_t>(launch->integers[number])};
}

// Lane i comes from `first` or `second`, in turns of `run` lanes, beginning with lane `start` of both.
template <int run>
TE_INLINE words interleave(words first, words second, int start) {
  words order{};
  for (int i = 0; i < lanes; ++i) {
    order[i] = static_cast<uint32_t>(start + i / (2 * run) * run + i % run + (i / run % 2) * lanes);
  }
  return shuffle(first, second, order);
}

// Writes the bits of a row of `groups` * 8 elements, rounded up to whole vectors of groups.
TE_INLINE void draw_row(uint16_t* bits, int64_t row, int64_t groups, random_stream stream) {
  const uint64_t begin = static_cast<uint64_t>(row) * static_cast<uint64_t>(groups);
#pragma GCC unroll 1
  for (int64_t g = 0; g < groups; g += lanes) {
    const uint64_t first = begin + static_cast<uint64_t>(g);
    const words low = lane_numbers() + static_cast<uint32_t>(first);
    const words carry = reinterpret_cast<words>(low < static_cast<uint32_t>(first));  // all ones, which is -1
    words c[4] = {low, static_cast<uint32_t>(first >> 32) - carry, splat_word(stream.number), splat_word(stream.offset)};
    philox(c, stream.seed);
    words* out = reinterpret_cast<words*>(bits + g * 8);
    constexpr int middle = lanes / 2;
    const words low01 = interleave<1>(c[0], c[1], 0), low23 = interleave<1>(c[2], c[3], 0);
    const words high01 = interleave<1>(c[0], c[1], middle), high23 = interleave<1>(c[2], c[3], middle);
    out[0] = interleave<2>(low01, low23, 0);
    out[1] = interleave<2>(low01, low23, middle);
    out[2] = interleave<2>(high01, high23, 0);
    out[3] = interleave<2>(high01, high23, middle);
  }
}

// 1 where an element's bits reach the threshold, else 0. May read, and ignore, the padding behind a row's bits.
TE_INLINE vec keep(const uint16_t* bits, place at, int32_t threshold) {
  const words drawn = widen(read<halves>(bits, place{at.index, lanes, 0}));
  return truth(reinterpret_cast<mask>(drawn) >= threshold);
}

// The one draw of a sample.
TE_INLINE float keep_sample(int64_t sample, int32_t threshold, random_stream stream) {
  const uint64_t group = static_cast<uint64_t>(sample);
  uint32_t c[4] = {static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), stream.number, stream.offset};
  philox(c, stream.seed);
  return truth(static_cast<int32_t>(c[0] & 0xffffu) >= threshold);
}

}  // namespace te

#endif
