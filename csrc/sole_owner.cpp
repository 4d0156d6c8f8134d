#include "sole_owner.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "reference.h"

namespace te {
namespace {

// Set once while the module is imported.
struct Names {
  PyObject* use_count = nullptr;          // of a tensor: its object counts as one
  PyObject* untyped_storage = nullptr;    // of a tensor: an object of its own
  PyObject* address = nullptr;            // of such an object
  PyObject* resizable = nullptr;          // of such an object: whether PyTorch allocated the memory
  PyObject* storage_use_count = nullptr;  // the function of that address; nullptr: this torch does not tell
};
Names names;

// How often a tensor and its storage are held, the objects that tell so included, and whose memory it is. Where PyTorch
// did not allocate it (an array, a DLPack capsule), its owner may read it whatever the counts say.
struct Counts {
  long tensor = 0;
  Py_ssize_t storage_object = 0;
  long storage = 0;
  bool by_torch = false;

  bool operator==(const Counts& other) const {
    return tensor == other.tensor && storage_object == other.storage_object && storage == other.storage &&
           by_torch == other.by_torch;
  }
};
Counts alone;  // of a tensor that nobody else holds: what torch's own objects hold of each other is its business

// Nothing, with a Python error set, where one of torch's functions fails.
std::optional<Counts> counts_of(PyObject* tensor) {
  const Reference uses = Reference::steal(PyObject_CallMethodNoArgs(tensor, names.use_count));
  const Reference storage =
      uses ? Reference::steal(PyObject_CallMethodNoArgs(tensor, names.untyped_storage)) : Reference();
  if (!storage) return std::nullopt;
  const Reference address = Reference::steal(PyObject_GetAttr(storage.get(), names.address));
  if (!address) return std::nullopt;
  const Reference found = Reference::steal(PyObject_CallOneArg(names.storage_use_count, address.get()));
  if (!found) return std::nullopt;
  const Reference own = Reference::steal(PyObject_CallMethodNoArgs(storage.get(), names.resizable));
  if (!own) return std::nullopt;
  const Counts counts{PyLong_AsLong(uses.get()), Py_REFCNT(storage.get()), PyLong_AsLong(found.get()),
                      own.get() == Py_True};
  if (PyErr_Occurred() != nullptr) return std::nullopt;
  return counts;
}

// A tensor in the host's memory, whatever the default device is: importing must not start CUDA.
Reference fresh_tensor() {
  const Reference empty = import_from("torch", "empty");
  const Reference sizes = Reference::steal(Py_BuildValue("(i)", 1));
  const Reference options = Reference::steal(Py_BuildValue("{s:s}", "device", "cpu"));
  if (!empty || !sizes || !options) return Reference();
  return Reference::steal(PyObject_Call(empty.get(), sizes.get(), options.get()));
}

}  // namespace

bool init_sole_owner() {
  names.use_count = PyUnicode_InternFromString("_use_count");
  names.untyped_storage = PyUnicode_InternFromString("untyped_storage");
  names.address = PyUnicode_InternFromString("_cdata");
  names.resizable = PyUnicode_InternFromString("resizable");
  for (PyObject* name : {names.use_count, names.untyped_storage, names.address, names.resizable}) {
    if (name == nullptr) return false;
  }
  const Reference fresh = fresh_tensor();
  if (!fresh) return false;
  names.storage_use_count = import_from("torch._C", "_storage_Use_Count").release();
  const std::optional<Counts> found = names.storage_use_count ? counts_of(fresh.get()) : std::nullopt;
  if (found) {
    alone = *found;
  } else {
    PyErr_Clear();
    Py_CLEAR(names.storage_use_count);
  }
  return true;
}

bool is_sole_owner(PyObject* tensor, Py_ssize_t references) {
  if (names.storage_use_count == nullptr || Py_REFCNT(tensor) != references) return false;
  const std::optional<Counts> counts = counts_of(tensor);
  return counts && *counts == alone;
}

namespace {

// holders(tensors): how often each is held, object and tensor, and the memory of the first; None where torch does not tell.
PyObject* holders(PyObject*, PyObject* tensors) {
  if (!PyTuple_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of tensors");
    return nullptr;
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  if (names.storage_use_count == nullptr || count == 0) Py_RETURN_NONE;
  const std::optional<Counts> first = counts_of(PyTuple_GET_ITEM(tensors, 0));
  if (!first) return nullptr;
  std::vector<int64_t> found{first->storage_object, first->storage};
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
    const Reference uses = Reference::steal(PyObject_CallMethodNoArgs(tensor, names.use_count));
    if (!uses) return nullptr;
    found.push_back(Py_REFCNT(tensor));
    found.push_back(PyLong_AsLong(uses.get()));
  }
  const auto bytes = static_cast<Py_ssize_t>(found.size() * sizeof(int64_t));
  return PyErr_Occurred() != nullptr ? nullptr : PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()), bytes);
}

PyMethodDef methods[] = {
    {"holders", holders, METH_O, "How often tensors that share memory are held, as bytes; None where torch does not tell."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool bind_holders(pybind11::module_& module) { return PyModule_AddFunctions(module.ptr(), methods) == 0; }

}  // namespace te
