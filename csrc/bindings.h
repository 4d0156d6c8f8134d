// What the files of the module add to it; those whose types others need as well have headers of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace te {

// A new reference to a type, or nullptr with a Python error set: CpuKernel, a generated CPU kernel that is loaded from a
// library and ready to be called; QuantizeWeights, many weights in 8 bits by one launch.
PyObject* make_cpu_kernel_type();
PyObject* make_quantize_weights_type();

// Types of exchanges between GPUs; KernelStep, FunctionStep and Program.
void bind_exchanges(pybind11::module_& module);
void bind_steps(pybind11::module_& module);

// still_hold and tensor_place of facts; attributes, call_key, like, refuse_create_graph, refusing, run_if_like and
// tensor_key, which tell in one native step whether a call is like an earlier one; false with a Python error set.
bool bind_guards(pybind11::module_& module);

}  // namespace te
