// Guards: whether the facts that something was made by hold still, and whether a call is like an earlier one.
#include <string>

#include "bindings.h"
#include "kernel_call.h"
#include "reference.h"
#include "tensor.h"

namespace te {
namespace {

PyObject* at(PyObject* tuple, Py_ssize_t index) { return PyTuple_GET_ITEM(tuple, index); }

// 1, 0, or -1 with a Python error set, as whatever is asked here.
int are_equal(PyObject* found, PyObject* wanted) { return PyObject_RichCompareBool(found, wanted, Py_EQ); }
int is_equal(const Reference& found, PyObject* wanted) { return found ? are_equal(found.get(), wanted) : -1; }

// ------------------------------------------------------------------------------------------------------------- facts

// The fields of a `Facts` tuple, each a tuple of tuples.
enum FactsField : Py_ssize_t { members, empty, filled, items, owned, placed, calls, pairs, fields };

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

// Whether all of a `Facts` tuple hold, as far as one does not fail before.
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

// -------------------------------------------------------------------------------------------------- keys of tensors

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

// What `append` knows of tensors, as bytes; None where it knows nothing of one.
PyObject* key_by(bool (*append)(PyObject*, std::string&), PyObject* tensors) {
  const Reference all = Reference::steal(PySequence_Tuple(tensors));
  if (!all) return nullptr;
  std::string key;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all.get()); ++i) {
    if (append(PyTuple_GET_ITEM(all.get(), i), key)) continue;
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
  }
  return PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size()));
}

// tensor_key(tensors): all but values and strides that is known of them, as bytes; None where one is no plain tensor.
PyObject* tensor_key(PyObject*, PyObject* tensors) { return key_by(append_key, tensors); }

// call_key(tensors): the same, of DTensors too.
PyObject* call_key(PyObject*, PyObject* tensors) { return key_by(append_call_key, tensors); }

// ------------------------------------------------------------------------------------------------------------- calls

// The fields of a `Known` tuple.
enum KnownField : Py_ssize_t { facts, names, slots, known_key, prepared, outputs, function, held, known_fields };

// Appends what is known of the named inputs, where these are the names in this order: 1, 0, or -1 with an error set.
int append_inputs(PyObject* inputs, PyObject* wanted, std::string& key) {
  Py_ssize_t position = 0, count = 0;
  PyObject *name, *tensor;
  while (PyDict_Next(inputs, &position, &name, &tensor)) {
    if (count >= PyTuple_GET_SIZE(wanted)) return 0;
    const int same = are_equal(name, at(wanted, count++));
    if (same != 1) return same;
    if (!append_key(tensor, key)) return PyErr_Occurred() != nullptr ? -1 : 0;
  }
  return count == PyTuple_GET_SIZE(wanted);
}

// The parameters of a call as a list, with what is known of them appended; empty with or without an error set.
Reference append_parameters(PyObject* slots, std::string& key) {
  const Py_ssize_t count = PyTuple_GET_SIZE(slots);
  Reference found = Reference::steal(PyList_New(count));
  for (Py_ssize_t i = 0; found && i < count; ++i) {
    PyObject* slot = at(slots, i);
    PyObject* parameter = PyDict_GetItemWithError(at(slot, 0), at(slot, 1));
    if (parameter == nullptr || !append_call_key(parameter, key)) return Reference();
    PyList_SET_ITEM(found.get(), i, Py_NewRef(parameter));
  }
  return found;
}

// is_negative(): whether its elements are to be read with the other sign.
int is_negative(PyObject* tensor) {
  static PyObject* name = PyUnicode_InternFromString("is_neg");
  return is_equal(Reference::steal(PyObject_CallMethodNoArgs(tensor, name)), Py_True);
}

// Whether no tensor of a call is read with the other sign: x, and the named inputs. An error may be set.
int are_as_stored(PyObject* x, PyObject* inputs) {
  int as_stored = 1 - is_negative(x);
  Py_ssize_t position = 0;
  PyObject *name, *tensor;
  while (as_stored == 1 && PyDict_Next(inputs, &position, &name, &tensor)) as_stored = 1 - is_negative(tensor);
  return as_stored;
}

// The parameters of a call (known, x, inputs, outputs) that is like the known one; empty with or without an error set.
Reference parameters_if_like(PyObject* const* arguments, Py_ssize_t given, const char* name) {
  if (!has_arguments(given, 4, name)) return Reference();
  PyObject* known = arguments[0];
  const bool is_known =
      PyTuple_Check(known) && PyTuple_GET_SIZE(known) == known_fields && PyBytes_Check(at(known, known_key));
  if (!is_known || !PyDict_Check(arguments[2])) {
    PyErr_SetString(PyExc_TypeError, "expected a Known, a tensor, a dict of inputs and a tuple of names");
    return Reference();
  }
  PyObject* wanted = at(known, known_key);
  std::string key;
  key.reserve(static_cast<size_t>(PyBytes_GET_SIZE(wanted)));
  Reference parameters;
  int same = append_key(arguments[1], key) ? append_inputs(arguments[2], at(known, names), key) : 0;
  if (same == 1) same = are_equal(arguments[3], at(known, outputs));
  if (same == 1) {
    parameters = append_parameters(at(known, slots), key);
    same = parameters && key.compare(0, std::string::npos, PyBytes_AS_STRING(wanted), PyBytes_GET_SIZE(wanted)) == 0;
  }
  if (same == 1) same = hold(at(known, facts));
  if (same == 1) same = are_as_stored(arguments[1], arguments[2]);
  return same == 1 && PyErr_Occurred() == nullptr ? parameters : Reference();
}

