#define PY_SSIZE_T_CLEAN  // lengths of bytes are Py_ssize_t
#include "bindings.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "callable_type.h"
#include "cuda_kernel.h"
#include "cuda_module.h"
#include "gil.h"
#include "new_tensor.h"
#include "reference.h"
#include "te_quantize_weights.h"
#include "tensor.h"

namespace te {
namespace {

constexpr char name[] = "quantize_weights";
constexpr unsigned threads = 256;
constexpr int64_t side = 128;  // of a tile
constexpr uintptr_t alignment = 16;

// What is said of a weight: two bits for its dtype, and what is made of it.
constexpr unsigned kind_bits = 3, by_rows = 4, turned = 8, records = 16;
constexpr const char* kinds[] = {"float32", "bfloat16", "float16"};

struct WeightsKernel {
  CudaModule module;
  Reference out_dtype;
  std::string out_name;
};

WeightsKernel& kernel_of(PyObject* self) { return owned_by<WeightsKernel>(self); }

// One call: what is launched, and what has to live until then or is given.
struct WeightsCall {
  int32_t device = -1;
  std::vector<WeightPlaces> places;
  std::vector<Reference> copies, made;
};

int64_t tiles_of(const WeightPlaces& weight) {
  return (weight.height + side - 1) / side * ((weight.width + side - 1) / side);
}

// The weight, or a copy that the kernel can read.
Reference readable(PyObject* weight, const ArgumentSite& site, TensorView* view) {
  if (!view_tensor(weight, site, view)) return Reference();
  Reference found = Reference::borrow(weight);
  if (!view->is_row_major) {
    found = Reference::steal(PyObject_CallMethod(weight, "contiguous", nullptr));
    if (!found || !view_tensor(found.get(), site, view)) return Reference();
  }
  if (reinterpret_cast<uintptr_t>(view->data) % alignment != 0) {
    found = Reference::steal(PyObject_CallMethod(found.get(), "clone", nullptr));
    if (!found || !view_tensor(found.get(), site, view)) return Reference();
  }
  return found;
}

bool read_pointer(PyObject* tensor, const char* dtype, Py_ssize_t index, WeightsCall& call, void** data) {
  Memory memory;
  if (!read_cuda_tensor(tensor, *find_dtype(dtype), {name, index}, &call.device, &memory)) return false;
  *data = memory.data;
  return true;
}

// A new tensor for a layout.
bool make(const WeightsKernel& kernel, PyObject* like, int64_t height, int64_t width, WeightsCall& call, void** data) {
  const int64_t sizes[] = {height, width};
  Reference found = Reference::steal(new_tensor(like, sizes, 2, kernel.out_dtype.get()));
  if (!found || !read_pointer(found.get(), kernel.out_name.c_str(), -1, call, data)) return false;
  call.made.push_back(std::move(found));
  return true;
}

// Reads a weight and the numbers behind it, of which `index` is the first, and makes what is wanted.
bool add_weight(const WeightsKernel& kernel, unsigned what, PyObject* const* tensors, Py_ssize_t index,
                WeightsCall& call) {
  TensorView view;
  Reference weight = readable(tensors[index], {name, index}, &view);
  if (!weight) return false;
  if (view.dimensions != 2 || std::max(view.shape[0], view.shape[1]) > std::numeric_limits<int32_t>::max()) {
    PyErr_Format(PyExc_ValueError, "%s: tensor %zd must be a weight [out, in]", name, index);
    return false;
  }
  const int64_t height = view.shape[0], width = view.shape[1];
  WeightPlaces place{};
  void *elements = nullptr, *scale = nullptr, *amax = nullptr;
  if (!read_pointer(weight.get(), kinds[what & kind_bits], index, call, &elements)) return false;
  if (!read_pointer(tensors[index + 1], "float32", index + 1, call, &scale)) return false;
  if ((what & records) != 0 && !read_pointer(tensors[index + 2], "float32", index + 2, call, &amax)) return false;
  if ((what & by_rows) != 0 && !make(kernel, weight.get(), height, width, call, &place.rows)) return false;
  if ((what & turned) != 0 && !make(kernel, weight.get(), width, height, call, &place.turned)) return false;
  call.copies.push_back(std::move(weight));
  if (height == 0 || width == 0) return true;
  place.elements = elements;
  place.scale = static_cast<const float*>(scale);
  place.amax = static_cast<float*>(amax);
  place.height = static_cast<int>(height);
  place.width = static_cast<int>(width);
  place.kind = static_cast<int>(what & kind_bits);
  call.places.push_back(place);
  return true;
}

// Needs no interpreter lock.
bool launch(WeightsKernel& kernel, const WeightsCall& call, CudaDriver::Stream stream, Failure& failure) {
  const CudaModule::Loaded* loaded = kernel.module.on(call.device, stream, failure);
  if (loaded == nullptr) return false;
  const CurrentContext current(*loaded->driver, loaded->context);
  if (current.error() != CudaDriver::success) {
    return kernel.module.refuse(*loaded->driver, "the device's context cannot be made current", current.error(), failure);
  }
  for (size_t first = 0; first < call.places.size(); first += WeightList::most) {
    WeightList list{};
    auto count = static_cast<int>(std::min<size_t>(WeightList::most, call.places.size() - first));
    int64_t tiles = 0;
    for (int i = 0; i < count; ++i) {
      list.weights[i] = call.places[first + static_cast<size_t>(i)];
      list.weights[i].first_tile = static_cast<int>(tiles);
      tiles += tiles_of(list.weights[i]);
    }
    void* parameters[] = {&list, &count};
    if (!kernel.module.launch(*loaded, 0, tiles, stream, parameters, failure)) return false;
  }
  return true;
}

// kernel(what, *tensors)
PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flags, PyObject*) {
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count < 1 || !PyBytes_Check(values[0])) {
    PyErr_Format(PyExc_TypeError, "%s takes bytes that say what is made, and tensors", name);
    return nullptr;
  }
  WeightsKernel& kernel = kernel_of(self);
  WeightsCall call;
  Py_ssize_t index = 0;
  for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(values[0]); ++i) {
    const auto what = static_cast<unsigned char>(PyBytes_AS_STRING(values[0])[i]);
    const Py_ssize_t taken = (what & records) != 0 ? 3 : 2;
    if ((what & kind_bits) > 2 || index + taken > count - 1) {
      PyErr_Format(PyExc_ValueError, "%s: weight %zd is said to be what its tensors are not", name, i);
      return nullptr;
    }
    if (!add_weight(kernel, what, values + 1, index, call)) return nullptr;
    index += taken;
  }
  if (!call.places.empty()) {
    void* stream = nullptr;
    if (!current_cuda_stream(call.device, &stream)) return nullptr;
    const auto work = [&](Failure& failure) {
      return launch(kernel, call, static_cast<CudaDriver::Stream>(stream), failure);
    };
    if (!without_gil(name, work)) return nullptr;
  }
  return alone_or_tuple(call.made.data(), call.made.size());
}

