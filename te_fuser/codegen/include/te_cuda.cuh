// What generated CUDA kernels call: storage types and vectors, reductions, random draws, functions.
//
// Needs no header of CUDA's. PTX is used where CUDA C++ has no equally short form; each such function has a plain
// form beside it, so that the same text also runs on a CPU under an emulation of blocks and threads (tests).
#pragma once

#include "te_cuda_types.cuh"

namespace te {

// -------------------------------------------------------------------------------- kernels before and after
//
// Kernels of one stream that say so may start before the one before them has ended: blocks and their first
// instructions are there when its last block leaves. From sm_90 on.

// Every thread calls this before it reads or writes global memory. What was launched before has then ended: a kernel
// that waited itself has in turn waited for those before it.
TE_DEVICE void wait_for_earlier() {
#if TE_PTX && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may come as soon as all blocks of this one have called it, as far as there is room; it waits.
TE_DEVICE void let_next_start() {
#if TE_PTX && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ------------------------------------------------------------------------------------------------ vectors

// kCount neighbours of a row as they are stored, in 32-bit registers.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vector {
  static constexpr int kWords = sizeof(T) * kCount / 4;
  unsigned words[kWords];
};

// Those of less than a register: one element, or two of 8 bits.
template <>
struct alignas(2) Vector<bf16, 1> {
  bf16 element;
};
template <>
struct alignas(2) Vector<fp16, 1> {
  fp16 element;
};
template <>
struct Vector<e4m3, 1> {
  e4m3 element;
};
template <>
struct Vector<e5m2, 1> {
  e5m2 element;
};
template <>
struct alignas(2) Vector<e4m3, 2> {
  unsigned short pair;
};
template <>
struct alignas(2) Vector<e5m2, 2> {
  unsigned short pair;
};

template <class T, int kCount>
constexpr bool bf16_pairs = false;
template <int kCount>
constexpr bool bf16_pairs<bf16, kCount> = kCount > 1;

template <class T, int kCount>
TE_DEVICE float get(const Vector<T, kCount>& vector, int index) {
  if constexpr (kCount == 1 && sizeof(T) < 4) {
    return number(vector.element);
  } else if constexpr (sizeof(T) == 4) {
    return as_float(vector.words[index]);
  } else if constexpr (sizeof(T) == 2) {
    return number(T{static_cast<unsigned short>(vector.words[index / 2] >> (index % 2 * 16))});
  } else if constexpr (kCount == 2) {
    return number(T{static_cast<unsigned char>(vector.pair >> (index * 8))});
  } else {
    return number(T{static_cast<unsigned char>(vector.words[index / 4] >> (index % 4 * 8))});
  }
}

// A zero, as there are no calls with 2^40 rows; another one for each number.
template <int kNumber>
TE_DEVICE unsigned unknown_zero(long long rows) {
  return static_cast<unsigned>(rows >> (40 + kNumber));
}

// The same with a zero that the assembler does not know: what it converts so is no number that it has converted before.
template <class T, int kCount>
TE_DEVICE float get(const Vector<T, kCount>& vector, int index, unsigned zero) {
  if constexpr (bf16_pairs<T, kCount>) {
    return as_float(__byte_perm(vector.words[index / 2], zero, index % 2 ? 0x3244 : 0x1044));
  } else {
    return get(vector, index);
  }
}

// Makes the compiler forget what it knows of a vector. Without it, numbers that are needed again later stay in
// registers as converted floats, which takes twice as many as the 16-bit words do, or four times.
template <class T, int kCount>
TE_DEVICE void forget(Vector<T, kCount>& vector) {
#if TE_PTX
  if constexpr (sizeof(T) == 2 && kCount == 1) {
    asm volatile("" : "+h"(vector.element.bits));
  } else if constexpr (sizeof(T) < 4 && sizeof(vector) >= 4) {
#pragma unroll
    for (int i = 0; i < Vector<T, kCount>::kWords; ++i) asm volatile("" : "+r"(vector.words[i]));
  }
#endif
}

namespace access {

struct alignas(8) Two {
  unsigned words[2];
};
struct alignas(16) Four {
  unsigned words[4];
};

// Through the read-only path of the cache: nothing that a kernel writes is read by it.
template <class Piece>
TE_DEVICE void read_piece(unsigned* to, const void* from) {
  const Piece piece = *static_cast<const Piece*>(from);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Piece) / 4); ++i) to[i] = piece.words[i];
}

