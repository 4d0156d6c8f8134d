#include "column_sums.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "te_column_sums.h"

namespace te {
namespace {

constexpr unsigned threads = 256;  // kFinishThreads of te_cuda.cuh
constexpr int64_t columns_of_a_block = 32;
// What may lie around waiting; an activation of a large model is larger.
constexpr int64_t most_bytes = int64_t{64} << 20;
constexpr size_t most_sums = ColumnSumList::most;

int32_t kind_of(const DType& dtype) {
  if (std::strcmp(dtype.name, "float32") == 0) return 0;
  return std::strcmp(dtype.name, "bfloat16") == 0 ? 1 : 2;
}

int64_t bytes_of(const PendingSum& sum) { return sum.groups * sum.width * static_cast<int64_t>(sizeof(float)); }

}  // namespace

ColumnSums::ColumnSums(std::string cubin) {
  module_.name = "column_sums";
  module_.cubin = std::move(cubin);
  module_.functions = {{"column_sums", threads, 0}};
  module_.waits = true;
}

bool ColumnSums::run(int32_t device, CudaDriver::Stream stream, const PendingSum* sums, size_t count,
                     Failure& failure) {
  const CudaModule::Loaded* loaded = module_.on(device, stream, failure);
  if (loaded == nullptr) return false;
  ColumnSumList list{};
  int64_t blocks = 0;
  for (size_t i = 0; i < count; ++i) {
    const PendingSum& sum = sums[i];
    list.sums[i] = {sum.partial, sum.total, sum.groups, static_cast<int32_t>(sum.width), static_cast<int32_t>(blocks),
                    kind_of(sum.dtype)};
    blocks += (sum.width + columns_of_a_block - 1) / columns_of_a_block;
  }
  auto length = static_cast<int32_t>(count);
  void* parameters[] = {&list, &length};
  const CurrentContext current(*loaded->driver, loaded->context);
  if (current.error() != CudaDriver::success) {
    return module_.refuse(*loaded->driver, "the device's context cannot be made current", current.error(), failure);
  }
  return module_.launch(*loaded, 0, blocks, stream, parameters, failure);
}

bool PendingSums::take(const Place& place, const std::vector<PendingSum>& sums, std::unique_ptr<DeviceMemory> memory,
                       Failure& failure) {
  if (!sums_.empty() && !(place == place_) && !add_up(failure)) return false;
  place_ = place;
  sums_.insert(sums_.end(), sums.begin(), sums.end());
  memory_.push_back(std::move(memory));
  for (const PendingSum& sum : sums) bytes_ += bytes_of(sum);
  return bytes_ <= most_bytes || add_up(failure);
}

bool PendingSums::add_up(Failure& failure) {
  for (size_t first = 0; first < sums_.size(); first += most_sums) {
    const size_t count = std::min(most_sums, sums_.size() - first);
    if (!kernel_.run(place_.device, place_.stream, sums_.data() + first, count, failure)) return false;
  }
  sums_.clear();
  memory_.clear();
  bytes_ = 0;
  return true;
}

}  // namespace te
