#include "kernel_call.h"

namespace te {
namespace {

constexpr size_t argument_count = 5;
constexpr const char* size_names[] = {"rows", "batch_inner", "batch_size"};

bool require_tuple(const char* kernel, PyObject* value, const char* name) {
  if (PyTuple_Check(value)) return true;
  PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' must be a tuple, got %s", kernel, name,
               Py_TYPE(value)->tp_name);
  return false;
}

bool read_integer(const char* kernel, PyObject* value, const char* name, int64_t* out) {
  *out = PyLong_AsLongLong(value);
  if (*out != -1 || PyErr_Occurred() == nullptr) return true;
  const bool wrong_type = PyErr_ExceptionMatches(PyExc_TypeError);
  const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
  if (!wrong_type && !too_large) return false;
  PyErr_Clear();
  if (wrong_type) {
    PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' must be an integer, got %s", kernel, name,
                 Py_TYPE(value)->tp_name);
  } else {
    PyErr_Format(PyExc_ValueError, "kernel '%s': argument '%s' does not fit into 64 bits", kernel, name);
  }
  return false;
}

}  // namespace

bool bind_arguments(const char* kernel, size_t tensor_count, PyObject* const* values, size_t count, PyObject* names,
                    Arguments& arguments) {
  if (count != argument_count || (names != nullptr && PyTuple_GET_SIZE(names) > 0)) {
    PyErr_Format(PyExc_TypeError, "kernel '%s' takes (tensors, rows, batch_inner, batch_size, integers) by their places",
                 kernel);
    return false;
  }
  arguments = {values[0], {values[1], values[2], values[3]}, values[4]};
  if (!require_tuple(kernel, arguments.tensors, "tensors")) return false;
  if (!require_tuple(kernel, arguments.integers, "integers")) return false;
  const auto given = static_cast<size_t>(PyTuple_GET_SIZE(arguments.tensors));
  if (given == tensor_count) return true;
  PyErr_Format(PyExc_ValueError, "kernel '%s' takes %zu tensors, got %zu", kernel, tensor_count, given);
  return false;
}

bool read_sizes(const char* kernel, const Arguments& arguments, CallSizes& sizes) {
  int64_t* targets[] = {&sizes.rows, &sizes.batch_inner, &sizes.batch_size};
  for (size_t i = 0; i < 3; ++i) {
    if (!read_integer(kernel, arguments.sizes[i], size_names[i], targets[i])) return false;
  }
  const int64_t least = sizes.rows > 0 ? 1 : 0;  // an empty batch has no rows, and rows / batch_inner is never asked
  if (sizes.rows >= 0 && sizes.batch_inner >= least && sizes.batch_size >= least) return true;
  PyErr_Format(PyExc_ValueError,
               "kernel '%s': rows must not be negative, batch_inner and batch_size must be positive, "
               "got %lld, %lld and %lld",
               kernel, static_cast<long long>(sizes.rows), static_cast<long long>(sizes.batch_inner),
               static_cast<long long>(sizes.batch_size));
  return false;
}

bool read_integers(const char* kernel, PyObject* integers, int64_t* values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(integers); ++i) {
    if (!read_integer(kernel, PyTuple_GET_ITEM(integers, i), "integers", &values[i])) return false;
  }
  return true;
}

bool read_dtypes(const char* kernel, PyObject* names, std::vector<DType>& dtypes) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
    if (name == nullptr) return false;
    const DType* dtype = find_dtype(name);
    if (dtype == nullptr) {
      PyErr_Format(PyExc_ValueError, "kernel '%s': tensor %zd has the unknown dtype '%s' (known: %s)", kernel, i, name,
                   known_dtypes().c_str());
      return false;
    }
    dtypes.push_back(*dtype);
  }
  return true;
}

}  // namespace te
