// Partial sums of several kernels, added up by one launch when nobody waits for them any longer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_module.h"
#include "failure.h"
#include "tensor.h"

namespace te {

// total[column] = the sum of partial[group][column] over the groups, in a fixed order.
struct PendingSum {
  const float* partial;  // [groups, width]
  void* total;           // [width]
  int32_t groups;
  int64_t width;
  DType dtype;  // of the total
};

// The kernel that adds up a list of sums: te_fuser/kernels/column_sums.cu.
class ColumnSums {
 public:
  explicit ColumnSums(std::string cubin);

  bool load(int32_t device, Failure& failure) { return module_.load(device, failure); }
  bool run(int32_t device, CudaDriver::Stream stream, const PendingSum* sums, size_t count, Failure& failure);

 private:
  CudaModule module_;
};

// Sums that wait, with the memory that their partial sums lie in. Ends without adding up what is left.
class PendingSums {
 public:
  struct Place {
    int32_t device;
    CudaDriver::Stream stream;
    bool operator==(const Place& other) const { return device == other.device && stream == other.stream; }
  };

  explicit PendingSums(ColumnSums& kernel) : kernel_(kernel) {}

  // Sums whose totals live on until they are added up. None of these needs the interpreter lock.
  bool take(const Place& place, const std::vector<PendingSum>& sums, std::unique_ptr<DeviceMemory> memory,
            Failure& failure);
  bool add_up(Failure& failure);
  bool empty() const { return sums_.empty(); }

 private:
  ColumnSums& kernel_;
  Place place_{};
  std::vector<PendingSum> sums_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  int64_t bytes_ = 0;
};

}  // namespace te
