// The steps of a program: what runs between slots, without the interpreter where that can be.
//
// Slots are a Python list of tensors (None where there is none). A step reads some and fills some.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda_launch.h"
#include "matmul.h"
#include "reference.h"
#include "workspace.h"

namespace te {

// What the steps of one run on one stream share: a second stream would have its own.
struct Shared {
  Workspace workspace;
  bool may_overwrite = true;  // whether outputs may be stored over what the steps read last
};

// One step. `run` returns false with a Python error set; it needs the interpreter lock.
class Step {
 public:
  Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  virtual ~Step() = default;
  virtual bool run(PyObject* slots, Shared& shared) = 0;
};

// How the sizes of an output follow from a call's: [..., width], as given, [samples], [samples, width], [width, rows up to
// a multiple of 16], and that with room for the scales of blocks.
enum class SizeRule : uint8_t { rows, fixed, samples, sample_rows, transposed, transposed_blocks };

struct OutputSpec {
  Py_ssize_t slot;
  Py_ssize_t alike;  // the tensor of the call, inputs first, that has the same sizes and dtype; -1: none
  SizeRule rule;
  int64_t width;
  std::vector<int64_t> fixed;
  Reference dtype;       // torch.dtype
  Py_ssize_t over = -1;  // the input whose memory it may have, where nobody else holds that; -1: none
};

// How many elements an input has: `width` for each row or sample, or once (SizeRule::fixed); -1: whatever it has.
struct InputSize {
  SizeRule rule;
  int64_t width;
};

// A kernel(tensors, rows, batch_inner, batch_size, integers), its inputs made contiguous, its outputs allocated or stored
// over inputs.
class KernelStep : public Step {
 public:
  std::string name;
  Reference kernel;  // None where nothing is computed, and outputs are other names of inputs
  CudaProgram* cuda = nullptr;  // what `kernel` is made of, where it is a CudaKernel
  std::vector<Py_ssize_t> inputs;
  std::vector<InputSize> input_sizes;  // of `inputs`, or empty: kernels trust them, so that others are refused
  Py_ssize_t lead = 0;  // the slot whose sizes are those of the call
  bool per_sample = false;
  int64_t batch_dim = 0;
  std::vector<OutputSpec> outputs;
  Reference streams;  // the integers that no call changes
  bool has_blocks = false;  // whether ranks share the rows by `cut_dim`: the last integer is a rank's block of them
  int64_t cut_dim = 0;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> aliases;  // new, old
  int64_t many_rows = 0;  // from so many rows on, outputs are shown to `large`
  Reference large;

  bool run(PyObject* slots, Shared& shared) override;

 private:
  struct Sizes;
  bool read_sizes(PyObject* lead_tensor, Sizes& sizes) const;
  bool launch(PyObject* slots, Shared& shared);
  Reference integers(const Sizes& sizes) const;
  bool call(PyObject* tensors, const Sizes& sizes) const;
  bool take_inputs(PyObject* slots, PyObject* tensors, const Sizes& sizes) const;
  bool make_outputs(PyObject* slots, PyObject* tensors, const Sizes& sizes, bool may_overwrite) const;
  bool can_overwrite(PyObject* slots, const OutputSpec& spec, PyObject* tensors, const Sizes& sizes) const;
  PyObject* make_output(const OutputSpec& spec, PyObject* tensors, const Sizes& sizes) const;
};

// output = function(*inputs), or (output, ...) = function(*inputs)
class FunctionStep : public Step {
 public:
  Reference function;
  CudaMatmul* product = nullptr;  // whose bound method `function` is, where it is CudaMatmul.make
  std::string name;
  std::vector<Py_ssize_t> inputs;
  std::vector<Py_ssize_t> outputs;  // -1 for a result that nobody reads

  bool run(PyObject* slots, Shared& shared) override;

 private:
  Reference call(PyObject* const* arguments, Shared& shared) const;
  bool unpack(PyObject* made, PyObject* slots) const;
};

// Steps in order, and after each the slots that nobody reads any more.
class Program {
 public:
  struct Entry {
    Reference callable;      // the step as Python has it: where `native` is nullptr it is called with the slots
    Step* native = nullptr;  // owned by `callable`
    std::vector<Py_ssize_t> dead;
  };
  std::vector<Entry> entries;

  // `watch(number)` is called before each step and, with the number of steps, after the last; nullptr: nobody watches.
  bool run(PyObject* slots, bool may_overwrite, PyObject* watch = nullptr);

  // For the garbage collector: steps may hold the ops whose plan this is.
  int visit(visitproc visit, void* argument) const;
  void clear() { entries.clear(); }

 private:
  bool run(const Entry& entry, PyObject* slots, Shared& shared) const;
};

// Looks up what steps ask torch for; false with a Python error set.
bool init_steps();

}  // namespace te
