#include "cuda_launch.h"

#include <algorithm>
#include <limits>
#include <memory>

namespace te {
namespace {

constexpr int64_t scratch_alignment = 256;
constexpr int64_t few_blocks = 64;

int64_t round_up(int64_t bytes) { return (bytes + scratch_alignment - 1) / scratch_alignment * scratch_alignment; }

int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool fits_int32(int64_t value) { return value <= std::numeric_limits<int32_t>::max(); }

bool is_misaligned(const Memory& memory, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(memory.data) % static_cast<uintptr_t>(alignment) != 0;
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

bool CudaProgram::sums_come_from_one_block(int64_t groups, int64_t samples) const {
  const auto one = [](int64_t rows) { return rows == 1; };
  return groups == samples && std::all_of(partial_rows.begin(), partial_rows.end(), one);
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
      found.partial = !sums_come_from_one_block(found.groups, sums.fixed == 0 ? samples : 1);
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
    for (size_t i = 0; i < program.partial_widths.size(); ++i) bytes += partial_bytes(program, i);
    if (bytes == 0) return true;
    if (!take(scratch_, device, bytes, failure)) return false;
    char* next = scratch_.data();
    for (size_t i = 0; i < program.partial_widths.size(); ++i) {
      partials_[i] = next;
      next += partial_bytes(program, i);
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

  int64_t partial_bytes(const CudaProgram& program, size_t index) const {
    const int64_t floats = sizes_.groups * program.partial_rows[index] * program.partial_widths[index];
    return sizes_.partial ? round_up(floats * static_cast<int64_t>(sizeof(float))) : 0;
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

// ---- running ---------------------------------------------------------------------------------------------------

bool CudaProgram::launch_all(const Loaded& loaded, const CudaCall& call, LaunchFrame& frame, Failure& failure) const {
  for (size_t i = 0; i < launches.size(); ++i) {
    if (frame.blocks(i) == 0) continue;
    const CudaLaunch& launch = launches[i];
    Array<void*> parameters(launch.arguments.size());
    for (size_t k = 0; k < launch.arguments.size(); ++k) parameters[k] = frame.address(launch.arguments[k]);
    if (!module.launch(loaded, i, frame.blocks(i), call.stream, parameters.data(), failure)) return false;
  }
  return true;
}

bool CudaProgram::check(const CudaCall& call, const CudaSizes& sizes, Failure& failure) const {
  failure.kind = Failure::Kind::value;
  if (!fits_int32(call.sizes.batch_inner) || !fits_int32(call.sizes.batch_size) || !fits_int32(sizes.most_blocks())) {
    failure.text = "kernel '" + module.name + "': batch_inner, batch_size and the grid must be below 2**31";
    return false;
  }
  for (size_t i = inputs; i < tensors.size(); ++i) {
    if (!is_misaligned(call.tensors[i], tensors[i].alignment)) continue;
    failure.text = "kernel '" + module.name + "': tensor " + std::to_string(i) +
                   " is written and must start at a multiple of " + std::to_string(tensors[i].alignment) + " bytes";
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
  const Loaded* loaded = module.on(call.device, call.stream, failure);
  if (loaded == nullptr) return false;
  const CudaSizes wanted = sizes(call.sizes.rows, call.sizes.batch_size, loaded->multiprocessors);
  if (wanted.most_blocks() == 0) return true;
  if (!check(call, wanted, failure)) return false;
  LaunchFrame frame(*this, call, wanted);
  if (!frame.allocate_scratch(*this, call.device, failure)) return false;
  const CurrentContext current(*loaded->driver, loaded->context);
  if (current.error() != CudaDriver::success) {
    return module.refuse(*loaded->driver, "the device's context cannot be made current", current.error(), failure);
  }
  if (!realign_inputs(*loaded, call, frame, failure)) return false;
  for (int64_t n = 0; n < call.repeats; ++n) {
    if (!launch_all(*loaded, call, frame, failure)) return false;
  }
  return true;
}

}  // namespace te
