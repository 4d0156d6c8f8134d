#include "matmul_product.h"

#include <cstring>
#include <string>

#include "matmul_tuned.h"

namespace te {
namespace {

using Role = MatmulArgument::Role;
using Use = Epilogue::Use;

bool refuse(const char* name, const std::string& why) {
  PyErr_Format(PyExc_ValueError, "product '%s': %s", name, why.c_str());
  return false;
}

bool read_dtype(const char* name, const char* dtype, DType* found) {
  const DType* known = find_dtype(dtype);
  if (known == nullptr || product_type(*known) < 0) {
    return refuse(name, "its dtypes are float32, bfloat16 and float16, got " + std::string(dtype));
  }
  *found = *known;
  return true;
}

bool read_addend(const char* name, const char* text, Addend* addend) {
  constexpr const char* names[] = {"none", "out", "c"};
  for (size_t i = 0; i < 3; ++i) {
    if (std::strcmp(text, names[i]) != 0) continue;
    *addend = static_cast<Addend>(i);
    return true;
  }
  return refuse(name, "add is 'none', 'out' or 'c', got '" + std::string(text) + "'");
}

bool add_argument(CudaMatmul& product, Role role, const DType* dtype, bool written) {
  Reference torch_dtype = import_from("torch", dtype->name);
  if (!torch_dtype) return false;
  product.arguments.push_back({role, dtype, written, std::move(torch_dtype)});
  return true;
}

bool list_arguments(CudaMatmul& product) {
  const MatmulForm& form = product.matmul.form;
  const Epilogue& epilogue = *form.epilogue;
  const DType* aux = epilogue.aux_is_mask ? find_dtype("uint8") : &form.out_dtype;
  const auto add = [&](Role role, const DType* dtype, bool written) {
    return add_argument(product, role, dtype, written);
  };
  return add(Role::a, &form.dtype, false) && add(Role::b, &form.dtype, false) &&
         add(Role::out, &form.out_dtype, true) && (form.addend != Addend::c || add(Role::c, &form.out_dtype, false)) &&
         (epilogue.bias == Use::none || add(Role::bias, &form.out_dtype, epilogue.bias == Use::written)) &&
         (epilogue.aux == Use::none || add(Role::aux, aux, epilogue.aux == Use::written));
}

// tuned: None, or (find, drop).
bool keep_tuned(CudaMatmul& product, PyObject* tuned) {
  if (tuned == Py_None) return true;
  product.tuned = Reference::borrow(tuned);
  return read_tuned(tuned, product.matmul.tuned);
}

}  // namespace

const char* MatmulArgument::name() const {
  constexpr const char* names[most_matmul_tensors] = {"a", "b", "out", "c", "bias", "aux"};
  return names[static_cast<size_t>(role)];
}

std::unique_ptr<CudaMatmul> build_matmul(PyObject* args, PyObject* keywords) {
  static const char* names[] = {"name", "dtype",    "transpose_a", "transpose_b", "out_dtype", "epilogue",
                                "add",  "on_empty", "tuned",       nullptr};
  const char *name = nullptr, *dtype = nullptr, *out_dtype = nullptr, *epilogue = "none", *add = "none";
  int transpose_a = 0, transpose_b = 0;
  PyObject *on_empty = Py_None, *tuned = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "ss|$ppzssOO:CudaMatmul", const_cast<char**>(names), &name, &dtype,
                                   &transpose_a, &transpose_b, &out_dtype, &epilogue, &add, &on_empty, &tuned)) {
    return nullptr;
  }
  MatmulForm form{name, {}, {}, transpose_a != 0, transpose_b != 0, find_epilogue(epilogue), Addend::none};
  if (form.epilogue == nullptr) {
    refuse(name, "the epilogue '" + std::string(epilogue) + "' is unknown (known: " + known_epilogues() + ")");
    return nullptr;
  }
  if (!read_dtype(name, dtype, &form.dtype) || !read_addend(name, add, &form.addend) ||
      !read_dtype(name, out_dtype != nullptr ? out_dtype : dtype, &form.out_dtype)) {
    return nullptr;
  }
  auto product = std::make_unique<CudaMatmul>(std::move(form));
  if (on_empty != Py_None) product->on_empty = Reference::borrow(on_empty);
  return list_arguments(*product) && keep_tuned(*product, tuned) ? std::move(product) : nullptr;
}

}  // namespace te