template <int kWords>
TE_DEVICE void read(unsigned* to, const unsigned* from) {
  if constexpr (kWords >= 4) {
    read_piece<Four>(to, from);
    if constexpr (kWords > 4) read<kWords - 4>(to + 4, from + 4);
  } else if constexpr (kWords == 2) {
    read_piece<Two>(to, from);
  } else {
    to[0] = from[0];
  }
}

template <int kWords>
TE_DEVICE void write(unsigned* to, const unsigned* from) {
  if constexpr (kWords >= 4) {
    *reinterpret_cast<Four*>(to) = Four{{from[0], from[1], from[2], from[3]}};
    if constexpr (kWords > 4) write<kWords - 4>(to + 4, from + 4);
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<Two*>(to) = Two{{from[0], from[1]}};
  } else {
    to[0] = from[0];
  }
}

}  // namespace access

// kCount neighbours of a tensor.
template <int kCount, class T>
TE_DEVICE Vector<T, kCount> load(const T* from) {
  Vector<T, kCount> vector;
  if constexpr (kCount == 1 && sizeof(T) < 4) {
    vector.element = *from;
  } else if constexpr (sizeof(vector) == 2) {
    vector.pair = *reinterpret_cast<const unsigned short*>(from);
  } else {
    access::read<Vector<T, kCount>::kWords>(vector.words, reinterpret_cast<const unsigned*>(from));
  }
  return vector;
}

// Rounds and writes kCount neighbours.
template <class T, int kCount>
TE_DEVICE void store(T* to, const float (&values)[kCount]) {
  if constexpr (kCount == 1 && sizeof(T) < 4) {
    *to = rounded<T>(values[0]);
  } else if constexpr (sizeof(T) * kCount == 2) {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(packed(T{}, values[0], values[1]));
  } else {
    unsigned words[Vector<T, kCount>::kWords];
#pragma unroll
    for (int i = 0; i < Vector<T, kCount>::kWords; ++i) {
      if constexpr (sizeof(T) == 4) words[i] = as_bits(values[i]);
      else if constexpr (sizeof(T) == 2) words[i] = packed(T{}, values[2 * i], values[2 * i + 1]);
      else words[i] = packed(T{}, values[4 * i], values[4 * i + 1]) | packed(T{}, values[4 * i + 2], values[4 * i + 3]) << 16;
    }
    access::write<Vector<T, kCount>::kWords>(reinterpret_cast<unsigned*>(to), words);
  }
}

// ------------------------------------------------------------------------------------------ shared memory

// Starts a copy from global to shared memory. A thread reads only what it copied itself, after `arrived`.
template <int kCount, class T>
TE_DEVICE void fetch(Vector<T, kCount>* to, const T* from) {
#if TE_PTX
  constexpr int kBytes = sizeof(Vector<T, kCount>);
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int at = 0; at < kBytes; at += 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + at),
                   "l"(reinterpret_cast<const char*>(from) + at)
                   : "memory");
  } else if constexpr (kBytes >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(from), "n"(kBytes) : "memory");
  } else {
    *to = load<kCount>(from);
  }
#else
  __builtin_memcpy(to, from, sizeof(*to));
#endif
}

// Closes the group of copies started since the last call.
TE_DEVICE void depart() {
#if TE_PTX
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups but the last kLater have arrived.
template <int kLater>
TE_DEVICE void arrived() {
#if TE_PTX
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}

template <int kCount>
struct Zeros {
  float values[kCount] = {};
};

// Numbers that a thread keeps for itself in shared memory, 16 bytes beside those of its neighbour.
template <int kLanes, int kCount>
TE_DEVICE void put(float* shelf, int chunk, int lane, const float (&values)[kCount]) {
  constexpr int kPiece = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    shelf[((chunk * (kCount / kPiece) + i / kPiece) * kLanes + lane) * kPiece + i % kPiece] = values[i];
}

template <int kLanes, int kCount>
TE_DEVICE void take(const float* shelf, int chunk, int lane, float (&values)[kCount]) {
  constexpr int kPiece = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    values[i] = shelf[((chunk * (kCount / kPiece) + i / kPiece) * kLanes + lane) * kPiece + i % kPiece];
}

// --------------------------------------------------------------------------------------------- reductions

struct Sum {
  TE_DEVICE float join(float a, float b) { return a + b; }
};
struct Max {
  TE_DEVICE float join(float a, float b) { return maximum(a, b); }
};
struct Min {
  TE_DEVICE float join(float a, float b) { return minimum(a, b); }
};

constexpr unsigned kWarp = 0xffffffffu;

// Reduces each value over groups of kLanes neighbours of a warp; every lane of a group gets the same bits.
template <int kLanes, class... Kinds, class... Values>
TE_DEVICE void reduce_lanes(Values&... values) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    ((values = Kinds::join(values, __shfl_xor_sync(kWarp, values, distance))), ...);
}

