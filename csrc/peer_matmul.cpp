#include "peer_matmul.h"

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "callable_type.h"
#include "gil.h"
#include "matmul.h"
#include "matmul_call.h"
#include "matmul_product.h"
#include "new_tensor.h"
#include "reference.h"
#include "tensor.h"
#include "workspace.h"

namespace te {

bool await_all(PeerBuffers& buffers, size_t buffer, PeerBuffers::Stream stream, Failure& failure) {
  for (size_t k = 1; k < buffers.ranks(); ++k) {
    if (!buffers.await(buffer, buffers.sender(k), stream, failure)) return false;
  }
  return true;
}

namespace {

using Role = MatmulArgument::Role;

// What both types own.
struct PeerMatmul {
  Reference held;  // the CudaMatmul
  CudaMatmul* product = nullptr;
  Reference peers;  // .buffers(bytes) gives PeerBuffers; .blocks(buffer, like), the tensors of a buffer's blocks
  size_t ranks = 0;
  bool gives = false;  // whether what is gathered is given, too, or the parts of a sum and not that
};

// Names of methods, set once while the module is imported.
struct Names {
  PyObject *buffers, *blocks, *narrow, *contiguous, *sum;
};
Names names{};

PeerMatmul& peer_of(PyObject* self) { return owned_by<PeerMatmul>(self); }

// ---- pieces of a product -----------------------------------------------------------------------------------------

bool is_empty(const MatmulSizes& sizes) { return sizes.m == 0 || sizes.n == 0 || sizes.k == 0; }

int64_t size_of(const DType& dtype) { return dtype.bits / 8; }

// Moves a matrix to rows that lie so many later.
void move_rows(Matrix& matrix, int64_t rows, int64_t element_bits) {
  const int64_t stride = matrix.flipped ? 1 : matrix.stride;
  matrix.data = static_cast<char*>(matrix.data) + rows * stride * element_bits / 8;
}

// The call of other rows: what it writes, and what it reads beside its first factor.
MatmulCall piece(const CudaMatmul& product, const MatmulCall& call, int64_t rows_later, int64_t rows) {
  MatmulCall found = call;
  const MatmulForm& form = product.matmul.form;
  move_rows(found.out, rows_later, form.out_dtype.bits);
  if (found.c.data != nullptr) move_rows(found.c, rows_later, form.out_dtype.bits);
  if (found.aux.data != nullptr) move_rows(found.aux, rows_later, form.out_dtype.bits);
  for (Matrix* matrix : {&found.out, &found.c, &found.aux}) matrix->rows = matrix->data != nullptr ? rows : 0;
  return found;
}

bool is_cut(const MatmulArgument& argument) {
  return argument.role == Role::a || argument.role == Role::out || argument.role == Role::c || argument.role == Role::aux;
}

// Rows of a tensor, those of one rank.
Reference rows_of(PyObject* tensor, size_t rank, int64_t rows) {
  const Reference dim = Reference::steal(PyLong_FromLong(0));
  const Reference first = Reference::steal(PyLong_FromLongLong(static_cast<int64_t>(rank) * rows));
  const Reference count = Reference::steal(PyLong_FromLongLong(rows));
  if (!dim || !first || !count) return Reference();
  PyObject* arguments[] = {tensor, dim.get(), first.get(), count.get()};
  return Reference::steal(PyObject_VectorcallMethod(names.narrow, arguments, 4, nullptr));
}

// Tensors of a call, those that a rank has a part of narrowed to it.
struct OwnTensors {
  std::array<PyObject*, most_matmul_tensors> all{};
  std::array<Reference, most_matmul_tensors> narrowed;
};

bool narrow_all(const CudaMatmul& product, const MatmulTensors& whole, PyObject* a, size_t rank, int64_t rows,
                OwnTensors& own) {
  for (size_t i = 0; i < whole.count; ++i) {
    own.all[i] = i == 0 ? a : whole.all[i];
    if (i == 0 || !is_cut(product.arguments[i])) continue;
    own.narrowed[i] = rows_of(whole.all[i], rank, rows);
    if (!own.narrowed[i]) return false;
    own.all[i] = own.narrowed[i].get();
  }
  return true;
}

// A tensor with as many times the rows.
Reference times_rows(PyObject* like, const TensorView& view, size_t times) {
  std::vector<int64_t> sizes(view.shape, view.shape + view.dimensions);
  sizes[0] *= static_cast<int64_t>(times);
  return Reference::steal(new_tensor(like, sizes.data(), sizes.size(), nullptr));
}

// ---- buffers -----------------------------------------------------------------------------------------------------

// The buffers of an exchange of such blocks; `owner` keeps them.
PeerBuffers* buffers_for(const PeerMatmul& peer, int64_t block_bytes, Reference& owner) {
  const Reference bytes = Reference::steal(PyLong_FromLongLong(block_bytes));
  if (!bytes) return nullptr;
  owner = Reference::steal(PyObject_CallMethodOneArg(peer.peers.get(), names.buffers, bytes.get()));
  return owner ? pybind11::cast<PeerBuffers*>(pybind11::handle(owner.get())) : nullptr;
}

// The blocks of a buffer as tensors of a shape, and behind them all of them joined.
Reference blocks_of(const PeerMatmul& peer, size_t buffer, PyObject* like) {
  const Reference number = Reference::steal(PyLong_FromSize_t(buffer));
  if (!number) return Reference();
  PyObject* arguments[] = {peer.peers.get(), number.get(), like};
  return Reference::steal(PyObject_VectorcallMethod(names.blocks, arguments, 3, nullptr));
}

PyObject* item(const Reference& tuple, size_t index) {
  return PyTuple_GET_ITEM(tuple.get(), static_cast<Py_ssize_t>(index));
}

bool check_given(const PeerMatmul& peer, size_t flags, PyObject* keywords, Py_ssize_t* given) {
  *given = PyVectorcall_NARGS(flags);
  if (*given >= 2 && *given <= static_cast<Py_ssize_t>(most_matmul_tensors) && keywords == nullptr) return true;
  PyErr_Format(PyExc_TypeError, "product '%s' takes the tensors that it reads", peer.product->name());
  return false;
}

// ---- gather, then multiply ---------------------------------------------------------------------------------------

// This rank's rows, dense.
Reference dense(const CudaMatmul& product, PyObject* tensor, TensorView* view) {
  const ArgumentSite site{product.name(), 0};
  if (!view_tensor(tensor, site, view)) return Reference();
  Reference found = Reference::borrow(tensor);
  if (!view->is_row_major) {
    found = Reference::steal(PyObject_CallMethodNoArgs(tensor, names.contiguous));
    if (!found || !view_tensor(found.get(), site, view)) return Reference();
  }
  if (view->dimensions >= 2) return found;
  PyErr_Format(PyExc_ValueError, "product '%s': what ranks exchange has rows and features", product.name());
  return Reference();
}

// What all ranks' rows of what is written are put into, made of what one rank's would be.
bool make_whole(const CudaMatmul& product, PyObject* const* inputs, Py_ssize_t given, size_t ranks, MatmulTensors& whole) {
  if (!make_outputs(product, inputs, given, whole)) return false;
  size_t made = 0;
  for (size_t i = 0; i < product.arguments.size(); ++i) {
    if (!product.arguments[i].written) continue;
    TensorView view;
    if (!view_tensor(whole.all[i], {product.name(), static_cast<Py_ssize_t>(i)}, &view)) return false;
    Reference larger = times_rows(whole.all[i], view, ranks);
    if (!larger) return false;
    whole.all[i] = larger.get();
    whole.made[made++] = std::move(larger);
  }
  return true;
}

// One exchange with its products, all that streams are given.
struct Gathering {
  PeerBuffers& buffers;
  const CudaMatmul& product;
  const MatmulCall& own;  // of this rank's rows
  const void* sent;
  void* gathered;  // nullptr: it is not wanted
  size_t bytes;
  int64_t rows;
  bool multiplies;

