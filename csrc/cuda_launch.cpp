#include "cuda_launch.h"

#include <limits>
#include <memory>

namespace te {
namespace {

constexpr int64_t scratch_alignment = 256;
constexpr int64_t few_blocks = 64;
constexpr int first_capability_that_waits = 9;  // griddepcontrol

int64_t round_up(int64_t bytes) { return (bytes + scratch_alignment - 1) / scratch_alignment * scratch_alignment; }

int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool fits_int32(int64_t value) { return value <= std::numeric_limits<int32_t>::max(); }

bool is_misaligned(const Memory& memory, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(memory.data) % static_cast<uintptr_t>(alignment) != 0;
}

// Needs a current context. A stream that will not even say counts as captured: asking the legacy stream while another
// one is captured is an error.
bool is_capturing(const CudaDriver& driver, CudaDriver::Stream stream) {
  int status = CudaDriver::capture_status_none;
  return driver.stream_is_capturing(stream, &status) != CudaDriver::success ||
         status != CudaDriver::capture_status_none;
}

}  // namespace

int64_t RowGrid::groups(int64_t rows, int64_t samples, int64_t multiprocessors) const {
  if (!per_sample) samples = 1;
  if (samples == 0 || (rows == 0 && !sums)) return 0;
  int64_t wanted = ceiling(std::max<int64_t>(1, rows / samples), rows_per_block);
  if (sums) {
    // A block does rows four times before another one is worth its partial sums, but a few blocks are always worth
    // having, unless one is done after two turns and nothing is left to add up.
    const int64_t few = std::min(wanted, ceiling(few_blocks, tiles * samples));
    wanted = wanted <= 2 ? 1 : std::max(few, ceiling(wanted, 4));
  }
  const int64_t room = multiprocessors * blocks_per_multiprocessor / (tiles * samples);
  return samples * std::max<int64_t>(1, std::min(wanted, room));
}

CudaSizes CudaProgram::sizes(int64_t rows, int64_t samples, int64_t multiprocessors) const {
  CudaSizes found;
  for (size_t i = 0; i < launches.size(); ++i) {
    if (const auto* grid = std::get_if<RowGrid>(&launches[i].grid)) {
      found.groups = grid->groups(rows, samples, multiprocessors);  // sums are in the last launch over rows
      found.blocks[i] = grid->tiles * found.groups;
    } else {
      const auto& sums = std::get<SumGrid>(launches[i].grid);
      // Where each sum comes from one block, that block has stored it itself.
      found.partial = found.groups != (sums.fixed == 0 ? samples : 1);
      found.blocks[i] = found.partial ? sums.fixed + sums.per_sample * samples : 0;
    }
  }
  return found;
}

// What the arguments of a call's launches point to.
class LaunchFrame {
 public:
  LaunchFrame(const CudaProgram& program, const CudaCall& call, const CudaSizes& sizes)
      : sizes_(sizes),
        rows_(call.sizes.rows),
        // An empty batch may have no inner rows either, and some kernels divide by them before they find no row.
        batch_inner_(static_cast<int32_t>(std::max<int64_t>(1, call.sizes.batch_inner))),
        batch_size_(static_cast<int32_t>(call.sizes.batch_size)),
        groups_(static_cast<int32_t>(sizes_.groups)),
        seed_value_(call.seed[0]),
        seed_offset_(call.seed[1]),
        tensors_(program.tensors.size()),
        partials_(program.partial_widths.size()),
        row_values_(program.row_values),
        integers_(program.integers) {
    for (size_t i = 0; i < program.tensors.size(); ++i) tensors_[i] = call.tensors[i].data;
    // Numbers of random streams: the kernels take them as 32 bits, whatever the sign.
    for (size_t i = 0; i < program.integers; ++i) integers_[i] = static_cast<int32_t>(call.integers[i]);
  }

  // Partial sums and values of rows, cut out of one piece of memory.
  bool allocate_scratch(const CudaProgram& program, int32_t device, Failure& failure) {
    const int64_t row_value = round_up(rows_ * static_cast<int64_t>(sizeof(float)));
    int64_t bytes = row_value * static_cast<int64_t>(program.row_values);
    for (const int64_t width : program.partial_widths) bytes += partial_bytes(width);
    if (bytes == 0) return true;
    if (!take(scratch_, device, bytes, failure)) return false;
    char* next = scratch_.data();
    for (size_t i = 0; i < program.partial_widths.size(); ++i) {
      partials_[i] = next;
      next += partial_bytes(program.partial_widths[i]);
    }
    for (size_t i = 0; i < program.row_values; ++i, next += row_value) row_values_[i] = next;
    return true;
  }

