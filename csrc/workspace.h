// Scratch memory of matrix products.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda_driver.h"
#include "tensor.h"

namespace te {

// What the products of one run of a program use in turn: the next of the same stream begins when one is done with it.
// It goes back to PyTorch's allocator at the end, which gives it only to later work of the same stream.
class Workspace {
 public:
  // At least so many bytes for work on a stream of a device; nullptr with PyTorch's words in `why`, or for no bytes.
  // Needs no interpreter lock.
  char* take(int64_t bytes, int32_t device, CudaDriver::Stream stream, std::string& why) {
    if (bytes == 0) return nullptr;
    if (memory_ && bytes <= bytes_ && device == device_ && stream == stream_) return memory_->data();
    memory_.emplace();
    if (!memory_->allocate(device, bytes, why)) {
      memory_.reset();
      return nullptr;
    }
    bytes_ = bytes;
    device_ = device;
    stream_ = stream;
    return memory_->data();
  }

 private:
  std::optional<DeviceMemory> memory_;
  int64_t bytes_ = 0;
  int32_t device_ = -1;
  CudaDriver::Stream stream_ = nullptr;
};

}  // namespace te
