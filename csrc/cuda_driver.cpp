#include "cuda_driver.h"

#include "library.h"

namespace te {
namespace {

// The name in the library is that of the newest form of each function, as cuda.h maps it.
std::string bind_functions(void* library, CudaDriver& driver) {
  Binder bind(library);
  bind(driver.init, "cuInit");
  bind(driver.get_error_name, "cuGetErrorName");
  bind(driver.get_error_string, "cuGetErrorString");
  bind(driver.device_get, "cuDeviceGet");
  bind(driver.device_get_attribute, "cuDeviceGetAttribute");
  bind(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
  bind(driver.context_get_current, "cuCtxGetCurrent");
  bind(driver.context_push_current, "cuCtxPushCurrent_v2");
  bind(driver.context_pop_current, "cuCtxPopCurrent_v2");
  bind(driver.module_load_data, "cuModuleLoadData");
  bind(driver.module_get_function, "cuModuleGetFunction");
  bind(driver.function_set_attribute, "cuFuncSetAttribute");
  bind(driver.stream_is_capturing, "cuStreamIsCapturing");
  bind(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  bind(driver.stream_create, "cuStreamCreateWithPriority");
  bind(driver.stream_wait_event, "cuStreamWaitEvent");
  bind(driver.stream_batch_memory, "cuStreamBatchMemOp_v2");
  bind(driver.event_create, "cuEventCreate");
  bind(driver.event_record, "cuEventRecord");
  bind(driver.event_query, "cuEventQuery");
  bind(driver.copy_on_device, "cuMemcpyDtoDAsync_v2");
  bind(driver.launch_kernel, "cuLaunchKernelEx");
  return bind.missing();
}

// The driver, or nullptr with the reason in `why`.
const CudaDriver* open_driver(const std::string& name, std::string& why) {
  void* library = open_file(name, "the CUDA driver", why);
  if (library == nullptr) {
    why += " (it comes with NVIDIA's GPU driver, not with PyTorch)";
    return nullptr;
  }
  auto* driver = new CudaDriver{};
  const std::string missing = bind_functions(library, *driver);
  if (!missing.empty()) {
    why = "the CUDA driver " + name + " has no " + missing + ": it is too old";
    return nullptr;
  }
  const CudaDriver::Result error = driver->init(0);
  if (error == CudaDriver::success) return driver;
  why = "the CUDA driver " + name + " cannot be initialized: " + cuda_error_text(*driver, error);
  return nullptr;
}

auto& opened() {
  static auto* const driver = new OpenedOnce<CudaDriver, open_driver>("libcuda.so.1");
  return *driver;
}

}  // namespace

const CudaDriver* cuda_driver(std::string& why) { return opened().get(why); }

std::string cuda_error_text(const CudaDriver& driver, CudaDriver::Result error) {
  const char *name = nullptr, *text = nullptr;
  const bool known = driver.get_error_name(error, &name) == CudaDriver::success && name != nullptr;
  const bool explained = driver.get_error_string(error, &text) == CudaDriver::success && text != nullptr;
  if (!known) return "error " + std::to_string(error);
  return explained ? std::string(text) + " (" + name + ")" : name;
}

bool is_capturing(const CudaDriver& driver, CudaDriver::Stream stream) {
  int status = CudaDriver::capture_status_none;
  return driver.stream_is_capturing(stream, &status) != CudaDriver::success ||
         status != CudaDriver::capture_status_none;
}

void set_cuda_driver(const std::string& library) { opened().reset(library); }

CurrentContext::CurrentContext(const CudaDriver& driver, CudaDriver::Context context) : driver_(driver) {
  CudaDriver::Context now = nullptr;
  error_ = driver.context_get_current(&now);
  if (error_ != CudaDriver::success || now == context) return;
  error_ = driver.context_push_current(context);
  pushed_ = error_ == CudaDriver::success;
}

CurrentContext::~CurrentContext() {
  CudaDriver::Context mine = nullptr;
  if (pushed_) driver_.context_pop_current(&mine);
}

}  // namespace te
