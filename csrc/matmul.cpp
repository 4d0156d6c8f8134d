#define PY_SSIZE_T_CLEAN  // lengths of bytes are Py_ssize_t
#include "matmul.h"

#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "gil.h"
#include "matmul_problem.h"
#include "reference.h"
#include "tensor.h"

namespace te {
namespace {

using Use = Epilogue::Use;

// The tensors of a call, in this order as far as the product has them.
enum class Role : uint8_t { a, b, out, c, bias, aux };
constexpr size_t most_tensors = 6;
constexpr const char* role_names[most_tensors] = {"a", "b", "out", "c", "bias", "aux"};
constexpr uintptr_t vector_alignment = 16;  // of biases, sums and aux tensors

struct Argument {
  Role role;
  const DType* dtype;
  bool written;
  Reference torch_dtype;
};

struct Product {
  explicit Product(MatmulForm form) : matmul(std::move(form)) {}
  Matmul matmul;
  std::vector<Argument> arguments;
  Reference on_empty;
  Reference tuned;
};

struct MatmulObject {
  PyObject_HEAD
  vectorcallfunc call;
  Product* product;
};

Product& product_of(PyObject* self) { return *reinterpret_cast<MatmulObject*>(self)->product; }

// Set once while the module is imported.
struct TorchFunctions {
  PyObject* new_empty = nullptr;
  PyObject* dtype = nullptr;  // names of its keywords
  PyObject* clone = nullptr;
  PyObject* precision = nullptr;  // of float32 products on CUDA
  PyObject* cuda = nullptr;
  PyObject* matmul = nullptr;
};
TorchFunctions torch_functions;

bool init_torch_functions() {
  const Reference torch = Reference::steal(PyImport_ImportModule("torch"));
  const Reference internals = torch ? Reference::steal(PyObject_GetAttrString(torch.get(), "_C")) : Reference();
  if (!internals) return false;
  TorchFunctions& f = torch_functions;
  f.new_empty = PyUnicode_InternFromString("new_empty");
  f.precision = PyObject_GetAttrString(internals.get(), "_get_fp32_precision_getter");
  f.dtype = Py_BuildValue("(s)", "dtype");
  f.clone = PyUnicode_InternFromString("clone");
  f.cuda = PyUnicode_InternFromString("cuda");
  f.matmul = PyUnicode_InternFromString("matmul");
  return f.new_empty && f.precision && f.dtype && f.clone && f.cuda && f.matmul;
}

// Whether float32 products may be TensorFloat-32 now: torch.backends.cuda.matmul.fp32_precision.
bool read_precision(bool* tf32) {
  PyObject* arguments[] = {torch_functions.cuda, torch_functions.matmul};
  const Reference found = Reference::steal(PyObject_Vectorcall(torch_functions.precision, arguments, 2, nullptr));
  if (!found) return false;
  *tf32 = PyUnicode_Check(found.get()) && PyUnicode_CompareWithASCIIString(found.get(), "tf32") == 0;
  return true;
}

// ---- the tensors of a call -------------------------------------------------------------------------------------

// A call as far as it is read, and copies that live until it is done.
struct Reading {
  MatmulCall call{};
  MatmulSizes sizes{};
  std::array<Reference, most_tensors> copies;
};

bool is_misaligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % vector_alignment != 0; }

// Puts a row-major copy of an input in the tensor's place.
bool copy_input(PyObject** tensor, Reference& copy) {
  const Reference flat = Reference::steal(PyObject_CallMethod(*tensor, "contiguous", nullptr));
  if (!flat) return false;
  copy = flat.get() == *tensor ? Reference::steal(PyObject_CallMethodNoArgs(*tensor, torch_functions.clone)) : flat;
  *tensor = copy.get();
  return static_cast<bool>(copy);
}

bool read_matrix(const Product& product, size_t index, PyObject* tensor, Matrix* matrix, Reading& reading) {
  const Argument& argument = product.arguments[index];
  const ArgumentSite site{product.matmul.form.name.c_str(), static_cast<Py_ssize_t>(index)};
  bool fits = false;
  if (!read_cuda_matrix(tensor, *argument.dtype, site, &reading.call.device, matrix, &fits)) return false;
  const bool factor = argument.role == Role::a || argument.role == Role::b;
  // The library sums factors only as they usually lie.
  const bool may_be_flipped = factor && product.matmul.form.epilogue->bias != Use::written;
  const bool needs_alignment = argument.role == Role::bias || argument.role == Role::aux;
  const auto suits = [&] {
    return fits && (may_be_flipped || !matrix->flipped) && !(needs_alignment && is_misaligned(matrix->data));
  };
  if (suits()) return true;
  if (!argument.written) {
    if (!copy_input(&tensor, reading.copies[index]) ||
        !read_cuda_matrix(tensor, *argument.dtype, site, &reading.call.device, matrix, &fits)) {
      return false;
    }
    if (suits()) return true;
  }
  PyErr_Format(PyExc_ValueError,
               "product '%s': %s is written and must be rows of elements side by side%s; make it contiguous",
               site.kernel, role_names[static_cast<size_t>(argument.role)],
               needs_alignment ? ", at an address that 16 divides" : "");
  return false;
}

bool read_bias(const Product& product, size_t index, PyObject* tensor, Reading& reading, int64_t* length) {
  Matrix vector;
  if (!read_matrix(product, index, tensor, &vector, reading)) return false;
  reading.call.bias = vector.data;
  *length = vector.rows == 1 ? vector.columns : -1;
  return true;
}

Matrix* matrix_of(MatmulCall& call, Role role) {
  switch (role) {
    case Role::a: return &call.a;
    case Role::b: return &call.b;
    case Role::out: return &call.out;
    case Role::c: return &call.c;
    default: return &call.aux;
  }
}

bool check_bias(const Product& product, int64_t length, const MatmulSizes& sizes) {
  const MatmulForm& form = product.matmul.form;
  if (form.epilogue->bias == Use::none) return true;
  const int64_t wanted = form.epilogue->bias_length == Epilogue::Length::columns ? sizes.n : sizes.m;
  if (length == wanted) return true;
  PyErr_Format(PyExc_ValueError, "product '%s': the bias or sums must be [%lld], got %lld numbers", form.name.c_str(),
               static_cast<long long>(wanted), static_cast<long long>(length));
  return false;
}

bool read_call(const Product& product, PyObject* const* tensors, size_t count, Reading& reading) {
  const MatmulForm& form = product.matmul.form;
  if (count != product.arguments.size()) {
    PyErr_Format(PyExc_ValueError, "product '%s' takes %zu tensors, got %zu", form.name.c_str(),
                 product.arguments.size(), count);
    return false;
  }
  MatmulCall& call = reading.call;
  call.device = -1;
  int64_t bias_length = 0;
  for (size_t i = 0; i < count; ++i) {
    const Role role = product.arguments[i].role;
    const bool read = role == Role::bias ? read_bias(product, i, tensors[i], reading, &bias_length)
                                         : read_matrix(product, i, tensors[i], matrix_of(call, role), reading);
    if (!read) return false;
  }
  if (form.epilogue->aux_is_mask) call.aux.stride *= 8;  // bits
  Failure failure;
  if (!product.matmul.sizes(call, reading.sizes, failure)) {
    raise_failure(failure, nullptr);
    return false;
  }
  if (!check_bias(product, bias_length, reading.sizes)) return false;
  if (std::strcmp(form.dtype.name, "float32") == 0 && !read_precision(&call.tf32)) return false;
  void* stream = nullptr;
  if (!current_cuda_stream(call.device, &stream)) return false;
  call.stream = static_cast<CublasLt::Stream>(stream);
  return true;
}

// ---- running ---------------------------------------------------------------------------------------------------

// Nothing to multiply: what the output is then, PyTorch's operations write.
bool run_empty(const Product& product, PyObject* const* tensors, size_t count) {
  if (!product.on_empty) {
    PyErr_Format(PyExc_ValueError, "product '%s' was given no function for empty sizes",
                 product.matmul.form.name.c_str());
    return false;
  }
  return static_cast<bool>(Reference::steal(PyObject_Vectorcall(product.on_empty.get(), tensors, count, nullptr)));
}

bool run(Product& product, PyObject* const* tensors, size_t count) {
  Reading reading;
  if (!read_call(product, tensors, count, reading)) return false;
  const MatmulSizes& sizes = reading.sizes;
  if (sizes.m == 0 || sizes.n == 0 || sizes.k == 0) return run_empty(product, tensors, count);
  return without_gil(nullptr, [&](Failure& failure) { return product.matmul.run(reading.call, failure); });
}

// The items of the one tuple that a call takes; nullptr with a Python error set.
PyObject* const* items_of(const Product& product, PyObject* tuple, size_t* count) {
  if (!PyTuple_Check(tuple)) {
    PyErr_Format(PyExc_TypeError, "product '%s' takes one tuple of tensors, got %s", product.matmul.form.name.c_str(),
                 Py_TYPE(tuple)->tp_name);
    return nullptr;
  }
  *count = static_cast<size_t>(PyTuple_GET_SIZE(tuple));
  return reinterpret_cast<PyTupleObject*>(tuple)->ob_item;
}

// What Python calls, with C++'s want of memory as Python's.
template <auto function, class... Arguments>
PyObject* guarded(PyObject* self, Arguments... arguments) {
  try {
    return function(self, arguments...);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  Product& product = product_of(self);
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) > 0)) {
    PyErr_Format(PyExc_TypeError, "product '%s' takes one tuple of tensors", product.matmul.form.name.c_str());
    return nullptr;
  }
  size_t count = 0;
  PyObject* const* tensors = items_of(product, values[0], &count);
  if (tensors == nullptr || !run(product, tensors, count)) return nullptr;
  Py_RETURN_NONE;
}