  bool run(Matmul& matmul, Failure& failure) const {
    const auto stream = reinterpret_cast<PeerBuffers::Stream>(own.stream);
    size_t buffer = 0;
    if (!buffers.open(bytes, stream, buffer, failure)) return false;
    if (exchange(matmul, buffer, stream, failure) && buffers.close(buffer, stream, failure)) return true;
    buffers.break_off(buffer, stream, failure.text);
    return false;
  }

  bool exchange(Matmul& matmul, size_t buffer, PeerBuffers::Stream stream, Failure& failure) const {
    Workspace workspace;
    for (size_t k = 1; k < buffers.ranks(); ++k) {
      if (!buffers.send(buffer, buffers.receiver(k), sent, bytes, stream, false, failure)) return false;
    }
    if (!buffers.end_sending(buffer, failure) || !keep(buffer, buffers.rank(), sent, stream, failure)) return false;
    if (multiplies && !matmul.run(own, workspace, failure)) return false;
    for (size_t k = 1; k < buffers.ranks(); ++k) {
      const size_t from = buffers.sender(k);
      MatmulCall call = piece(product, own, (static_cast<int64_t>(from) - static_cast<int64_t>(buffers.rank())) * rows,
                              own.out.rows);
      call.a.data = reinterpret_cast<void*>(buffers.block(buffer, from));
      call.a.stride = call.a.columns;
      if (!buffers.await(buffer, from, stream, failure)) return false;
      if (!keep(buffer, from, call.a.data, stream, failure)) return false;
      if (multiplies && !matmul.run(call, workspace, failure)) return false;
    }
    return true;
  }

