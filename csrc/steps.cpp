#include "steps.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda_kernel.h"
#include "kernel_call.h"
#include "new_tensor.h"
#include "sole_owner.h"
#include "tensor.h"

namespace te {
namespace {

// Set once while the module is imported.
PyObject* contiguous = nullptr;  // names of methods and of an attribute
PyObject* detach = nullptr;
PyObject* requires_grad = nullptr;

constexpr size_t most_dimensions = 64;  // torch's own limit

// A list's item; a step that reads an empty slot is a mistake of whoever made the program.
PyObject* read_slot(PyObject* slots, Py_ssize_t index, const char* name) {
  PyObject* item = index >= 0 && index < PyList_GET_SIZE(slots) ? PyList_GET_ITEM(slots, index) : nullptr;
  if (item == nullptr || item == Py_None) {
    PyErr_Format(PyExc_RuntimeError, "step '%s': slot %zd is empty", name, index);
    return nullptr;
  }
  return item;
}

// Puts a new reference into a slot.
bool fill_slot(PyObject* slots, Py_ssize_t index, PyObject* item) { return PyList_SetItem(slots, index, item) == 0; }

}  // namespace

// What a call's sizes are: those of its lead.
struct KernelStep::Sizes {
  PyObject* lead;
  std::array<int64_t, most_dimensions> outer;  // all but the last
  size_t dimensions;                           // of `outer`
  CallSizes call;
};

bool KernelStep::read_sizes(PyObject* lead_tensor, Sizes& sizes) const {
  TensorView view;
  if (!view_tensor(lead_tensor, {name.c_str(), 0}, &view)) return false;
  sizes.lead = lead_tensor;
  sizes.dimensions = view.dimensions > 0 ? static_cast<size_t>(view.dimensions) - 1 : 0;
  if (sizes.dimensions > most_dimensions) {
    PyErr_Format(PyExc_ValueError, "step '%s': a tensor of %zu dimensions", name.c_str(), sizes.dimensions + 1);
    return false;
  }
  std::copy_n(view.shape, sizes.dimensions, sizes.outer.begin());
  sizes.call = {1, 1, 1};
  for (size_t i = 0; i < sizes.dimensions; ++i) sizes.call.rows *= sizes.outer[i];
  if (!per_sample || sizes.dimensions == 0) return true;
  const auto batch = static_cast<size_t>(batch_dim < 0 ? batch_dim + view.dimensions : batch_dim);
  for (size_t i = batch + 1; i < sizes.dimensions; ++i) sizes.call.batch_inner *= sizes.outer[i];
  sizes.call.batch_inner = std::max<int64_t>(sizes.call.batch_inner, 1);
  sizes.call.batch_size = view.shape[batch];
  return true;
}

namespace {

// An op or a fusion that gives another shape than it declared must not make a kernel read beyond a tensor.
bool has_size(const TensorView& view, const InputSize& size, const CallSizes& call, const char* step, size_t input) {
  if (size.width < 0) return true;
  int64_t elements = 1;
  for (int64_t i = 0; i < view.dimensions; ++i) elements *= view.shape[i];
  const int64_t count = size.rule == SizeRule::rows ? call.rows : size.rule == SizeRule::fixed ? 1 : call.batch_size;
  if (elements == count * size.width) return true;
  PyErr_Format(PyExc_ValueError,
               "step '%s': input %zu has %lld elements, planned were %lld (%lld x %lld): an op or a fusion before it "
               "gave another shape than it declares (by infer(), for an op)",
               step, input, static_cast<long long>(elements), static_cast<long long>(count * size.width),
               static_cast<long long>(count), static_cast<long long>(size.width));
  return false;
}

}  // namespace

bool KernelStep::take_inputs(PyObject* slots, PyObject* tensors, const Sizes& sizes) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    PyObject* tensor = read_slot(slots, inputs[i], name.c_str());
    TensorView view;
    if (tensor == nullptr || !view_tensor(tensor, {name.c_str(), static_cast<Py_ssize_t>(i)}, &view)) return false;
    if (!input_sizes.empty() && !has_size(view, input_sizes[i], sizes.call, name.c_str(), i)) return false;
    PyObject* dense = view.is_row_major ? Py_NewRef(tensor) : PyObject_CallMethodNoArgs(tensor, contiguous);
    if (dense == nullptr) return false;
    PyTuple_SET_ITEM(tensors, static_cast<Py_ssize_t>(i), dense);
  }
  return true;
}

