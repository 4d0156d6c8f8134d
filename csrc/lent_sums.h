// Sums that wait, lent to a step in Python: it hands them on to the kernels whose sums may wait; no other finds them.
#pragma once

#include <Python.h>

#include <vector>

#include "column_sums.h"
#include "reference.h"

namespace te {

// Sums that wait in a program, with the tensors of totals that steps in Python made: whatever becomes of those there, the
// last addition has where to write to. Made, and ended, under the interpreter lock.
class ProgramSums : public PendingSums {
 public:
  using PendingSums::PendingSums;

  std::vector<Reference> totals;
};

// A capsule that is worth nothing once this object has ended, whoever still holds it. Needs the interpreter lock.
class LentSums {
 public:
  explicit LentSums(ProgramSums& sums) : capsule_(Reference::steal(PyCapsule_New(&sums, good, nullptr))) {}
  LentSums(const LentSums&) = delete;
  LentSums& operator=(const LentSums&) = delete;
  ~LentSums() {
    if (capsule_) PyCapsule_SetName(capsule_.get(), spent);
  }

  // nullptr, with a Python error set, where there is no memory for it.
  PyObject* get() const { return capsule_.get(); }

  // The sums behind what `get` gave; nullptr with a Python error set for anything else.
  static ProgramSums* behind(const char* kernel, PyObject* object) {
    if (PyCapsule_IsValid(object, good)) return static_cast<ProgramSums*>(PyCapsule_GetPointer(object, good));
    if (PyCapsule_IsValid(object, spent)) {
      PyErr_Format(PyExc_RuntimeError, "kernel '%s': the step to which a program lent its sums is over", kernel);
    } else {
      PyErr_Format(PyExc_TypeError, "kernel '%s': its sums are left to what a program lends to a step, got %s", kernel,
                   Py_TYPE(object)->tp_name);
    }
    return nullptr;
  }

 private:
  static constexpr const char* good = "te_fuser sums that wait";
  static constexpr const char* spent = "te_fuser sums that have waited";
  Reference capsule_;
};

}  // namespace te
