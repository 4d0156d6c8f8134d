#include "facts.h"

#include <string>

#include "tensor.h"

namespace te {
namespace {

// The fields of a `Facts` tuple, each a tuple of tuples.
enum Field : Py_ssize_t { members, empty, filled, items, owned, placed, calls, pairs, fields };

// Whether something holds of all items of a tuple.
template <class Holds>
int all_hold(PyObject* tuple, Holds holds) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    const int held = holds(at(tuple, i));
    if (held != 1) return held;
  }
  return 1;
}

// (dict, values): those are its values, in this order.
int has_members(PyObject* fact) {
  PyObject* values = at(fact, 1);
  Py_ssize_t position = 0, count = 0;
  PyObject *name, *value;
  while (PyDict_Next(at(fact, 0), &position, &name, &value)) {
    if (count >= PyTuple_GET_SIZE(values) || at(values, count++) != value) return 0;
  }
  return count == PyTuple_GET_SIZE(values);
}

// What a dict has there, borrowed, None standing for nothing; null with a Python error set.
PyObject* item_or_none(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  return found != nullptr || PyErr_Occurred() != nullptr ? found : Py_None;
}

// (dict, key, value): that is what it has there, None standing for nothing.
int has_item(PyObject* fact) {
  PyObject* found = item_or_none(at(fact, 0), at(fact, 1));
  return found == nullptr ? -1 : are_equal(found, at(fact, 2));
}

// The dict of that name of a module; empty with or without a Python error set.
Reference dict_of(PyObject* module, PyObject* name) {
  Reference found = Reference::steal(PyObject_GetAttr(module, name));
  return found && PyDict_Check(found.get()) ? found : Reference();
}

// The module that a weak reference is to, or None where that is gone.
Reference module_of(PyObject* weak) { return Reference::steal(PyObject_CallNoArgs(weak)); }

// What a path of names leads to from a module; None where it leads nowhere, empty with a Python error set.
Reference module_at(Reference module, PyObject* path) {
  static PyObject* modules = PyUnicode_InternFromString("_modules");
  for (Py_ssize_t i = 0; module && module.get() != Py_None && i < PyTuple_GET_SIZE(path); ++i) {
    const Reference inside = dict_of(module.get(), modules);
    module = inside ? Reference::borrow(item_or_none(inside.get(), at(path, i))) : Reference();
  }
  return module;
}

// (weak reference to an owner, path, weak reference to a module, name, whether): the path leads from the owner to the
// module, and this has a parameter of that name or not.
int is_owned(PyObject* fact) {
  static PyObject* parameters = PyUnicode_InternFromString("_parameters");
  const Reference module = module_at(module_of(at(fact, 0)), at(fact, 1)), wanted = module_of(at(fact, 2));
  if (!module || !wanted) return PyErr_Occurred() != nullptr ? -1 : 0;
  if (module.get() == Py_None || module.get() != wanted.get()) return 0;
  const Reference own = dict_of(module.get(), parameters);
  PyObject* found = own ? item_or_none(own.get(), at(fact, 3)) : nullptr;
  if (found == nullptr) return PyErr_Occurred() != nullptr ? -1 : 0;
  return (found != Py_None) == (at(fact, 4) == Py_True);
}

// (dict, key, tensor, place): that tensor is what it has there, and lies there still.
int is_placed(PyObject* fact) {
  PyObject* tensor = at(fact, 2);
  if (item_or_none(at(fact, 0), at(fact, 1)) != tensor) return PyErr_Occurred() != nullptr ? -1 : 0;
  PyObject* wanted = at(fact, 3);
  if (!PyBytes_Check(wanted)) return 0;
  std::string place;
  place.reserve(static_cast<size_t>(PyBytes_GET_SIZE(wanted)));
  if (!append_place(tensor, place)) return PyErr_Occurred() != nullptr ? -1 : 0;
  return place.compare(0, std::string::npos, PyBytes_AS_STRING(wanted), PyBytes_GET_SIZE(wanted)) == 0;
}

// Dicts are looked into without a look at what they are, so this is the one place that checks.
bool are_facts(PyObject* facts) {
  if (PyTuple_Check(facts) && PyTuple_GET_SIZE(facts) == fields) return true;
  PyErr_SetString(PyExc_TypeError, "expected Facts");
  return false;
}

// still_hold(facts): whether all of them do.
PyObject* still_hold(PyObject*, PyObject* facts) {
  if (!are_facts(facts)) return nullptr;
  const int held = hold(facts);
  return held < 0 ? nullptr : PyBool_FromLong(held);
}

// tensor_place(tensor): all but values that is known of it, where it lies as well, as bytes; None of no plain tensor.
PyObject* tensor_place(PyObject*, PyObject* tensor) {
  std::string place;
  if (append_place(tensor, place)) return PyBytes_FromStringAndSize(place.data(), static_cast<Py_ssize_t>(place.size()));
  return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"still_hold", still_hold, METH_O, "Whether all these facts hold."},
    {"tensor_place", tensor_place, METH_O, "What is known of a tensor and where it lies, as bytes; None of no plain one."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int hold(PyObject* facts) {
  int held = all_hold(at(facts, members), has_members);
  if (held == 1) held = all_hold(at(facts, empty), [](PyObject* d) -> int { return PyDict_GET_SIZE(d) == 0; });
  if (held == 1) held = all_hold(at(facts, filled), [](PyObject* d) -> int { return PyDict_GET_SIZE(d) != 0; });
  if (held == 1) held = all_hold(at(facts, items), has_item);
  if (held == 1) held = all_hold(at(facts, owned), is_owned);
  if (held == 1) held = all_hold(at(facts, placed), is_placed);
  if (held == 1) {
    held = all_hold(at(facts, calls), [](PyObject* fact) {
      return is_equal(Reference::steal(PyObject_CallNoArgs(at(fact, 0))), at(fact, 1));
    });
  }
  if (held == 1) held = all_hold(at(facts, pairs), [](PyObject* fact) { return are_equal(at(fact, 0), at(fact, 1)); });
  return held;
}

bool bind_facts(pybind11::module_& module) { return PyModule_AddFunctions(module.ptr(), methods) == 0; }

}  // namespace te
