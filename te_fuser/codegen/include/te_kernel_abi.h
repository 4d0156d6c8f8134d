/* The interface between the native runtime and a generated CPU kernel: plain C, no other header than stdint.
 *
 * A library that was generated for the symbol NAME exports
 *   NAME_rows    (te_rows_fn)    always: computes the rows [row_begin, row_end) as worker number `worker`
 *   NAME_finish  (te_finish_fn)  if it has partial sums: adds the workers' partial sums up and stores them
 *
 * The runtime cuts the rows into as many equal ranges as there are workers and calls NAME_rows once for each, on
 * several threads at once; then it calls NAME_finish once. Without rows it only calls NAME_finish, with one worker.
 * What a worker adds up depends on the number of workers alone, so results repeat bit for bit.
 */
#ifndef TE_KERNEL_ABI_H
#define TE_KERNEL_ABI_H

#include <stdint.h>

/* Raised with every change of this file that an already compiled kernel would notice. */
#define TE_KERNEL_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_launch {
  void* const* tensors;    /* data pointers: inputs, then stores, then sums, in the description's order */
  int64_t rows;            /* all rows of the call, not those of one worker */
  int64_t batch_inner;     /* the sample of row r is (r / batch_inner) % batch_size */
  int64_t batch_size;      /* both are at least 1 whenever there are rows */
  const int64_t* integers; /* further run-time integers, e.g. dropout stream numbers */
  float* const* scratch;   /* one block per worker, uninitialised, 64-byte aligned; NULL blocks if none was asked for */
  float* const* partials;  /* one block per worker, zero-filled, 64-byte aligned; NULL blocks if none was asked for */
} te_launch;

typedef void (*te_rows_fn)(const te_launch* launch, int64_t row_begin, int64_t row_end, int64_t worker);
typedef void (*te_finish_fn)(const te_launch* launch, int64_t workers);

#ifdef __cplusplus
}
#endif

#endif
