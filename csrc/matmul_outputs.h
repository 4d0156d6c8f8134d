// Outputs that a CudaMatmul makes itself, from the tensors that it reads.
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>

#include "matmul_product.h"
#include "reference.h"

namespace te {

// The tensors of one call, in the order of the product's arguments; those that were made are owned.
struct MatmulTensors {
  std::array<PyObject*, most_matmul_tensors> all{};
  std::array<Reference, most_matmul_tensors> made;
  size_t count = 0, made_count = 0;
};

// Makes what is written beside `given` inputs, all that is read; false with a Python error set.
bool make_outputs(const CudaMatmul& product, PyObject* const* inputs, Py_ssize_t given, MatmulTensors& tensors);

// What was made, alone or as a tuple; nullptr with a Python error set.
PyObject* take_outputs(MatmulTensors& tensors);

}  // namespace te