PyObject* KernelStep::make_output(const OutputSpec& spec, PyObject* tensors, const Sizes& sizes) const {
  if (spec.alike >= 0) return new_tensor_like(PyTuple_GET_ITEM(tensors, spec.alike));
  std::array<int64_t, most_dimensions + 1> shape;
  const int64_t* found = shape.data();
  size_t count = 0;
  switch (spec.rule) {
    case SizeRule::fixed: found = spec.fixed.data(), count = spec.fixed.size(); break;
    case SizeRule::rows:
      std::copy_n(sizes.outer.begin(), sizes.dimensions, shape.begin());
      shape[sizes.dimensions] = spec.width;
      count = sizes.dimensions + 1;
      break;
    case SizeRule::samples: shape[0] = sizes.call.batch_size, count = 1; break;
    case SizeRule::sample_rows: shape[0] = sizes.call.batch_size, shape[1] = spec.width, count = 2; break;
    case SizeRule::transposed: shape[0] = spec.width, shape[1] = (sizes.call.rows + 15) / 16 * 16, count = 2; break;
    case SizeRule::transposed_blocks:  // four bytes for the scale of each 128 rows
      shape[0] = spec.width, shape[1] = (sizes.call.rows + 15) / 16 * 16 + (sizes.call.rows + 127) / 128 * 4, count = 2;
      break;
  }
  return new_tensor(sizes.lead, found, count, spec.dtype.get());
}

namespace {

// The tensor, or one over its memory that autograd knows nothing of: what one segment keeps may be another one's result.
PyObject* detached(PyObject* tensor) {
  const Reference needs = Reference::steal(PyObject_GetAttr(tensor, requires_grad));
  if (!needs) return nullptr;
  if (needs.get() == Py_True) return PyObject_CallMethodNoArgs(tensor, detach);
  return Py_NewRef(tensor);
}

}  // namespace

// Nobody reads that input later. It is stored over if it lies as the output would, and none but the slot and `tensors`
// hold it. False with or without a Python error set.
bool KernelStep::can_overwrite(PyObject* slots, const OutputSpec& spec, PyObject* tensors, const Sizes& sizes) const {
  const auto input = static_cast<size_t>(spec.over);
  PyObject* tensor = PyTuple_GET_ITEM(tensors, spec.over);
  if (tensor != PyList_GET_ITEM(slots, inputs[input])) return false;  // a contiguous copy of it
  TensorView view;
  if (!view_tensor(tensor, {name.c_str(), spec.over}, &view)) return false;
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(cuda->tensors[input].alignment) != 0) return false;
  if (view.dimensions != static_cast<int32_t>(sizes.dimensions) + 1 || view.shape[sizes.dimensions] != spec.width ||
      !std::equal(view.shape, view.shape + sizes.dimensions, sizes.outer.begin())) {
    return false;
  }
  return is_sole_owner(tensor, 2);
}

bool KernelStep::make_outputs(PyObject* slots, PyObject* tensors, const Sizes& sizes, bool may_overwrite) const {
  auto place = static_cast<Py_ssize_t>(inputs.size());
  for (const OutputSpec& spec : outputs) {
    bool over = false;
    if (may_overwrite && spec.over >= 0) {
      over = can_overwrite(slots, spec, tensors, sizes);
      if (!over && PyErr_Occurred() != nullptr) return false;
    }
    PyObject* tensor = over ? detached(PyTuple_GET_ITEM(tensors, spec.over)) : make_output(spec, tensors, sizes);
    if (tensor == nullptr) return false;
    PyTuple_SET_ITEM(tensors, place++, tensor);
    const bool shown = !over && sizes.call.rows >= many_rows;
    if (shown && !Reference::steal(PyObject_CallOneArg(large.get(), tensor))) return false;
    if (!fill_slot(slots, spec.slot, Py_NewRef(tensor))) return false;
  }
  return true;
}

// A rank's rows follow each other, here and in the whole, in blocks of so many.
Reference KernelStep::integers(const Sizes& sizes) const {
  if (!has_blocks) return Reference::borrow(streams.get());
  int64_t block = 1;
  const auto first = static_cast<size_t>(cut_dim < 0 ? cut_dim + static_cast<int64_t>(sizes.dimensions) + 1 : cut_dim);
  for (size_t i = first; i < sizes.dimensions; ++i) block *= sizes.outer[i];
  const Py_ssize_t count = PyTuple_GET_SIZE(streams.get());
  Reference made = Reference::steal(PyTuple_New(count + 1));
  if (!made) return made;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(made.get(), i, Py_NewRef(PyTuple_GET_ITEM(streams.get(), i)));
  }
  PyObject* last = PyLong_FromLongLong(std::max<int64_t>(block, 1));
  if (last == nullptr) return Reference();
  PyTuple_SET_ITEM(made.get(), count, last);
  return made;
}

