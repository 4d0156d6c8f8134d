#define PY_SSIZE_T_CLEAN  // lengths of bytes are Py_ssize_t
#include "cuda_kernel.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "callable_type.h"
#include "cuda_launch.h"
#include "gil.h"
#include "kernel_call.h"
#include "tensor.h"

namespace te {
namespace {

constexpr long long most_partial_rows = 65536;

PyTypeObject* kernel_type = nullptr;  // set once while the module is imported

CudaProgram& program_of(PyObject* self) { return owned_by<CudaProgram>(self); }

// ---- the call from Python --------------------------------------------------------------------------------------

// A seed on the host is read now and passed by value; its memory then is nullptr. One on the device is read by the
// kernel: so each replay of a graph draws anew.
bool read_seed(const CudaProgram& program, PyObject* tensor, const ArgumentSite& site, CudaCall& call, Memory* memory) {
  const DType& dtype = program.tensors[static_cast<size_t>(site.index)].dtype;
  TensorView view;
  if (!view_tensor(tensor, site, &view)) return false;
  if (view.dimensions != 1 || view.shape[0] != 2) {
    PyErr_Format(PyExc_ValueError, "kernel '%s': tensor %zd must be (seed, offset), two numbers", site.kernel, site.index);
    return false;
  }
  if (!view.is_on_host) return read_cuda_tensor(tensor, dtype, site, &call.device, memory);
  void* data = nullptr;
  if (!read_cpu_tensor(tensor, dtype, site, &data)) return false;
  std::memcpy(call.seed, data, sizeof(call.seed));
  return true;
}

bool read_tensors(const CudaProgram& program, PyObject* tensors, CudaCall& call, Memory* memory) {
  for (size_t i = 0; i < program.tensors.size(); ++i) {
    const auto index = static_cast<Py_ssize_t>(i);
    const ArgumentSite site{program.name(), index};
    PyObject* tensor = PyTuple_GET_ITEM(tensors, index);
    const bool read = program.draws && i + 1 == program.inputs
                          ? read_seed(program, tensor, site, call, &memory[i])
                          : read_cuda_tensor(tensor, program.tensors[i].dtype, site, &call.device, &memory[i]);
    if (!read) return false;
  }
  return true;
}

// The numbers of the call have been read; an integer's __index__ may run Python code, which could still change tensors, so
// those come last.
bool call_kernel(CudaProgram& program, PyObject* tensors, PyObject* numbers, CudaCall& call) {
  const char* name = program.name();
  const auto given = static_cast<size_t>(PyTuple_GET_SIZE(numbers));
  if (given != program.integers) {
    PyErr_Format(PyExc_ValueError, "kernel '%s' takes %zu integers, got %zu", name, program.integers, given);
    return false;
  }
  Array<int64_t> integers(program.integers);
  if (!read_integers(name, numbers, integers.data())) return false;
  Array<Memory> memory(program.tensors.size());
  if (!read_tensors(program, tensors, call, memory.data())) return false;
  void* stream = nullptr;
  if (!current_cuda_stream(call.device, &stream)) return false;
  call.stream = static_cast<CudaDriver::Stream>(stream);
  call.tensors = memory.data();
  call.integers = integers.data();
  return without_gil(name, [&](Failure& failure) { return program.run(call, failure); });
}

PyObject* bind_and_call(CudaProgram& program, PyObject* const* values, size_t positional, PyObject* names,
                        int64_t repeats) {
  Arguments arguments;
  if (!bind_arguments(program.name(), program.tensors.size(), values, positional, names, arguments)) {
    return nullptr;
  }
  CudaCall call{-1, nullptr, nullptr, {}, nullptr, repeats, {0, 0}};
  if (!read_sizes(program.name(), arguments, call.sizes)) return nullptr;
  if (!call_kernel(program, arguments.tensors, arguments.integers, call)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  return bind_and_call(program_of(self), values, static_cast<size_t>(PyVectorcall_NARGS(flags)), names, 1);
}

// ---- methods ---------------------------------------------------------------------------------------------------

PyObject* load(PyObject* self, PyObject* device) { return load_module(program_of(self).module, device); }

PyObject* repeat(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  const long long times = count > 0 ? PyLong_AsLongLong(values[0]) : 0;
  if (times == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (times < 1) {
    PyErr_SetString(PyExc_ValueError, "repeat(times, tensors, rows, ...): times must be positive");
    return nullptr;
  }
  return bind_and_call(program_of(self), values + 1, static_cast<size_t>(count - 1), nullptr, times);
}

PyObject* sizes(PyObject* self, PyObject* args) {
  long long rows = 0, samples = 0, multiprocessors = 0;
  if (!PyArg_ParseTuple(args, "LLL:sizes", &rows, &samples, &multiprocessors)) return nullptr;
  if (rows < 0 || samples < 0 || multiprocessors < 1) {
    PyErr_SetString(PyExc_ValueError, "sizes(rows, samples, multiprocessors) takes no negative numbers");
    return nullptr;
  }
  const CudaProgram& program = program_of(self);
  const CudaSizes found = program.sizes(rows, samples, multiprocessors);
  PyObject* blocks = PyTuple_New(static_cast<Py_ssize_t>(program.launches.size()));
  if (blocks == nullptr) return nullptr;
  for (size_t i = 0; i < program.launches.size(); ++i) {
    PyTuple_SET_ITEM(blocks, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(found.blocks[i]));
  }
  return Py_BuildValue("(NL)", blocks, static_cast<long long>(found.groups));
}

// ---- construction ----------------------------------------------------------------------------------------------

bool refuse(const CudaProgram& program, const char* why) {
  PyErr_Format(PyExc_ValueError, "kernel '%s': %s", program.name(), why);
  return false;
}

bool read_alignments(CudaProgram& program, const std::vector<DType>& dtypes, PyObject* alignments) {
  if (PyTuple_GET_SIZE(alignments) != static_cast<Py_ssize_t>(dtypes.size())) {
    return refuse(program, "there must be one alignment for each dtype");
  }
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const long long bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(alignments, static_cast<Py_ssize_t>(i)));
    if (bytes == -1 && PyErr_Occurred() != nullptr) return false;
    // Copies of misaligned inputs lie as PyTorch's allocator lays them.
    if (bytes < 1 || bytes > 64) return refuse(program, "alignments lie between 1 and 64 bytes");
    program.tensors.push_back({dtypes[i], bytes});
  }
  return true;
}

bool read_widths(CudaProgram& program, PyObject* widths) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(widths); ++i) {
    const long long width = PyLong_AsLongLong(PyTuple_GET_ITEM(widths, i));
    if (width == -1 && PyErr_Occurred() != nullptr) return false;
    if (width < 0) return refuse(program, "partial sums cannot have a negative width");
    program.partial_widths.push_back(width);
    program.partial_rows.push_back(1);
  }
  return true;
}

