// The functions of the formula language in CUDA, and the bits of a float.
#pragma once

#if defined(__CUDA_ARCH__)
#define TE_PTX 1
#else
#define TE_PTX 0
#endif
#define TE_DEVICE static __device__ __forceinline__

namespace te {

TE_DEVICE float as_float(unsigned bits) {
#if TE_PTX
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
#endif
}

TE_DEVICE unsigned as_bits(float value) {
#if TE_PTX
  return __float_as_uint(value);
#else
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
#endif
}

TE_DEVICE float infinity() { return as_float(0x7f800000u); }

// -------------------------------------------------------------------------------------------- comparisons

// The larger and the smaller of two numbers; NaN if either is.
TE_DEVICE float maximum(float a, float b) {
#if TE_PTX
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a != a ? a : b != b ? b : a > b ? a : b;
#endif
}

TE_DEVICE float minimum(float a, float b) {
#if TE_PTX
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
#else
  return a != a ? a : b != b ? b : a < b ? a : b;
#endif
}

TE_DEVICE float relu(float x) { return maximum(x, 0.0f); }

TE_DEVICE float clamp(float x, float low, float high) { return minimum(maximum(x, low), high); }

// ---------------------------------------------------------------------------------------------- functions

#if TE_PTX
#define TE_APPROXIMATE(name, instruction, plain)              \
  TE_DEVICE float name(float x) {                             \
    float y;                                                  \
    asm(instruction ".ftz.f32 %0, %1;" : "=f"(y) : "f"(x));   \
    return y;                                                 \
  }
#else
#define TE_APPROXIMATE(name, instruction, plain) \
  TE_DEVICE float name(float x) { return plain; }
#endif

constexpr float kLog2E = 1.44269504f;

// Full float32 accuracy (at most 2 units in the last place).
namespace precise {
TE_DEVICE float exp(float x) { return expf(x); }
TE_DEVICE float log(float x) { return logf(x); }
TE_DEVICE float tanh(float x) { return tanhf(x); }
TE_DEVICE float erf(float x) { return erff(x); }
TE_DEVICE float sqrt(float x) { return sqrtf(x); }
TE_DEVICE float rsqrt(float x) { return rsqrtf(x); }
TE_DEVICE float divide(float a, float b) { return a / b; }
TE_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
}  // namespace precise

// Nothing overflows, nor is lost for large negative x.
TE_DEVICE float softplus(float x) { return relu(x) + log1pf(expf(-fabsf(x))); }

// For values that are stored in 16 bits: single instructions, errors of a few 1e-7 where the argument is small.
// No tanh.approx: it has lost the negative tail of tanh-GELU before the subtraction that needs it.
namespace fast {
TE_APPROXIMATE(exp2, "ex2.approx", exp2f(x))
TE_APPROXIMATE(reciprocal, "rcp.approx", 1.0f / x)
TE_APPROXIMATE(sqrt, "sqrt.approx", sqrtf(x))
TE_APPROXIMATE(rsqrt, "rsqrt.approx", 1.0f / sqrtf(x))

TE_DEVICE float exp(float x) { return exp2(x * kLog2E); }
TE_DEVICE float log(float x) { return logf(x); }
TE_DEVICE float erf(float x) { return erff(x); }
TE_DEVICE float divide(float a, float b) { return a * reciprocal(b); }

// 1 / (1 + 2^-x), the sigmoid of x / log2(e).
TE_DEVICE float sigmoid2(float x) { return reciprocal(1.0f + exp2(-x)); }
TE_DEVICE float sigmoid(float x) { return sigmoid2(x * kLog2E); }

// 1 - 2 / (1 + e^2x) cancels near zero; the first terms of the series take over there.
TE_DEVICE float tanh(float x) {
  const float square = x * x;
  const float near = x * (1.0f + square * (-0.333333333f + square * 0.133333333f));
  const float far = 1.0f - 2.0f * reciprocal(1.0f + exp2(x * (2.0f * kLog2E)));
  return square < 0.01f ? near : far;
}
}  // namespace fast

}  // namespace te
