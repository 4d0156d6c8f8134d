/* What generated CPU kernels are written with: vectors, functions, row and column sums, and the random bits. C++17 for
 * g++ and clang++; it includes next to nothing, because every kernel pays for it at each compilation.
 */
#ifndef TE_CPU_H
#define TE_CPU_H

#include "te_cpu_functions.h"

namespace te {

// ---- sums and extremes over the features of a row ----------------------------------------------------------------

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

// What was lost in adding; nothing is lost of a sum that is infinite.
TE_INLINE vec finite(vec lost) { return where(abs(lost) < infinity, lost, vec{}); }
TE_INLINE float finite(float lost) { return where(abs(lost) < infinity, lost, 0.0f); }

// A worker's partial sums lie side by side: `padded` sums, then what was lost in adding them. Per-sample sums follow
// the others, sample after sample.
template <class Number>
TE_INLINE void add_compensated(Number& sum, Number& lost, Number x) {
  const Number corrected = x - lost, next = sum + corrected;
  lost = finite((next - sum) - corrected);
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
  partial[partial_padding] = finite(static_cast<float>(partial[0] - total));
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

// ---- largest magnitudes ------------------------------------------------------------------------------------------

// As bits, of which NaN's are the largest.
TE_INLINE void take_larger(words& largest, place at, vec x) {
  const words size = bits_of(only(x, at, 0.0f)) & 0x7fffffffu;
  largest = size > largest ? size : largest;
}

// Raises a number that other workers raise too; the order makes no difference.
TE_INLINE void raise(float* number, words largest) {
  typedef uint32_t word __attribute__((may_alias));
  uint32_t found = 0;
  for (int i = 0; i < lanes; ++i) found = largest[i] > found ? largest[i] : found;
  word* const bits = reinterpret_cast<word*>(number);
  uint32_t known = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (known < found && !__atomic_compare_exchange_n(bits, &known, found, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// ---- stores that lie transposed ----------------------------------------------------------------------------------

// [features, tokens]: tokens are the rows of the call and zeros up to a multiple of 16.
TE_INLINE int64_t tokens_of(const te_launch* launch) { return (launch->rows + 15) / 16 * 16; }

// Stores features of a row, from `first` + at.index on.
template <class Element, class Value>
TE_INLINE void store_transposed(Element* to, const te_launch* launch, int64_t row, int64_t first, place at,
                                Value value) {
  Element found[lanes];
  store(found, place{0, at.count, 0}, value);
  for (int i = 0; i < at.count; ++i) to[(first + at.index + i) * tokens_of(launch) + row] = found[i];
}

template <class Element>
TE_INLINE void clear_padding(Element* to, int64_t width, const te_launch* launch) {
  const int64_t tokens = tokens_of(launch);
  for (int64_t feature = 0; feature < width; ++feature) {
    for (int64_t token = launch->rows; token < tokens; ++token) to[feature * tokens + token] = Element{};
  }
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

// Writes the bits of `groups` groups of 8 elements, rounded up to whole vectors of groups.
TE_INLINE void draw_groups(uint16_t* bits, int64_t from, int64_t groups, random_stream stream) {
  const uint64_t begin = static_cast<uint64_t>(from);
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

// The same of a row of `groups` groups.
TE_INLINE void draw_row(uint16_t* bits, int64_t row, int64_t groups, random_stream stream) {
  draw_groups(bits, row * groups, groups, stream);
}

// The index in the whole, of which this rank has a block in every `ranks`; with 1 it has one block.
TE_INLINE int64_t whole_of(int64_t index, int64_t block, int64_t rank, int64_t ranks) {
  return index + block * (rank + (ranks == 1 ? 0 : index / block * (ranks - 1)));
}

// The bits of `width` elements of a row of `whole`, of which this rank has blocks of any size: one after the other.
TE_INLINE void draw_apart(uint16_t* bits, int64_t row, int64_t width, int64_t whole, int64_t block, int64_t ranks,
                          int64_t rank, random_stream stream) {
  const int64_t groups = (whole + 7) / 8;
  for (int64_t column = 0; column < width; ++column) {
    const int64_t place = whole_of(column, block, rank, ranks);
    const uint64_t group = static_cast<uint64_t>(row * groups + place / 8);
    uint32_t c[4] = {static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), stream.number, stream.offset};
    philox(c, stream.seed);
    bits[column] = static_cast<uint16_t>(c[place % 8 / 2] >> place % 2 * 16);
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