  // Copies a block to where all are joined, beside the products.
  bool keep(size_t buffer, size_t from, const void* block, PeerBuffers::Stream stream, Failure& failure) const {
    return gathered == nullptr || buffers.copy_beside(buffer, static_cast<char*>(gathered) + from * bytes, block, bytes,
                                                      stream, failure);
  }
};

bool gather(const PeerMatmul& peer, PyObject* const* inputs, Py_ssize_t given, MatmulTensors& whole,
            Reference& gathered) {
  CudaMatmul& product = *peer.product;
  TensorView view;
  const Reference x = dense(product, inputs[0], &view);
  if (!x) return false;
  std::array<PyObject*, most_matmul_tensors> read{};
  for (Py_ssize_t i = 0; i < given; ++i) read[static_cast<size_t>(i)] = i == 0 ? x.get() : inputs[i];
  int64_t rows = 1;  // of a rank's part, in the first dimension and as a matrix
  for (int32_t i = 0; i + 1 < view.dimensions; ++i) rows *= view.shape[i];
  const int64_t bytes = rows * view.shape[view.dimensions - 1] * size_of(*product.arguments[0].dtype);
  Reference owner;
  PeerBuffers* buffers = buffers_for(peer, bytes, owner);
  if (buffers == nullptr || !make_whole(product, read.data(), given, peer.ranks, whole)) return false;
  OwnTensors own;
  MatmulReading reading;
  if (!narrow_all(product, whole, x.get(), buffers->rank(), view.shape[0], own)) return false;
  if (!read_call(product, own.all.data(), whole.count, reading)) return false;
  const bool empty = is_empty(reading.sizes);
  void* target = nullptr;
  if (peer.gives || empty) {
    gathered = times_rows(x.get(), view, peer.ranks);
    TensorView all;
    if (!gathered || !view_tensor(gathered.get(), {product.name(), 0}, &all)) return false;
    target = peer.gives ? const_cast<void*>(all.data) : nullptr;
  }
  const Gathering work{*buffers, product, reading.call, view.data, target, static_cast<size_t>(bytes), rows, !empty};
  if (!without_gil(nullptr, [&](Failure& failure) { return work.run(product.matmul, failure); })) return false;
  if (!empty) return true;
  std::array<PyObject*, most_matmul_tensors> tensors = whole.all;
  tensors[0] = gathered.get();
  Workspace workspace;
  return run_product(product, tensors.data(), whole.count, workspace);
}

PyObject* call_gather(PyObject* self, PyObject* const* inputs, size_t flags, PyObject* keywords) {
  const PeerMatmul& peer = peer_of(self);
  Py_ssize_t given = 0;
  MatmulTensors whole;
  Reference gathered;
  if (!check_given(peer, flags, keywords, &given)) return nullptr;
  if (!gather(peer, inputs, given, whole, gathered)) return nullptr;
  if (peer.gives) whole.made[whole.made_count++] = std::move(gathered);
  return alone_or_tuple(whole.made.data(), whole.made_count);
}

// ---- multiply, then scatter --------------------------------------------------------------------------------------

// One exchange with its products: those of other ranks are sent from where they are made, the own one is put beside
// those that arrive.
struct Scattering {
  PeerBuffers& buffers;
  const CudaMatmul& product;
  const MatmulCall& whole;
  size_t bytes;
  int64_t rows;
  bool multiplies;