  // A copy of an input in aligned memory, made by the stream.
  bool realign(size_t index, const CudaDriver& driver, const CudaCall& call, Failure& failure) {
    const Memory& original = call.tensors[index];
    if (original.bytes == 0) return true;
    copies_.push_back(std::make_unique<DeviceMemory>());
    if (!take(*copies_.back(), call.device, original.bytes, failure)) return false;
    char* copy = copies_.back()->data();
    tensors_[index] = copy;
    const CudaDriver::Result error =
        driver.copy_on_device(reinterpret_cast<CudaDriver::Pointer>(copy),
                              reinterpret_cast<CudaDriver::Pointer>(original.data),
                              static_cast<size_t>(original.bytes), call.stream);
    if (error != CudaDriver::success) failure.text = "a misaligned input: " + cuda_error_text(driver, error);
    return error == CudaDriver::success;
  }

  int64_t blocks(size_t launch) const { return sizes_.blocks[launch]; }

  void* address(const LaunchArgument& argument) {
    switch (argument.source) {
      case Source::tensor: return &tensors_[argument.index];
      case Source::partial: return &partials_[argument.index];
      case Source::row_value: return &row_values_[argument.index];
      case Source::integer: return &integers_[argument.index];
      case Source::seed_value: return &seed_value_;
      case Source::seed_offset: return &seed_offset_;
      case Source::rows: return &rows_;
      case Source::batch_inner: return &batch_inner_;
      case Source::batch_size: return &batch_size_;
      case Source::groups: return &groups_;
    }
    return nullptr;
  }

 private:
  static bool take(DeviceMemory& memory, int32_t device, int64_t bytes, Failure& failure) {
    if (memory.allocate(device, bytes, failure.text)) return true;
    failure.kind = Failure::Kind::memory;
    return false;
  }

  int64_t partial_bytes(int64_t width) const {
    return sizes_.partial ? round_up(sizes_.groups * width * static_cast<int64_t>(sizeof(float))) : 0;
  }

