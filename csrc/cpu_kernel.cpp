#include "cpu_kernel.h"

#include <dlfcn.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "te_kernel_abi.h"
#include "tensor.h"
#include "threads.h"

namespace te {
namespace {

// A thread is worth waking for about this many elements: 128 KiB of float32, some 10 us of work.
constexpr int64_t elements_per_worker = 32768;
constexpr size_t alignment = 64;
constexpr size_t floats_per_line = alignment / sizeof(float);
// A workspace that grew beyond this is given back after the call instead of being kept for the next.
constexpr size_t kept_workspace_bytes = size_t{64} << 20;

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

struct KernelObject {
  PyObject_HEAD
  vectorcallfunc call;
  Kernel* kernel;
};

// An array on the stack while it is short.
template <class T>
class Array {
 public:
  explicit Array(size_t size) : heap_(size > short_size ? new T[size] : nullptr) {}
  T* data() { return heap_ ? heap_.get() : stack_.data(); }
  T& operator[](size_t index) { return data()[index]; }

 private:
  static constexpr size_t short_size = 24;
  std::array<T, short_size> stack_;
  std::unique_ptr<T[]> heap_;
};

// Memory for the workers' blocks, kept by each calling thread: no call can meet another one's.
class Workspace {
 public:
  ~Workspace() { std::free(memory_); }

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
    if (capacity_ > kept_workspace_bytes) release();
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
  thread_local Workspace workspace;
  const int64_t workers = count_workers(kernel, launch.rows);
  const int64_t partial_floats = kernel.partial_floats + kernel.partial_floats_per_sample * launch.batch_size;
  workspace.reserve(workers, kernel.scratch_floats, partial_floats);
  launch.scratch = workspace.scratch.data();
  launch.partials = workspace.partials.data();

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
  workspace.give_back_excess();
}

bool run_without_gil(const Kernel& kernel, const te_launch& launch) {
  bool ran = true;
  PyThreadState* state = PyEval_SaveThread();
  try {
    run(kernel, launch);
  } catch (const std::bad_alloc&) {
    ran = false;
  }
  PyEval_RestoreThread(state);
  if (!ran) PyErr_NoMemory();
  return ran;
}

// ---- the call from Python --------------------------------------------------------------------------------------

constexpr size_t argument_count = 5;
constexpr const char* argument_names[argument_count] = {"tensors", "rows", "batch_inner", "batch_size", "integers"};
using Arguments = std::array<PyObject*, argument_count>;

bool place_keyword(const Kernel& kernel, PyObject* name, PyObject* value, Arguments& arguments) {
  for (size_t i = 0; i < argument_count; ++i) {
    if (PyUnicode_CompareWithASCIIString(name, argument_names[i]) != 0) continue;
    if (arguments[i] != nullptr) {
      PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' was given twice", kernel.symbol.c_str(),
                   argument_names[i]);
      return false;
    }
    arguments[i] = value;
    return true;
  }
  PyErr_Format(PyExc_TypeError, "kernel '%s': unknown argument '%U'", kernel.symbol.c_str(), name);
  return false;
}

bool bind_arguments(const Kernel& kernel, PyObject* const* values, size_t positional, PyObject* names,
                    Arguments& arguments) {
  if (positional > argument_count) {
    PyErr_Format(PyExc_TypeError, "kernel '%s' takes %zu arguments, got %zu", kernel.symbol.c_str(), argument_count,
                 positional);
    return false;
  }
  arguments.fill(nullptr);
  std::copy_n(values, positional, arguments.begin());
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    if (!place_keyword(kernel, PyTuple_GET_ITEM(names, i), values[positional + static_cast<size_t>(i)], arguments)) {
      return false;
    }
  }
  for (size_t i = 0; i < argument_count; ++i) {
    if (arguments[i] != nullptr) continue;
    PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' is missing", kernel.symbol.c_str(), argument_names[i]);
    return false;
  }
  return true;
}

bool require_tuple(const Kernel& kernel, PyObject* value, const char* name) {
  if (PyTuple_Check(value)) return true;
  PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' must be a tuple, got %s", kernel.symbol.c_str(), name,
               Py_TYPE(value)->tp_name);
  return false;
}

bool read_integer(const Kernel& kernel, PyObject* value, const char* name, int64_t* out) {
  *out = PyLong_AsLongLong(value);
  if (*out != -1 || PyErr_Occurred() == nullptr) return true;
  const bool wrong_type = PyErr_ExceptionMatches(PyExc_TypeError);
  const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
  if (!wrong_type && !too_large) return false;
  PyErr_Clear();
  if (wrong_type) {
    PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' must be an integer, got %s", kernel.symbol.c_str(), name,
                 Py_TYPE(value)->tp_name);
  } else {
    PyErr_Format(PyExc_ValueError, "kernel '%s': argument '%s' does not fit into 64 bits", kernel.symbol.c_str(), name);
  }
  return false;
}

