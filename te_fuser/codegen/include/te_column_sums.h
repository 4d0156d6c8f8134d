// The list of sums that one launch of te_fuser/kernels/column_sums.cu adds up: its parameter, for the kernel and for the
// native runtime that fills it.
#ifndef TE_COLUMN_SUMS_H
#define TE_COLUMN_SUMS_H

namespace te {

// total[column] = the sum of partial[group][column] over the groups.
struct ColumnSum {
  const float* partial;  // [groups, width]
  void* total;           // [width]
  int groups, width;
  int first_block;  // of those that add this one up
  int kind;         // what the total is: 0 float, 1 bfloat16, 2 float16
};

struct ColumnSumList {
  static constexpr int most = 64;
  ColumnSum sums[most];
};

}  // namespace te

#endif
