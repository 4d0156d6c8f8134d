// The Python module te_fuser._native: nothing but the list of what it offers.
#include <pybind11/pybind11.h>

#include <string>

#include "cpu_kernel.h"
#include "te_kernel_abi.h"
#include "tensor.h"
#include "threads.h"

namespace py = pybind11;

namespace {

void set_thread_backend(const std::string& name) {
  if (!te::set_thread_backend(name.c_str())) {
    throw py::value_error("thread backend '" + name + "' is unknown or not there (known: openmp, std)");
  }
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native runtime of te_fuser.";
  if (!te::init_tensor_api()) throw py::error_already_set();
  module.attr("version") = TE_FUSER_VERSION;
  module.attr("kernel_abi_version") = TE_KERNEL_ABI_VERSION;

  module.def("num_threads", &te::num_threads, "The number of threads kernels may use now: that of torch.");
  module.def("thread_backend", &te::thread_backend, "Where kernels run: 'openmp' (torch's pool) or 'std'.");
  module.def("set_thread_backend", &set_thread_backend, py::arg("name"),
             "Choose where kernels run; ValueError if that backend is not there.");

  PyObject* kernel_type = te::make_cpu_kernel_type();
  if (kernel_type == nullptr) throw py::error_already_set();
  module.attr("CpuKernel") = py::reinterpret_steal<py::object>(kernel_type);
}
