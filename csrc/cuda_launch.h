// What a generated CUDA kernel is made of, and how it is launched. Knows nothing of Python.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "cuda_driver.h"
#include "cuda_module.h"
#include "failure.h"
#include "kernel_call.h"
#include "tensor.h"

namespace te {

// How many blocks walk over the rows: `tiles` side by side, times groups of rows with partial sums of their own.
struct RowGrid {
  int64_t tiles;
  int64_t rows_per_block;
  int64_t blocks_per_multiprocessor;
  bool per_sample;
  bool sums;

  // As many groups as the GPU holds at once; a multiple of `samples` where sums belong to samples.
  int64_t groups(int64_t rows, int64_t samples, int64_t multiprocessors) const;
};

// How many blocks add up partial sums.
struct SumGrid {
  int64_t fixed;
  int64_t per_sample;
};

// Where an argument of a kernel comes from; the first four have an index.
enum class Source : uint8_t {
  tensor,
  partial,
  row_value,
  integer,
  seed_value,
  seed_offset,
  rows,
  batch_inner,
  batch_size,
  groups
};

struct LaunchArgument {
  Source source;
  uint32_t index;
};

// The launch of the module's function with the same number. One that adds up partial sums takes all of them, and as many
// tensors in the same order.
struct CudaLaunch {
  std::variant<RowGrid, SumGrid> grid;
  std::vector<LaunchArgument> arguments;
};

// A tensor that a kernel takes: its first element must lie at a multiple of `alignment` bytes.
struct TensorParameter {
  DType dtype;
  int64_t alignment;
};

// Over the rows, for column sums alone, for adding up what the blocks found: no kernel has more.
constexpr size_t most_launches = 4;

// The grid of each launch, the groups of rows, and whether their partial sums are to be added up.
struct CudaSizes {
  std::array<int64_t, most_launches> blocks{};
  int64_t groups = 0;
  bool partial = true;

  int64_t most_blocks() const { return *std::max_element(blocks.begin(), blocks.end()); }
};

// One call: what is on the device, and where it runs.
struct CudaCall {
  int32_t device;
  CudaDriver::Stream stream;
  const Memory* tensors;
  CallSizes sizes;
  const int64_t* integers;
  int64_t repeats;
  int64_t seed[2];  // value and offset, where the seed's tensor is on the host: then its memory here is nullptr
};

class LaunchFrame;

// A kernel: machine code and the launches in it, in order.
class CudaProgram {
 public:
  CudaModule module;
  std::vector<TensorParameter> tensors;
  size_t inputs = 0;  // so many of the tensors are read, the others are written
  std::vector<std::pair<size_t, size_t>> overwrites;  // a written and a read tensor that may have the same memory
  std::vector<CudaLaunch> launches;
  std::vector<int64_t> partial_widths;  // partial sums: float32 [groups * rows, width] each
  std::vector<int64_t> partial_rows;    // of a group: one for each block that adds to the same sums
  size_t row_values = 0;                // float32 [rows] each, from one launch to the next
  size_t integers = 0;
  bool draws = false;  // then the last input is the seed: two int64, on the device or on the host

  const char* name() const { return module.name.c_str(); }
  CudaSizes sizes(int64_t rows, int64_t samples, int64_t multiprocessors) const;

  // Needs no interpreter lock, must not be called under one that others wait for, and throws std::bad_alloc.
  bool run(const CudaCall& call, Failure& failure);

 private:
  using Loaded = CudaModule::Loaded;

  bool sums_come_from_one_block(int64_t groups, int64_t samples) const;
  bool check(const CudaCall& call, const CudaSizes& sizes, Failure& failure) const;
  bool realign_inputs(const Loaded& loaded, const CudaCall& call, LaunchFrame& frame, Failure& failure) const;
  bool launch_all(const Loaded& loaded, const CudaCall& call, LaunchFrame& frame, Failure& failure) const;
};

}  // namespace te