bool read_partial_rows(CudaProgram& program, PyObject* rows) {
  if (PyTuple_GET_SIZE(rows) == 0) return true;
  if (PyTuple_GET_SIZE(rows) != static_cast<Py_ssize_t>(program.partial_widths.size())) {
    return refuse(program, "there must be one number of partial rows for each width");
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); ++i) {
    const long long count = PyLong_AsLongLong(PyTuple_GET_ITEM(rows, i));
    if (count == -1 && PyErr_Occurred() != nullptr) return false;
    if (count < 1 || count > most_partial_rows) return refuse(program, "a group has 1 to 65536 rows of partial sums");
    program.partial_rows[static_cast<size_t>(i)] = count;
  }
  return true;
}

// How many things of a source there are; 1 for the numbers of the call itself.
size_t count_of(const CudaProgram& program, Source source) {
  switch (source) {
    case Source::tensor: return program.tensors.size();
    case Source::partial: return program.partial_widths.size();
    case Source::row_value: return program.row_values;
    case Source::integer: return program.integers;
    default: return 1;
  }
}

constexpr struct {
  const char* name;
  Source source;
} sources[] = {
    {"tensor", Source::tensor},           {"partial", Source::partial},         {"row_value", Source::row_value},
    {"integer", Source::integer},         {"seed_value", Source::seed_value},   {"seed_offset", Source::seed_offset},
    {"rows", Source::rows},               {"batch_inner", Source::batch_inner}, {"batch_size", Source::batch_size},
    {"groups", Source::groups},
};

