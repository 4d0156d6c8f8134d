// The Python types of exchanges between GPUs.
#pragma once

#include <pybind11/pybind11.h>

namespace te {

void bind_exchanges(pybind11::module_& module);

}  // namespace te
