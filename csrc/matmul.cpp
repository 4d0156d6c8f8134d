#define PY_SSIZE_T_CLEAN  // lengths of bytes are Py_ssize_t
#include "matmul.h"

#include <new>
#include <string>
#include <vector>

#include "callable_type.h"
#include "gil.h"
#include "matmul_call.h"
#include "matmul_problem.h"
#include "matmul_product.h"
#include "reference.h"

namespace te {
namespace {

PyTypeObject* matmul_type = nullptr;  // set once while the module is imported

CudaMatmul& product_of(PyObject* self) { return owned_by<CudaMatmul>(self); }

// ---- running ---------------------------------------------------------------------------------------------------

// Nothing to multiply: what the output is then, PyTorch's operations write.
bool run_empty(const CudaMatmul& product, PyObject* const* tensors, size_t count) {
  if (!product.on_empty) {
    PyErr_Format(PyExc_ValueError, "product '%s' was given no function for empty sizes", product.name());
    return false;
  }
  return static_cast<bool>(Reference::steal(PyObject_Vectorcall(product.on_empty.get(), tensors, count, nullptr)));
}

bool run(CudaMatmul& product, PyObject* const* tensors, size_t count, Workspace& workspace) {
  MatmulReading reading;
  if (!read_call(product, tensors, count, reading)) return false;
  const MatmulSizes& sizes = reading.sizes;
  if (sizes.m == 0 || sizes.n == 0 || sizes.k == 0) return run_empty(product, tensors, count);
  return without_gil(nullptr, [&](Failure& failure) { return product.matmul.run(reading.call, workspace, failure); });
}

// The items of the one tuple that a call takes; nullptr with a Python error set.
PyObject* const* items_of(const CudaMatmul& product, PyObject* tuple, size_t* count) {
  if (!PyTuple_Check(tuple)) {
    PyErr_Format(PyExc_TypeError, "product '%s' takes one tuple of tensors, got %s", product.name(),
                 Py_TYPE(tuple)->tp_name);
    return nullptr;
  }
  *count = static_cast<size_t>(PyTuple_GET_SIZE(tuple));
  return reinterpret_cast<PyTupleObject*>(tuple)->ob_item;
}

PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  CudaMatmul& product = product_of(self);
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) > 0)) {
    PyErr_Format(PyExc_TypeError, "product '%s' takes one tuple of tensors", product.name());
    return nullptr;
  }
  size_t count = 0;
  PyObject* const* tensors = items_of(product, values[0], &count);
  Workspace workspace;
  if (tensors == nullptr || !run(product, tensors, count, workspace)) return nullptr;
  Py_RETURN_NONE;
}

// make(*inputs): what is written is made here, in the order of the tensors; returned alone or as a tuple.
PyObject* make(PyObject* self, PyObject* const* inputs, Py_ssize_t given) {
  Workspace workspace;
  return make_product(product_of(self), inputs, given, workspace);
}

// ---- problems and algorithms -----------------------------------------------------------------------------------

PyObject* problem(PyObject* self, PyObject* tuple) {
  CudaMatmul& product = product_of(self);
  size_t count = 0;
  PyObject* const* tensors = items_of(product, tuple, &count);
  MatmulReading reading;
  if (tensors == nullptr || !read_call(product, tensors, count, reading)) return nullptr;
  MatmulKey key;
  const auto meet = [&](Failure& failure) { return product.matmul.meet(reading.call, key, failure); };
  return without_gil(nullptr, meet) ? tuple_of(key) : nullptr;
}

PyObject* problems(PyObject* self, PyObject*) {
  Reference found = Reference::steal(PyDict_New());
  if (!found) return nullptr;
  for (const auto& [key, runs] : product_of(self).matmul.problems()) {
    const Reference name = Reference::steal(tuple_of(key));
    const Reference count = Reference::steal(PyLong_FromUnsignedLongLong(runs));
    if (!name || !count || PyDict_SetItem(found.get(), name.get(), count.get()) != 0) return nullptr;
  }
  return found.release();
}

PyObject* algorithms(PyObject* self, PyObject* args) {
  CudaMatmul& product = product_of(self);
  PyObject* tuple = nullptr;
  int most = 8;
  if (!PyArg_ParseTuple(args, "O!|i:algorithms", &PyTuple_Type, &tuple, &most)) return nullptr;
  if (most < 1 || most > 256) {
    PyErr_Format(PyExc_ValueError, "algorithms(problem, most): most lies between 1 and 256, got %d", most);
    return nullptr;
  }
  MatmulKey key;
  std::vector<CublasLt::Candidate> found;
  const auto look = [&](Failure& failure) { return product.matmul.list(key, most, found, failure); };
  if (!read_problem(tuple, &key) || !without_gil(nullptr, look)) return nullptr;
  const Reference list = Reference::steal(PyList_New(0));
  if (!list) return nullptr;
  for (const CublasLt::Candidate& candidate : found) {
    const Reference item = Reference::steal(tuple_of(candidate));
    if (!item || PyList_Append(list.get(), item.get()) != 0) return nullptr;
  }
  return PyList_AsTuple(list.get());
}