PyObject* load(PyObject* self, PyObject* device) { return load_module(kernel_of(self).module, device); }

std::unique_ptr<WeightsKernel> build(PyObject* args, PyObject*) {
  const char *cubin = nullptr, *dtype = "float8_e4m3fn";
  Py_ssize_t size = 0;
  if (!PyArg_ParseTuple(args, "y#|s:QuantizeWeights", &cubin, &size, &dtype)) return nullptr;
  if (find_dtype(dtype) == nullptr || find_dtype(dtype)->bits != 8) {
    PyErr_Format(PyExc_ValueError, "%s makes numbers of 8 bits, not %s", name, dtype);
    return nullptr;
  }
  auto kernel = std::make_unique<WeightsKernel>();
  kernel->out_name = dtype;
  kernel->out_dtype = import_from("torch", dtype);
  if (!kernel->out_dtype) return nullptr;
  kernel->module.name = name;
  kernel->module.cubin.assign(cubin, static_cast<size_t>(size));
  kernel->module.functions = {{name, threads, 0}};
  kernel->module.waits = true;
  return kernel;
}

PyObject* describe(PyObject*) { return PyUnicode_FromString("<QuantizeWeights>"); }

PyMethodDef methods[] = {
    {"load", load, METH_O, "load(device)\n--\n\nLoad the machine code on a device, as the first call there would."},
    {nullptr, nullptr, 0, nullptr},
};

PyDoc_STRVAR(documentation,
             "QuantizeWeights(cubin, dtype='float8_e4m3fn')\n--\n\n"
             "The kernel that makes 8 bits of weights; call it with (what, *tensors).");

}  // namespace

PyObject* make_quantize_weights_type() {
  return make_callable_type<WeightsKernel, build, vectorcall>(
      {"te_fuser._native.QuantizeWeights", documentation, describe, methods});
}

}  // namespace te
