// What tuning passes between Python and a product: problems as tuples, algorithms as bytes, and the functions that know
// which algorithm was measured to be the best.
#pragma once

#include <Python.h>

#include "cublaslt.h"
#include "matmul_problem.h"

namespace te {

// Every function here that returns a bool or an object returns false or nullptr with a Python error set.

// (device, m, n, k, strides of a, b, out, c, aux, layout), as Python has a problem.
PyObject* tuple_of(const MatmulKey& key);
bool read_problem(PyObject* tuple, MatmulKey* key);

// (algorithm, bytes of workspace, waves).
PyObject* tuple_of(const CublasLt::Candidate& candidate);
bool read_algorithm(const char* bytes, Py_ssize_t length, CublasLt::Algorithm* algorithm);

// The functions of a tuple (find, drop), which has to live as long as they are called.
bool read_tuned(PyObject* functions, TunedAlgorithms& tuned);

}  // namespace te