// ---- outputs of its own ----------------------------------------------------------------------------------------

// like.new_empty(*sizes): sizes as arguments of their own, which takes half the time of torch.empty(sizes, ...).
PyObject* make_tensor(const std::vector<int64_t>& sizes, PyObject* dtype, PyObject* like) {
  std::vector<Reference> numbers;
  std::vector<PyObject*> arguments{like};
  for (const int64_t size : sizes) {
    numbers.push_back(Reference::steal(PyLong_FromLongLong(size)));
    if (!numbers.back()) return nullptr;
    arguments.push_back(numbers.back().get());
  }
  const size_t count = arguments.size();
  if (dtype != nullptr) arguments.push_back(dtype);
  return PyObject_VectorcallMethod(torch_functions.new_empty, arguments.data(), count,
                                   dtype != nullptr ? torch_functions.dtype : nullptr);
}

// The last two sizes of a factor's view as a matrix.
bool view_factor(const Product& product, PyObject* tensor, size_t index, TensorView* view) {
  const ArgumentSite site{product.matmul.form.name.c_str(), static_cast<Py_ssize_t>(index)};
  if (!view_tensor(tensor, site, view)) return false;
  if (view->dimensions >= 1) return true;
  PyErr_Format(PyExc_ValueError, "product '%s': %s is a scalar", site.kernel, index == 0 ? "a" : "b");
  return false;
}

