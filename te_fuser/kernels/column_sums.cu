// Adds up the partial sums of many column sums in one launch: total[column] = the sum of partial[group][column] over the
// groups, in the order of te::finish, which kernels with sums end by when they add up their own.

#include "te_column_sums.h"
#include "te_cuda.cuh"

extern "C" __global__ void __launch_bounds__(te::kFinishThreads) column_sums(const te::ColumnSumList list, int count) {
  te::wait_for_earlier();
  __shared__ float found[32][33];
  const int block = blockIdx.x;
  int number = 0;
  while (number + 1 < count && list.sums[number + 1].first_block <= block) ++number;
  const te::ColumnSum sum = list.sums[number];
  const int tile = block - sum.first_block;
  if (sum.kind == 0) {
    te::finish(found, sum.partial, static_cast<float*>(sum.total), 0, sum.groups, tile, 0, sum.width);
  } else if (sum.kind == 1) {
    te::finish(found, sum.partial, static_cast<te::bf16*>(sum.total), 0, sum.groups, tile, 0, sum.width);
  } else {
    te::finish(found, sum.partial, static_cast<te::fp16*>(sum.total), 0, sum.groups, tile, 0, sum.width);
  }
}
