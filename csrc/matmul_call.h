// The tensors of one call of a CudaMatmul, read from Python into a MatmulCall, and outputs that it makes itself.
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "matmul_problem.h"
#include "matmul_product.h"
#include "reference.h"

namespace te {

// Looks up what reading calls needs of PyTorch; false with a Python error set.
bool init_matmul_calls();

// A call as far as it is read, and copies that live until it is done.
struct MatmulReading {
  MatmulCall call{};
  MatmulSizes sizes{};
  std::array<Reference, most_matmul_tensors> copies;
};

// Reads the tensors of a call in the order of the product's arguments, and PyTorch's stream and precision; inputs that
// the library cannot take as they lie are copied. False with a Python error set.
bool read_call(const CudaMatmul& product, PyObject* const* tensors, size_t count, MatmulReading& reading);

// A call with matrices as PyTorch's allocator would lay them, of which the heuristic reads the sizes alone: nothing of
// it may run. False with a Python error set.
bool imagine_call(const CudaMatmul& product, int32_t device, const MatmulSizes& sizes, MatmulCall& call);

// The tensors of one call, in the order of the product's arguments; those that were made are owned.
struct MatmulTensors {
  std::array<PyObject*, most_matmul_tensors> all{};
  std::array<Reference, most_matmul_tensors> made;
  size_t count = 0, made_count = 0;
};

// Makes what is written beside `given` inputs, all that is read; false with a Python error set.
bool make_outputs(const CudaMatmul& product, PyObject* const* inputs, Py_ssize_t given, MatmulTensors& tensors);

}  // namespace te