// Reduces each value over the block with one barrier. `exchange` alternates between two buffers from call to call:
// who writes it again has passed the other buffer's barrier, so nobody still reads it.
template <int kThreads, class... Kinds, class... Values>
TE_DEVICE void reduce_block(float (&exchange)[sizeof...(Values)][32], Values&... values) {
  constexpr int kWarps = kThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  reduce_lanes<32, Kinds...>(values...);
  int which = 0;
  if (lane == 0) ((exchange[which++][warp] = values), ...);
  __syncthreads();
  which = 0;
  ((values = exchange[which++][lane % kWarps]), ...);
  reduce_lanes<kWarps, Kinds...>(values...);  // kWarps is a power of two, so every lane gets the whole
}

// Adds what kSlots groups of kLanes threads summed for the same columns, in the order of the slots; slot 0 gets it.
template <int kSlots, int kLanes, int kCount>
TE_DEVICE void add_slots(float* shared, int slot, int lane, float (&sums)[kCount]) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) shared[(i * kSlots + slot) * kLanes + lane] = sums[i];
  __syncthreads();
  if (slot == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      for (int other = 1; other < kSlots; ++other) sums[i] += shared[(i * kSlots + other) * kLanes + lane];
  }
}

// The larger magnitude, as bits, of which NaN's are the largest.
TE_DEVICE unsigned larger(unsigned bits, float value) {
#if TE_PTX && __CUDA_ARCH__ >= 890
  float found;  // one instruction, where comparing bits takes two, but fewer registers
  asm("{.reg .f32 size; abs.f32 size, %2; max.NaN.f32 %0, %1, size;}" : "=f"(found) : "f"(as_float(bits)), "f"(value));
  return as_bits(found);
#else
  const unsigned size = as_bits(value) & 0x7fffffffu;
  return size > bits ? size : bits;
#endif
}

// Whether numbers of which none is larger than `bound`, or than it by 1%, may be larger than what the block has met,
// which the thread then knows. What is too small or too large for that share to hold may, infinities and NaN as well.
TE_DEVICE bool may_be_larger(unsigned bound, unsigned& largest, const unsigned* met) {
  largest = larger(*static_cast<const volatile unsigned*>(met), as_float(largest));
  const float size = as_float(bound);
  return !(size > 1e-30f && size < 1e38f && 1.01f * size <= as_float(largest));
}

// Lets the block know the largest magnitude that a thread has met.
TE_DEVICE void meet(unsigned largest, unsigned* met) {
  if (largest > *static_cast<volatile unsigned*>(met)) atomicMax(met, largest);
}

// The largest magnitude that the warp found, as bits.
TE_DEVICE unsigned largest_of_warp(unsigned largest) {
#if TE_PTX
  unsigned found;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(found) : "r"(largest));
  return found;
#else
  for (int distance = 16; distance > 0; distance /= 2)
    largest = larger(largest, __shfl_xor_sync(kWarp, as_float(largest), distance));
  return largest;
#endif
}

// The largest magnitude that the block found, for its first thread.
template <int kThreads>
TE_DEVICE unsigned largest_of_block(float (&found)[32], unsigned largest) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  largest = largest_of_warp(largest);
  if (lane == 0) found[warp] = as_float(largest);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int other = 1; other < kThreads / 32; ++other) largest = larger(largest, found[other]);
  return largest;
}

// The number that blocks raise as it is now, for the first thread of one.
TE_DEVICE unsigned raised_so_far(const float* number) {
  return threadIdx.x == 0 ? *reinterpret_cast<const volatile unsigned*>(number) : 0u;
}

// Raises a number to the largest magnitude that the block found; other blocks raise it too. Most of them find that
// another was there with more than they have, and leave it at that.
template <int kThreads>
TE_DEVICE void raise(float (&found)[32], float* number, unsigned largest, unsigned so_far) {
  largest = largest_of_block<kThreads>(found, largest);
  if (threadIdx.x == 0 && largest > so_far) atomicMax(reinterpret_cast<unsigned*>(number), largest);
}

