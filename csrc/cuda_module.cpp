#include "cuda_module.h"

#include <memory>

namespace te {
namespace {

constexpr int first_capability_that_waits = 9;  // griddepcontrol

std::string place(int32_t device) { return "cuda:" + std::to_string(device); }

}  // namespace

bool CudaModule::refuse(const CudaDriver& driver, const std::string& what, CudaDriver::Result error,
                        Failure& failure) const {
  failure.text = "kernel '" + name + "': " + what + ": " + cuda_error_text(driver, error);
  return false;
}

// ---- loading ---------------------------------------------------------------------------------------------------

bool CudaModule::find_functions(const CudaDriver& driver, CudaDriver::Module module, Loaded& loaded,
                                Failure& failure) const {
  for (const CudaFunction& wanted : functions) {
    CudaDriver::Function function = nullptr;
    CudaDriver::Result error = driver.module_get_function(&function, module, wanted.symbol.c_str());
    if (error != CudaDriver::success) {
      return refuse(driver, "its machine code has no function '" + wanted.symbol + "'", error, failure);
    }
    // Without asking it has 48 KiB less its static shared memory, of which nothing is known here.
    if (wanted.shared_bytes > 0) {
      error = driver.function_set_attribute(function, CudaDriver::max_dynamic_shared_size_bytes,
                                            static_cast<int>(wanted.shared_bytes));
      if (error != CudaDriver::success) {
        const std::string bytes = std::to_string(wanted.shared_bytes);
        return refuse(driver, "'" + wanted.symbol + "' cannot have " + bytes + " bytes of shared memory", error, failure);
      }
    }
    loaded.functions.push_back(function);
  }
  return true;
}

bool CudaModule::load_code(const CudaDriver& driver, int32_t device, const CudaDriver::Stream* asking, Loaded& loaded,
                           Failure& failure) const {
  const std::string where = place(device);
  CudaDriver::Device ordinal = 0;
  CudaDriver::Result error = driver.device_get(&ordinal, device);
  if (error != CudaDriver::success) return refuse(driver, "there is no " + where, error, failure);
  int count = 0, capability = 0;
  error = driver.device_get_attribute(&count, CudaDriver::multiprocessor_count, ordinal);
  if (error == CudaDriver::success) {
    error = driver.device_get_attribute(&capability, CudaDriver::compute_capability_major, ordinal);
  }
  if (error != CudaDriver::success) return refuse(driver, where + " cannot be asked what it is", error, failure);
  loaded.driver = &driver;
  loaded.device = device;
  loaded.multiprocessors = count;
  loaded.starts_early = waits && capability >= first_capability_that_waits;
  error = driver.primary_context_retain(&loaded.context, ordinal);
  if (error != CudaDriver::success) return refuse(driver, where + " gives no context", error, failure);
  const CurrentContext current(driver, loaded.context);
  if (current.error() != CudaDriver::success) {
    return refuse(driver, "the context of " + where + " cannot be made current", current.error(), failure);
  }
  if (asking != nullptr && is_capturing(driver, *asking)) {
    failure.text = "kernel '" + name + "' is not loaded on " + where +
                   ", and its stream is being captured: run the model once with inputs like these before the capture";
    return false;
  }
  CudaDriver::Module module = nullptr;
  error = driver.module_load_data(&module, cubin.data());
  if (error != CudaDriver::success) {
    return refuse(driver, "its machine code cannot be loaded on " + where, error, failure);
  }
  return find_functions(driver, module, loaded, failure);
}

bool CudaModule::load(int32_t device, Failure& failure, const CudaDriver::Stream* asking) {
  if (device < 0 || static_cast<size_t>(device) >= most_devices) {
    failure = {Failure::Kind::value, "kernel '" + name + "': there is no device number " + std::to_string(device)};
    return false;
  }
  std::atomic<const Loaded*>& slot = loaded_[static_cast<size_t>(device)];
  const std::lock_guard<std::mutex> lock(loading_);
  if (slot.load(std::memory_order_acquire) != nullptr) return true;
  const CudaDriver* driver = cuda_driver(failure.text);
  if (driver == nullptr) {
    failure.text = "kernel '" + name + "': " + failure.text;
    return false;
  }
  auto loaded = std::make_unique<Loaded>();
  if (!load_code(*driver, device, asking, *loaded, failure)) return false;
  slot.store(loaded.release(), std::memory_order_release);
  return true;
}

bool CudaModule::load(int32_t device, Failure& failure) { return load(device, failure, nullptr); }

const CudaModule::Loaded* CudaModule::on(int32_t device, CudaDriver::Stream stream, Failure& failure) {
  const auto number = static_cast<size_t>(device);
  const Loaded* found = number < most_devices ? loaded_[number].load(std::memory_order_acquire) : nullptr;
  if (found != nullptr) return found;
  return load(device, failure, &stream) ? loaded_[number].load(std::memory_order_acquire) : nullptr;
}

// ---- launching -------------------------------------------------------------------------------------------------

bool CudaModule::launch(const Loaded& loaded, size_t function, int64_t blocks, CudaDriver::Stream stream,
                        void** parameters, Failure& failure) const {
  CudaDriver::Attribute early{};
  early.id = CudaDriver::may_start_early;
  early.value.number = 1;
  CudaDriver::Configuration configuration{};
  configuration.grid_x = static_cast<unsigned>(blocks);
  configuration.block_x = functions[function].threads;
  configuration.grid_y = configuration.grid_z = configuration.block_y = configuration.block_z = 1;
  configuration.shared_bytes = functions[function].shared_bytes;
  configuration.stream = stream;
  configuration.attributes = &early;
  configuration.attribute_count = loaded.starts_early ? 1 : 0;
  const CudaDriver::Result error =
      loaded.driver->launch_kernel(&configuration, loaded.functions[function], parameters, nullptr);
  if (error == CudaDriver::success) return true;
  const std::string who = place(loaded.device) + " refused '" + functions[function].symbol;
  return refuse(*loaded.driver, who + "' (perhaps for what an earlier kernel did)", error, failure);
}

}  // namespace te
