#include "cublaslt.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "library.h"

namespace te {
namespace {

// What PyTorch's builds for CUDA 13 and 12 link with.
constexpr const char* loaded_names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr size_t most_devices = 64;
constexpr size_t mebibyte = size_t{1} << 20;

std::string bind_functions(void* library, CublasLt& lt) {
  Binder bind(library);
  bind(lt.get_version, "cublasLtGetVersion");
  bind(lt.get_status_name, "cublasLtGetStatusName");
  bind(lt.get_status_string, "cublasLtGetStatusString");
  bind(lt.create, "cublasLtCreate");
  bind(lt.description_create, "cublasLtMatmulDescCreate");
  bind(lt.description_destroy, "cublasLtMatmulDescDestroy");
  bind(lt.description_set, "cublasLtMatmulDescSetAttribute");
  bind(lt.layout_create, "cublasLtMatrixLayoutCreate");
  bind(lt.layout_destroy, "cublasLtMatrixLayoutDestroy");
  bind(lt.preference_create, "cublasLtMatmulPreferenceCreate");
  bind(lt.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  bind(lt.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  bind(lt.get_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  bind(lt.check_algorithm, "cublasLtMatmulAlgoCheck");
  bind(lt.matmul, "cublasLtMatmul");
  return bind.missing();
}

void* open_library(const std::string& path, std::string& why) {
  if (!path.empty()) return open_file(path, "cuBLASLt", why);
  for (const char* name : loaded_names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  why = "PyTorch has not loaded cuBLASLt (libcublasLt.so.13 or .12): it is a build without CUDA, or of another version";
  return nullptr;
}

// The library, or nullptr with the reason in `why`.
const CublasLt* open_cublaslt(const std::string& path, std::string& why) {
  void* library = open_library(path, why);
  if (library == nullptr) return nullptr;
  auto lt = std::make_unique<CublasLt>();
  const std::string missing = bind_functions(library, *lt);
  if (missing.empty()) return lt.release();
  why = "this cuBLASLt has no " + missing + ": it is too old";
  return nullptr;
}

bool read_attribute(const CudaDriver& driver, int attribute, CudaDriver::Device device, int* value, std::string& why) {
  const CudaDriver::Result error = driver.device_get_attribute(value, attribute, device);
  if (error != CudaDriver::success) why = "the device cannot be asked for its size: " + cuda_error_text(driver, error);
  return error == CudaDriver::success;
}

bool open_device(int32_t device, const CublasLt& lt, CublasLtDevice& opened, std::string& why) {
  const CudaDriver* driver = cuda_driver(why);
  if (driver == nullptr) return false;
  CudaDriver::Device ordinal = 0;
  CudaDriver::Result error = driver->device_get(&ordinal, device);
  if (error == CudaDriver::success) error = driver->primary_context_retain(&opened.context, ordinal);
  if (error != CudaDriver::success) {
    why = "cuda:" + std::to_string(device) + " gives no context: " + cuda_error_text(*driver, error);
    return false;
  }
  int major = 0;
  if (!read_attribute(*driver, CudaDriver::compute_capability_major, ordinal, &major, why)) return false;
  const CurrentContext current(*driver, opened.context);
  const CublasLt::Status status = lt.create(&opened.handle);
  if (status != CublasLt::success) {
    why = "cuBLASLt cannot start on cuda:" + std::to_string(device) + ": " + cublaslt_error_text(lt, status);
    return false;
  }
  opened.library = &lt;
  opened.driver = driver;
  opened.most_workspace = (major >= 9 ? 32 : 4) * mebibyte;  // what NVIDIA recommends
  return true;
}

// Never destroyed: products may run until the very end of the process.
struct State {
  OpenedOnce<CublasLt, open_cublaslt> library{""};
  std::mutex opening;  // a device
  std::array<std::atomic<const CublasLtDevice*>, most_devices> devices{};
};

State& state() {
  static State* const the_state = new State;
  return *the_state;
}

}  // namespace

const CublasLt* cublaslt(std::string& why) { return state().library.get(why); }

const CublasLtDevice* cublaslt_on(int32_t device, std::string& why) {
  const CublasLt* library = cublaslt(why);
  if (library == nullptr) return nullptr;
  if (device < 0 || static_cast<size_t>(device) >= most_devices) {
    why = "there is no device number " + std::to_string(device);
    return nullptr;
  }
  State& s = state();
  auto& slot = s.devices[static_cast<size_t>(device)];
  if (const CublasLtDevice* found = slot.load(std::memory_order_acquire)) return found;
  const std::lock_guard<std::mutex> lock(s.opening);
  if (const CublasLtDevice* found = slot.load(std::memory_order_acquire)) return found;
  auto opened = std::make_unique<CublasLtDevice>();
  if (!open_device(device, *library, *opened, why)) return nullptr;
  slot.store(opened.get(), std::memory_order_release);
  return opened.release();
}

std::string cublaslt_error_text(const CublasLt& library, CublasLt::Status status) {
  const char* name = library.get_status_name(status);
  const char* text = library.get_status_string(status);
  if (name == nullptr) return "status " + std::to_string(status);
  return text == nullptr || std::string(text) == name ? name : std::string(text) + " (" + name + ")";
}

void set_cublaslt(const std::string& path) {
  State& s = state();
  s.library.reset(path);
  const std::lock_guard<std::mutex> lock(s.opening);
  for (auto& device : s.devices) device.store(nullptr, std::memory_order_release);
}

}  // namespace te
