// New tensors from PyTorch, made by its Python functions: its exchange API's own know no record_stream.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace te {

// Looks up what making tensors needs of Python; false with a Python error set.
bool init_new_tensors();

// A new, uninitialised tensor of these sizes on the device of `like`; dtype nullptr: in its dtype. A new reference, or
// nullptr with a Python error set.
PyObject* new_tensor(PyObject* like, const int64_t* sizes, size_t count, PyObject* dtype);

// One of the sizes and the dtype of `model`, in less time.
PyObject* new_tensor_like(PyObject* model);

}  // namespace te
