/* Kernels for tests of what launches them: they scale, say where they run, and touch what they are given. Each stands
   for one promise of te_kernel_abi.h. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "te_kernel_abi.h"

/* scale: x, y, column sums of y; integers: features, factor. Sums go through scratch to see that it is there. */
void scale_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  const float* x = (const float*)l->tensors[0];
  float* y = (float*)l->tensors[1];
  const int64_t features = l->integers[0];
  float *scratch = l->scratch[worker], *partial = l->partials[worker];
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t f = 0; f < features; ++f) scratch[f] = x[r * features + f] * (float)l->integers[1];
    for (int64_t f = 0; f < features; ++f) {
      y[r * features + f] = scratch[f];
      partial[f] += scratch[f];
    }
  }
}
void scale_finish(const te_launch* l, int64_t workers) {
  float* sums = (float*)l->tensors[2];
  for (int64_t f = 0; f < l->integers[0]; ++f) {
    sums[f] = 0;
    for (int64_t w = 0; w < workers; ++w) sums[f] += l->partials[w][f];
  }
}

/* where: the worker and the thread that each row met. */
void where_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  for (int64_t r = begin; r < end; ++r) {
    ((int64_t*)l->tensors[0])[r] = worker;
    ((int64_t*)l->tensors[1])[r] = (int64_t)syscall(SYS_gettid);
  }
}

/* blocks: row r tells what is wrong with the worker's blocks (0: nothing), then makes them dirty for the next call. */
void blocks_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  const int64_t partial_floats = l->integers[0] + l->integers[1] * l->batch_size, scratch_floats = l->integers[2];
  float *partial = l->partials[worker], *scratch = l->scratch[worker];
  int64_t wrong = 0;
  if ((size_t)partial % 64 || (size_t)scratch % 64) wrong |= 1;
  if (!partial != !partial_floats || !scratch != !scratch_floats) wrong |= 2;
  for (int64_t i = 0; i < partial_floats; ++i) {
    if (partial[i] != 0) wrong |= 4;
    partial[i] = (float)(worker + 1);
  }
  for (int64_t i = 0; i < scratch_floats; ++i) scratch[i] = (float)-(worker + 1);
  for (int64_t i = 0; i < partial_floats; ++i) if (partial[i] != (float)(worker + 1)) wrong |= 8;
  for (int64_t r = begin; r < end; ++r) ((int64_t*)l->tensors[0])[r] = wrong;
}
void blocks_finish(const te_launch* l, int64_t workers) { (void)l; (void)workers; }

/* samples: counts the rows of each sample. */
void samples_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  for (int64_t r = begin; r < end; ++r) l->partials[worker][(r / l->batch_inner) % l->batch_size] += 1;
}
void samples_finish(const te_launch* l, int64_t workers) {
  for (int64_t s = 0; s < l->batch_size; ++s) {
    float count = 0;
    for (int64_t w = 0; w < workers; ++w) count += l->partials[w][s];
    ((float*)l->tensors[0])[s] = count;
  }
}

/* await: returns when somebody has written the flag, or after a minute; stores 1 if it saw the flag. */
void await_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  volatile int64_t* flag = (volatile int64_t*)l->tensors[0];
  const time_t limit = time(NULL) + 60;
  while (flag[0] == 0 && time(NULL) < limit) usleep(100);
  flag[1] = flag[0];
  (void)begin; (void)end; (void)worker;
}

void touch_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  (void)l; (void)begin; (void)end; (void)worker;
}

/* bytes: adds the integers and the first byte of each of the last tensors. */
void many_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  int64_t* sum = (int64_t*)l->tensors[0];
  for (int64_t i = 0; i < l->integers[0]; ++i) *sum += ((uint8_t*)l->tensors[1 + i])[0] + l->integers[1 + i];
  (void)begin; (void)end; (void)worker;
}
