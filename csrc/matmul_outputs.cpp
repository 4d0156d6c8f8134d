#include "matmul_outputs.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "new_tensor.h"
#include "tensor.h"

namespace te {
namespace {

using Role = MatmulArgument::Role;

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

PyObject* take_outputs(MatmulTensors& tensors) {
  if (tensors.made_count == 1) return tensors.made[0].release();
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(tensors.made_count));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < tensors.made_count; ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), tensors.made[i].release());
  }
  return tuple;
}

}  // namespace te
