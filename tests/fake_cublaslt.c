/* Stands for libcublasLt in tests: computes what the library would, slowly, on the CPU, and counts.
 *
 * Matrices are column-major, as the library's; sums are taken in double. Refuses what `fake.refused` (an epilogue) and
 * `fake.refused_algorithm` say, and scales that lie at no multiple of 16 bytes, as cuBLAS does from 12.9 on. There are three algorithms, numbered from 1, which compute the same.
 */
#include <malloc.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct fake_state {
  int heuristics, products, refused, refused_algorithm, last_epilogue, last_compute, by_algorithm[4];
  long long last_workspace;
  void* last_workspace_at;
  int last_fast, any_layout;
};
struct fake_state fake;

struct layout { int type; uint64_t rows, columns; int64_t ld; };
struct description {
  int compute, transa, transb, epilogue;
  void *bias, *aux;
  int64_t aux_ld;
  const float *scale_a, *scale_b;
  int8_t fast;
  int mode_a, mode_b; /* 0: one scale, 4: for each 128 numbers of a row, 5: for each 128 x 128 */
};
struct preference { uint64_t workspace; };
struct algorithm { uint64_t data[8]; };
struct candidate { struct algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };

size_t cublasLtGetVersion(void) { return 130100; }
const char* cublasLtGetStatusName(int status) { return status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_FAKE"; }
const char* cublasLtGetStatusString(int status) { return cublasLtGetStatusName(status); }
int cublasLtCreate(void** handle) { return *handle = &fake, 0; }
int cublasLtMatmulDescCreate(struct description** d, int compute, int scale) {
  *d = calloc(1, sizeof(**d));
  (*d)->compute = compute, (*d)->epilogue = 1;
  return scale == 0 ? 0 : 7;
}
int cublasLtMatmulDescDestroy(struct description* d) { return free(d), 0; }
int cublasLtMatmulDescSetAttribute(struct description* d, int attribute, const void* value, size_t bytes) {
  struct { int attribute; void* field; size_t bytes; } known[] = {
      {3, &d->transa, 4}, {4, &d->transb, 4}, {7, &d->epilogue, 4},
      {8, &d->bias, 8},   {11, &d->aux, 8},   {12, &d->aux_ld, 8},
      {17, &d->scale_a, 8}, {18, &d->scale_b, 8}, {25, &d->fast, 1}, {31, &d->mode_a, 4}, {32, &d->mode_b, 4}};
  for (int i = 0; i < 11; ++i) {
    if (known[i].attribute != attribute || known[i].bytes != bytes) continue;
    return memcpy(known[i].field, value, bytes), 0;
  }
  return 7;
}
int cublasLtMatrixLayoutCreate(struct layout** l, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  *l = malloc(sizeof(**l));
  **l = (struct layout){type, rows, columns, ld};
  return ld >= (int64_t)rows ? 0 : 7;
}
int cublasLtMatrixLayoutDestroy(struct layout* l) { return free(l), 0; }
int cublasLtMatmulPreferenceCreate(struct preference** p) { return *p = calloc(1, sizeof(**p)), 0; }
int cublasLtMatmulPreferenceDestroy(struct preference* p) { return free(p), 0; }
int cublasLtMatmulPreferenceSetAttribute(struct preference* p, int attribute, const void* value, size_t bytes) {
  if (attribute == 1 && bytes == 8) memcpy(&p->workspace, value, 8);
  return (attribute == 1 && bytes == 8) || (attribute >= 5 && attribute <= 8 && bytes == 4) ? 0 : 7;
}
int cublasLtMatmulAlgoCheck(void* handle, struct description* d, struct layout* a, struct layout* b, struct layout* c,
                            struct layout* out, const struct algorithm* algorithm, struct candidate* found) {
  (void)handle, (void)c, (void)out;
  /* Hopper's: both factors lie along what is summed, in steps of 16, and one of them is E4M3; others take any layout. */
  int narrow = a->type >= 28, along = (d->transa && !d->transb) || fake.any_layout;
  if (narrow != (b->type >= 28) || (narrow && (!along || a->type + b->type == 58))) return 15;
  if (narrow && (a->rows % 16 || a->ld % 16 || b->ld % 16)) return 15;
  /* Blocks: of both factors, not 128 x 128 of both, sums that are not fast, whole fours of rows; with squares k is
     whole blocks, and no epilogue but a bias. */
  int blocks = d->mode_a || d->mode_b;
  if (blocks && (!narrow || !d->mode_a || !d->mode_b || d->mode_a + d->mode_b == 10 || d->fast)) return 15;
  if (blocks && (a->columns % 4 || (b->columns % 4 && b->columns != 1) || (d->epilogue != 1 && d->epilogue != 4))) return 15;
  if (blocks && d->mode_a + d->mode_b == 9 && a->rows % 128) return 15;
  memset(found, 0, sizeof(*found));
  found->algorithm = *algorithm;
  found->workspace = (size_t)algorithm->data[0] * 1024;
  int number = (int)algorithm->data[0];
  return d->epilogue == fake.refused || number == fake.refused_algorithm || number > 8 ? 15 : 0;
}
/* Algorithm i takes i KiB of workspace. */
int cublasLtMatmulAlgoGetHeuristic(void* handle, struct description* d, struct layout* a, struct layout* b,
                                   struct layout* c, struct layout* out, struct preference* p, int most,
                                   struct candidate* found, int* count) {
  __atomic_add_fetch(&fake.heuristics, 1, __ATOMIC_RELAXED);
  *count = 0;
  if (d->epilogue == fake.refused) return 15;
  for (; *count < most && *count < 3; ++*count) {
    struct algorithm algorithm = {{(uint64_t)*count + 1}};
    int status = cublasLtMatmulAlgoCheck(handle, d, a, b, c, out, &algorithm, &found[*count]);
    if (status || found[*count].workspace > p->workspace) return 15;
  }
  return 0;
}

static double from_half(uint16_t bits) {
  int exponent = bits >> 10 & 31, sign = bits >> 15;
  double value = exponent ? ldexp(1024 + (bits & 1023), exponent - 25) : ldexp(bits & 1023, -24);
  return sign ? -value : value;
}
/* Type 28 is E4M3, which has no infinity, 29 is E5M2; neither is NaN here. */
static double from_byte(uint8_t bits, int type) {
  int mantissa_bits = type == 28 ? 3 : 2, bias = type == 28 ? 7 : 15, one = 1 << mantissa_bits;
  int exponent = (bits & 127) >> mantissa_bits, mantissa = bits & (one - 1);
  double value = exponent ? ldexp(one + mantissa, exponent - bias - mantissa_bits) : ldexp(mantissa, 1 - bias - mantissa_bits);
  return bits >> 7 ? -value : value;
}
static double load(const void* data, int type, int64_t index) {
  if (type == 0) return ((const float*)data)[index];
  if (type >= 28) return from_byte(((const uint8_t*)data)[index], type);
  uint16_t bits = ((const uint16_t*)data)[index];
  if (type == 2) return from_half(bits);
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  return memcpy(&value, &wide, 4), value;
}
static void store(void* data, int type, int64_t index, double value) {
  float narrow = (float)value;
  uint32_t bits;
  memcpy(&bits, &narrow, 4);
  if (type == 0) ((float*)data)[index] = narrow;
  if (type == 14) ((uint16_t*)data)[index] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
/* The scale of element `inner` of row `outer`, of a factor with so many rows of k numbers. */
static double scale_at(const float* scales, int mode, int64_t outer, int64_t inner, int64_t rows, int64_t k) {
  if (mode == 0) return *scales;
  if (mode == 4) return scales[inner / 128 * rows + outer];
  return scales[outer / 128 * ((k + 511) / 512 * 4) + inner / 128];
}
static double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static double dgelu(double x) {
  double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

int cublasLtMatmul(void* handle, struct description* d, const float* alpha, const void* a, struct layout* la,
                   const void* b, struct layout* lb, const float* beta, const void* c, struct layout* lc, void* out,
                   struct layout* lo, const struct algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
  (void)handle, (void)stream;
  int64_t m = (int64_t)lo->rows, n = (int64_t)lo->columns, k = (int64_t)(d->transa ? la->rows : la->columns);
  int relu = (d->epilogue & 2) && d->epilogue < 256;
  int back_gelu = (d->epilogue & ~16) == 192, sums = d->epilogue & 16 && d->epilogue < 256;
  double* column = calloc((size_t)(m > n ? m : n), sizeof(double));
  int fits = bytes == algorithm->data[0] * 1024 && (!bytes || (workspace && malloc_usable_size(workspace) >= bytes));
  if (!fits || lo->type == 2) return free(column), 7;
  int narrow = la->type >= 28;
  if (narrow && ((uintptr_t)d->scale_a | (uintptr_t)d->scale_b) % 16) return free(column), 15;
  int blocks = d->mode_a != 0;
  double scale = narrow && !blocks ? (double)*d->scale_a * *d->scale_b : 1;
  fake.last_fast = d->fast;
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        double x = load(a, la->type, d->transa ? i * la->ld + l : l * la->ld + i);
        double y = load(b, lb->type, d->transb ? l * lb->ld + j : j * lb->ld + l);
        if (blocks) {
          x *= scale_at(d->scale_a, d->mode_a, i, l, m, k);
          y *= scale_at(d->scale_b, d->mode_b, j, l, n, k);
        }
        sum += x * y;
        if (d->epilogue == 512 && i == 0) column[j] += y;
        if (d->epilogue == 256 && j == 0) column[i] += x;
      }
      sum *= *alpha * scale;
      if (*beta != 0) sum += *beta * load(c, lc->type, j * lc->ld + i);
      if (d->epilogue & 4) sum += load(d->bias, lo->type, i);
      if (d->epilogue == 164) store(d->aux, lo->type, j * d->aux_ld + i, sum);
      if (d->epilogue & 32) sum = gelu(d->epilogue == 164 ? load(d->aux, lo->type, j * d->aux_ld + i) : sum);
      if (relu) sum = sum > 0 ? sum : 0;
      if (back_gelu) sum *= dgelu(load(d->aux, lo->type, j * d->aux_ld + i));
      if (sums) column[i] += sum;
      store(out, lo->type, j * lo->ld + i, sum);
    }
  }
  for (int64_t i = 0; (sums || d->epilogue >= 256) && i < (d->epilogue == 512 ? n : m); ++i) {
    store(d->bias, lo->type, i, column[i]);
  }
  free(column);
  __atomic_add_fetch(&fake.products, 1, __ATOMIC_RELAXED);
  if (algorithm->data[0] < 4) __atomic_add_fetch(&fake.by_algorithm[algorithm->data[0]], 1, __ATOMIC_RELAXED);
  fake.last_epilogue = d->epilogue, fake.last_compute = d->compute, fake.last_workspace = (long long)bytes;
  fake.last_workspace_at = workspace;
  return 0;
}
