// Machine code and the kernels in it: loaded on the devices that need it, launched there. Knows nothing of Python.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "failure.h"

namespace te {

// One kernel of the machine code, and the block that it runs in.
struct CudaFunction {
  std::string symbol;
  unsigned threads;
  unsigned shared_bytes;
};

// It never changes after construction but for the devices it has been loaded on, so any number of threads may use it at
// once. What is loaded stays loaded: a CUDA graph may hold it.
class CudaModule {
 public:
  struct Loaded {
    const CudaDriver* driver;
    int32_t device;
    CudaDriver::Context context;
    int64_t multiprocessors;
    bool starts_early;
    std::vector<CudaDriver::Function> functions;
  };

  CudaModule() = default;
  CudaModule(const CudaModule&) = delete;
  CudaModule& operator=(const CudaModule&) = delete;

  std::string name;
  std::string cubin;
  std::vector<CudaFunction> functions;
  bool waits = false;  // its kernels begin by waiting for those before them, so the GPU may start them while these end

  // These need no interpreter lock, must not be called under one that others wait for, and throw std::bad_alloc.

  bool load(int32_t device, Failure& failure);

  // What is loaded on the device; loaded now if it is not, unless the stream is being captured.
  const Loaded* on(int32_t device, CudaDriver::Stream stream, Failure& failure);

  // Launches a function as blocks side by side; the device's context must be current.
  bool launch(const Loaded& loaded, size_t function, int64_t blocks, CudaDriver::Stream stream, void** parameters,
              Failure& failure) const;

  // Sets the failure to what the driver said; false.
  bool refuse(const CudaDriver& driver, const std::string& what, CudaDriver::Result error, Failure& failure) const;

 private:
  static constexpr size_t most_devices = 64;

  bool load(int32_t device, Failure& failure, const CudaDriver::Stream* asking);
  bool load_code(const CudaDriver& driver, int32_t device, const CudaDriver::Stream* asking, Loaded& loaded,
                 Failure& failure) const;
  bool find_functions(const CudaDriver& driver, CudaDriver::Module module, Loaded& loaded, Failure& failure) const;

  std::mutex loading_;
  std::array<std::atomic<const Loaded*>, most_devices> loaded_{};
};

}  // namespace te
