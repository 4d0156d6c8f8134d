#include "matmul_call.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "failure.h"
#include "gil.h"
#include "new_tensor.h"
#include "tensor.h"

namespace te {
namespace {

using Role = MatmulArgument::Role;
using Use = Epilogue::Use;

constexpr uintptr_t vector_alignment = 16;  // of biases, sums and aux tensors

// Set once while the module is imported.
struct TorchNames {
  PyObject* clone = nullptr;
  PyObject* precision = nullptr;  // of float32 products on CUDA: precision(cuda, matmul)
  PyObject* cuda = nullptr;
  PyObject* matmul = nullptr;
};
TorchNames torch;

// Whether a float32 product may be TensorFloat-32 now: torch.backends.cuda.matmul.fp32_precision.
bool read_precision(const MatmulForm& form, MatmulCall& call) {
  if (std::strcmp(form.dtype.name, "float32") != 0) return true;
  PyObject* arguments[] = {torch.cuda, torch.matmul};
  const Reference found = Reference::steal(PyObject_Vectorcall(torch.precision, arguments, 2, nullptr));
  if (!found) return false;
  call.tf32 = PyUnicode_Check(found.get()) && PyUnicode_CompareWithASCIIString(found.get(), "tf32") == 0;
  return true;
}

bool is_misaligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % vector_alignment != 0; }

// Puts a row-major copy of an input in the tensor's place.
bool copy_input(PyObject** tensor, Reference& copy) {
  const Reference flat = Reference::steal(PyObject_CallMethod(*tensor, "contiguous", nullptr));
  if (!flat) return false;
  copy = flat.get() == *tensor ? Reference::steal(PyObject_CallMethodNoArgs(*tensor, torch.clone)) : flat;
  *tensor = copy.get();
  return static_cast<bool>(copy);
}

bool read_matrix(const CudaMatmul& product, size_t index, PyObject* tensor, Matrix* matrix, MatmulReading& reading) {
  const MatmulArgument& argument = product.arguments[index];
  const ArgumentSite site{product.name(), static_cast<Py_ssize_t>(index)};
  bool fits = false;
  if (!read_cuda_matrix(tensor, *argument.dtype, site, &reading.call.device, matrix, &fits)) return false;
  const bool factor = argument.role == Role::a || argument.role == Role::b;
  const bool narrow = argument.dtype->bits == 8 && factor;
  // The library sums factors only as they usually lie; those of 8 bits are taken as they are said to, in steps of 16 bytes.
  const bool may_be_flipped = factor && product.matmul.form.epilogue->bias != Use::written && !narrow;
  const bool needs_alignment = argument.role == Role::bias || argument.role == Role::aux || narrow;
  const auto is_in_steps = [&] {
    constexpr auto step = static_cast<int64_t>(vector_alignment);
    return matrix->columns % step == 0 && matrix->stride % step == 0;
  };
  const auto suits = [&] {
    return fits && (may_be_flipped || !matrix->flipped) && !(needs_alignment && is_misaligned(matrix->data)) &&
           (!narrow || is_in_steps());
  };
  if (suits()) return true;
  if (!argument.written) {
    if (!copy_input(&tensor, reading.copies[index]) ||
        !read_cuda_matrix(tensor, *argument.dtype, site, &reading.call.device, matrix, &fits)) {
      return false;
    }
    if (suits()) return true;
  }
  if (narrow) {
    PyErr_Format(PyExc_ValueError, "product '%s': %s has %lld numbers of 8 bits in a row; cuBLASLt takes multiples of 16",
                 site.kernel, argument.name(), static_cast<long long>(matrix->columns));
    return false;
  }
  PyErr_Format(PyExc_ValueError,
               "product '%s': %s is written and must be rows of elements side by side%s; make it contiguous",
               site.kernel, argument.name(), needs_alignment ? ", at an address that 16 divides" : "");
  return false;
}

bool read_bias(const CudaMatmul& product, size_t index, PyObject* tensor, MatmulReading& reading, int64_t* length) {
  Matrix vector;
  if (!read_matrix(product, index, tensor, &vector, reading)) return false;
  reading.call.bias = vector.data;
  *length = vector.rows == 1 ? vector.columns : -1;
  return true;
}

// What a factor of 8 bits is multiplied by; the library reads it at multiples of 16 bytes alone.
bool read_scale(const CudaMatmul& product, size_t index, PyObject* tensor, MatmulReading& reading) {
  const MatmulArgument& argument = product.arguments[index];
  const ArgumentSite site{product.name(), static_cast<Py_ssize_t>(index)};
  MatmulCall& call = reading.call;
  Memory memory;
  if (!read_cuda_tensor(tensor, *argument.dtype, site, &call.device, &memory)) return false;
  if (is_misaligned(memory.data) && (!copy_input(&tensor, reading.copies[index]) ||
                                     !read_cuda_tensor(tensor, *argument.dtype, site, &call.device, &memory))) {
    return false;
  }
  const bool of_a = argument.role == Role::scale_a;
  const FactorScales& scales = of_a ? *product.matmul.form.scales_a : *product.matmul.form.scales_b;
  const int64_t count = memory.bytes / static_cast<int64_t>(sizeof(float));
  if (scales.is_one() && count != 1) {
    PyErr_Format(PyExc_ValueError, "product '%s': %s is one number", site.kernel, argument.name());
    return false;
  }
  (of_a ? call.scale_a : call.scale_b) = memory.data;
  (of_a ? call.scales_a : call.scales_b) = count;
  return true;
}

bool is_scale(Role role) { return role == Role::scale_a || role == Role::scale_b; }

Matrix* matrix_of(MatmulCall& call, Role role) {
  switch (role) {
    case Role::a: return &call.a;
    case Role::b: return &call.b;
    case Role::out: return &call.out;
    case Role::c: return &call.c;
    default: return &call.aux;
  }
}

bool check_bias(const CudaMatmul& product, int64_t length, const MatmulSizes& sizes) {
  const MatmulForm& form = product.matmul.form;
  if (form.epilogue->bias == Use::none) return true;
  const int64_t wanted = form.epilogue->bias_length == Epilogue::Length::columns ? sizes.n : sizes.m;
  if (length == wanted) return true;
  PyErr_Format(PyExc_ValueError, "product '%s': the bias or sums must be [%lld], got %lld numbers", product.name(),
               static_cast<long long>(wanted), static_cast<long long>(length));
  return false;
}

Matrix imagined(int64_t rows, int64_t columns) { return {nullptr, rows, columns, columns, false}; }

}  // namespace