int64_t rows_of(const TensorView& view) {
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < view.dimensions; ++i) rows *= view.shape[i];
  return rows;
}

// The output's sizes: those of a, with b's columns for its features.
bool output_sizes(const Product& product, PyObject* const* inputs, std::vector<int64_t>& sizes) {
  const MatmulForm& form = product.matmul.form;
  TensorView a, b;
  if (!view_factor(product, inputs[0], 0, &a) || !view_factor(product, inputs[1], 1, &b)) return false;
  if (form.transpose_a) {
    sizes = {a.shape[a.dimensions - 1]};
  } else {
    sizes.assign(a.shape, a.shape + a.dimensions - 1);
  }
  sizes.push_back(form.transpose_b ? rows_of(b) : b.shape[b.dimensions - 1]);
  return true;
}

std::vector<int64_t> sizes_of(const Product& product, Role role, const std::vector<int64_t>& out) {
  const Epilogue& epilogue = *product.matmul.form.epilogue;
  std::vector<int64_t> sizes = out;
  if (role == Role::bias) {
    const bool columns = epilogue.bias_length == Epilogue::Length::columns;
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < out.size(); ++i) rows *= out[i];
    sizes = {columns ? out.back() : rows};
  } else if (role == Role::aux && epilogue.aux_is_mask) {
    sizes.back() = (sizes.back() + 127) / 128 * 16;
  }
  return sizes;
}

