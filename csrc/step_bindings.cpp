#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "callable_type.h"
#include "cuda_kernel.h"
#include "gil.h"
#include "steps.h"

namespace py = pybind11;

namespace te {
namespace {

using Slots = std::vector<Py_ssize_t>;
// slot, alike, rule, width, fixed sizes, dtype
using FixedSizes = std::optional<std::vector<int64_t>>;
using Output = std::tuple<Py_ssize_t, Py_ssize_t, int, int64_t, FixedSizes, py::object>;

Reference hold(const py::object& object) { return Reference::borrow(object.ptr()); }

SizeRule size_rule(int number) {
  if (number < 0 || number > static_cast<int>(SizeRule::transposed_blocks)) {
    throw py::value_error("an unknown rule for sizes");
  }
  return static_cast<SizeRule>(number);
}

OutputSpec output_spec(const Output& given) {
  const auto& [slot, alike, rule, width, fixed, dtype] = given;
  if (size_rule(rule) == SizeRule::fixed && !fixed) throw py::value_error("an output of fixed sizes has none");
  return {slot, alike, size_rule(rule), width, fixed.value_or(std::vector<int64_t>()), hold(dtype)};
}

// Which outputs may have the memory of `dying` input slots: what the kernel's text allows of it.
void let_overwrite(KernelStep& step, const Slots& dying) {
  if (step.cuda == nullptr) return;
  for (const auto& [written, read] : step.cuda->overwrites) {
    const size_t output = written - step.inputs.size();
    if (read >= step.inputs.size() || output >= step.outputs.size()) continue;
    const bool dies = std::count(dying.begin(), dying.end(), step.inputs[read]) > 0;
    if (dies && step.outputs[output].rule == SizeRule::rows) step.outputs[output].over = static_cast<Py_ssize_t>(read);
  }
}

std::unique_ptr<KernelStep> make_kernel_step(const std::string& name, const py::object& kernel, Slots inputs,
                                             Py_ssize_t lead, std::optional<int64_t> batch_dim,
                                             const std::vector<Output>& outputs, const py::tuple& streams,
                                             std::vector<std::pair<Py_ssize_t, Py_ssize_t>> aliases, int64_t many_rows,
                                             const py::object& large,
                                             const std::vector<std::pair<int, int64_t>>& input_sizes,
                                             const Slots& dying, std::optional<int64_t> cut_dim) {
  auto step = std::make_unique<KernelStep>();
  step->name = name;
  step->kernel = hold(kernel);
  step->cuda = cuda_program(kernel.ptr());
  step->inputs = std::move(inputs);
  for (const auto& [rule, width] : input_sizes) step->input_sizes.push_back({size_rule(rule), width});
  if (!input_sizes.empty() && input_sizes.size() != step->inputs.size()) {
    throw py::value_error("there are sizes of all inputs, or of none");
  }
  step->lead = lead;
  step->per_sample = batch_dim.has_value();
  step->batch_dim = batch_dim.value_or(0);
  for (const Output& output : outputs) {
    step->outputs.push_back(output_spec(output));
    const auto before = static_cast<Py_ssize_t>(step->inputs.size() + step->outputs.size()) - 1;
    if (step->outputs.back().alike >= before) throw py::value_error("an output is like a tensor that comes later");
  }
  step->streams = hold(streams);
  step->has_blocks = cut_dim.has_value();
  step->cut_dim = cut_dim.value_or(0);
  step->aliases = std::move(aliases);
  step->many_rows = many_rows;
  step->large = hold(large);
  let_overwrite(*step, dying);
  return step;
}

std::unique_ptr<FunctionStep> make_function_step(const std::string& name, const py::object& function, Slots inputs,
                                                 Slots outputs) {
  auto step = std::make_unique<FunctionStep>();
  step->name = name;
  step->function = hold(function);
  step->product = product_made_by(function.ptr());
  step->inputs = std::move(inputs);
  step->outputs = std::move(outputs);
  return step;
}

std::unique_ptr<Program> make_program(const std::vector<std::pair<py::object, Slots>>& steps) {
  auto program = std::make_unique<Program>();
  for (const auto& [callable, dead] : steps) {
    Step* native = py::isinstance<Step>(callable) ? callable.cast<Step*>() : nullptr;
    program->entries.push_back({hold(callable), native, dead});
  }
  return program;
}

void run_step(Step& step, const py::list& slots) {
  Shared alone;
  alone.may_overwrite = false;  // who runs a step alone may look at what it has read
  if (!step.run(slots.ptr(), alone)) throw py::error_already_set();
}

// The program behind a Python object; nullptr while it is being made.
Program* program_of(PyObject* self) {
  const auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return held.holder_constructed() ? static_cast<Program*>(held.value_ptr()) : nullptr;
}

// run(slots, may_overwrite = true, watch = None): one for each call of a model, so without pybind's look at arguments.
PyObject* run_program(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count < 1 || count > 3 || !PyList_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "run takes a list of slots, may_overwrite and watch");
    return nullptr;
  }
  const int may_overwrite = count > 1 ? PyObject_IsTrue(given[1]) : 1;
  if (may_overwrite < 0) return nullptr;
  PyObject* watch = count > 2 && given[2] != Py_None ? given[2] : nullptr;
  return program_of(self)->run(given[0], may_overwrite != 0, watch) ? Py_NewRef(Py_None) : nullptr;
}

py::object runner_of(const py::object& program) {
  using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
  constexpr Fast run = guarded<run_program, PyObject* const*, Py_ssize_t>;
  static PyMethodDef method = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
                               "Run every step on these slots."};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, program.ptr()));
}

// Lets the garbage collector see what a program holds.
void collect_programs(PyHeapTypeObject* heap_type) {
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
#if PY_VERSION_HEX >= 0x03090000
    Py_VISIT(Py_TYPE(self));
#endif
    const Program* program = program_of(self);
    return program != nullptr ? program->visit(visit, arg) : 0;
  };
  type->tp_clear = [](PyObject* self) -> int {
    if (Program* program = program_of(self)) program->clear();
    return 0;
  };
}

}  // namespace

void bind_steps(py::module_& module) {
  if (!init_steps()) throw py::error_already_set();
  py::class_<Step>(module, "Step").def("__call__", &run_step, py::arg("slots"));
  py::class_<KernelStep, Step>(module, "KernelStep", "A kernel between slots: step(slots).")
      .def(py::init(&make_kernel_step), py::arg("name"), py::arg("kernel"), py::arg("inputs"), py::arg("lead"),
           py::arg("batch_dim"), py::arg("outputs"), py::arg("streams"), py::arg("aliases"), py::arg("many_rows"),
           py::arg("large"), py::arg("input_sizes") = std::vector<std::pair<int, int64_t>>{}, py::arg("dying") = Slots{},
           py::arg("cut_dim") = py::none());
  py::class_<FunctionStep, Step>(module, "FunctionStep", "slots[outputs] = function(*slots[inputs]).")
      .def(py::init(&make_function_step), py::arg("name"), py::arg("function"), py::arg("inputs"), py::arg("outputs"));
  py::class_<Program>(module, "Program", "Steps in order, and after each the slots that nobody reads any more.",
                      py::custom_type_setup(collect_programs))
      .def(py::init(&make_program), py::arg("steps"))
      .def_property_readonly("run", &runner_of);
}

}  // namespace te
