// The Python type CudaKernel: a generated CUDA kernel, ready to be called with tensors on any device.
#pragma once

#include <Python.h>

namespace te {

// A new reference to the type, or nullptr with a Python error set.
PyObject* make_cuda_kernel_type();

}  // namespace te
