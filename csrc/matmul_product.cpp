#define PY_SSIZE_T_CLEAN  // lengths of bytes are Py_ssize_t
#include "matmul_product.h"

#include <cstring>
#include <string>

namespace te {
namespace {

using Role = MatmulArgument::Role;
using Use = Epilogue::Use;

bool refuse(const char* name, const std::string& why) {
  PyErr_Format(PyExc_ValueError, "product '%s': %s", name, why.c_str());
  return false;
}

bool read_dtype(const char* name, const char* dtype, bool of_a_factor, DType* found) {
  const DType* known = find_dtype(dtype);
  if (known == nullptr || product_type(*known) < 0 || (known->bits == 8 && !of_a_factor)) {
    return refuse(name, "its dtypes are float32, bfloat16 and float16" +
                            std::string(of_a_factor ? ", of factors float8_e4m3fn and float8_e5m2 too" : "") + ", got " +
                            dtype);
  }
  *found = *known;
  return true;
}

bool read_scales(const char* name, const char* text, const FactorScales** found) {
  *found = find_factor_scales(text);
  return *found != nullptr || refuse(name, "scales of a factor are 'one', 'rows' or 'squares', got '" +
                                               std::string(text) + "'");
}

// Whether the library could take blocks of factors that have scales of their own.
bool check_scales(const MatmulForm& form) {
  const char* name = form.name.c_str();
  const bool one_a = form.scales_a->is_one(), one_b = form.scales_b->is_one();
  if (one_a && one_b) return true;
  if (!form.is_scaled()) return refuse(name, "scales are of factors of 8 bits");
  if (one_a || one_b) return refuse(name, "its factors both have a scale for each block, or neither");
  if (form.scales_a->block > 1 && form.scales_b->block > 1) {
    return refuse(name, "one of its factors has a scale for each 128 numbers in a row, got squares twice");
  }
  if (form.transpose_a || !form.transpose_b) {
    return refuse(name, "factors with a scale for each block lie along what is summed: [m, k] and, with transpose_b, [n, k]");
  }
  return !form.fast_accumulation || refuse(name, "sums over blocks are not fast");
}

// Whether the library could take factors in these dtypes, lying so.
bool check_factors(const MatmulForm& form) {
  const char* name = form.name.c_str();
  const bool same = std::strcmp(form.dtype.name, form.b_dtype.name) == 0;
  if (!form.is_scaled()) {
    if (form.fast_accumulation) return refuse(name, "fast accumulation is for factors of 8 bits");
    return same || refuse(name, "its factors are of one dtype, or both of 8 bits, got " + std::string(form.dtype.name) +
                                    " and " + form.b_dtype.name);
  }
  if (form.b_dtype.bits != 8) return refuse(name, "its factors are both of 8 bits, or neither");
  if (same && std::strcmp(form.dtype.name, "float8_e5m2") == 0) {
    return refuse(name, "one of its factors is float8_e4m3fn, got two in float8_e5m2");
  }
  return true;
}

bool read_addend(const char* name, const char* text, Addend* addend) {
  constexpr const char* names[] = {"none", "out", "c"};
  for (size_t i = 0; i < 3; ++i) {
    if (std::strcmp(text, names[i]) != 0) continue;
    *addend = static_cast<Addend>(i);
    return true;
  }
  return refuse(name, "add is 'none', 'out' or 'c', got '" + std::string(text) + "'");
}

bool add_argument(CudaMatmul& product, Role role, const DType* dtype, bool written) {
  Reference torch_dtype = import_from("torch", dtype->name);
  if (!torch_dtype) return false;
  product.arguments.push_back({role, dtype, written, std::move(torch_dtype)});
  return true;
}

bool list_arguments(CudaMatmul& product) {
  const MatmulForm& form = product.matmul.form;
  const Epilogue& epilogue = *form.epilogue;
  const auto add = [&](Role role, const DType* dtype, bool written) {
    return add_argument(product, role, dtype, written);
  };
  const DType* scale = find_dtype("float32");
  return add(Role::a, &form.dtype, false) && add(Role::b, &form.b_dtype, false) &&
         (!form.is_scaled() || (add(Role::scale_a, scale, false) && add(Role::scale_b, scale, false))) &&
         add(Role::out, &form.out_dtype, true) && (form.addend != Addend::c || add(Role::c, &form.out_dtype, false)) &&
         (epilogue.bias == Use::none || add(Role::bias, &form.out_dtype, epilogue.bias == Use::written)) &&
         (epilogue.aux == Use::none || add(Role::aux, &form.out_dtype, epilogue.aux == Use::written));
}

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

// tuned: None, or (find, drop).
bool keep_tuned(CudaMatmul& product, PyObject* functions) {
  if (functions == Py_None) return true;
  PyObject *find = nullptr, *drop = nullptr;
  if (!PyTuple_Check(functions) || !PyArg_ParseTuple(functions, "OO;tuned is (find, drop)", &find, &drop)) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_TypeError, "tuned is (find, drop)");
    return false;
  }
  product.tuned = Reference::borrow(functions);
  TunedAlgorithms& tuned = product.matmul.tuned;
  tuned.find = [find](const MatmulKey& key, CublasLt::Algorithm& algorithm) {
    return find_tuned(find, key, algorithm);
  };
  tuned.drop = [drop](const MatmulKey& key, const std::string& why) { drop_tuned(drop, key, why); };
  return true;
}

}  // namespace

