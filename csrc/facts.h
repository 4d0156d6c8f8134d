// Facts that something was made by, and whether they still hold.
#pragma once

#include <pybind11/pybind11.h>

#include "reference.h"

namespace te {

inline PyObject* at(PyObject* tuple, Py_ssize_t index) { return PyTuple_GET_ITEM(tuple, index); }

// 1, 0, or -1 with a Python error set, as whatever is asked here.
inline int are_equal(PyObject* found, PyObject* wanted) { return PyObject_RichCompareBool(found, wanted, Py_EQ); }
inline int is_equal(const Reference& found, PyObject* wanted) { return found ? are_equal(found.get(), wanted) : -1; }

// Whether all of a `Facts` tuple hold, as far as one does not fail before.
int hold(PyObject* facts);

// still_hold and tensor_place.
bool bind_facts(pybind11::module_& module);

}  // namespace te
