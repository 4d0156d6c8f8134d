// Weights in 8 bits, many by one launch, as a Python type; te_fuser/kernels/quantize_weights.cu.
#pragma once

#include <Python.h>

namespace te {

// A new reference to the type, or nullptr with a Python error set.
PyObject* make_quantize_weights_type();

}  // namespace te