bool read_argument(CudaProgram& program, PyObject* pair, const char* symbol, CudaLaunch& launch) {
  const char* kind = nullptr;
  int index = 0;
  if (!PyArg_ParseTuple(pair, "si;an argument is (kind, index)", &kind, &index)) return false;
  for (const auto& known : sources) {
    if (std::string(known.name) != kind) continue;
    if (index < 0 || static_cast<size_t>(index) >= count_of(program, known.source)) {
      PyErr_Format(PyExc_ValueError, "kernel '%s': '%s' has an argument (%s, %d), which there is not",
                   program.name(), symbol, kind, index);
      return false;
    }
    launch.arguments.push_back({known.source, static_cast<uint32_t>(index)});
    if (known.source == Source::seed_value) program.draws = true;
    return true;
  }
  PyErr_Format(PyExc_ValueError, "kernel '%s': '%s' has an argument of the unknown kind '%s'", program.name(), symbol,
               kind);
  return false;
}

bool read_grid(const CudaProgram& program, PyObject* numbers, CudaLaunch& launch) {
  if (PyTuple_GET_SIZE(numbers) == 2) {
    long long fixed = 0, per_sample = 0;
    if (!PyArg_ParseTuple(numbers, "LL", &fixed, &per_sample)) return false;
    if (fixed < 0 || per_sample < 0) return refuse(program, "a grid cannot be negative");
    launch.grid = SumGrid{fixed, per_sample};
    return true;
  }
  long long tiles = 0, rows = 0, blocks = 0;
  int per_sample = 0, sums = 0;
  if (!PyArg_ParseTuple(numbers, "LLLpp;a grid is (tiles, rows per block, blocks per multiprocessor, per sample, sums) "
                        "or (fixed, per sample)", &tiles, &rows, &blocks, &per_sample, &sums)) {
    return false;
  }
  if (tiles < 1 || rows < 1 || blocks < 1) return refuse(program, "a grid over rows must be positive");
  launch.grid = RowGrid{tiles, rows, blocks, per_sample != 0, sums != 0};
  return true;
}

bool read_launch(CudaProgram& program, PyObject* item) {
  const char* symbol = nullptr;
  int threads = 0, shared_bytes = 0;
  PyObject *grid = nullptr, *arguments = nullptr;
  if (!PyTuple_Check(item) ||
      !PyArg_ParseTuple(item, "siiO!O!", &symbol, &threads, &shared_bytes, &PyTuple_Type, &grid, &PyTuple_Type,
                        &arguments)) {
    PyErr_Clear();
    return refuse(program, "a launch is (symbol, threads, shared bytes, grid, arguments)");
  }
  if (threads < 1 || threads > 1024) return refuse(program, "a block has 1 to 1024 threads");
  if (shared_bytes < 0) return refuse(program, "a block cannot have negative shared memory");
  CudaLaunch launch{RowGrid{}, {}};
  if (!read_grid(program, grid, launch)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
    PyObject* pair = PyTuple_GET_ITEM(arguments, i);
    if (!PyTuple_Check(pair)) return refuse(program, "an argument is (kind, index)");
    if (!read_argument(program, pair, symbol, launch)) return false;
  }
  program.module.functions.push_back({symbol, static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes)});
  program.launches.push_back(std::move(launch));
  return true;
}