// make(*inputs): what is written is made here, in the order of the tensors; returned alone or as a tuple.
PyObject* make(PyObject* self, PyObject* const* inputs, Py_ssize_t given) {
  Product& product = product_of(self);
  const auto read = std::count_if(product.arguments.begin(), product.arguments.end(),
                                  [](const Argument& argument) { return !argument.written; });
  if (given != read || product.matmul.form.addend == Addend::out) {
    const bool adds = product.matmul.form.addend == Addend::out;
    PyErr_Format(PyExc_ValueError, "product '%s': make() takes the %zd tensors that are read, got %zd%s",
                 product.matmul.form.name.c_str(), static_cast<Py_ssize_t>(read), given,
                 adds ? "; this one adds to what its output holds, so give that" : "");
    return nullptr;
  }
  std::vector<int64_t> out;
  if (!output_sizes(product, inputs, out)) return nullptr;
  std::array<PyObject*, most_tensors> tensors{};
  std::array<Reference, most_tensors> made;
  size_t count = 0, next = 0, results = 0;
  for (const Argument& argument : product.arguments) {
    if (argument.written) {
      Reference& tensor = made[results++];
      const bool alike = argument.dtype->name == product.arguments[0].dtype->name;  // names are of one table
      PyObject* dtype = alike ? nullptr : argument.torch_dtype.get();
      tensor = Reference::steal(make_tensor(sizes_of(product, argument.role, out), dtype, inputs[0]));
      if (!tensor) return nullptr;
      tensors[count++] = tensor.get();
    } else {
      tensors[count++] = inputs[next++];
    }
  }
  if (!run(product, tensors.data(), count)) return nullptr;
  if (results == 1) return made[0].release();
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(results));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < results; ++i) PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), made[i].release());
  return tuple;
}

// ---- problems and algorithms -----------------------------------------------------------------------------------

// (device, m, n, k, strides of a, b, out, c, aux, layout), as Python has a problem.
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

bool read_algorithm(const char* bytes, Py_ssize_t length, CublasLt::Algorithm* algorithm) {
  if (length != static_cast<Py_ssize_t>(sizeof(*algorithm))) {
    PyErr_Format(PyExc_ValueError, "an algorithm is %zu bytes, as algorithms() gives them, got %zd",
                 sizeof(*algorithm), length);
    return false;
  }
  std::memcpy(algorithm, bytes, sizeof(*algorithm));
  return true;
}

PyObject* problem(PyObject* self, PyObject* tuple) {
  Product& product = product_of(self);
  size_t count = 0;
  PyObject* const* tensors = items_of(product, tuple, &count);
  Reading reading;
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
  Product& product = product_of(self);
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
    const auto* bytes = reinterpret_cast<const char*>(&candidate.algorithm);
    const auto workspace = static_cast<unsigned long long>(candidate.workspace);
    const Reference item = Reference::steal(
        Py_BuildValue("(y#Kd)", bytes, static_cast<Py_ssize_t>(sizeof(CublasLt::Algorithm)), workspace,
                      static_cast<double>(candidate.waves)));
    if (!item || PyList_Append(list.get(), item.get()) != 0) return nullptr;
  }
  return PyList_AsTuple(list.get());
}

