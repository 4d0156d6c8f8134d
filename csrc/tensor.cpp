#include "tensor.h"

#include "reference.h"

namespace te {
namespace {

// The part of DLPack 1.x that is read here. Minor versions only add enumeration values, so the layout holds for 1.*.
namespace dlpack {

constexpr uint32_t major_version = 1;
constexpr int32_t cpu = 1;
constexpr int32_t cuda = 2;

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

// A tensor that owns its memory until `deleter` is called on it.
struct ManagedTensor {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};

using SetError = void (*)(void* context, const char* kind, const char* message);

struct ExchangeHeader {
  uint32_t major;
  uint32_t minor;
  const ExchangeHeader* previous;
};

struct ExchangeApi {
  ExchangeHeader header;
  int (*managed_tensor_allocator)(Tensor* like, ManagedTensor** out, void* error_context, SetError set_error);
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows: valid while the object lives
  int (*current_work_stream)(int32_t device_type, int32_t device_index, void** out);
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
  const dlpack::ExchangeApi* exchange = nullptr;
  PyObject* requires_grad = nullptr;  // name
  bool cpu_stands_for_cuda = false;  // tests only
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
  const Reference capsule = Reference::steal(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(torch_api.tensor), "__dlpack_c_exchange_api__"));
  if (!capsule) {
    PyErr_Clear();
    return refuse_torch("torch.Tensor has no DLPack C exchange API");
  }
  const void* newest = PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api");
  if (newest == nullptr) return false;
  const dlpack::ExchangeApi* table = supported_table(newest);
  if (table == nullptr) return refuse_torch("its DLPack C exchange API has no version 1");
  if (table->tensor_from_object == nullptr) return refuse_torch("its DLPack C exchange API cannot borrow tensors");
  if (table->current_work_stream == nullptr || table->managed_tensor_allocator == nullptr) {
    return refuse_torch("its DLPack C exchange API has no streams or no allocator");
  }
  torch_api.exchange = table;
  return true;
}

const char* dtype_name(uint8_t code, uint8_t bits) {
  for (const DType& dtype : dtypes) {
    if (dtype.code == code && dtype.bits == bits) return dtype.name;
  }
  return nullptr;
}

// Whether the elements lie in order without gaps; `count` is how many there are.
bool is_row_major(const dlpack::Tensor& tensor, int64_t* count) {
  bool dense = true;
  *count = 1;
  for (int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    const int64_t size = tensor.shape[axis];
    if (size == 1) continue;
    if (tensor.strides[axis] != *count) dense = false;
    *count *= size;
  }
  return dense || *count == 0;
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
  PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(error))), error, PyException_GetTraceback(error));
#endif
}

// Replaces the error that torch set by one that says which argument it was; torch's own stays as its cause.
void refuse_unreadable(const ArgumentSite& site) {
  PyObject* cause = take_error();
  PyErr_Format(PyExc_TypeError,
               "kernel '%s': tensor %zd has no memory of its own (a meta, sparse, nested, quantized or transformed "
               "tensor); for vmap and batched gradients (is_grads_batched, jacobian(vectorize=True)) "
               "take " TE_FUSER_INSTEAD ", which is plain PyTorch",
               site.kernel, site.index);
  PyObject* error = take_error();
  PyException_SetCause(error, cause);  // steals the cause
  put_error(error);
}

bool check_dtype(const dlpack::Tensor& tensor, const DType& expected, const ArgumentSite& site) {
  if (tensor.code == expected.code && tensor.bits == expected.bits && tensor.lanes == 1) return true;
  const char* name = dtype_name(tensor.code, tensor.bits);
  if (name != nullptr) {
    PyErr_Format(PyExc_TypeError, "kernel '%s': tensor %zd must be %s, got %s", site.kernel, site.index, expected.name,
                 name);
  } else {
    PyErr_Format(PyExc_TypeError, "kernel '%s': tensor %zd must be %s, got a dtype of %d bits that no kernel takes",
                 site.kernel, site.index, expected.name, static_cast<int>(tensor.bits));
  }
  return false;
}

bool refuse_value(const char* why, const ArgumentSite& site) {
  PyErr_Format(PyExc_ValueError, "kernel '%s': tensor %zd %s", site.kernel, site.index, why);
  return false;
}

// What torch shows of an object that is a plain tensor.
bool borrow(PyObject* object, const ArgumentSite& site, dlpack::Tensor* tensor) {
  // Subclasses (FakeTensor, DTensor, ...) pass torch's export but mean something else than the memory it shows.
  if (Py_TYPE(object) != torch_api.tensor && Py_TYPE(object) != torch_api.parameter) {
    PyErr_Format(PyExc_TypeError, "kernel '%s': tensor %zd must be a plain torch.Tensor or torch.nn.Parameter, got %s",
                 site.kernel, site.index, Py_TYPE(object)->tp_name);
    return false;
  }
  if (torch_api.exchange->tensor_from_object(object, tensor) == 0) return true;
  refuse_unreadable(site);
  return false;
}

