#define PY_SSIZE_T_CLEAN  // lengths of bytes are Py_ssize_t
#include "matmul_tuned.h"

#include <cstring>
#include <string>

#include "reference.h"

namespace te {
namespace {

// The interpreter lock on a thread that may be without it.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// find(problem) -> an algorithm or None. Whatever goes wrong costs a choice, not the call.
bool find_tuned(PyObject* find, const MatmulKey& key, CublasLt::Algorithm& algorithm) {
  const WithGil gil;
  const Reference name = Reference::steal(tuple_of(key));
  const Reference found = name ? Reference::steal(PyObject_CallOneArg(find, name.get())) : Reference();
  char* bytes = nullptr;
  Py_ssize_t length = 0;
  const bool read = found && found.get() != Py_None && PyBytes_AsStringAndSize(found.get(), &bytes, &length) == 0 &&
                    read_algorithm(bytes, length, &algorithm);
  if (PyErr_Occurred() != nullptr) PyErr_WriteUnraisable(find);
  return read;
}

// drop(problem, why), in words.
void drop_tuned(PyObject* drop, const MatmulKey& key, const std::string& why) {
  const WithGil gil;
  const Reference name = Reference::steal(tuple_of(key));
  if (name) Reference::steal(PyObject_CallFunction(drop, "Os", name.get(), why.c_str()));
  if (PyErr_Occurred() != nullptr) PyErr_WriteUnraisable(drop);
}

}  // namespace

PyObject* tuple_of(const MatmulKey& key) {
  return Py_BuildValue("(iLLLLLLLLK)", static_cast<int>(key.device()), static_cast<long long>(key.m),
                       static_cast<long long>(key.n), static_cast<long long>(key.k), static_cast<long long>(key.lda),
                       static_cast<long long>(key.ldb), static_cast<long long>(key.ldout),
                       static_cast<long long>(key.ldc), static_cast<long long>(key.ldaux),
                       static_cast<unsigned long long>(key.layout()));
}

bool read_problem(PyObject* tuple, MatmulKey* key) {
  int device = 0;
  long long m = 0, n = 0, k = 0, a = 0, b = 0, out = 0, c = 0, aux = 0;
  unsigned long long layout = 0;
  if (!PyArg_ParseTuple(tuple, "iLLLLLLLLK;a problem as problems() gives them", &device, &m, &n, &k, &a, &b, &out, &c,
                        &aux, &layout)) {
    return false;
  }
  *key = {m, n, k, a, b, out, c, aux, static_cast<uint64_t>(device) << MatmulKey::layout_bits | layout};
  return true;
}

PyObject* tuple_of(const CublasLt::Candidate& candidate) {
  return Py_BuildValue("(y#Kd)", reinterpret_cast<const char*>(&candidate.algorithm),
                       static_cast<Py_ssize_t>(sizeof(candidate.algorithm)),
                       static_cast<unsigned long long>(candidate.workspace), static_cast<double>(candidate.waves));
}

bool read_algorithm(const char* bytes, Py_ssize_t length, CublasLt::Algorithm* algorithm) {
  if (length != static_cast<Py_ssize_t>(sizeof(*algorithm))) {
    PyErr_Format(PyExc_ValueError, "an algorithm is %zu bytes, as algorithms() gives them, got %zd",
                 sizeof(*algorithm), length);
    return false;
  }
  std::memcpy(algorithm, bytes, sizeof(*algorithm));
  return true;
}

bool read_tuned(PyObject* functions, TunedAlgorithms& tuned) {
  PyObject *find = nullptr, *drop = nullptr;
  if (!PyTuple_Check(functions) || !PyArg_ParseTuple(functions, "OO;tuned is (find, drop)", &find, &drop)) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_TypeError, "tuned is (find, drop)");
    return false;
  }
  tuned.find = [find](const MatmulKey& key, CublasLt::Algorithm& algorithm) {
    return find_tuned(find, key, algorithm);
  };
  tuned.drop = [drop](const MatmulKey& key, const std::string& why) { drop_tuned(drop, key, why); };
  return true;
}

}  // namespace te