bool init_matmul_calls() {
  torch.precision = import_from("torch._C", "_get_fp32_precision_getter").release();
  torch.clone = PyUnicode_InternFromString("clone");
  torch.cuda = PyUnicode_InternFromString("cuda");
  torch.matmul = PyUnicode_InternFromString("matmul");
  return torch.precision && torch.clone && torch.cuda && torch.matmul;
}

bool read_call(const CudaMatmul& product, PyObject* const* tensors, size_t count, MatmulReading& reading) {
  const MatmulForm& form = product.matmul.form;
  if (count != product.arguments.size()) {
    PyErr_Format(PyExc_ValueError, "product '%s' takes %zu tensors, got %zu", product.name(), product.arguments.size(),
                 count);
    return false;
  }
  MatmulCall& call = reading.call;
  call.device = -1;
  int64_t bias_length = 0;
  for (size_t i = 0; i < count; ++i) {
    const Role role = product.arguments[i].role;
    const bool read = is_scale(role)       ? read_scale(product, i, tensors[i], reading)
                      : role == Role::bias ? read_bias(product, i, tensors[i], reading, &bias_length)
                                         : read_matrix(product, i, tensors[i], matrix_of(call, role), reading);
    if (!read) return false;
  }
  Failure failure;
  if (!product.matmul.sizes(call, reading.sizes, failure)) {
    raise_failure(failure, nullptr);
    return false;
  }
  if (!check_bias(product, bias_length, reading.sizes) || !read_precision(form, call)) return false;
  void* stream = nullptr;
  if (!current_cuda_stream(call.device, &stream)) return false;
  call.stream = static_cast<CublasLt::Stream>(stream);
  return true;
}

