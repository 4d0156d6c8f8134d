// The CUDA driver, opened when it is first needed: no toolkit to build, no driver to import. The few functions that
// kernels need are declared here by hand; names of types are the driver's own, as `struct`s that nobody looks into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;
struct CUevent_st;

namespace te {

struct CudaDriver {
  using Result = int;
  using Device = int;
  using Pointer = unsigned long long;
  using Context = CUctx_st*;
  using Module = CUmod_st*;
  using Function = CUfunc_st*;
  using Stream = CUstream_st*;
  using Event = CUevent_st*;

  // Numbers of the driver's enumerations.
  static constexpr int success = 0;
  static constexpr int multiprocessor_count = 16;          // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  static constexpr int compute_capability_major = 75;      // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  static constexpr int max_dynamic_shared_size_bytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  static constexpr int capture_status_none = 0;            // CU_STREAM_CAPTURE_STATUS_NONE
  static constexpr int capture_mode_relaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
  static constexpr int not_ready = 600;                    // CUDA_ERROR_NOT_READY
  static constexpr unsigned stream_non_blocking = 1;       // CU_STREAM_NON_BLOCKING
  static constexpr unsigned event_disable_timing = 2;      // CU_EVENT_DISABLE_TIMING
  static constexpr unsigned may_start_early = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

  // CUlaunchAttribute and CUlaunchConfig.
  struct Attribute {
    unsigned id;
    char padding[4];
    union {
      char bytes[64];
      int number;
    } value;
  };
  struct Configuration {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    Stream stream;
    const Attribute* attributes;
    unsigned attribute_count;
  };

  // One of CUstreamBatchMemOpParams: to wait until 32 bits of memory have a value, or to write it.
  struct MemoryOperation {
    static constexpr unsigned wait = 1, write = 2;  // CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
    static constexpr unsigned until_equal = 1;      // CU_STREAM_WAIT_VALUE_EQ
    unsigned operation;
    Pointer address;
    uint64_t value;
    unsigned flags;
    Pointer alias;
    uint64_t padding;
  };

  Result (*init)(unsigned flags);
  Result (*get_error_name)(Result error, const char** text);
  Result (*get_error_string)(Result error, const char** text);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_get_attribute)(int* value, int attribute, Device device);
  Result (*primary_context_retain)(Context* context, Device device);
  Result (*context_get_current)(Context* context);
  Result (*context_push_current)(Context context);
  Result (*context_pop_current)(Context* context);
  Result (*module_load_data)(Module* module, const void* image);
  Result (*module_get_function)(Function* function, Module module, const char* name);
  Result (*function_set_attribute)(Function function, int attribute, int value);
  Result (*stream_is_capturing)(Stream stream, int* status);
  Result (*exchange_capture_mode)(int* mode);
  Result (*stream_create)(Stream* stream, unsigned flags, int priority);
  Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  Result (*stream_batch_memory)(Stream stream, unsigned count, MemoryOperation* operations, unsigned flags);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_query)(Event event);
  Result (*copy_on_device)(Pointer to, Pointer from, size_t bytes, Stream stream);
  Result (*launch_kernel)(const Configuration* configuration, Function function, void** parameters, void** extra);
};

// The driver, opened and initialized by the first call; nullptr when it cannot be used, and `why` says what is missing.
// Needs no interpreter lock.
const CudaDriver* cuda_driver(std::string& why);

// The driver's words for an error: "out of memory (CUDA_ERROR_OUT_OF_MEMORY)".
std::string cuda_error_text(const CudaDriver& driver, CudaDriver::Result error);

// Needs a current context. A stream that will not even say counts as captured: asking the legacy stream while another
// one is captured is an error.
bool is_capturing(const CudaDriver& driver, CudaDriver::Stream stream);

// Another library than libcuda.so.1, for tests; what is loaded already keeps the driver that it was loaded by.
void set_cuda_driver(const std::string& library);

// On this thread calls are allowed that a capture on another one forbids, as long as this lives.
class BesideCaptures {
 public:
  explicit BesideCaptures(const CudaDriver& driver) : driver_(driver) { driver_.exchange_capture_mode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;
  ~BesideCaptures() { driver_.exchange_capture_mode(&mode_); }

 private:
  const CudaDriver& driver_;
  int mode_ = CudaDriver::capture_mode_relaxed;
};

// Makes a context current on this thread and gives the earlier one back at the end: threads of the autograd engine may
// have none, and PyTorch on this thread may work on another device.
class CurrentContext {
 public:
  CurrentContext(const CudaDriver& driver, CudaDriver::Context context);
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext();

  CudaDriver::Result error() const { return error_; }

 private:
  const CudaDriver& driver_;
  bool pushed_ = false;
  CudaDriver::Result error_;
};

}  // namespace te
