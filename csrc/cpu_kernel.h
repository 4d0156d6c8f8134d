// The Python type CpuKernel: a generated CPU kernel, loaded from a library and ready to be called.
#pragma once

#include <Python.h>

namespace te {

// A new reference to the type, or nullptr with a Python error set.
PyObject* make_cpu_kernel_type();

}  // namespace te
