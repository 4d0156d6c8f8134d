#include "workspace.h"

namespace te {

char* Workspace::take(int64_t bytes, int32_t device, CudaDriver::Stream stream, std::string& why) {
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

}  // namespace te
