/* The functions of the formula language, for vectors and for one number.
 *
 * NaN and infinity behave as in torch. Functions are within about 2 units in the last place of float32; their
 * polynomials are minimax fits made for this file.
 */
#ifndef TE_CPU_FUNCTIONS_H
#define TE_CPU_FUNCTIONS_H

#include "te_cpu_vectors.h"

namespace te {

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

// log2(m) for m in [sqrt(1/2), sqrt(2)), as 2 artanh(s) / log(2) with s = (m - 1) / (m + 1).
TE_INLINE doubles log2_near_one(doubles m) {
  const doubles s = (m - 1.0) / (m + 1.0), square = s * s;
  doubles p = square * (1.0 / 13) + 1.0 / 11;
  p = p * square + 1.0 / 9;
  p = p * square + 1.0 / 7;
  p = p * square + 1.0 / 5;
  p = p * square + 1.0 / 3;
  return (p * square + 1.0) * s * 2.8853900817779268;
}

// 2**r for |r| <= 1/2, by exp's series.
TE_INLINE doubles exp2_near_zero(doubles r) {
  const doubles x = r * 0.69314718055994531;
  doubles p = x * (1.0 / 40320) + 1.0 / 5040;
  p = p * x + 1.0 / 720;
  p = p * x + 1.0 / 120;
  p = p * x + 1.0 / 24;
  p = p * x + 1.0 / 6;
  p = p * x + 0.5;
  return (p * x + 1.0) * x + 1.0;
}

// |x|**p = 2**(p log2 |x|) in double precision, as p may be large; the rest is what C's pow says of signs and of ends.
TE_INLINE vec pow(vec x, float p) {
  constexpr double shift = 0x1.8p52;  // adding it rounds to a whole number
  constexpr float largest = 0x1.fffffep127f;
  p = p > largest ? largest : p < -largest ? -largest : p;  // not infinite: 1**p is 1
  const bool whole = __builtin_floorf(p) == p, odd = whole && __builtin_floorf(p * 0.5f) != p * 0.5f;
  const vec size = abs(x);
  const mask tiny = size < 0x1p-126f;
  const words bits = bits_of(tiny ? size * 0x1p25f : size);
  const mask exponent = reinterpret_cast<mask>(bits - 0x3f3504f3u) >> 23;
  const vec e = __builtin_convertvector(exponent, vec) - (tiny ? splat(25.0f) : vec{});
  const vec m = as_float(bits - (reinterpret_cast<words>(exponent) << 23));
  doubles y = __builtin_convertvector(e, doubles) + log2_near_one(__builtin_convertvector(m, doubles));
  y *= p;
  y = y < -200.0 ? y * 0.0 - 200.0 : y > 200.0 ? y * 0.0 + 200.0 : y;
  const doubles n = y + shift - shift;
  const vec found = __builtin_convertvector(exp2_near_zero(y - n), vec);
  vec result = scale_by_power(found, __builtin_convertvector(n, vec));
  result = size == 0.0f ? splat(p > 0.0f ? 0.0f : infinity) : result;
  result = size == infinity ? splat(p > 0.0f ? infinity : 0.0f) : result;
  result = odd ? copy_sign(result, x) : result;
  if (!whole) result = ((x < 0.0f) & (size < infinity)) ? splat(not_a_number) : result;
  return x != x ? x : result;
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
TE_SCALAR(float8_e4m3fn)
TE_SCALAR(float8_e5m2)
#undef TE_SCALAR
TE_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
TE_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
TE_INLINE float maximum(float a, float b) { return a > b || a != a ? a : b; }
TE_INLINE float minimum(float a, float b) { return a < b || a != a ? a : b; }
TE_INLINE float clamp(float x, float low, float high) { return clamp(splat(x), low, high)[0]; }
TE_INLINE float pow(float x, float p) { return pow(splat(x), p)[0]; }

}  // namespace te

#endif
