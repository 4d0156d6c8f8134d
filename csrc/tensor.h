// Reads torch tensors, asks torch for its streams and for memory: through torch's DLPack C exchange API, without a
// torch header.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

// What to call, by whose call it is, where a kernel is no operation that others record or differentiate; in errors.
#define TE_FUSER_INSTEAD                                                                                  \
  "model.reference(x) (of a single op, te_fuser.Sequential(op).reference(x); of a converted model, after " \
  "te_fuser.revert(model), the model)"

namespace te {

// A dtype as DLPack spells it; `name` is torch's name without "torch.".
struct DType {
  const char* name;
  uint8_t code;
  uint8_t bits;
};

// The dtype of that name, or nullptr when kernels cannot take it.
const DType* find_dtype(const char* name);

// Every name that find_dtype knows, for messages.
std::string known_dtypes();

// Looks torch's types and its exchange table up; on failure a Python error is set.
bool init_tensor_api();

// Where a tensor was passed, for messages: "kernel 'NAME': tensor INDEX".
struct ArgumentSite {
  const char* kernel;
  Py_ssize_t index;
};

// Whether an object is a torch.Tensor, of whatever subclass.
bool is_tensor(PyObject* object);

// Appends class, dtype, device, shape and whether it needs a gradient; false where the object is no plain tensor in
// memory, and false with a Python error set where torch fails.
bool append_key(PyObject* object, std::string& key);

// The same of a tensor that this process has its part of, too: of a DTensor, of its part, and which object says how it is
// distributed; whoever keeps a key keeps that.
bool append_call_key(PyObject* object, std::string& key);

// append_key, and where it lies: its first element and its strides.
bool append_place(PyObject* object, std::string& place);

// What is known of a tensor without looking at its elements; borrowed: it is valid while the tensor lives.
struct TensorView {
  const void* data;
  const int64_t* shape;
  int32_t dimensions;
  bool is_row_major;
  bool is_on_host;
};

// Returns false with a Python error set when the object is no plain tensor.
bool view_tensor(PyObject* object, const ArgumentSite& site, TensorView* view);

// The data pointer of a dense, row-major CPU tensor of dtype `expected`; a tensor without elements may give nullptr.
// Returns false with a Python error set when the object is anything else.
bool read_cpu_tensor(PyObject* object, const DType& expected, const ArgumentSite& site, void** data);

// A tensor's memory.
struct Memory {
  void* data = nullptr;
  int64_t bytes = 0;
};

// The same for a tensor on a CUDA device. `device` is -1 for the first tensor of a call and is then the device on which
// the others must be, too.
bool read_cuda_tensor(PyObject* object, const DType& expected, const ArgumentSite& site, int32_t* device,
                      Memory* memory);

// A tensor as a matrix: its leading dimensions are its rows, whose elements lie side by side and `stride` apart.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
  bool flipped = false;  // it is the transpose of such a matrix: `stride` lies between columns
};

// Reads a tensor on a CUDA device as a matrix; one of a single dimension is one row. `fits` is false, without an error,
// when its strides are those of no matrix.
bool read_cuda_matrix(PyObject* object, const DType& expected, const ArgumentSite& site, int32_t* device,
                      Matrix* matrix, bool* fits);

// PyTorch's current stream of a CUDA device; false with a Python error set.
bool current_cuda_stream(int32_t device, void** stream);

// Memory on a CUDA device from PyTorch's allocator, for the work of one call on the current stream: it goes back when
// the object ends, and the allocator gives it only to later work of the same stream. Needs no interpreter lock.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // At least 16 bytes of alignment, uninitialised; false with PyTorch's words in `why`.
  bool allocate(int32_t device, int64_t bytes, std::string& why);
  char* data() const { return data_; }

 private:
  void* owner_ = nullptr;
  char* data_ = nullptr;
};

// For tests on machines without a GPU: tensors on the CPU count as being on CUDA device 0.
void let_cpu_stand_for_cuda(bool on);

}  // namespace te