// Freed storages (FSDP), zero tensors and functionalized tensors show a shape without memory behind it.
bool refuse_freed(const ArgumentSite& site) {
  return refuse_value("has a shape but no memory (its storage was freed, or it is a transformed tensor)", site);
}

bool read_memory(const dlpack::Tensor& tensor, const DType& expected, const ArgumentSite& site, Memory* memory) {
  if (!check_dtype(tensor, expected, site)) return false;
  int64_t count = 0;
  if (!is_row_major(tensor, &count)) return refuse_value("must be contiguous (row-major)", site);
  if (tensor.data == nullptr && count > 0) return refuse_freed(site);
  *memory = {static_cast<char*>(tensor.data) + tensor.byte_offset, count * (expected.bits / 8)};
  return true;
}

// How a tensor lies as a matrix; false when its leading dimensions have no common stride, or its columns overlap.
bool as_matrix(const dlpack::Tensor& tensor, Matrix* matrix) {
  matrix->columns = tensor.ndim > 0 ? tensor.shape[tensor.ndim - 1] : 1;
  matrix->rows = 1;
  int64_t stride = 0;  // of the innermost leading dimension that has more than one row
  bool even = true;
  for (int32_t axis = tensor.ndim - 2; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1) {
      if (stride == 0 && matrix->rows == 1) stride = tensor.strides[axis];
      even = even && tensor.strides[axis] == stride * matrix->rows;
    }
    matrix->rows *= tensor.shape[axis];
  }
  const int64_t across = matrix->columns > 1 ? tensor.strides[tensor.ndim - 1] : 1;
  matrix->stride = matrix->rows > 1 ? stride : matrix->columns;
  matrix->flipped = false;
  if (matrix->rows * matrix->columns == 0) {
    matrix->stride = matrix->columns;
    return true;
  }
  if (even && across == 1 && matrix->stride >= matrix->columns) return true;
  matrix->flipped = even && (matrix->rows == 1 || stride == 1) && across >= matrix->rows;
  matrix->stride = across;
  return matrix->flipped;
}

// Whether a tensor is on the device of the call; the first one says which that is.
bool check_device(const dlpack::Tensor& tensor, const ArgumentSite& site, int32_t* device) {
  const bool stands_in = torch_api.cpu_stands_for_cuda && tensor.device_type == dlpack::cpu;
  if (tensor.device_type != dlpack::cuda && !stands_in) return refuse_value("must be on a CUDA device", site);
  if (*device < 0) *device = tensor.device_index;
  if (*device == tensor.device_index) return true;
  PyErr_Format(PyExc_ValueError, "kernel '%s': tensor %zd is on cuda:%d, and the first tensor is on cuda:%d",
               site.kernel, site.index, static_cast<int>(tensor.device_index), static_cast<int>(*device));
  return false;
}

