// Runs CUDA text on a CPU, one block after the other: enough of the language for generated kernels.
//
// The threads of a block are coroutines on one thread of the system, so a run repeats exactly. A barrier or a shuffle
// switches to the next coroutine until all participants are there. Asynchronous copies happen at once.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ thread_local
#define __launch_bounds__(...)

struct uint4 {
  unsigned x, y, z, w;
};
struct Index {
  unsigned x;
};

static Index threadIdx, blockIdx, gridDim, blockDim;
thread_local uint4 shelves[1 << 14];  // dynamic shared memory, 256 KiB

namespace emulation {

constexpr int kMostThreads = 1024, kStack = 1 << 16, kMark = 64;

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};

static ucontext_t coroutines[kMostThreads], outside;
static jmp_buf resume[kMostThreads];
static bool started[kMostThreads], finished[kMostThreads];
static char* stacks = nullptr;
static int threads = 0;
static float offered[kMostThreads];
static Barrier block_barrier, warp_barriers[kMostThreads / 32];
static void (*body)(void*) = nullptr;
static void* body_argument = nullptr;

inline void next() {
  const int me = threadIdx.x;
  int other = me;
  do {
    other = (other + 1) % threads;
  } while (finished[other] && other != me);
  if (other == me) {
    if (finished[me]) setcontext(&outside);
    fprintf(stderr, "a barrier that nobody else reaches\n");
    abort();
  }
  threadIdx.x = other;
  // A context is entered once; after that jumps do, which need no system calls.
  if (!finished[me] && _setjmp(resume[me])) return;
  if (started[other]) _longjmp(resume[other], 1);
  started[other] = true;
  setcontext(&coroutines[other]);
}

inline void meet(Barrier& barrier, int participants) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == participants) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) next();
  }
}

inline void start() {
  body(body_argument);
  finished[threadIdx.x] = true;
  next();
}

// The lowest bytes of each stack, which a kernel whose variables need more writes over.
inline void mark_end(char* stack) { memset(stack, 0xa5, kMark); }
inline void check_end(const char* stack) {
  for (int k = 0; k < kMark; ++k) {
    if (static_cast<unsigned char>(stack[k]) != 0xa5) {
      fprintf(stderr, "a kernel needs more than the %d bytes of a thread's stack\n", kStack);
      abort();
    }
  }
}

inline void run_block(int count) {
  threads = count;
  if (!stacks) stacks = static_cast<char*>(malloc(static_cast<size_t>(kMostThreads) * kStack));
  for (int i = 0; i < count; ++i) {
    started[i] = finished[i] = false;
    getcontext(&coroutines[i]);
    coroutines[i].uc_stack.ss_sp = stacks + static_cast<size_t>(i) * kStack;
    coroutines[i].uc_stack.ss_size = kStack;
    mark_end(stacks + static_cast<size_t>(i) * kStack);
    coroutines[i].uc_link = nullptr;
    makecontext(&coroutines[i], start, 0);
  }
  threadIdx.x = 0;
  started[0] = true;
  swapcontext(&outside, &coroutines[0]);
  for (int i = 0; i < count; ++i) check_end(stacks + static_cast<size_t>(i) * kStack);
}

template <size_t... kAt>
struct Indices {};
template <size_t kCount, size_t... kAt>
struct Count : Count<kCount - 1, kCount - 1, kAt...> {};
template <size_t... kAt>
struct Count<0, kAt...> {
  using type = Indices<kAt...>;
};

template <class... Arguments, size_t... kAt>
void call(void (*kernel)(Arguments...), void** arguments, Indices<kAt...>) {
  kernel(*static_cast<Arguments*>(arguments[kAt])...);
}

template <class... Arguments>
struct Call {
  void (*kernel)(Arguments...);
  void** arguments;
  static void run(void* self) {
    auto* me = static_cast<Call*>(self);
    call(me->kernel, me->arguments, typename Count<sizeof...(Arguments)>::type{});
  }
};

template <class... Arguments>
void launch(void (*kernel)(Arguments...), int blocks, int count, void** arguments) {
  Call<Arguments...> one{kernel, arguments};
  body = Call<Arguments...>::run, body_argument = &one;
  gridDim.x = blocks, blockDim.x = count;
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = i;
    memset(shelves, 0xff, sizeof(shelves));  // shared memory starts as garbage: NaN
    run_block(count);
  }
}

}  // namespace emulation

#define EMULATE(number, kernel)                                                           \
  extern "C" void emulate_##number##_##kernel(int blocks, int threads, void** arguments) { \
    emulation::launch(kernel, blocks, threads, arguments);                                 \
  }

inline void __syncthreads() { emulation::meet(emulation::block_barrier, blockDim.x); }

inline float shuffle(float value, int source) {
  const int me = threadIdx.x, warp = me / 32;
  emulation::Barrier& barrier = emulation::warp_barriers[warp];
  emulation::offered[me] = value;
  emulation::meet(barrier, 32);
  const float found = emulation::offered[warp * 32 + source];
  emulation::meet(barrier, 32);
  return found;
}
inline float __shfl_xor_sync(unsigned, float value, int distance) {
  return shuffle(value, static_cast<int>(threadIdx.x % 32) ^ distance);
}

inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned before = *at;
  if (value > before) *at = value;
  return before;
}

inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at += value;
  return before;
}

inline unsigned atomicExch(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = value;
  return before;
}

inline void __threadfence() {}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }

// Byte i of the result is that of low and high, counted through, whose number is digit i of the selector.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}

inline unsigned short emulated_float_to_bf16(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float emulated_half_to_float(unsigned short half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float sign = half >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24));
}

inline unsigned short emulated_float_to_half(float value) {
  const unsigned short sign = signbit(value) ? 0x8000 : 0;
  const float size = fabsf(value);
  if (value != value) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = size < 6.103515625e-05f ? -14 : ilogbf(size);
  const int mantissa = static_cast<int>(nearbyintf(ldexpf(size, 10 - exponent)));  // to even, as the default is
  return sign | static_cast<unsigned short>(mantissa + ((exponent + 14) << 10));
}
