// Reads torch tensors through torch's DLPack C exchange API, without a torch header.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

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

// The data pointer of a dense, row-major CPU tensor of dtype `expected`; a tensor without elements may give nullptr.
// Returns false with a Python error set when the object is anything else.
bool read_cpu_tensor(PyObject* object, const DType& expected, const ArgumentSite& site, void** data);

}  // namespace te
