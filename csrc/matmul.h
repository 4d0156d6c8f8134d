// The Python type CudaMatmul: a matrix product with an epilogue, by cuBLASLt.
#pragma once

#include <Python.h>

#include <cstddef>

namespace te {

// The type, ready to be put into the module; nullptr with a Python error set.
PyObject* make_cuda_matmul_type();

// What a call of the Python object does, for native code: tensors in the order that the type documents. Needs the
// interpreter lock; returns false with a Python error set.
bool run_matmul(PyObject* matmul, PyObject* const* tensors, size_t count);

}  // namespace te
