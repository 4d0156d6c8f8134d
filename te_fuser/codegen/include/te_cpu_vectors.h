/* The vector type of generated CPU kernels, their loops over the features, loads and stores that convert. */
#ifndef TE_CPU_VECTORS_H
#define TE_CPU_VECTORS_H

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
typedef uint8_t bytes __attribute__((vector_size(lanes)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
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

TE_INLINE words widen(bytes x) { return __builtin_convertvector(x, words); }

// Numbers of 8 bits, so many of which are the exponent's.
template <int exponent_bits>
struct float8 {
  static constexpr int mantissa = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1, dropped = 23 - mantissa;
  static constexpr uint32_t first_normal = static_cast<uint32_t>(128 - bias) << 23;
  // A number whose last place is that of the denormals: added, it rounds to them.
  static constexpr uint32_t unit = static_cast<uint32_t>(127 + 24 - bias - mantissa) << 23;

  // Rounds to nearest even within [-largest, largest], whose bits are given; every NaN becomes 0x7f.
  TE_MEMBER static bytes encode(vec x, uint32_t largest) {
    const words bits = bits_of(x), size = bits & 0x7fffffffu;
    const words within = size < largest ? size : splat_word(largest);
    const words even = (within >> dropped) & 1u;
    const words normal = (within - (first_normal - (1u << 23)) + ((1u << (dropped - 1)) - 1u) + even) >> dropped;
    const words denormal = bits_of(as_float(within) + as_float(splat_word(unit))) - unit;
    const words rounded = (within < first_normal ? denormal : normal) | ((bits >> 24) & 0x80u);
    return __builtin_convertvector(size > 0x7f800000u ? splat_word(0x7fu) : rounded, bytes);
  }

  // From `special` on the exponent of the last numbers stands for infinity and NaN.
  TE_MEMBER static vec decode(bytes x, uint32_t special) {
    const words code = widen(x), size = (code & 0x7fu) << dropped, sign = (code & 0x80u) << 24;
    const words finite = bits_of(as_float(size) * as_float(splat_word(static_cast<uint32_t>(254 - bias) << 23)));
    return as_float(((code & 0x7fu) >= special ? (size & 0x7fffffu) | 0x7f800000u : finite) | sign);
  }
};

TE_INLINE bytes encode(vec x, e4m3) { return float8<4>::encode(x, 0x43e00000u); }  // 448
TE_INLINE bytes encode(vec x, e5m2) { return float8<5>::encode(x, 0x47600000u); }  // 57344
TE_INLINE vec decode(bytes x, e4m3) { return float8<4>::decode(x, 0x7fu); }
TE_INLINE vec decode(bytes x, e5m2) { return float8<5>::decode(x, 0x7cu); }

// x rounded to a dtype of 8 bits, as a float.
TE_INLINE vec float8_e4m3fn(vec x) { return decode(encode(x, e4m3{}), e4m3{}); }
TE_INLINE vec float8_e5m2(vec x) { return decode(encode(x, e5m2{}), e5m2{}); }

TE_INLINE vec load(const float* from, place at) { return read<vec>(from, at); }
TE_INLINE void store(float* to, place at, vec value) { write(to, at, value); }

// What holds the bits of so many elements as a vec has lanes.
template <class Bits>
struct stored;
template <>
struct stored<uint16_t> {
  using vector = halves;
};
template <>
struct stored<uint8_t> {
  using vector = bytes;
};

template <class Element>
TE_INLINE vec load(const Element* from, place at) {
  return decode(read<typename stored<decltype(Element::bits)>::vector>(&from->bits, at), Element{});
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

}  // namespace te

#endif