  CudaSizes sizes_;
  long long rows_;
  int32_t batch_inner_, batch_size_, groups_;
  long long seed_value_, seed_offset_;
  Array<void*> tensors_, partials_, row_values_;
  Array<int32_t> integers_;
  DeviceMemory scratch_;
  std::vector<std::unique_ptr<DeviceMemory>> copies_;
};

// ---- loading ---------------------------------------------------------------------------------------------------

bool CudaProgram::refuse(const CudaDriver& driver, const std::string& what, CudaDriver::Result error,
                         Failure& failure) const {
  failure.text = "kernel '" + name + "': " + what + ": " + cuda_error_text(driver, error);
  return false;
}

bool CudaProgram::find_functions(const CudaDriver& driver, CudaDriver::Module module, Loaded& loaded,
                                 Failure& failure) const {
  for (const CudaLaunch& launch : launches) {
    CudaDriver::Function function = nullptr;
    CudaDriver::Result error = driver.module_get_function(&function, module, launch.symbol.c_str());
    if (error != CudaDriver::success) {
      return refuse(driver, "its machine code has no function '" + launch.symbol + "'", error, failure);
    }
    // Without asking it has 48 KiB less its static shared memory, of which nothing is known here.
    if (launch.shared_bytes > 0) {
      error = driver.function_set_attribute(function, CudaDriver::max_dynamic_shared_size_bytes,
                                            static_cast<int>(launch.shared_bytes));
      if (error != CudaDriver::success) {
        const std::string bytes = std::to_string(launch.shared_bytes);
        return refuse(driver, "'" + launch.symbol + "' cannot have " + bytes + " bytes of shared memory", error, failure);
      }
    }
    loaded.functions.push_back(function);
  }
  return true;
}

bool CudaProgram::load_module(const CudaDriver& driver, int32_t device, const CudaCall* call, Loaded& loaded,
                              Failure& failure) const {
  const std::string where = "cuda:" + std::to_string(device);
  CudaDriver::Device ordinal = 0;
  CudaDriver::Result error = driver.device_get(&ordinal, device);
  if (error != CudaDriver::success) return refuse(driver, "there is no " + where, error, failure);
  int count = 0;
  error = driver.device_get_attribute(&count, CudaDriver::multiprocessor_count, ordinal);
  if (error != CudaDriver::success) return refuse(driver, where + " cannot be asked for its size", error, failure);
  int capability = 0;
  error = driver.device_get_attribute(&capability, CudaDriver::compute_capability_major, ordinal);
  if (error != CudaDriver::success) return refuse(driver, where + " does not say what it is", error, failure);
  loaded.driver = &driver;
  loaded.multiprocessors = count;
  loaded.starts_early = waits && capability >= first_capability_that_waits;
  error = driver.primary_context_retain(&loaded.context, ordinal);
  if (error != CudaDriver::success) return refuse(driver, where + " gives no context", error, failure);
  const CurrentContext current(driver, loaded.context);
  if (current.error() != CudaDriver::success) {
    return refuse(driver, "the context of " + where + " cannot be made current", current.error(), failure);
  }
  if (call != nullptr && is_capturing(driver, call->stream)) {
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

bool CudaProgram::load(int32_t device, Failure& failure, const CudaCall* call) {
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
  if (!load_module(*driver, device, call, *loaded, failure)) return false;
  slot.store(loaded.release(), std::memory_order_release);
  return true;
}

const CudaProgram::Loaded* CudaProgram::loaded_on(const CudaCall& call, Failure& failure) {
  const auto device = static_cast<size_t>(call.device);
  const Loaded* found = device < most_devices ? loaded_[device].load(std::memory_order_acquire) : nullptr;
  if (found != nullptr) return found;
  return load(call.device, failure, &call) ? loaded_[device].load(std::memory_order_acquire) : nullptr;
}

// ---- running ---------------------------------------------------------------------------------------------------

CudaDriver::Result CudaProgram::launch(const Loaded& loaded, const CudaCall& call, LaunchFrame& frame,
                                       size_t index) const {
  const CudaLaunch& kernel = launches[index];
  Array<void*> parameters(kernel.arguments.size());
  for (size_t k = 0; k < kernel.arguments.size(); ++k) parameters[k] = frame.address(kernel.arguments[k]);
  CudaDriver::Attribute early{};
  early.id = CudaDriver::may_start_early;
  early.value.number = 1;
  CudaDriver::Configuration configuration{};
  configuration.grid_x = static_cast<unsigned>(frame.blocks(index));
  configuration.block_x = kernel.threads;
  configuration.grid_y = configuration.grid_z = configuration.block_y = configuration.block_z = 1;
  configuration.shared_bytes = kernel.shared_bytes;
  configuration.stream = call.stream;
  configuration.attributes = &early;
  configuration.attribute_count = loaded.starts_early ? 1 : 0;
  return loaded.driver->launch_kernel(&configuration, loaded.functions[index], parameters.data(), nullptr);
}

bool CudaProgram::launch_all(const Loaded& loaded, const CudaCall& call, LaunchFrame& frame, Failure& failure) const {
  for (size_t i = 0; i < launches.size(); ++i) {
    if (frame.blocks(i) == 0) continue;
    const CudaDriver::Result error = launch(loaded, call, frame, i);
    if (error == CudaDriver::success) continue;
    return refuse(*loaded.driver,
                  "cuda:" + std::to_string(call.device) + " refused '" + launches[i].symbol +
                      "' (perhaps for what an earlier kernel did)",
                  error, failure);
  }
  return true;
}

bool CudaProgram::check(const CudaCall& call, const CudaSizes& sizes, Failure& failure) const {
  failure.kind = Failure::Kind::value;
  if (!fits_int32(call.sizes.batch_inner) || !fits_int32(call.sizes.batch_size) || !fits_int32(sizes.most_blocks())) {
    failure.text = "kernel '" + name + "': batch_inner, batch_size and the grid must be below 2**31";
    return false;
  }
  for (size_t i = inputs; i < tensors.size(); ++i) {
    if (!is_misaligned(call.tensors[i], tensors[i].alignment)) continue;
    failure.text = "kernel '" + name + "': tensor " + std::to_string(i) + " is written and must start at a multiple of " +
                   std::to_string(tensors[i].alignment) + " bytes";
    return false;
  }
  failure.kind = Failure::Kind::runtime;
  return true;
}

bool CudaProgram::realign_inputs(const Loaded& loaded, const CudaCall& call, LaunchFrame& frame,
                                 Failure& failure) const {
  for (size_t i = 0; i < inputs; ++i) {
    if (is_misaligned(call.tensors[i], tensors[i].alignment) && !frame.realign(i, *loaded.driver, call, failure)) {
      return false;
    }
  }
  return true;
}

bool CudaProgram::run(const CudaCall& call, Failure& failure) {
  const Loaded* loaded = loaded_on(call, failure);
  if (loaded == nullptr) return false;
  const CudaSizes wanted = sizes(call.sizes.rows, call.sizes.batch_size, loaded->multiprocessors);
  if (wanted.most_blocks() == 0) return true;
  if (!check(call, wanted, failure)) return false;
  LaunchFrame frame(*this, call, wanted);
  if (!frame.allocate_scratch(*this, call.device, failure)) return false;
  const CurrentContext current(*loaded->driver, loaded->context);
  if (current.error() != CudaDriver::success) {
    return refuse(*loaded->driver, "the device's context cannot be made current", current.error(), failure);
  }
  if (!realign_inputs(*loaded, call, frame, failure)) return false;
  for (int64_t n = 0; n < call.repeats; ++n) {
    if (!launch_all(*loaded, call, frame, failure)) return false;
  }
  return true;
}

}  // namespace te