template <int kThreads>
TE_DEVICE void raise(float (&found)[32], float* number, unsigned largest) {
  largest = largest_of_block<kThreads>(found, largest);
  if (largest > raised_so_far(number) && threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(number), largest);
}

// The scale of what has this largest magnitude, as ops/blockwise_scaling.py has it. A power of two is found without dividing:
// a quotient that is below one by its numbers is so when it is rounded.
template <bool kPowerOfTwo>
TE_DEVICE float own_scale(float amax, float most, float epsilon) {
  const float least = amax < epsilon ? epsilon : amax;
  if (!(least > 0.0f) || as_bits(least) >= 0x7f800000u) return 1.0f;
  const unsigned largest = 0x7f7fffffu;
  if constexpr (kPowerOfTwo) {
    const unsigned below = (as_bits(least) & 0x7fffffu) > (as_bits(most) & 0x7fffffu);
    const unsigned exponent = 127 + (as_bits(most) >> 23) - (as_bits(least) >> 23) - below;
    return as_float((exponent < 254 ? exponent : 254) << 23);
  } else {
    const unsigned bits = as_bits(most / least);
    return as_float(bits < largest ? bits : largest);
  }
}

// 1 / scale; of a power of two without dividing.
template <bool kPowerOfTwo>
TE_DEVICE float inverse_of(float scale) {
  if constexpr (!kPowerOfTwo) return 1.0f / scale;
  const unsigned bits = as_bits(scale), largest = 254u << 23;
  return as_float(bits == largest ? 1u << 22 : largest - bits);
}

// Makes the scale of what so many blocks raise the third of these numbers to, by the last of them: its reciprocal and
// itself are the first two, and the third and the fourth, which counts the blocks, are zero again.
template <bool kPowerOfTwo>
TE_DEVICE void scale_of_all(float* numbers, unsigned blocks, float most, float epsilon) {
  if (threadIdx.x != 0) return;
  unsigned* const bits = reinterpret_cast<unsigned*>(numbers);
  __threadfence();
  if (atomicAdd(bits + 3, 1u) + 1 != blocks) return;
  __threadfence();
  const float scale = own_scale<kPowerOfTwo>(as_float(atomicExch(bits + 2, 0u)), most, epsilon);
  bits[3] = 0u;
  numbers[1] = scale;
  numbers[0] = inverse_of<kPowerOfTwo>(scale);
}

// Stores the sums of a block: where they belong if no other block adds to them, else where `finish` finds them.
template <class T, int kCount>
TE_DEVICE void store_sums(bool alone, T* total, float* partial, const float (&sums)[kCount]) {
  if (alone) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = rounded<T>(sums[i]);  // totals may be anywhere in a larger buffer
  } else {
    store(partial, sums);
  }
}

// Adds the partial sums of the groups [first, first + groups) for 32 columns, always in the same order, and stores them.
// 32 chains of 8 threads: each adds every 32nd group, four columns a thread, then warps add up what the chains found.
constexpr int kFinishThreads = 256;

