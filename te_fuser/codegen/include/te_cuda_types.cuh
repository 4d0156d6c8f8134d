// How numbers are stored: the types of elements, read as floats and rounded from them.
#pragma once

#include "te_cuda_functions.cuh"

namespace te {

struct bf16 {
  unsigned short bits;
};
struct fp16 {
  unsigned short bits;
};
struct e4m3 {
  unsigned char bits;
};
struct e5m2 {
  unsigned char bits;
};

TE_DEVICE float number(float value) { return value; }

TE_DEVICE float number(bf16 value) { return as_float(static_cast<unsigned>(value.bits) << 16); }

TE_DEVICE float number(fp16 value) {
#if TE_PTX
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  return emulated_half_to_float(value.bits);
#endif
}

// As float16 of another scale, whose largest number stands for NaN.
TE_DEVICE float number(e4m3 value) {
  const unsigned size = value.bits & 0x7fu, sign = (value.bits & 0x80u) << 8;
  const float found = 256.0f * number(fp16{static_cast<unsigned short>(sign | size << 7)});
  return size == 0x7fu ? as_float(0x7fc00000u) : found;
}

TE_DEVICE float number(e5m2 value) { return number(fp16{static_cast<unsigned short>(value.bits << 8)}); }

// Two numbers rounded to nearest, in one register; `low` is the element at the lower address.
TE_DEVICE unsigned packed(bf16, float low, float high) {
#if TE_PTX
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return emulated_float_to_bf16(low) | static_cast<unsigned>(emulated_float_to_bf16(high)) << 16;
#endif
}

TE_DEVICE unsigned packed(fp16, float low, float high) {
#if TE_PTX
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return emulated_float_to_half(low) | static_cast<unsigned>(emulated_float_to_half(high)) << 16;
#endif
}

// Rounds to nearest even within [-largest, largest], whose bits are given; every NaN becomes 0x7f.
template <int kExponentBits>
TE_DEVICE unsigned float8_bits(float value, unsigned largest) {
  constexpr int kMantissa = 7 - kExponentBits, kBias = (1 << (kExponentBits - 1)) - 1, kDropped = 23 - kMantissa;
  constexpr unsigned kFirstNormal = static_cast<unsigned>(128 - kBias) << 23;
  // A number whose last place is that of the denormals: added, it rounds to them.
  constexpr unsigned kUnit = static_cast<unsigned>(127 + 24 - kBias - kMantissa) << 23;
  const unsigned bits = as_bits(value), size = bits & 0x7fffffffu;
  const unsigned within = size < largest ? size : largest, even = within >> kDropped & 1u;
  const unsigned normal = (within - (kFirstNormal - (1u << 23)) + ((1u << (kDropped - 1)) - 1u) + even) >> kDropped;
  const unsigned denormal = as_bits(as_float(within) + as_float(kUnit)) - kUnit;
  const unsigned found = (within < kFirstNormal ? denormal : normal) | (bits >> 24 & 0x80u);
  return size > 0x7f800000u ? 0x7fu : found;
}

// The two conversions that GPUs have an instruction for from 8.9 on; it gives the same bytes.
TE_DEVICE unsigned packed(e4m3, float low, float high) {
#if TE_PTX && __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float8_bits<4>(low, 0x43e00000u) | float8_bits<4>(high, 0x43e00000u) << 8;  // 448
#endif
}

TE_DEVICE unsigned packed(e5m2, float low, float high) {
#if TE_PTX && __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float8_bits<5>(low, 0x47600000u) | float8_bits<5>(high, 0x47600000u) << 8;  // 57344
#endif
}

template <class T>
TE_DEVICE T rounded(float value) {
  if constexpr (sizeof(T) == 4) return value;
  else if constexpr (sizeof(T) == 2) return T{static_cast<unsigned short>(packed(T{}, value, 0.0f))};
  else return T{static_cast<unsigned char>(packed(T{}, value, 0.0f))};
}

// The nearest number that T has, as a float.
template <class T>
TE_DEVICE float nearest(float value) {
  return number(rounded<T>(value));
}

}  // namespace te
