#include "known_call.h"

#include <string>

#include "reference.h"
#include "tensor.h"

namespace te {
namespace {

bool has_arguments(Py_ssize_t given, Py_ssize_t wanted, const char* name) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, given);
  return false;
}

// attributes(objects, name): that attribute of each, as a tuple.
PyObject* attributes(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!has_arguments(given, 2, "attributes")) return nullptr;
  const Reference objects = Reference::steal(PySequence_Tuple(arguments[0]));
  if (!objects) return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(objects.get());
  Reference found = Reference::steal(PyTuple_New(count));
  if (!found) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyObject_GetAttr(PyTuple_GET_ITEM(objects.get(), i), arguments[1]);
    if (value == nullptr) return nullptr;
    PyTuple_SET_ITEM(found.get(), i, value);
  }
  return found.release();
}

// tensor_key(tensors): all but values and strides that is known of them, as bytes; None where one is no plain tensor.
PyObject* tensor_key(PyObject*, PyObject* tensors) {
  const Reference all = Reference::steal(PySequence_Tuple(tensors));
  if (!all) return nullptr;
  std::string key;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all.get()); ++i) {
    if (append_key(PyTuple_GET_ITEM(all.get(), i), key)) continue;
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
  }
  return PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size()));
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"attributes", fast(attributes), METH_FASTCALL, "That attribute of each object, as a tuple."},
    {"tensor_key", tensor_key, METH_O, "What plans know of tensors, as bytes; None where one is no plain tensor."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool bind_known_call(pybind11::module_& module) { return PyModule_AddFunctions(module.ptr(), methods) == 0; }

}  // namespace te