PyObject* none_or_error() { return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_None); }

// like(known, x, inputs, outputs): the parameters of a call that is like the known one; None where it is not.
PyObject* like(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  Reference parameters = parameters_if_like(arguments, given, "like");
  return parameters ? parameters.release() : none_or_error();
}

// ---------------------------------------------------------------------------------------------------------- backward

// refuse_create_graph(...): an error where grad mode is on, so where a backward is to be differentiated itself. Nodes of
// PyTorch's have it as a hook, which gets their gradients and changes none.
PyObject* refuse_create_graph(PyObject*, PyObject* const*, Py_ssize_t) {
  static PyObject* ask = import_from("torch", "is_grad_enabled").release();
  if (ask == nullptr) return nullptr;
  const int on = is_equal(Reference::steal(PyObject_CallNoArgs(ask)), Py_True);
  if (on == 0) return Py_NewRef(Py_None);
  if (on == 1) {
    PyErr_SetString(PyExc_RuntimeError,
                    "te_fuser does not differentiate its backward: call backward() without create_graph=True, or "
                    "use " TE_FUSER_INSTEAD ", which plain autograd differentiates any number of times");
  }
  return nullptr;
}

// A tensor whose hook is refuse_create_graph: a node of PyTorch's takes it from there, without a handle for each call.
PyObject* make_refusing() {
  const Reference empty = import_from("torch", "empty");
  const Reference hook = import_from("te_fuser._native", "refuse_create_graph");
  const Reference size = Reference::steal(Py_BuildValue("(i)", 0));
  const Reference options = Reference::steal(Py_BuildValue("{s:s,s:O}", "device", "cpu", "requires_grad", Py_True));
  if (!empty || !hook || !size || !options) return nullptr;
  Reference made = Reference::steal(PyObject_Call(empty.get(), size.get(), options.get()));
  if (!made) return nullptr;
  const Reference handle = Reference::steal(PyObject_CallMethod(made.get(), "register_hook", "O", hook.get()));
  return handle ? made.release() : nullptr;
}

// Lets the backward of a result that autograd recorded refuse to be differentiated; false with a Python error set.
bool refuse_in_backward_of(PyObject* result) {
  static PyObject* grad_fn = PyUnicode_InternFromString("grad_fn");
  static PyObject* output_nr = PyUnicode_InternFromString("output_nr");
  static PyObject* take_hooks = PyUnicode_InternFromString("_register_hook_dict");
  static PyObject* hooks_of = make_refusing();
  if (hooks_of == nullptr) return false;
  const Reference node = Reference::steal(PyObject_GetAttr(result, grad_fn));
  if (!node || node.get() == Py_None) return static_cast<bool>(node);
  const Reference number = Reference::steal(PyObject_GetAttr(result, output_nr));
  if (!number) return false;
  if (PyLong_AsLong(number.get()) == 0) {
    return static_cast<bool>(Reference::steal(PyObject_CallMethodOneArg(node.get(), take_hooks, hooks_of)));
  }
  const Reference hook = import_from("te_fuser._native", "refuse_create_graph");
  return hook && Reference::steal(PyObject_CallMethod(node.get(), "register_prehook", "O", hook.get()));
}

// refusing(result): that, and the backward of it refuses as those of our own nodes do.
PyObject* refusing(PyObject*, PyObject* result) {
  return refuse_in_backward_of(result) ? Py_NewRef(result) : nullptr;
}

// run_if_like(known, x, inputs, outputs): the known call's function on x and the parameters, which autograd records;
// None where this call is not like that.
PyObject* run_if_like(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  const Reference parameters = parameters_if_like(arguments, given, "run_if_like");
  if (!parameters) return none_or_error();
  const Py_ssize_t count = PyList_GET_SIZE(parameters.get());
  Array<PyObject*> tensors(static_cast<size_t>(count) + 1);
  tensors[0] = arguments[1];
  for (Py_ssize_t i = 0; i < count; ++i) tensors[static_cast<size_t>(i) + 1] = PyList_GET_ITEM(parameters.get(), i);
  PyObject* called = at(arguments[0], function);
  const auto with_call = static_cast<size_t>(count) + 1;
  Reference result = Reference::steal(PyObject_Vectorcall(called, tensors.data(), with_call, nullptr));
  return result && refuse_in_backward_of(result.get()) ? result.release() : nullptr;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"attributes", fast(attributes), METH_FASTCALL, "That attribute of each object, as a tuple."},
    {"call_key", call_key, METH_O, "What calls know of tensors, DTensors too, as bytes; None where one is neither."},
    {"like", fast(like), METH_FASTCALL, "The parameters of a call that is like the known one; None where it is not."},
    {"refuse_create_graph", fast(refuse_create_graph), METH_FASTCALL,
     "An error where grad mode is on: the backward that runs is to be differentiated itself."},
    {"refusing", refusing, METH_O, "A result that autograd recorded; its backward refuses to be differentiated."},
    {"run_if_like", fast(run_if_like), METH_FASTCALL,
     "The known call's function on x and the parameters; None where this call is not like that."},
    {"tensor_key", tensor_key, METH_O, "What plans know of tensors, as bytes; None where one is no plain tensor."},
    {"still_hold", still_hold, METH_O, "Whether all these facts hold."},
    {"tensor_place", tensor_place, METH_O, "What is known of a tensor and where it lies, as bytes; None of no plain one."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool bind_guards(pybind11::module_& module) { return PyModule_AddFunctions(module.ptr(), methods) == 0; }

}  // namespace te