bool imagine_call(const CudaMatmul& product, int32_t device, const MatmulSizes& sizes, MatmulCall& call) {
  const MatmulForm& form = product.matmul.form;
  const auto [m, n, k] = sizes;
  call = {};
  call.device = device;
  call.a = form.transpose_a ? imagined(k, m) : imagined(m, k);
  call.b = form.transpose_b ? imagined(n, k) : imagined(k, n);
  call.out = imagined(m, n);
  if (form.addend == Addend::c) call.c = imagined(m, n);
  if (form.epilogue->aux != Use::none) call.aux = imagined(m, n);
  // Nothing is read there; the library wants a pointer where an epilogue has one.
  call.bias = call.aux.data = call.scale_a = call.scale_b = reinterpret_cast<void*>(uintptr_t{4096});
  call.scales_a = form.scales_a->count(m, k);
  call.scales_b = form.scales_b->count(n, k);
  return read_precision(form, call);
}

// ---- outputs ---------------------------------------------------------------------------------------------------

namespace {

// The last two sizes of a factor's view as a matrix.
bool view_factor(const CudaMatmul& product, PyObject* tensor, size_t index, TensorView* view) {
  const ArgumentSite site{product.name(), static_cast<Py_ssize_t>(index)};
  if (!view_tensor(tensor, site, view)) return false;
  if (view->dimensions >= 1) return true;
  PyErr_Format(PyExc_ValueError, "product '%s': %s is a scalar", site.kernel, index == 0 ? "a" : "b");
  return false;
}

int64_t rows_of(const TensorView& view) {
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < view.dimensions; ++i) rows *= view.shape[i];
  return rows;
}

// The output's sizes: those of a, with b's columns for its features.
bool output_sizes(const CudaMatmul& product, PyObject* const* inputs, std::vector<int64_t>& sizes) {
  const MatmulForm& form = product.matmul.form;
  TensorView a, b;
  if (!view_factor(product, inputs[0], 0, &a) || !view_factor(product, inputs[1], 1, &b)) return false;
  if (form.transpose_a) {
    sizes = {a.shape[a.dimensions - 1]};
  } else {
    sizes.assign(a.shape, a.shape + a.dimensions - 1);
  }
  sizes.push_back(form.transpose_b ? rows_of(b) : b.shape[b.dimensions - 1]);
  return true;
}

std::vector<int64_t> sizes_of(const CudaMatmul& product, Role role, const std::vector<int64_t>& out) {
  const Epilogue& epilogue = *product.matmul.form.epilogue;
  std::vector<int64_t> sizes = out;
  if (role == Role::bias) {
    const bool columns = epilogue.bias_length == Epilogue::Length::columns;
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < out.size(); ++i) rows *= out[i];
    sizes = {columns ? out.back() : rows};
  }
  return sizes;
}

// Checks that the tensors are as many as are read.
bool check_inputs(const CudaMatmul& product, Py_ssize_t given) {
  const auto read = std::count_if(product.arguments.begin(), product.arguments.end(),
                                  [](const MatmulArgument& argument) { return !argument.written; });
  const bool adds = product.matmul.form.addend == Addend::out;
  if (given == read && !adds) return true;
  PyErr_Format(PyExc_ValueError, "product '%s': make() takes the %zd tensors that are read, got %zd%s", product.name(),
               static_cast<Py_ssize_t>(read), given,
               adds ? "; this one adds to what its output holds, so give that" : "");
  return false;
}

}  // namespace

bool make_outputs(const CudaMatmul& product, PyObject* const* inputs, Py_ssize_t given, MatmulTensors& tensors) {
  std::vector<int64_t> out;
  if (!check_inputs(product, given) || !output_sizes(product, inputs, out)) return false;
  size_t next = 0;
  for (const MatmulArgument& argument : product.arguments) {
    if (!argument.written) {
      tensors.all[tensors.count++] = inputs[next++];
      continue;
    }
    const bool alike = argument.dtype->name == product.arguments[0].dtype->name;  // names are of one table
    PyObject* dtype = alike ? nullptr : argument.torch_dtype.get();
    const std::vector<int64_t> sizes = sizes_of(product, argument.role, out);
    PyObject* made = new_tensor(inputs[0], sizes.data(), sizes.size(), dtype);
    if (made == nullptr) return false;
    tensors.made[tensors.made_count++] = Reference::steal(made);
    tensors.all[tensors.count++] = made;
  }
  return true;
}

}  // namespace te
