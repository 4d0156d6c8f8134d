#include "kernel_call.h"

#include <algorithm>

namespace te {
namespace {

constexpr size_t argument_count = 5;
constexpr const char* argument_names[argument_count] = {"tensors", "rows", "batch_inner", "batch_size", "integers"};
using Slots = std::array<PyObject*, argument_count>;

bool place_keyword(const char* kernel, PyObject* name, PyObject* value, Slots& slots) {
  for (size_t i = 0; i < argument_count; ++i) {
    if (PyUnicode_CompareWithASCIIString(name, argument_names[i]) != 0) continue;
    if (slots[i] != nullptr) {
      PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' was given twice", kernel, argument_names[i]);
      return false;
    }
    slots[i] = value;
    return true;
  }
  PyErr_Format(PyExc_TypeError, "kernel '%s': unknown argument '%U'", kernel, name);
  return false;
}

bool place_arguments(const char* kernel, PyObject* const* values, size_t positional, PyObject* names, Slots& slots) {
  if (positional > argument_count) {
    PyErr_Format(PyExc_TypeError, "kernel '%s' takes %zu arguments, got %zu", kernel, argument_count, positional);
    return false;
  }
  slots.fill(nullptr);
  std::copy_n(values, positional, slots.begin());
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* value = values[positional + static_cast<size_t>(i)];
    if (!place_keyword(kernel, PyTuple_GET_ITEM(names, i), value, slots)) return false;
  }
  for (size_t i = 0; i < argument_count; ++i) {
    if (slots[i] != nullptr) continue;
    PyErr_Format(PyExc_TypeError, "kernel '%s': argument '%s' is missing", kernel, argument_names[i]);
    return false;
  }
  return true;
}

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

bool bind_arguments(const char* kernel, size_t tensor_count, PyObject* const* values, size_t positional,
                    PyObject* names, Arguments& arguments) {
  Slots slots;
  if (!place_arguments(kernel, values, positional, names, slots)) return false;
  arguments = {slots[0], {slots[1], slots[2], slots[3]}, slots[4]};
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
    if (!read_integer(kernel, arguments.sizes[i], argument_names[1 + i], targets[i])) return false;
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