template <class T>
TE_DEVICE void finish(float (&found)[32][33], const float* partial, T* total, long long first, int groups, int tile,
                      long long output, int width) {
  const int chain = threadIdx.x / 8, mine = threadIdx.x % 8 * 4, column = tile * 32 + mine;
  const float* const from = partial + first * width + column;
  float sums[4] = {};
  if (width % 4 != 0) {
    for (int group = chain; group < groups; group += 32)
      for (int i = 0; i < 4 && column + i < width; ++i) sums[i] += from[static_cast<long long>(group) * width + i];
  } else if (column < width) {
#pragma unroll 4
    for (int group = chain; group < groups; group += 32) {
      const Vector<float, 4> read = load<4>(from + static_cast<long long>(group) * width);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += get(read, i);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) found[chain][mine + i] = sums[i];
  __syncthreads();
  // A warp takes one column after the other, so that the last additions are a reduction within it.
  const int lane = threadIdx.x % 32;
  for (int at = threadIdx.x / 32; at < 32; at += kFinishThreads / 32) {
    float whole = found[lane][at];
    reduce_lanes<32, Sum>(whole);
    if (lane == 0 && tile * 32 + at < width) total[output * width + tile * 32 + at] = rounded<T>(whole);
  }
}

// ------------------------------------------------------------------------------------------- rows, samples

// The sample of a row: (row / inner) % size; 64-bit division is slow and rarely needed.
TE_DEVICE int sample_of(long long row, int inner, int size) {
  if (row >> 32 == 0) return static_cast<int>(static_cast<unsigned>(row) / inner % size);
  return static_cast<int>(row / inner % size);
}

// Row `index` of the rows of one sample.
TE_DEVICE long long row_of(long long index, int sample, int inner, int size) {
  if (index >> 32 == 0) {
    const unsigned outer = static_cast<unsigned>(index) / inner;
    return (static_cast<long long>(outer) * size + sample) * inner + (static_cast<unsigned>(index) - outer * inner);
  }
  return (index / inner * size + sample) * inner + index % inner;
}

// How many indices of `row_of` cover all rows of a sample, the last ones perhaps beyond the last row.
TE_DEVICE long long rows_of_sample(long long rows, int inner, int size) {
  const long long period = static_cast<long long>(inner) * size;
  return (rows + period - 1) / period * inner;
}

// ------------------------------------------------------------------------------------------- random draws

// 16 random bits for each of kCount neighbours.
template <int kCount>
struct Draws {
  unsigned words[kCount < 2 ? 1 : kCount / 2];
  TE_DEVICE unsigned half(unsigned word, int index) { return index % 2 ? word >> 16 : word & 0xffffu; }
  __device__ __forceinline__ unsigned get(int index) const { return half(words[index / 2], index); }
};

// Where draws come from: the seed and the offset of this call, and the number of the stream.
struct Random {
  unsigned seed_low, seed_high, offset, stream;
};

// `seed` is nullptr where the call brings value and offset; in a graph it is where each replay draws them anew.
TE_DEVICE Random random(const long long* seed, long long value, long long offset, int stream) {
  if (seed != nullptr) value = seed[0], offset = seed[1];
  const unsigned long long bits = static_cast<unsigned long long>(value);
  return {static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32), static_cast<unsigned>(offset),
          static_cast<unsigned>(stream)};
}

// Philox4x32 with 7 rounds (Salmon et al., 2011): the draws of 8 neighbours.
TE_DEVICE Draws<8> draw8(const Random& random, long long group) {
  unsigned c0 = static_cast<unsigned>(group), c1 = static_cast<unsigned>(group >> 32);
  unsigned c2 = random.stream, c3 = random.offset, k0 = random.seed_low, k1 = random.seed_high;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The row of the whole, of which this rank has a block in every kRanks; 0: its rows are one block.
template <int kRanks>
TE_DEVICE long long whole_row(long long row, int block, int rank) {
  if constexpr (kRanks == 0) return row + static_cast<long long>(block) * rank;
  const long long before = row >> 32 == 0 ? static_cast<unsigned>(row) / block : row / block;
  return row + static_cast<long long>(block) * (rank + before * (kRanks - 1));
}

// The draws of kCount neighbours from `column` on, in a row of `width` columns; kCount divides 8 and `column`.
template <int kCount>
TE_DEVICE Draws<kCount> draw(const Random& random, long long row, int width, int column) {
  const Draws<8> all = draw8(random, row * ((width + 7) / 8) + column / 8);
  const int first = column % 8;
  if constexpr (kCount == 8) {
    return all;
  } else if constexpr (kCount == 4) {
    return {{first ? all.words[2] : all.words[0], first ? all.words[3] : all.words[1]}};
  } else {
    // Selected by value: a run-time index would move the words to local memory.
    const unsigned low = first & 2 ? all.words[1] : all.words[0], high = first & 2 ? all.words[3] : all.words[2];
    const unsigned word = first & 4 ? high : low;
    return {{kCount == 1 && first & 1 ? word >> 16 : word}};
  }
}

// The same where a rank has a block of columns in every `ranks`, whatever their size: an element after the other.
template <int kCount>
TE_DEVICE Draws<kCount> draw_apart(const Random& random, long long row, int width, int column, int block, int ranks,
                                   int rank) {
  Draws<kCount> found = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = column + i, whole = at + block * (rank + at / block * (ranks - 1));
    const unsigned bits = draw<1>(random, row, width, whole).get(0);
    found.words[i / 2] |= i % 2 ? bits << 16 : bits;
  }
  return found;
}

}  // namespace te