const char* MatmulArgument::name() const {
  constexpr const char* names[most_matmul_tensors] = {"a", "b", "scale_a", "scale_b", "out", "c", "bias", "aux"};
  return names[static_cast<size_t>(role)];
}

std::unique_ptr<CudaMatmul> build_matmul(PyObject* args, PyObject* keywords) {
  static const char* names[] = {"name",     "dtype", "transpose_a", "transpose_b",       "out_dtype", "epilogue", "add",
                                "on_empty", "tuned", "b_dtype",     "fast_accumulation", "scales_a",  "scales_b",
                                nullptr};
  const char *name = nullptr, *dtype = nullptr, *out_dtype = nullptr, *epilogue = "none", *add = "none";
  const char *b_dtype = nullptr, *scales_a = "one", *scales_b = "one";
  int transpose_a = 0, transpose_b = 0, fast_accumulation = 0;
  PyObject *on_empty = Py_None, *tuned = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "ss|$ppzssOOzpss:CudaMatmul", const_cast<char**>(names), &name, &dtype,
                                   &transpose_a, &transpose_b, &out_dtype, &epilogue, &add, &on_empty, &tuned, &b_dtype,
                                   &fast_accumulation, &scales_a, &scales_b)) {
    return nullptr;
  }
  MatmulForm form{name, {}, {}, {}, transpose_a != 0, transpose_b != 0, find_epilogue(epilogue), Addend::none,
                  fast_accumulation != 0, nullptr, nullptr};
  if (form.epilogue == nullptr) {
    refuse(name, "the epilogue '" + std::string(epilogue) + "' is unknown (known: " + known_epilogues() + ")");
    return nullptr;
  }
  if (!read_dtype(name, dtype, true, &form.dtype) || !read_addend(name, add, &form.addend) ||
      !read_dtype(name, b_dtype != nullptr ? b_dtype : dtype, true, &form.b_dtype) ||
      !read_dtype(name, out_dtype != nullptr ? out_dtype : dtype, false, &form.out_dtype) || !check_factors(form) ||
      !read_scales(name, scales_a, &form.scales_a) || !read_scales(name, scales_b, &form.scales_b) ||
      !check_scales(form)) {
    return nullptr;
  }
  auto product = std::make_unique<CudaMatmul>(std::move(form));
  if (on_empty != Py_None) product->on_empty = Reference::borrow(on_empty);
  return list_arguments(*product) && keep_tuned(*product, tuned) ? std::move(product) : nullptr;
}

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

}  // namespace te