// Pairs (written, read) of tensors: each at most once, of the same dtype.
bool read_overwrites(CudaProgram& program, PyObject* pairs) {
  std::vector<bool> seen(program.tensors.size());
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); ++i) {
    PyObject* pair = PyTuple_GET_ITEM(pairs, i);
    Py_ssize_t written = 0, read = 0;
    if (!PyTuple_Check(pair)) return refuse(program, "what overwrites is (written, read)");
    if (!PyArg_ParseTuple(pair, "nn;what overwrites is (written, read)", &written, &read)) return false;
    const auto out = static_cast<size_t>(written), in = static_cast<size_t>(read);
    if (out < program.inputs || out >= seen.size() || in >= program.inputs) {
      return refuse(program, "what overwrites is a tensor that is written, over one that is read");
    }
    if (seen[out] || seen[in]) return refuse(program, "a tensor overwrites one other, and is overwritten once");
    if (std::string(program.tensors[out].dtype.name) != program.tensors[in].dtype.name) {
      return refuse(program, "a tensor overwrites another of its own dtype");
    }
    seen[out] = seen[in] = true;
    program.overwrites.emplace_back(out, in);
  }
  return true;
}

bool takes_all_sums(const CudaProgram& program, const CudaLaunch& launch) {
  const auto count = [&launch](Source source) {
    return static_cast<size_t>(std::count_if(launch.arguments.begin(), launch.arguments.end(),
                                             [source](const LaunchArgument& a) { return a.source == source; }));
  };
  const size_t sums = program.partial_widths.size();
  return count(Source::partial) == sums && count(Source::tensor) == sums;
}

bool read_launches(CudaProgram& program, PyObject* items) {
  const Py_ssize_t count = PyTuple_GET_SIZE(items);
  if (count < 1 || count > static_cast<Py_ssize_t>(most_launches)) return refuse(program, "it has 1 to 4 launches");
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!read_launch(program, PyTuple_GET_ITEM(items, i))) return false;
  }
  if (!std::holds_alternative<RowGrid>(program.launches[0].grid)) {
    return refuse(program, "its first launch must be one over rows");
  }
  for (const CudaLaunch& launch : program.launches) {
    if (std::holds_alternative<SumGrid>(launch.grid) && !takes_all_sums(program, launch)) {
      return refuse(program, "a launch that adds up partial sums takes all of them, and as many tensors");
    }
  }
  return true;
}

bool read_program(CudaProgram& program, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"name",     "cubin",          "dtypes",     "alignments", "inputs",
                                "launches", "partial_widths", "row_values", "integers",   "waits",  "overwrites",
                                "partial_rows", nullptr};
  const char *name = nullptr, *cubin = nullptr;
  Py_ssize_t cubin_size = 0, inputs = 0, row_values = 0, integers = 0;
  PyObject *dtype_names = nullptr, *alignments = nullptr, *launches = nullptr, *widths = nullptr;
  PyObject *overwrites = nullptr, *partial_rows = nullptr;
  int waits = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "sy#O!O!nO!O!nn|pO!O!:CudaKernel", const_cast<char**>(names), &name,
                                   &cubin, &cubin_size, &PyTuple_Type, &dtype_names, &PyTuple_Type, &alignments, &inputs,
                                   &PyTuple_Type, &launches, &PyTuple_Type, &widths, &row_values, &integers, &waits,
                                   &PyTuple_Type, &overwrites, &PyTuple_Type, &partial_rows)) {
    return false;
  }
  program.module.name = name;
  program.module.waits = waits != 0;
  program.module.cubin.assign(cubin, static_cast<size_t>(cubin_size));
  std::vector<DType> dtypes;
  if (!read_dtypes(name, dtype_names, dtypes) || !read_alignments(program, dtypes, alignments)) return false;
  if (inputs < 0 || inputs > static_cast<Py_ssize_t>(dtypes.size()) || row_values < 0 || integers < 0) {
    return refuse(program, "inputs, row_values and integers must not be negative, nor inputs more than there are tensors");
  }
  if (dtypes.empty()) return refuse(program, "it takes no tensor, so nothing says on which device it runs");
  program.inputs = static_cast<size_t>(inputs);
  program.row_values = static_cast<size_t>(row_values);
  program.integers = static_cast<size_t>(integers);
  if (!read_widths(program, widths)) return false;
  if (partial_rows != nullptr && !read_partial_rows(program, partial_rows)) return false;
  if (!read_launches(program, launches)) return false;
  if (overwrites != nullptr && !read_overwrites(program, overwrites)) return false;
  const bool has_seed = inputs > 0 && std::string(dtypes[program.inputs - 1].name) == "int64";
  return !program.draws || has_seed || refuse(program, "it draws, and its last input is no seed (int64)");
}

