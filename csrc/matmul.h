// The Python type CudaMatmul: a matrix product with an epilogue, by cuBLASLt.
#pragma once

#include <Python.h>

#include "workspace.h"

namespace te {

struct CudaMatmul;

// The type, ready to be put into the module; nullptr with a Python error set.
PyObject* make_cuda_matmul_type();

// The product whose bound method `make` a function is, or nullptr; it lives as long as the function.
CudaMatmul* product_made_by(PyObject* function);

// What that method does, with a workspace that several products may share. Needs the interpreter lock; a new reference,
// or nullptr with a Python error set.
PyObject* make_product(CudaMatmul& product, PyObject* const* inputs, Py_ssize_t given, Workspace& workspace);

// A product of tensors that are there, what is written among them; false with a Python error set.
bool run_product(CudaMatmul& product, PyObject* const* tensors, size_t count, Workspace& workspace);

}  // namespace te