bool KernelStep::call(PyObject* tensors, const Sizes& of) const {
  const CallSizes& sizes = of.call;
  const Reference numbers = integers(of);
  if (!numbers) return false;
  if (cuda != nullptr) return call_cuda_kernel(*cuda, tensors, sizes, numbers.get());
  const Reference rows = Reference::steal(PyLong_FromLongLong(sizes.rows));
  const Reference inner = Reference::steal(PyLong_FromLongLong(sizes.batch_inner));
  const Reference samples = Reference::steal(PyLong_FromLongLong(sizes.batch_size));
  if (!rows || !inner || !samples) return false;
  PyObject* arguments[] = {tensors, rows.get(), inner.get(), samples.get(), numbers.get()};
  return static_cast<bool>(Reference::steal(PyObject_Vectorcall(kernel.get(), arguments, 5, nullptr)));
}

bool KernelStep::launch(PyObject* slots, Shared& shared) {
  Sizes sizes;
  PyObject* lead_tensor = read_slot(slots, lead, name.c_str());
  if (lead_tensor == nullptr || !read_sizes(lead_tensor, sizes)) return false;
  const Reference tensors = Reference::steal(PyTuple_New(static_cast<Py_ssize_t>(inputs.size() + outputs.size())));
  return tensors && take_inputs(slots, tensors.get(), sizes) &&
         make_outputs(slots, tensors.get(), sizes, shared.may_overwrite) && call(tensors.get(), sizes);
}

bool KernelStep::run(PyObject* slots, Shared& shared) {
  if (kernel.get() != Py_None && !launch(slots, shared)) return false;
  for (const auto& [alias, original] : aliases) {
    PyObject* tensor = read_slot(slots, original, name.c_str());
    if (tensor == nullptr || !fill_slot(slots, alias, Py_NewRef(tensor))) return false;
  }
  return true;
}

bool FunctionStep::unpack(PyObject* made, PyObject* slots) const {
  if (!PyTuple_Check(made) || static_cast<size_t>(PyTuple_GET_SIZE(made)) != outputs.size()) {
    PyErr_Format(PyExc_TypeError, "step '%s' must give a tuple of %zu tensors, got %s", name.c_str(), outputs.size(),
                 Py_TYPE(made)->tp_name);
    return false;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i] < 0) continue;
    PyObject* item = PyTuple_GET_ITEM(made, static_cast<Py_ssize_t>(i));
    if (!fill_slot(slots, outputs[i], Py_NewRef(item))) return false;
  }
  return true;
}

Reference FunctionStep::call(PyObject* const* arguments, Shared& shared) const {
  if (product != nullptr) {
    const auto count = static_cast<Py_ssize_t>(inputs.size());
    return Reference::steal(make_product(*product, arguments, count, shared.workspace));
  }
  return Reference::steal(PyObject_Vectorcall(function.get(), arguments, inputs.size(), nullptr));
}

bool FunctionStep::run(PyObject* slots, Shared& shared) {
  Array<PyObject*> arguments(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) arguments[i] = PyList_GET_ITEM(slots, inputs[i]);
  Reference made = call(arguments.data(), shared);
  if (!made) return false;
  if (outputs.size() != 1) return unpack(made.get(), slots);
  if (is_tensor(made.get())) return fill_slot(slots, outputs[0], made.release());
  PyErr_Format(PyExc_TypeError, "step '%s' must give a tensor, got %s", name.c_str(), Py_TYPE(made.get())->tp_name);
  return false;
}

bool Program::run(const Entry& entry, PyObject* slots, Shared& shared) const {
  if (entry.native != nullptr) return entry.native->run(slots, shared);
  return static_cast<bool>(Reference::steal(PyObject_CallOneArg(entry.callable.get(), slots)));
}

namespace {

bool tell(PyObject* watch, Py_ssize_t number) {
  if (watch == nullptr) return true;
  const Reference step = Reference::steal(PyLong_FromSsize_t(number));
  return step && static_cast<bool>(Reference::steal(PyObject_CallOneArg(watch, step.get())));
}

}  // namespace

bool Program::run(PyObject* slots, bool may_overwrite, PyObject* watch) {
  Shared shared;
  shared.may_overwrite = may_overwrite;
  Py_ssize_t number = 0;
  for (const Entry& entry : entries) {
    if (!tell(watch, number++) || !run(entry, slots, shared)) return false;
    for (const Py_ssize_t slot : entry.dead) {
      if (!fill_slot(slots, slot, Py_NewRef(Py_None))) return false;
    }
  }
  return tell(watch, number);
}

int Program::visit(visitproc visit, void* argument) const {
  for (const Entry& entry : entries) {
    const int result = visit(entry.callable.get(), argument);
    if (result != 0) return result;
  }
  return 0;
}

bool init_steps() {
  contiguous = PyUnicode_InternFromString("contiguous");
  detach = PyUnicode_InternFromString("detach");
  requires_grad = PyUnicode_InternFromString("requires_grad");
  const bool named = contiguous != nullptr && detach != nullptr && requires_grad != nullptr;
  return named && init_new_tensors() && init_sole_owner();
}

}  // namespace te
