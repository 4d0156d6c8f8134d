// What the Python types of the module share: an instance owns one C++ object and is called by vectorcall.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace te {

template <class Owned>
struct CallableObject {
  PyObject_HEAD
  vectorcallfunc call;
  Owned* owned;
};

template <class Owned>
Owned& owned_by(PyObject* self) {
  return *reinterpret_cast<CallableObject<Owned>*>(self)->owned;
}

// A function that Python calls, with C++'s want of memory as Python's.
template <auto function, class... Arguments>
PyObject* guarded(PyObject* self, Arguments... arguments) {
  try {
    return function(self, arguments...);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

template <class Owned, auto build, auto call>
PyObject* new_callable(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  try {
    std::unique_ptr<Owned> owned = build(args, keywords);
    if (owned == nullptr) return nullptr;
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    auto* object = reinterpret_cast<CallableObject<Owned>*>(self);
    object->call = guarded<call, PyObject* const*, size_t, PyObject*>;
    object->owned = owned.release();
    return self;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

template <class Owned>
void free_callable(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete &owned_by<Owned>(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// What a type is called, what help() and repr() say of it, and what it offers beside being called.
struct CallableType {
  const char* name;
  const char* documentation;
  reprfunc describe;
  PyMethodDef* methods = nullptr;
  PyGetSetDef* properties = nullptr;
};

// A new reference to the type, or nullptr with a Python error set. `build(args, keywords)` makes what an instance owns,
// or gives nullptr with a Python error set; `call(self, values, flags, names)` is its vectorcall. Both may throw
// std::bad_alloc.
template <class Owned, auto build, auto call>
PyObject* make_callable_type(const CallableType& type) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallableObject<Owned>, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  std::vector<PyType_Slot> slots = {
      {Py_tp_doc, const_cast<char*>(type.documentation)},
      {Py_tp_new, reinterpret_cast<void*>(new_callable<Owned, build, call>)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_callable<Owned>)},
      {Py_tp_repr, reinterpret_cast<void*>(type.describe)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, members},
  };
  if (type.methods != nullptr) slots.push_back({Py_tp_methods, type.methods});
  if (type.properties != nullptr) slots.push_back({Py_tp_getset, type.properties});
  slots.push_back({0, nullptr});
  PyType_Spec spec = {type.name, sizeof(CallableObject<Owned>), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
                      slots.data()};
  return PyType_FromSpec(&spec);
}

}  // namespace te
