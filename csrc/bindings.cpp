// The Python module te_fuser._native: nothing but the list of what it offers.
#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "cublaslt.h"
#include "cuda_driver.h"
#include "cuda_kernel.h"
#include "matmul.h"
#include "peer_matmul.h"
#include "sole_owner.h"
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

void add_type(py::module_& module, const char* name, PyObject* type) {
  if (type == nullptr) throw py::error_already_set();
  module.attr(name) = py::reinterpret_steal<py::object>(type);
}

py::object cuda_driver_refusal() {
  std::string why;
  return te::cuda_driver(why) != nullptr ? py::none() : py::object(py::str(why));
}

py::object cublaslt_refusal() {
  std::string why;
  return te::cublaslt(why) != nullptr ? py::none() : py::object(py::str(why));
}

py::object cublaslt_version() {
  std::string why;
  const te::CublasLt* library = te::cublaslt(why);
  return library != nullptr ? py::object(py::int_(library->get_version())) : py::none();
}

void set_cuda_driver(const std::string& library, bool host_tensors) {
  te::set_cuda_driver(library);
  te::let_cpu_stand_for_cuda(host_tensors);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native runtime of te_fuser.";
  if (!te::init_tensor_api()) throw py::error_already_set();
  module.attr("version") = TE_FUSER_VERSION;
  module.attr("kernel_abi_version") = TE_KERNEL_ABI_VERSION;
  module.attr("instead") = TE_FUSER_INSTEAD;

  module.def("num_threads", &te::num_threads, "The number of threads kernels may use now: that of torch.");
  module.def("thread_backend", &te::thread_backend, "Where kernels run: 'openmp' (torch's pool) or 'std'.");
  module.def("set_thread_backend", &set_thread_backend, py::arg("name"),
             "Choose where kernels run; ValueError if that backend is not there.");

  module.def("cuda_driver_refusal", &cuda_driver_refusal, "Why CUDA kernels cannot be launched here; None if they can.");
  module.def("set_cuda_driver", &set_cuda_driver, py::arg("library"), py::arg("host_tensors") = false,
             "For tests: take another library for the driver, and tensors on the CPU for ones on CUDA device 0.");

  module.def("cublaslt_refusal", &cublaslt_refusal, "Why cuBLASLt cannot be used here; None if it can.");
  module.def("cublaslt_version", &cublaslt_version, "The version of cuBLASLt, as one number; None if there is none.");
  module.def("set_cublaslt", &te::set_cublaslt, py::arg("path"),
             "Take another file than the library that PyTorch has loaded; '' for that one again.");

  te::bind_steps(module);
  te::bind_exchanges(module);
  if (!te::bind_guards(module) || !te::bind_holders(module)) throw py::error_already_set();
  add_type(module, "CpuKernel", te::make_cpu_kernel_type());
  add_type(module, "CudaKernel", te::make_cuda_kernel_type());
  add_type(module, "CudaMatmul", te::make_cuda_matmul_type());
  add_type(module, "GatherMatmul", te::make_gather_matmul_type());
  add_type(module, "MatmulScatter", te::make_matmul_scatter_type());
  add_type(module, "QuantizeWeights", te::make_quantize_weights_type());
}
