// What the kernel types share: their call from Python, kernel(tensors, rows, batch_inner, batch_size, integers).
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tensor.h"

namespace te {

// An array on the stack while it is short.
template <class T>
class Array {
 public:
  explicit Array(size_t size) : heap_(size > short_size ? new T[size] : nullptr) {}
  T* data() { return heap_ ? heap_.get() : stack_.data(); }
  T& operator[](size_t index) { return data()[index]; }

 private:
  static constexpr size_t short_size = 24;
  std::array<T, short_size> stack_;
  std::unique_ptr<T[]> heap_;
};

// The arguments of one call, borrowed from the caller. Every function here that returns a bool returns false with a
// Python error set, which names the kernel.
struct Arguments {
  PyObject* tensors;
  PyObject* sizes[3];
  PyObject* integers;
};

struct CallSizes {
  int64_t rows;
  int64_t batch_inner;
  int64_t batch_size;
};

// The arguments of a vectorcall, all by their places; checks that there are as many tensors as the kernel takes.
bool bind_arguments(const char* kernel, size_t tensor_count, PyObject* const* values, size_t count, PyObject* names,
                    Arguments& arguments);

bool read_sizes(const char* kernel, const Arguments& arguments, CallSizes& sizes);

// A tuple; `values` has room for all of them.
bool read_integers(const char* kernel, PyObject* integers, int64_t* values);

// The dtypes with these names, a tuple of str.
bool read_dtypes(const char* kernel, PyObject* names, std::vector<DType>& dtypes);

}  // namespace te
