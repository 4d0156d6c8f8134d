#include "bindings.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "callable_type.h"
#include "gil.h"
#include "kernel_call.h"
#include "te_kernel_abi.h"
#include "tensor.h"
#include "threads.h"

namespace te {
namespace {

// A thread is worth waking for about this many elements: 128 KiB of float32, some 10 us of work.
constexpr int64_t elements_per_worker = 32768;
constexpr size_t alignment = 64;
constexpr size_t floats_per_line = alignment / sizeof(float);
// Memory of workers that grew beyond this is given back after the call instead of being kept for the next.
constexpr size_t most_kept_bytes = size_t{64} << 20;

// What a kernel is made of. It never changes after construction, so any number of threads may use it at once.
struct Kernel {
  std::string library;
  std::string symbol;
  std::vector<DType> dtypes;
  int64_t partial_floats = 0;
  int64_t partial_floats_per_sample = 0;
  int64_t scratch_floats = 0;
  int64_t row_elements = 1;
  void* handle = nullptr;
  te_rows_fn rows = nullptr;
  te_finish_fn finish = nullptr;

  Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() {
    if (handle != nullptr) dlclose(handle);
  }

  bool has_partials() const { return partial_floats > 0 || partial_floats_per_sample > 0; }
};

// Memory for the workers' blocks, kept by each calling thread: no call can meet another one's.
class WorkerMemory {
 public:
  ~WorkerMemory() { std::free(memory_); }

  // Cuts one block of each size for each worker, cache lines apart; throws std::bad_alloc.
  void reserve(int64_t workers, int64_t scratch_floats, int64_t partial_floats) {
    const size_t count = static_cast<size_t>(workers);
    const size_t scratch_lines = lines(scratch_floats), partial_lines = lines(partial_floats);
    grow(count * (scratch_lines + partial_lines) * alignment);
    scratch.resize(count);
    partials.resize(count);
    float* next = memory_;
    cut(scratch, scratch_lines * floats_per_line, next);
    cut(partials, partial_lines * floats_per_line, next);
  }

  void give_back_excess() {
    if (capacity_ > most_kept_bytes) release();
  }

  std::vector<float*> scratch;
  std::vector<float*> partials;

 private:
  static size_t lines(int64_t floats) { return (static_cast<size_t>(floats) + floats_per_line - 1) / floats_per_line; }

  static void cut(std::vector<float*>& blocks, size_t floats, float*& next) {
    for (float*& block : blocks) {
      block = floats > 0 ? next : nullptr;
      next += floats;
    }
  }

  void grow(size_t bytes) {
    if (bytes <= capacity_) return;
    release();
    memory_ = static_cast<float*>(std::aligned_alloc(alignment, bytes));
    if (memory_ == nullptr) throw std::bad_alloc();
    capacity_ = bytes;
  }

  void release() {
    std::free(memory_);
    memory_ = nullptr;
    capacity_ = 0;
  }

