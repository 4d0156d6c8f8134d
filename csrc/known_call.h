// What tells whether a call is like an earlier one, each in one native step.
#pragma once

#include <pybind11/pybind11.h>

namespace te {

// attributes, call_key, like, refuse_create_graph, refusing, run_if_like and tensor_key.
bool bind_known_call(pybind11::module_& module);

}  // namespace te
