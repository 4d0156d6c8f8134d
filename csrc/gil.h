// Work without the interpreter lock, and what went wrong in it as a Python error.
#pragma once

#include <Python.h>

#include <new>
#include <string>

#include "failure.h"
#include "reference.h"

namespace te {

// Sets the Python error of a failure; where memory is missing torch.OutOfMemoryError, which training loops catch. It
// then names the kernel whose scratch that was, unless `kernel` is nullptr and the text says it.
inline void raise_failure(const Failure& failure, const char* kernel) {
  if (failure.kind != Failure::Kind::memory) {
    PyErr_SetString(failure.kind == Failure::Kind::value ? PyExc_ValueError : PyExc_RuntimeError, failure.text.c_str());
    return;
  }
  const Reference type = import_from("torch", "OutOfMemoryError");
  PyErr_Clear();
  std::string who;
  if (kernel != nullptr) who = "kernel '" + std::string(kernel) + "': no memory for its partial sums: ";
  PyErr_SetString(type ? type.get() : PyExc_MemoryError, (who + failure.text).c_str());
}

// Does something that may wait for the device, or for a thread that waits for the interpreter; false with a Python
// error set when it fails.
template <class Work>
bool without_gil(const char* kernel, Work work) {
  Failure failure;
  bool done = false, no_memory = false;
  PyThreadState* thread = PyEval_SaveThread();
  try {
    done = work(failure);
  } catch (const std::bad_alloc&) {
    no_memory = true;
  }
  PyEval_RestoreThread(thread);
  if (no_memory) {
    PyErr_NoMemory();
  } else if (!done) {
    raise_failure(failure, kernel);
  }
  return done;
}

}  // namespace te