  bool run(Matmul& matmul, size_t& buffer, Failure& failure) const {
    const auto stream = reinterpret_cast<PeerBuffers::Stream>(whole.stream);
    if (!buffers.open(bytes, stream, buffer, failure)) return false;
    if (exchange(matmul, buffer, stream, failure)) return true;
    buffers.break_off(buffer, stream, failure.text);
    return false;
  }

  bool exchange(Matmul& matmul, size_t buffer, PeerBuffers::Stream stream, Failure& failure) const {
    Workspace workspace;
    for (size_t k = 1; k <= buffers.ranks(); ++k) {
      const size_t to = k < buffers.ranks() ? buffers.receiver(k) : buffers.rank();
      const int64_t later = static_cast<int64_t>(to) * rows;
      MatmulCall call = piece(product, whole, later, rows);
      move_rows(call.a, later, product.matmul.form.dtype.bits);
      call.a.rows = rows;
      if (to == buffers.rank() && multiplies) {
        call.out.data = reinterpret_cast<void*>(buffers.block(buffer, to));
        call.out.stride = call.out.columns;
      }
      if (multiplies && !matmul.run(call, workspace, failure)) return false;
      if (to == buffers.rank() && multiplies) continue;  // it is in its place
      if (!buffers.send(buffer, to, call.out.data, bytes, stream, true, failure)) return false;
    }
    // What is sent may be freed when this returns.
    return buffers.end_sending(buffer, failure) && buffers.sent(buffer, stream, failure) &&
           await_all(buffers, buffer, stream, failure);
  }
};

// The parts of all ranks, and (buffers, number): who has read them closes that.
PyObject* left_open(const Reference& parts, size_t ranks, const Reference& owner, size_t buffer) {
  Reference found = Reference::steal(PyTuple_New(static_cast<Py_ssize_t>(ranks) + 1));
  const Reference number = Reference::steal(PyLong_FromSize_t(buffer));
  if (!found || !number) return nullptr;
  PyObject* open = PyTuple_Pack(2, owner.get(), number.get());
  if (open == nullptr) return nullptr;
  for (size_t i = 0; i < ranks; ++i) {
    PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item(parts, i)));
  }
  PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(ranks), open);
  return found.release();
}

// The sum of the parts; then others may send anew.
PyObject* added_up(const Reference& parts, size_t ranks, PeerBuffers& buffers, size_t buffer,
                   PeerBuffers::Stream stream) {
  const Reference dim = Reference::steal(PyLong_FromLong(0));
  if (!dim) return nullptr;
  Reference sum = Reference::steal(PyObject_CallMethodOneArg(item(parts, ranks), names.sum, dim.get()));
  // Where there is no memory for the sum, the exchange is whole still.
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  const bool closed =
      without_gil(nullptr, [&](Failure& failure) { return buffers.close(buffer, stream, failure); });
  if (closed) PyErr_Restore(type, value, traceback);
  return closed ? sum.release() : nullptr;
}