PyObject* choose(PyObject* self, PyObject* args) {
  CudaMatmul& product = product_of(self);
  PyObject* tuple = nullptr;
  const char* bytes = nullptr;
  Py_ssize_t length = 0;
  if (!PyArg_ParseTuple(args, "O!y#:choose", &PyTuple_Type, &tuple, &bytes, &length)) return nullptr;
  CublasLt::Algorithm algorithm;
  MatmulKey key;
  if (!read_algorithm(bytes, length, &algorithm) || !read_problem(tuple, &key)) return nullptr;
  const auto take = [&](Failure& failure) { return product.matmul.choose(key, algorithm, failure); };
  if (!without_gil(nullptr, take)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* refusal(PyObject* self, PyObject* args) {
  CudaMatmul& product = product_of(self);
  long long m = 0, n = 0, k = 0;
  int device = 0;
  if (!PyArg_ParseTuple(args, "LLL|i:refusal", &m, &n, &k, &device)) return nullptr;
  if (m <= 0 || n <= 0 || k <= 0) Py_RETURN_NONE;
  MatmulCall call{};
  if (!imagine_call(product, device, {m, n, k}, call)) return nullptr;
  Failure refused;
  bool can = false;
  const auto ask = [&](Failure&) {
    MatmulKey key;
    can = product.matmul.meet(call, key, refused);
    return true;
  };
  if (!without_gil(nullptr, ask)) return nullptr;
  if (can) Py_RETURN_NONE;
  return PyUnicode_FromString(refused.text.c_str());
}

// ---- the type --------------------------------------------------------------------------------------------------

PyObject* describe(PyObject* self) {
  const MatmulForm& form = product_of(self).matmul.form;
  return PyUnicode_FromFormat("<CudaMatmul %s, %s, epilogue %s>", form.name.c_str(), form.dtype.name,
                              form.epilogue->name);
}

// The names of a call's tensors, in order.
PyObject* arguments_of(PyObject* self, void*) {
  const CudaMatmul& product = product_of(self);
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(product.arguments.size()));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < product.arguments.size(); ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyUnicode_FromString(product.arguments[i].name()));
  }
  return tuple;
}

PyGetSetDef properties[] = {
    {"arguments", arguments_of, nullptr, "The names of a call's tensors, in order.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

const auto guarded_make = reinterpret_cast<void (*)()>(guarded<make, PyObject* const*, Py_ssize_t>);

PyMethodDef methods[] = {
    {"make", reinterpret_cast<PyCFunction>(guarded_make), METH_FASTCALL,
     "make(*inputs)\n--\n\nThe product of the tensors that are read; what is written is made and returned."},
    {"problem", guarded<problem, PyObject*>, METH_O,
     "problem(tensors)\n--\n\nThe problem of a call, prepared but not run."},
    {"problems", guarded<problems, PyObject*>, METH_NOARGS,
     "problems()\n--\n\nEvery problem that was met, and how often it ran."},
    {"algorithms", guarded<algorithms, PyObject*>, METH_VARARGS,
     "algorithms(problem, most=8)\n--\n\n(algorithm, bytes of workspace, waves) of each candidate, best guess first."},
    {"choose", guarded<choose, PyObject*>, METH_VARARGS,
     "choose(problem, algorithm)\n--\n\nTake this algorithm for a problem from now on."},
    {"refusal", guarded<refusal, PyObject*>, METH_VARARGS,
     "refusal(m, n, k, device=0)\n--\n\nWhy cuBLASLt cannot run these sizes on this device; None if it can."},
    {nullptr, nullptr, 0, nullptr},
};

PyDoc_STRVAR(documentation,
             "CudaMatmul(name, dtype, *, transpose_a=False, transpose_b=False, out_dtype=None, epilogue='none', "
             "add='none', on_empty=None, tuned=None, b_dtype=None, fast_accumulation=False, scales_a='one', scales_b='one')\n--\n\nA matrix product by cuBLASLt; call it with one tuple of "
             "tensors.");

}  // namespace

PyObject* make_cuda_matmul_type() {
  if (!init_matmul_calls()) return nullptr;
  PyObject* type = make_callable_type<CudaMatmul, build_matmul, vectorcall>(
      {"te_fuser._native.CudaMatmul", documentation, describe, methods, properties});
  matmul_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

CudaMatmul* product_made_by(PyObject* function) {
  if (!PyCFunction_CheckExact(function)) return nullptr;
  PyObject* self = PyCFunction_GET_SELF(function);
  const bool makes = self != nullptr && Py_TYPE(self) == matmul_type &&
                     PyCFunction_GET_FUNCTION(function) == reinterpret_cast<PyCFunction>(guarded_make);
  return makes ? &product_of(self) : nullptr;
}

bool run_product(CudaMatmul& product, PyObject* const* tensors, size_t count, Workspace& workspace) {
  return run(product, tensors, count, workspace);
}

PyObject* make_product(CudaMatmul& product, PyObject* const* inputs, Py_ssize_t given, Workspace& workspace) {
  try {
    MatmulTensors tensors;
    if (!make_outputs(product, inputs, given, tensors)) return nullptr;
    if (!run(product, tensors.all.data(), tensors.count, workspace)) return nullptr;
    return alone_or_tuple(tensors.made.data(), tensors.made_count);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

}  // namespace te
