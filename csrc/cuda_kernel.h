// The Python type CudaKernel: a generated CUDA kernel, ready to be called with tensors on any device.
#pragma once

#include <Python.h>

#include "cuda_launch.h"

namespace te {

// A new reference to the type, or nullptr with a Python error set.
PyObject* make_cuda_kernel_type();

// What a CudaKernel is made of; nullptr for any other object.
CudaProgram* cuda_program(PyObject* object);

// The kernel called with tuples of tensors and of integers, on PyTorch's current stream; false with a Python error set.
bool call_cuda_kernel(CudaProgram& program, PyObject* tensors, const CallSizes& sizes, PyObject* integers);

// load(device) of a Python type: loads machine code there; None, or nullptr with a Python error set.
PyObject* load_module(CudaModule& module, PyObject* device);

}  // namespace te