PyObject* scatter(const PeerMatmul& peer, PyObject* const* inputs, Py_ssize_t given) {
  CudaMatmul& product = *peer.product;
  MatmulTensors whole;
  MatmulReading reading;
  TensorView view;
  if (!view_tensor(inputs[0], {product.name(), 0}, &view)) return nullptr;
  const auto ranks = static_cast<int64_t>(peer.ranks);
  if (view.dimensions < 2 || view.shape[0] % ranks != 0) {
    PyErr_Format(PyExc_ValueError, "product '%s': its rows are no equal parts for %lld ranks", product.name(),
                 static_cast<long long>(ranks));
    return nullptr;
  }
  const int64_t first = view.shape[0] / ranks;
  if (!make_outputs(product, inputs, given, whole)) return nullptr;
  if (whole.made_count != 1) {
    PyErr_Format(PyExc_ValueError, "product '%s' gives %zu tensors, of which none alone is a sum", product.name(),
                 whole.made_count);
    return nullptr;
  }
  if (!read_call(product, whole.all.data(), whole.count, reading)) return nullptr;
  const MatmulSizes& sizes = reading.sizes;
  const int64_t rows = sizes.m / ranks, bytes = rows * sizes.n * size_of(product.matmul.form.out_dtype);
  Reference owner;
  PeerBuffers* buffers = buffers_for(peer, bytes, owner);
  if (buffers == nullptr) return nullptr;
  const bool empty = is_empty(sizes);
  Workspace workspace;
  if (empty && !run_product(product, whole.all.data(), whole.count, workspace)) return nullptr;
  const Reference part = rows_of(whole.made[0].get(), buffers->rank(), first);
  if (!part) return nullptr;
  size_t buffer = 0;
  const Scattering work{*buffers, product, reading.call, static_cast<size_t>(bytes), rows, !empty};
  if (!without_gil(nullptr, [&](Failure& failure) { return work.run(product.matmul, buffer, failure); })) return nullptr;
  const Reference parts = blocks_of(peer, buffer, part.get());
  if (!parts) return nullptr;
  if (peer.gives) return left_open(parts, peer.ranks, owner, buffer);
  return added_up(parts, peer.ranks, *buffers, buffer, reinterpret_cast<PeerBuffers::Stream>(reading.call.stream));
}

PyObject* call_scatter(PyObject* self, PyObject* const* inputs, size_t flags, PyObject* keywords) {
  const PeerMatmul& peer = peer_of(self);
  Py_ssize_t given = 0;
  return check_given(peer, flags, keywords, &given) ? scatter(peer, inputs, given) : nullptr;
}

// ---- types -------------------------------------------------------------------------------------------------------

std::unique_ptr<PeerMatmul> build(PyObject* args, PyObject*) {
  PyObject *make = nullptr, *peers = nullptr;
  int gives = 0;
  if (!PyArg_ParseTuple(args, "OO|p", &make, &peers, &gives)) return nullptr;
  auto peer = std::make_unique<PeerMatmul>();
  peer->product = product_made_by(make);
  if (peer->product == nullptr) {
    PyErr_SetString(PyExc_TypeError, "it takes the method `make` of a CudaMatmul");
    return nullptr;
  }
  peer->held = Reference::borrow(make);
  peer->peers = Reference::borrow(peers);
  peer->gives = gives != 0;
  const Reference ranks = Reference::steal(PyObject_GetAttrString(peers, "ranks"));
  peer->ranks = ranks ? PyLong_AsSize_t(ranks.get()) : 0;
  return PyErr_Occurred() == nullptr ? std::move(peer) : nullptr;
}

PyObject* describe(PyObject* self) {
  return PyUnicode_FromFormat("<%s of '%s'>", Py_TYPE(self)->tp_name, peer_of(self).product->name());
}

bool init_names() {
  names = {PyUnicode_InternFromString("buffers"), PyUnicode_InternFromString("blocks"),
           PyUnicode_InternFromString("narrow"), PyUnicode_InternFromString("contiguous"),
           PyUnicode_InternFromString("sum")};
  return names.sum != nullptr;
}

}  // namespace

PyObject* make_gather_matmul_type() {
  if (!init_names()) return nullptr;
  return make_callable_type<PeerMatmul, build, call_gather>(
      {"te_fuser._native.GatherMatmul",
       "GatherMatmul(make, peers, gives=False)\n--\n\nA product of the rows that all ranks of a group have: as make(a, b, "
       "..), of this rank's a; `gives` the gathered a, too.",
       describe});
}

PyObject* make_matmul_scatter_type() {
  return make_callable_type<PeerMatmul, build, call_scatter>(
      {"te_fuser._native.MatmulScatter",
       "MatmulScatter(make, peers, gives=False)\n--\n\nThis rank's rows of the sum of all ranks' make(a, b, ..); or, "
       "where it `gives` them, each rank's part of these, and (buffers, number), which are to be closed.",
       describe});
}

}  // namespace te