bool read_sizes(const Kernel& kernel, const Arguments& arguments, te_launch& launch) {
  if (!read_integer(kernel, arguments[1], "rows", &launch.rows)) return false;
  if (!read_integer(kernel, arguments[2], "batch_inner", &launch.batch_inner)) return false;
  if (!read_integer(kernel, arguments[3], "batch_size", &launch.batch_size)) return false;
  const int64_t least = launch.rows > 0 ? 1 : 0;  // an empty batch has no rows, and rows / batch_inner is never asked
  if (launch.rows >= 0 && launch.batch_inner >= least && launch.batch_size >= least) return true;
  PyErr_Format(PyExc_ValueError,
               "kernel '%s': rows must not be negative, batch_inner and batch_size must be positive, "
               "got %lld, %lld and %lld",
               kernel.symbol.c_str(), static_cast<long long>(launch.rows), static_cast<long long>(launch.batch_inner),
               static_cast<long long>(launch.batch_size));
  return false;
}

bool read_tensors(const Kernel& kernel, PyObject* tensors, void** pointers) {
  for (size_t i = 0; i < kernel.dtypes.size(); ++i) {
    const auto index = static_cast<Py_ssize_t>(i);
    const ArgumentSite site{kernel.symbol.c_str(), index};
    if (!read_cpu_tensor(PyTuple_GET_ITEM(tensors, index), kernel.dtypes[i], site, &pointers[i])) return false;
  }
  return true;
}

PyObject* call_kernel(const Kernel& kernel, const Arguments& arguments) {
  PyObject *tensors = arguments[0], *integers = arguments[4];
  if (!require_tuple(kernel, tensors, "tensors") || !require_tuple(kernel, integers, "integers")) return nullptr;
  const auto given = static_cast<size_t>(PyTuple_GET_SIZE(tensors));
  if (given != kernel.dtypes.size()) {
    PyErr_Format(PyExc_ValueError, "kernel '%s' takes %zu tensors, got %zu", kernel.symbol.c_str(),
                 kernel.dtypes.size(), given);
    return nullptr;
  }
  te_launch launch{};
  if (!read_sizes(kernel, arguments, launch)) return nullptr;
  const auto integer_count = static_cast<size_t>(PyTuple_GET_SIZE(integers));
  Array<int64_t> integer_values(integer_count);
  for (size_t i = 0; i < integer_count; ++i) {
    PyObject* value = PyTuple_GET_ITEM(integers, static_cast<Py_ssize_t>(i));
    if (!read_integer(kernel, value, "integers", &integer_values[i])) return nullptr;
  }
  // The tensors come last: an integer's __index__ may run Python code, which could still change them.
  Array<void*> pointers(given);
  if (!read_tensors(kernel, tensors, pointers.data())) return nullptr;
  launch.tensors = pointers.data();
  launch.integers = integer_values.data();
  if (!run_without_gil(kernel, launch)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  const Kernel& kernel = *reinterpret_cast<KernelObject*>(self)->kernel;
  Arguments arguments;
  if (!bind_arguments(kernel, values, static_cast<size_t>(PyVectorcall_NARGS(flags)), names, arguments)) {
    return nullptr;
  }
  try {
    return call_kernel(kernel, arguments);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// ---- construction ----------------------------------------------------------------------------------------------

bool read_dtypes(Kernel& kernel, PyObject* names) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
    if (name == nullptr) return false;
    const DType* dtype = find_dtype(name);
    if (dtype == nullptr) {
      PyErr_Format(PyExc_ValueError, "kernel '%s': tensor %zd has the unknown dtype '%s' (known: %s)",
                   kernel.symbol.c_str(), i, name, known_dtypes().c_str());
      return false;
    }
    kernel.dtypes.push_back(*dtype);
  }
  return true;
}

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

bool build_kernel(Kernel& kernel, PyObject* args, PyObject* keywords) {
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
  return check_counts(kernel) && read_dtypes(kernel, dtypes) && load_library(kernel);
}

PyObject* new_kernel(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  try {
    auto kernel = std::make_unique<Kernel>();
    if (!build_kernel(*kernel, args, keywords)) return nullptr;
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    auto* object = reinterpret_cast<KernelObject*>(self);
    object->call = vectorcall;
    object->kernel = kernel.release();
    return self;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

void free_kernel(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<KernelObject*>(self)->kernel;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* describe(PyObject* self) {
  const Kernel& kernel = *reinterpret_cast<KernelObject*>(self)->kernel;
  return PyUnicode_FromFormat("<CpuKernel %s from %s>", kernel.symbol.c_str(), kernel.library.c_str());
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(KernelObject, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyDoc_STRVAR(documentation,
             "CpuKernel(library, symbol, dtypes, partial_floats, partial_floats_per_sample, scratch_floats, "
             "row_elements)\n--\n\n"
             "A generated CPU kernel; call it with (tensors, rows, batch_inner, batch_size, integers).");

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>(documentation)},
    {Py_tp_new, reinterpret_cast<void*>(new_kernel)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_kernel)},
    {Py_tp_repr, reinterpret_cast<void*>(describe)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"te_fuser._native.CpuKernel", sizeof(KernelObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

PyObject* make_cpu_kernel_type() { return PyType_FromSpec(&spec); }

}  // namespace te
