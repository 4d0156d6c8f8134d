// Whether a tensor's memory is anybody else's business.
#pragma once

#include <pybind11/pybind11.h>

namespace te {

// Looks up what torch offers to count references; without it no tensor counts as one's own. False with a Python error
// set.
bool init_sole_owner();

// Whether nobody but the caller can see this tensor's memory: so many references to the object are all there are, no
// C++ code holds the tensor (a saved variable, a DLPack capsule), no other tensor or storage object its storage, and
// PyTorch allocated that.
// False with or without a Python error set.
bool is_sole_owner(PyObject* tensor, Py_ssize_t references);

// Adds `holders` to a module; false with a Python error set.
bool bind_holders(pybind11::module_& module);

}  // namespace te