PyObject* choose(PyObject* self, PyObject* args) {
  Product& product = product_of(self);
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

// ---- algorithms that were measured before ----------------------------------------------------------------------

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
bool set_tuned(Product& product, PyObject* tuned) {
  if (tuned == Py_None) return true;
  PyObject *find = nullptr, *drop = nullptr;
  if (!PyTuple_Check(tuned) || !PyArg_ParseTuple(tuned, "OO;tuned is (find, drop)", &find, &drop)) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_TypeError, "tuned is (find, drop)");
    return false;
  }
  product.tuned = Reference::borrow(tuned);
  product.matmul.tuned.find = [find](const MatmulKey& key, CublasLt::Algorithm& algorithm) {
    return find_tuned(find, key, algorithm);
  };
  product.matmul.tuned.drop = [drop](const MatmulKey& key, const std::string& why) { drop_tuned(drop, key, why); };
  return true;
}

// A matrix as PyTorch's allocator would lay it, of which the heuristic reads the sizes alone.
Matrix imagined(int64_t rows, int64_t columns) { return {nullptr, rows, columns, columns, false}; }

PyObject* refusal(PyObject* self, PyObject* args) {
  Product& product = product_of(self);
  const MatmulForm& form = product.matmul.form;
  long long m = 0, n = 0, k = 0;
  int device = 0;
  if (!PyArg_ParseTuple(args, "LLL|i:refusal", &m, &n, &k, &device)) return nullptr;
  if (m <= 0 || n <= 0 || k <= 0) Py_RETURN_NONE;
  MatmulCall call{};
  call.device = device;
  call.a = form.transpose_a ? imagined(k, m) : imagined(m, k);
  call.b = form.transpose_b ? imagined(n, k) : imagined(k, n);
  call.out = call.c = imagined(m, n);
  call.aux = form.epilogue->aux_is_mask ? Matrix{nullptr, m, (n + 127) / 128 * 16, (n + 127) / 128 * 128, false}
                                        : imagined(m, n);
  if (form.epilogue->aux == Use::none) call.aux = {};
  // Nothing is read there; the library wants a pointer where an epilogue has one.
  call.bias = call.aux.data = reinterpret_cast<void*>(uintptr_t{4096});
  if (form.addend != Addend::c) call.c = {};
  if (std::strcmp(form.dtype.name, "float32") == 0 && !read_precision(&call.tf32)) return nullptr;
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

// ---- construction ----------------------------------------------------------------------------------------------

bool refuse(const char* name, const std::string& problem) {
  PyErr_Format(PyExc_ValueError, "product '%s': %s", name, problem.c_str());
  return false;
}

bool read_dtype(const char* name, const char* dtype, DType* found) {
  const DType* known = find_dtype(dtype);
  const std::string text = dtype;
  if (known == nullptr || (text != "float32" && text != "bfloat16" && text != "float16")) {
    return refuse(name, "its dtypes are float32, bfloat16 and float16, got " + text);
  }
  *found = *known;
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

bool add_argument(Product& product, PyObject* torch, Role role, const DType* dtype, bool written) {
  Reference torch_dtype = Reference::steal(PyObject_GetAttrString(torch, dtype->name));
  if (!torch_dtype) return false;
  product.arguments.push_back({role, dtype, written, torch_dtype});
  return true;
}

bool list_arguments(Product& product) {
  const MatmulForm& form = product.matmul.form;
  const Epilogue& epilogue = *form.epilogue;
  const Reference torch = Reference::steal(PyImport_ImportModule("torch"));
  if (!torch) return false;
  const DType* aux = epilogue.aux_is_mask ? find_dtype("uint8") : &form.out_dtype;
  const auto add = [&](Role role, const DType* dtype, bool written) {
    return add_argument(product, torch.get(), role, dtype, written);
  };
  return add(Role::a, &form.dtype, false) && add(Role::b, &form.dtype, false) &&
         add(Role::out, &form.out_dtype, true) && (form.addend != Addend::c || add(Role::c, &form.out_dtype, false)) &&
         (epilogue.bias == Use::none || add(Role::bias, &form.out_dtype, epilogue.bias == Use::written)) &&
         (epilogue.aux == Use::none || add(Role::aux, aux, epilogue.aux == Use::written));
}

std::unique_ptr<Product> build(PyObject* args, PyObject* keywords) {
  static const char* names[] = {"name", "dtype",    "transpose_a", "transpose_b", "out_dtype", "epilogue",
                                "add",  "on_empty", "tuned",       nullptr};
  const char *name = nullptr, *dtype = nullptr, *out_dtype = nullptr, *epilogue = "none", *add = "none";
  int transpose_a = 0, transpose_b = 0;
  PyObject *on_empty = Py_None, *tuned = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "ss|$ppzssOO:CudaMatmul", const_cast<char**>(names), &name, &dtype,
                                   &transpose_a, &transpose_b, &out_dtype, &epilogue, &add, &on_empty, &tuned)) {
    return nullptr;
  }
  MatmulForm form{name, {}, {}, transpose_a != 0, transpose_b != 0, find_epilogue(epilogue), Addend::none};
  if (form.epilogue == nullptr) {
    refuse(name, "the epilogue '" + std::string(epilogue) + "' is unknown (known: " + known_epilogues() + ")");
    return nullptr;
  }
  if (!read_dtype(name, dtype, &form.dtype) || !read_addend(name, add, &form.addend) ||
      !read_dtype(name, out_dtype != nullptr ? out_dtype : dtype, &form.out_dtype)) {
    return nullptr;
  }
  auto product = std::make_unique<Product>(std::move(form));
  if (on_empty != Py_None) product->on_empty = Reference::borrow(on_empty);
  return list_arguments(*product) && set_tuned(*product, tuned) ? std::move(product) : nullptr;
}

