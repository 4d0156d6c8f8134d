#include "tensor.h"

namespace te {
namespace {

// The part of DLPack 1.x that is read here. Minor versions only add enumeration values, so the layout holds for 1.*.
namespace dlpack {

constexpr uint32_t major_version = 1;
constexpr int32_t cpu = 1;

enum Code : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E5m2 = 12,
};

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48, "layout of DLTensor");

struct ExchangeHeader {
  uint32_t major;
  uint32_t minor;
  const ExchangeHeader* previous;
};

struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows: valid while the object lives
  void* current_work_stream;
};

}  // namespace dlpack

constexpr DType dtypes[] = {
    {"float32", dlpack::kFloat, 32},
    {"bfloat16", dlpack::kBfloat, 16},
    {"float16", dlpack::kFloat, 16},
    {"float64", dlpack::kFloat, 64},
    {"int64", dlpack::kInt, 64},
    {"int32", dlpack::kInt, 32},
    {"uint8", dlpack::kUInt, 8},
    {"bool", dlpack::kBool, 8},
    {"float8_e4m3fn", dlpack::kFloat8E4m3fn, 8},
    {"float8_e5m2", dlpack::kFloat8E5m2, 8},
};

// Set once while the module is imported and never changed; both types live as long as torch does.
struct TorchApi {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  int (*tensor_from_object)(void*, dlpack::Tensor*) = nullptr;
};
TorchApi torch_api;

// A torch that is newer than this file may offer its older table behind the newest one.
const dlpack::ExchangeApi* supported_table(const void* newest) {
  const auto* header = static_cast<const dlpack::ExchangeHeader*>(newest);
  while (header != nullptr && header->major != dlpack::major_version) header = header->previous;
  return reinterpret_cast<const dlpack::ExchangeApi*>(header);
}

bool refuse_torch(const char* reason) {
  PyErr_Format(PyExc_ImportError, "te_fuser needs torch 2.11 or newer: %s", reason);
  return false;
}

bool load_exchange_table() {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(torch_api.tensor), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return refuse_torch("torch.Tensor has no DLPack C exchange API");
  }
  const void* newest = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  if (newest == nullptr) return false;
  const dlpack::ExchangeApi* table = supported_table(newest);
  if (table == nullptr) return refuse_torch("its DLPack C exchange API has no version 1");
  if (table->tensor_from_object == nullptr) return refuse_torch("its DLPack C exchange API cannot borrow tensors");
  torch_api.tensor_from_object = table->tensor_from_object;
  return true;
}

PyTypeObject* import_type(const char* module_name, const char* name) {
  PyObject* module = PyImport_ImportModule(module_name);
  if (module == nullptr) return nullptr;
  PyObject* type = PyObject_GetAttrString(module, name);
  Py_DECREF(module);
  return reinterpret_cast<PyTypeObject*>(type);
}

const char* dtype_name(uint8_t code, uint8_t bits) {
  for (const DType& dtype : dtypes) {
    if (dtype.code == code && dtype.bits == bits) return dtype.name;
  }
  return nullptr;
}

bool is_row_major(const dlpack::Tensor& tensor, bool* empty) {
  int64_t expected = 1;
  bool dense = true;
  *empty = false;
  for (int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    const int64_t size = tensor.shape[axis];
    if (size == 0) *empty = true;
    if (size == 1) continue;
    if (tensor.strides[axis] != expected) dense = false;
    expected *= size;
  }
  return dense || *empty;
}

// The pending exception, taken out of the interpreter.
PyObject* take_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
#endif
}

void put_error(PyObject* error) {
#if PY_VERSION_HEX >= 0x030C0000
  PyErr_SetRaisedException(error);
#else
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(error));
  Py_INCREF(type);
  PyErr_Restore(type, error, PyException_GetTraceback(error));
#endif
}

// Replaces the error that torch set by one that says which argument it was; torch's own stays as its cause.
void refuse_unreadable(const ArgumentSite& site) {
  PyObject* cause = take_error();
  PyErr_Format(PyExc_TypeError,
               "kernel '%s': tensor %zd has no memory of its own on the CPU (a meta, sparse, nested, quantized or "
               "transformed tensor)",
               site.kernel, site.index);
  PyObject* error = take_error();
  PyException_SetCause(error, cause);  // steals the cause
  put_error(error);
}

void refuse_type(PyObject* object, const ArgumentSite& site) {
  PyErr_Format(PyExc_TypeError, "kernel '%s': tensor %zd must be a plain torch.Tensor or torch.nn.Parameter, got %s",
               site.kernel, site.index, Py_TYPE(object)->tp_name);
}

void refuse_dtype(const dlpack::Tensor& tensor, const DType& expected, const ArgumentSite& site) {
  const char* name = dtype_name(tensor.code, tensor.bits);
  if (name != nullptr) {
    PyErr_Format(PyExc_TypeError, "kernel '%s': tensor %zd must be %s, got %s", site.kernel, site.index, expected.name,
                 name);
  } else {
    PyErr_Format(PyExc_TypeError, "kernel '%s': tensor %zd must be %s, got a dtype of %d bits that no kernel takes",
                 site.kernel, site.index, expected.name, static_cast<int>(tensor.bits));
  }
}

void refuse_value(const char* problem, const ArgumentSite& site) {
  PyErr_Format(PyExc_ValueError, "kernel '%s': tensor %zd %s", site.kernel, site.index, problem);
}

}  // namespace

const DType* find_dtype(const char* name) {
  for (const DType& dtype : dtypes) {
    if (std::string(dtype.name) == name) return &dtype;
  }
  return nullptr;
}

std::string known_dtypes() {
  std::string names;
  for (const DType& dtype : dtypes) names += (names.empty() ? "" : ", ") + std::string(dtype.name);
  return names;
}

bool init_tensor_api() {
  torch_api.tensor = import_type("torch", "Tensor");
  if (torch_api.tensor == nullptr) return false;
  torch_api.parameter = import_type("torch.nn", "Parameter");
  if (torch_api.parameter == nullptr) return false;
  return load_exchange_table();
}

bool read_cpu_tensor(PyObject* object, const DType& expected, const ArgumentSite& site, void** data) {
  // Subclasses (FakeTensor, DTensor, ...) pass torch's export but mean something else than the memory it shows.
  if (Py_TYPE(object) != torch_api.tensor && Py_TYPE(object) != torch_api.parameter) {
    refuse_type(object, site);
    return false;
  }
  dlpack::Tensor tensor;
  if (torch_api.tensor_from_object(object, &tensor) != 0) {
    refuse_unreadable(site);
    return false;
  }
  if (tensor.device_type != dlpack::cpu) {
    refuse_value("must be on the CPU", site);
    return false;
  }
  if (tensor.code != expected.code || tensor.bits != expected.bits || tensor.lanes != 1) {
    refuse_dtype(tensor, expected, site);
    return false;
  }
  bool empty = false;
  if (!is_row_major(tensor, &empty)) {
    refuse_value("must be contiguous (row-major)", site);
    return false;
  }
  // Freed storages (FSDP), zero tensors and functionalized tensors show a shape without memory behind it.
  if (tensor.data == nullptr && !empty) {
    refuse_value("has a shape but no memory (its storage was freed, or it is a transformed tensor)", site);
    return false;
  }
  *data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return true;
}

}  // namespace te