void keep_error(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

// Whether an object is a DTensor; there is none while their module is not loaded.
bool is_distributed(PyObject* object) {
  static PyObject* name = PyUnicode_InternFromString("torch.distributed.tensor");
  static PyObject* type = nullptr;
  if (type == nullptr) {
    const Reference module = Reference::steal(PyImport_GetModule(name));
    if (!module) return false;
    type = PyObject_GetAttrString(module.get(), "DTensor");
  }
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type;
}

// This process's part of a DTensor.
Reference part_of(PyObject* object) {
  static PyObject* name = PyUnicode_InternFromString("_local_tensor");
  return Reference::steal(PyObject_GetAttr(object, name));
}

// append_key, which gives the tensor too.
bool append_key_of(PyObject* object, std::string& key, dlpack::Tensor& tensor) {
  const bool is_parameter = Py_TYPE(object) == torch_api.parameter;
  if (!is_parameter && Py_TYPE(object) != torch_api.tensor) return false;
  if (torch_api.exchange->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const Reference needs_grad = Reference::steal(PyObject_GetAttr(object, torch_api.requires_grad));
  if (!needs_grad) return false;
  const int64_t facts[] = {is_parameter,        needs_grad.get() == Py_True, tensor.code, tensor.bits,
                           tensor.device_type, tensor.device_index,         tensor.ndim};
  key.append(reinterpret_cast<const char*>(facts), sizeof(facts));
  key.append(reinterpret_cast<const char*>(tensor.shape), static_cast<size_t>(tensor.ndim) * sizeof(int64_t));
  return true;
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
  torch_api.tensor = reinterpret_cast<PyTypeObject*>(import_from("torch", "Tensor").release());
  if (torch_api.tensor == nullptr) return false;
  torch_api.parameter = reinterpret_cast<PyTypeObject*>(import_from("torch.nn", "Parameter").release());
  torch_api.requires_grad = PyUnicode_InternFromString("requires_grad");
  return torch_api.parameter != nullptr && torch_api.requires_grad != nullptr && load_exchange_table();
}

bool is_tensor(PyObject* object) { return PyObject_TypeCheck(object, torch_api.tensor); }

bool append_key(PyObject* object, std::string& key) {
  dlpack::Tensor tensor;
  return append_key_of(object, key, tensor);
}

bool append_call_key(PyObject* object, std::string& key) {
  if (append_key(object, key)) return true;
  if (PyErr_Occurred() != nullptr || !is_distributed(object)) return false;
  static PyObject* spec_of = PyUnicode_InternFromString("_spec");
  const Reference needs_grad = Reference::steal(PyObject_GetAttr(object, torch_api.requires_grad));
  const Reference part = part_of(object);
  const Reference spec = Reference::steal(PyObject_GetAttr(object, spec_of));
  if (!needs_grad || !part || !spec || !append_key(part.get(), key)) return false;
  const int64_t facts[] = {needs_grad.get() == Py_True, reinterpret_cast<int64_t>(spec.get())};
  key.append(reinterpret_cast<const char*>(facts), sizeof(facts));
  return true;
}

bool append_place(PyObject* object, std::string& place) {
  if (is_distributed(object)) {
    const Reference part = part_of(object);
    return part && append_place(part.get(), place);
  }
  dlpack::Tensor tensor;
  if (!append_key_of(object, place, tensor)) return false;
  const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  place.append(reinterpret_cast<const char*>(&data), sizeof(data));
  place.append(reinterpret_cast<const char*>(tensor.strides), static_cast<size_t>(tensor.ndim) * sizeof(int64_t));
  return true;
}

bool view_tensor(PyObject* object, const ArgumentSite& site, TensorView* view) {
  dlpack::Tensor tensor;
  if (!borrow(object, site, &tensor)) return false;
  int64_t count = 0;
  const void* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  *view = {data, tensor.shape, tensor.ndim, is_row_major(tensor, &count), tensor.device_type == dlpack::cpu};
  return true;
}

bool read_cpu_tensor(PyObject* object, const DType& expected, const ArgumentSite& site, void** data) {
  dlpack::Tensor tensor;
  if (!borrow(object, site, &tensor)) return false;
  if (tensor.device_type != dlpack::cpu) return refuse_value("must be on the CPU", site);
  Memory memory;
  if (!read_memory(tensor, expected, site, &memory)) return false;
  *data = memory.data;
  return true;
}

bool read_cuda_tensor(PyObject* object, const DType& expected, const ArgumentSite& site, int32_t* device,
                      Memory* memory) {
  dlpack::Tensor tensor;
  return borrow(object, site, &tensor) && check_device(tensor, site, device) &&
         read_memory(tensor, expected, site, memory);
}

bool read_cuda_matrix(PyObject* object, const DType& expected, const ArgumentSite& site, int32_t* device,
                      Matrix* matrix, bool* fits) {
  dlpack::Tensor tensor;
  if (!borrow(object, site, &tensor) || !check_device(tensor, site, device) || !check_dtype(tensor, expected, site)) {
    return false;
  }
  *fits = as_matrix(tensor, matrix);
  if (tensor.data == nullptr && matrix->rows * matrix->columns > 0) return refuse_freed(site);
  matrix->data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return true;
}

bool current_cuda_stream(int32_t device, void** stream) {
  if (torch_api.cpu_stands_for_cuda) {
    *stream = nullptr;
    return true;
  }
  return torch_api.exchange->current_work_stream(dlpack::cuda, device, stream) == 0;
}

bool DeviceMemory::allocate(int32_t device, int64_t bytes, std::string& why) {
  const int32_t type = torch_api.cpu_stands_for_cuda ? dlpack::cpu : dlpack::cuda;
  dlpack::Tensor like{nullptr, type, device, 1, dlpack::kUInt, 8, 1, &bytes, nullptr, 0};
  dlpack::ManagedTensor* made = nullptr;
  if (torch_api.exchange->managed_tensor_allocator(&like, &made, &why, keep_error) != 0) return false;
  owner_ = made;
  data_ = static_cast<char*>(made->tensor.data) + made->tensor.byte_offset;
  return true;
}

DeviceMemory::~DeviceMemory() {
  auto* made = static_cast<dlpack::ManagedTensor*>(owner_);
  if (made != nullptr && made->deleter != nullptr) made->deleter(made);
}

void let_cpu_stand_for_cuda(bool on) { torch_api.cpu_stands_for_cuda = on; }

}  // namespace te