PyObject* new_matmul(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  try {
    std::unique_ptr<Product> product = build(args, keywords);
    if (product == nullptr) return nullptr;
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    auto* object = reinterpret_cast<MatmulObject*>(self);
    object->call = guarded<vectorcall, PyObject* const*, size_t, PyObject*>;
    object->product = product.release();
    return self;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

void free_matmul(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<MatmulObject*>(self)->product;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* describe(PyObject* self) {
  const MatmulForm& form = product_of(self).matmul.form;
  return PyUnicode_FromFormat("<CudaMatmul %s, %s, epilogue %s>", form.name.c_str(), form.dtype.name,
                              form.epilogue->name);
}

// The names of a call's tensors, in order.
PyObject* arguments_of(PyObject* self, void*) {
  const Product& product = product_of(self);
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(product.arguments.size()));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < product.arguments.size(); ++i) {
    const char* name = role_names[static_cast<size_t>(product.arguments[i].role)];
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyUnicode_FromString(name));
  }
  return tuple;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(MatmulObject, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

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
             "add='none', on_empty=None, tuned=None)\n--\n\nA matrix product by cuBLASLt; call it with one tuple of "
             "tensors.");

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>(documentation)},
    {Py_tp_new, reinterpret_cast<void*>(new_matmul)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_matmul)},
    {Py_tp_repr, reinterpret_cast<void*>(describe)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"te_fuser._native.CudaMatmul", sizeof(MatmulObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

PyTypeObject* matmul_type = nullptr;

}  // namespace

PyObject* make_cuda_matmul_type() {
  if (!init_torch_functions()) return nullptr;
  PyObject* type = PyType_FromSpec(&spec);
  matmul_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

bool run_matmul(PyObject* matmul, PyObject* const* tensors, size_t count) {
  try {
    if (Py_TYPE(matmul) == matmul_type) return run(product_of(matmul), tensors, count);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
  PyErr_Format(PyExc_TypeError, "a product is a CudaMatmul, got %s", Py_TYPE(matmul)->tp_name);
  return false;
}

}  // namespace te
