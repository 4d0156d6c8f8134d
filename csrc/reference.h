// A counted reference to a Python object.
#pragma once

#include <Python.h>

#include <cstddef>
#include <utility>

namespace te {

// Owns one reference, or none. Copying and destroying need the interpreter lock.
class Reference {
 public:
  Reference() = default;
  static Reference steal(PyObject* object) { return Reference(object); }
  static Reference borrow(PyObject* object) {
    Py_XINCREF(object);
    return Reference(object);
  }
  Reference(const Reference& other) : object_(other.object_) { Py_XINCREF(object_); }
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Reference(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// What was made, taken out of these references: alone, or as a tuple where there are several; nullptr with a Python error
// set.
inline PyObject* alone_or_tuple(Reference* made, size_t count) {
  if (count == 1) return made[0].release();
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(count));
  for (size_t i = 0; tuple != nullptr && i < count; ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), made[i].release());
  }
  return tuple;
}

// What a module calls by a name; empty, with a Python error set, where there is none.
inline Reference import_from(const char* module_name, const char* name) {
  const Reference module = Reference::steal(PyImport_ImportModule(module_name));
  return module ? Reference::steal(PyObject_GetAttrString(module.get(), name)) : Reference();
}

}  // namespace te