  float* memory_ = nullptr;
  size_t capacity_ = 0;
};

// ---- running, without the interpreter --------------------------------------------------------------------------

int64_t count_workers(const Kernel& kernel, int64_t rows) {
  const double elements = static_cast<double>(rows) * static_cast<double>(kernel.row_elements);
  const auto useful = static_cast<int64_t>(std::min(elements / elements_per_worker, 1e6));
  if (useful <= 1) return 1;
  return std::clamp<int64_t>(useful, 1, std::min(num_threads(), rows));
}

// Throws std::bad_alloc before the first row is touched, and nothing afterwards.
void run(const Kernel& kernel, te_launch launch) {
  thread_local WorkerMemory memory;
  const int64_t workers = count_workers(kernel, launch.rows);
  const int64_t partial_floats = kernel.partial_floats + kernel.partial_floats_per_sample * launch.batch_size;
  memory.reserve(workers, kernel.scratch_floats, partial_floats);
  launch.scratch = memory.scratch.data();
  launch.partials = memory.partials.data();

  const int64_t share = launch.rows / workers, longer = launch.rows % workers;
  auto work = [&](int64_t worker) noexcept {
    if (partial_floats > 0) {
      std::memset(launch.partials[worker], 0, static_cast<size_t>(partial_floats) * sizeof(float));
    }
    const int64_t begin = worker * share + std::min(worker, longer);
    const int64_t end = begin + share + (worker < longer ? 1 : 0);
    if (begin < end) kernel.rows(&launch, begin, end, worker);
  };
  parallel_for(workers, work);
  if (kernel.finish != nullptr) kernel.finish(&launch, workers);
  memory.give_back_excess();
}

// ---- the call from Python --------------------------------------------------------------------------------------

bool read_tensors(const Kernel& kernel, PyObject* tensors, void** pointers) {
  for (size_t i = 0; i < kernel.dtypes.size(); ++i) {
    const auto index = static_cast<Py_ssize_t>(i);
    const ArgumentSite site{kernel.symbol.c_str(), index};
    if (!read_cpu_tensor(PyTuple_GET_ITEM(tensors, index), kernel.dtypes[i], site, &pointers[i])) return false;
  }
  return true;
}

PyObject* call_kernel(const Kernel& kernel, const Arguments& arguments) {
  CallSizes sizes;
  if (!read_sizes(kernel.symbol.c_str(), arguments, sizes)) return nullptr;
  Array<int64_t> integers(static_cast<size_t>(PyTuple_GET_SIZE(arguments.integers)));
  if (!read_integers(kernel.symbol.c_str(), arguments.integers, integers.data())) return nullptr;
  // The tensors come last: an integer's __index__ may run Python code, which could still change them.
  Array<void*> pointers(kernel.dtypes.size());
  if (!read_tensors(kernel, arguments.tensors, pointers.data())) return nullptr;
  te_launch launch{};
  launch.rows = sizes.rows;
  launch.batch_inner = sizes.batch_inner;
  launch.batch_size = sizes.batch_size;
  launch.tensors = pointers.data();
  launch.integers = integers.data();
  const auto work = [&](Failure&) {
    run(kernel, launch);
    return true;
  };
  if (!without_gil(kernel.symbol.c_str(), work)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  const Kernel& kernel = owned_by<Kernel>(self);
  Arguments arguments;
  if (!bind_arguments(kernel.symbol.c_str(), kernel.dtypes.size(), values,
                      static_cast<size_t>(PyVectorcall_NARGS(flags)), names, arguments)) {
    return nullptr;
  }
  return call_kernel(kernel, arguments);
}

// ---- construction ----------------------------------------------------------------------------------------------

bool check_counts(const Kernel& kernel) {
  if (kernel.partial_floats >= 0 && kernel.partial_floats_per_sample >= 0 && kernel.scratch_floats >= 0 &&
      kernel.row_elements >= 0) {
    return true;
  }
  PyErr_Format(PyExc_ValueError, "kernel '%s': the numbers of floats and of row elements must not be negative",
               kernel.symbol.c_str());
  return false;
}

void* find_symbol(const Kernel& kernel, const char* suffix) {
  const std::string name = kernel.symbol + suffix;
  void* address = dlsym(kernel.handle, name.c_str());
  if (address == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "kernel '%s': the library %s has no symbol '%s'", kernel.symbol.c_str(),
                 kernel.library.c_str(), name.c_str());
  }
  return address;
}

bool load_library(Kernel& kernel) {
  kernel.handle = dlopen(kernel.library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (kernel.handle == nullptr) {
    const char* reason = dlerror();
    PyErr_Format(PyExc_RuntimeError, "kernel '%s': cannot load the library %s: %s", kernel.symbol.c_str(),
                 kernel.library.c_str(), reason != nullptr ? reason : "unknown reason");
    return false;
  }
  kernel.rows = reinterpret_cast<te_rows_fn>(find_symbol(kernel, "_rows"));
  if (kernel.rows == nullptr) return false;
  if (!kernel.has_partials()) return true;
  kernel.finish = reinterpret_cast<te_finish_fn>(find_symbol(kernel, "_finish"));
  return kernel.finish != nullptr;
}

bool read_kernel(Kernel& kernel, PyObject* args, PyObject* keywords) {
  static const char* names[] = {
      "library",        "symbol",       "dtypes", "partial_floats", "partial_floats_per_sample",
      "scratch_floats", "row_elements", nullptr};
  const char *library = nullptr, *symbol = nullptr;
  PyObject* dtypes = nullptr;
  long long partial = 0, per_sample = 0, scratch = 0, elements = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "ssO!LLLL:CpuKernel", const_cast<char**>(names), &library, &symbol,
                                   &PyTuple_Type, &dtypes, &partial, &per_sample, &scratch, &elements)) {
    return false;
  }
  kernel.library = library;
  kernel.symbol = symbol;
  kernel.partial_floats = partial;
  kernel.partial_floats_per_sample = per_sample;
  kernel.scratch_floats = scratch;
  kernel.row_elements = elements;
  return check_counts(kernel) && read_dtypes(symbol, dtypes, kernel.dtypes) && load_library(kernel);
}

std::unique_ptr<Kernel> build_kernel(PyObject* args, PyObject* keywords) {
  auto kernel = std::make_unique<Kernel>();
  return read_kernel(*kernel, args, keywords) ? std::move(kernel) : nullptr;
}

PyObject* describe(PyObject* self) {
  const Kernel& kernel = owned_by<Kernel>(self);
  return PyUnicode_FromFormat("<CpuKernel %s from %s>", kernel.symbol.c_str(), kernel.library.c_str());
}

PyDoc_STRVAR(documentation,
             "CpuKernel(library, symbol, dtypes, partial_floats, partial_floats_per_sample, scratch_floats, "
             "row_elements)\n--\n\n"
             "A generated CPU kernel; call it with (tensors, rows, batch_inner, batch_size, integers).");

}  // namespace

PyObject* make_cpu_kernel_type() {
  return make_callable_type<Kernel, build_kernel, vectorcall>({"te_fuser._native.CpuKernel", documentation, describe});
}

}  // namespace te