std::unique_ptr<CudaProgram> build_program(PyObject* args, PyObject* keywords) {
  auto program = std::make_unique<CudaProgram>();
  return read_program(*program, args, keywords) ? std::move(program) : nullptr;
}

PyObject* describe(PyObject* self) {
  const CudaProgram& program = program_of(self);
  const char* plural = program.launches.size() == 1 ? "" : "es";
  return PyUnicode_FromFormat("<CudaKernel %s, %zu launch%s>", program.name(), program.launches.size(), plural);
}

const auto guarded_repeat = reinterpret_cast<void (*)()>(guarded<repeat, PyObject* const*, Py_ssize_t>);

PyMethodDef methods[] = {
    {"load", load, METH_O, "load(device)\n--\n\nLoad the machine code on a device, as the first call there would."},
    {"repeat", reinterpret_cast<PyCFunction>(guarded_repeat), METH_FASTCALL,
     "repeat(times, tensors, rows, batch_inner, batch_size, integers)\n--\n\n"
     "Launch the same call several times, to measure what a launch alone costs."},
    {"sizes", sizes, METH_VARARGS,
     "sizes(rows, samples, multiprocessors)\n--\n\nThe blocks of each launch, and the groups of partial sums."},
    {nullptr, nullptr, 0, nullptr},
};

PyDoc_STRVAR(documentation,
             "CudaKernel(name, cubin, dtypes, alignments, inputs, launches, partial_widths, row_values, integers, "
             "waits=False, overwrites=(), partial_rows=())\n--\n\n"
             "A generated CUDA kernel; call it with (tensors, rows, batch_inner, batch_size, integers).");

}  // namespace

PyObject* load_module(CudaModule& module, PyObject* device) {
  const long number = PyLong_AsLong(device);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  const auto index = static_cast<int32_t>(std::clamp<long>(number, -1, std::numeric_limits<int32_t>::max()));
  const auto work = [&](Failure& failure) { return module.load(index, failure); };
  if (!without_gil(module.name.c_str(), work)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* make_cuda_kernel_type() {
  PyObject* type = make_callable_type<CudaProgram, build_program, vectorcall>(
      {"te_fuser._native.CudaKernel", documentation, describe, methods});
  kernel_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

CudaProgram* cuda_program(PyObject* object) {
  return kernel_type != nullptr && Py_IS_TYPE(object, kernel_type) ? &program_of(object) : nullptr;
}

bool call_cuda_kernel(CudaProgram& program, PyObject* tensors, const CallSizes& sizes, PyObject* integers) {
  if (static_cast<size_t>(PyTuple_GET_SIZE(tensors)) != program.tensors.size()) {
    PyErr_Format(PyExc_TypeError, "kernel '%s' takes %zu tensors, got %zd", program.name(), program.tensors.size(),
                 PyTuple_GET_SIZE(tensors));
    return false;
  }
  CudaCall call{-1, nullptr, nullptr, sizes, nullptr, 1, {0, 0}};
  try {
    return call_kernel(program, tensors, integers, call);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

}  // namespace te
