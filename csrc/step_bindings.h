// The Python types KernelStep, FunctionStep and Program.
#pragma once

#include <pybind11/pybind11.h>

namespace te {

void bind_steps(pybind11::module_& module);

}  // namespace te
