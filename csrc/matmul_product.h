// What a CudaMatmul is made of: a product, the tensors of its calls, and what Python gave it to call, as functions that
// know which algorithm was measured to be the best. A problem is a tuple there, an algorithm is bytes.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cublaslt.h"
#include "matmul_problem.h"
#include "reference.h"
#include "tensor.h"

namespace te {

// One tensor of a call. Calls take them in the order of the roles, as far as the product has them.
struct MatmulArgument {
  enum class Role : uint8_t { a, b, scale_a, scale_b, out, c, bias, aux };
  Role role;
  const DType* dtype;
  bool written;
  Reference torch_dtype;

  const char* name() const;
};

constexpr size_t most_matmul_tensors = 8;

struct CudaMatmul {
  explicit CudaMatmul(MatmulForm form) : matmul(std::move(form)) {}
  const char* name() const { return matmul.form.name.c_str(); }

  Matmul matmul;
  std::vector<MatmulArgument> arguments;
  Reference on_empty;  // on_empty(*tensors), for products of no elements
  Reference tuned;     // (find, drop), which matmul.tuned calls
};

// The product of the arguments that the Python type documents; nullptr with a Python error set. Throws std::bad_alloc.
std::unique_ptr<CudaMatmul> build_matmul(PyObject* args, PyObject* keywords);

// These return false or nullptr with a Python error set.

// (device, m, n, k, strides of a, b, out, c, aux, layout), as Python has a problem.
PyObject* tuple_of(const MatmulKey& key);
bool read_problem(PyObject* tuple, MatmulKey* key);

// (algorithm, bytes of workspace, waves).
PyObject* tuple_of(const CublasLt::Candidate& candidate);
bool read_algorithm(const char* bytes, Py_ssize_t length, CublasLt::Algorithm* algorithm);

}  // namespace te
