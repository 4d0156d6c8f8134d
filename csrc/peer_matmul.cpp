#include "peer_matmul.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "callable_type.h"
#include "gil.h"
#include "matmul.h"
#include "matmul_outputs.h"
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
  bool gives = false;  // whether what is gathered is given, too, or the parts of a sum and not that
};

// Names of methods, set once while the module is imported.
struct Names {
  PyObject *buffers, *blocks, *narrow, *contiguous, *sum;
};
Names names{};

bool is_cut(const MatmulArgument& argument) {
  return argument.role == Role::a || argument.role == Role::out || argument.role == Role::c || argument.role == Role::aux;
}

// One call: the peers' buffers, where the work goes, and what is kept until it is done.
struct Exchanging {
  Reference owner;  // of the buffers
  PeerBuffers* buffers = nullptr;
  PeerBuffers::Stream stream = nullptr;
  size_t buffer = 0;
  std::vector<Reference> held;
  Workspace workspace;
  size_t ranks() const { return buffers->ranks(); }
};

bool begin(const PeerMatmul& peer, int32_t device, size_t block_bytes, Exchanging& call) {
  const Reference bytes = Reference::steal(PyLong_FromSize_t(block_bytes));
  if (!bytes) return false;
  Reference found = Reference::steal(PyObject_CallMethodOneArg(peer.peers.get(), names.buffers, bytes.get()));
  if (!found) return false;
  call.buffers = pybind11::cast<PeerBuffers*>(pybind11::handle(found.get()));
  call.owner = std::move(found);
  void* stream = nullptr;
  if (!current_cuda_stream(device, &stream)) return false;
  call.stream = static_cast<PeerBuffers::Stream>(stream);
  return without_gil(nullptr,
                     [&](Failure& failure) { return call.buffers->open(block_bytes, call.stream, call.buffer, failure); });
}

// The blocks of the call's buffer as tensors of that shape, and behind them all of them joined.
PyObject* blocks(const PeerMatmul& peer, Exchanging& call, PyObject* like) {
  const Reference number = Reference::steal(PyLong_FromSize_t(call.buffer));
  if (!number) return nullptr;
  PyObject* arguments[] = {peer.peers.get(), number.get(), like};
  Reference found = Reference::steal(PyObject_VectorcallMethod(names.blocks, arguments, 3, nullptr));
  if (!found || !PyTuple_Check(found.get())) return nullptr;
  call.held.push_back(found);
  return found.get();
}

PyObject* item(PyObject* tuple, size_t index) { return PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(index)); }

// Rows of a tensor, those of one rank.
PyObject* rows_of(PyObject* tensor, size_t rank, int64_t rows, Exchanging& call) {
  const Reference dim = Reference::steal(PyLong_FromLong(0));
  const Reference first = Reference::steal(PyLong_FromLongLong(static_cast<int64_t>(rank) * rows));
  const Reference count = Reference::steal(PyLong_FromLongLong(rows));
  if (!dim || !first || !count) return nullptr;
  PyObject* arguments[] = {tensor, dim.get(), first.get(), count.get()};
  Reference found = Reference::steal(PyObject_VectorcallMethod(names.narrow, arguments, 4, nullptr));
  if (!found) return nullptr;
  call.held.push_back(found);
  return found.get();
}

// A dense tensor of the call, made so where it is not, with its memory.
PyObject* dense(const CudaMatmul& product, PyObject* tensor, int32_t* device, TensorView* view, Memory* memory,
                Exchanging& call) {
  const ArgumentSite site{product.name(), 0};
  if (!view_tensor(tensor, site, view)) return nullptr;
  Reference found = Reference::borrow(tensor);
  if (!view->is_row_major) {
    found = Reference::steal(PyObject_CallMethodNoArgs(tensor, names.contiguous));
    if (!found || !view_tensor(found.get(), site, view)) return nullptr;
  }
  if (!read_cuda_tensor(found.get(), *product.arguments[0].dtype, site, device, memory)) return nullptr;
  if (view->dimensions < 2) {
    PyErr_Format(PyExc_ValueError, "product '%s': what ranks exchange has rows and features", product.name());
    return nullptr;
  }
  call.held.push_back(std::move(found));
  return call.held.back().get();
}

// ---- gather, then multiply ---------------------------------------------------------------------------------------

// What all ranks' rows of what is written are put into, made of what one rank's would be.
bool make_whole(const CudaMatmul& product, PyObject* const* inputs, Py_ssize_t given, size_t ranks, MatmulTensors& whole) {
  if (!make_outputs(product, inputs, given, whole)) return false;
  size_t made = 0;
  for (size_t i = 0; i < product.arguments.size(); ++i) {
    if (!product.arguments[i].written) continue;
    TensorView view;
    if (!view_tensor(whole.all[i], {product.name(), static_cast<Py_ssize_t>(i)}, &view)) return false;
    std::vector<int64_t> sizes(view.shape, view.shape + view.dimensions);
    sizes[0] *= static_cast<int64_t>(ranks);
    PyObject* larger = new_tensor(whole.all[i], sizes.data(), sizes.size(), nullptr);
    if (larger == nullptr) return false;
    whole.made[made++] = Reference::steal(larger);
    whole.all[i] = larger;
  }
  return true;
}

// The product of one rank's rows, which are `a`.
bool multiply(const PeerMatmul& peer, const MatmulTensors& whole, PyObject* a, size_t rank, int64_t rows,
              Exchanging& call) {
  std::array<PyObject*, most_matmul_tensors> tensors{};
  for (size_t i = 0; i < peer.product->arguments.size(); ++i) {
    const MatmulArgument& argument = peer.product->arguments[i];
    tensors[i] = i == 0 ? a : is_cut(argument) ? rows_of(whole.all[i], rank, rows, call) : whole.all[i];
    if (tensors[i] == nullptr) return false;
  }
  return run_product(*peer.product, tensors.data(), peer.product->arguments.size(), call.workspace);
}

Reference joined(PyObject* like, const TensorView& view, size_t ranks) {
  std::vector<int64_t> sizes(view.shape, view.shape + view.dimensions);
  sizes[0] *= static_cast<int64_t>(ranks);
  return Reference::steal(new_tensor(like, sizes.data(), sizes.size(), nullptr));
}

bool gather(const PeerMatmul& peer, PyObject* const* inputs, Py_ssize_t given, Exchanging& call, MatmulTensors& whole,
            Reference& gathered) {
  TensorView view;
  Memory own, out;
  int32_t device = -1;
  PyObject* x = dense(*peer.product, inputs[0], &device, &view, &own, call);
  if (x == nullptr || !begin(peer, device, static_cast<size_t>(own.bytes), call)) return false;
  PeerBuffers& buffers = *call.buffers;
  const auto bytes = static_cast<size_t>(own.bytes);
  const int64_t rows = view.shape[0];
  if (peer.gives) {
    gathered = joined(x, view, call.ranks());
    if (!gathered || !read_cuda_tensor(gathered.get(), *peer.product->arguments[0].dtype, {peer.product->name(), 0},
                                       &device, &out)) {
      return false;
    }
  }
  const bool sent = without_gil(nullptr, [&](Failure& failure) {
    for (size_t k = 1; k < buffers.ranks(); ++k) {
      if (!buffers.send(call.buffer, buffers.receiver(k), own.data, bytes, call.stream, false, failure)) return false;
    }
    return buffers.end_sending(call.buffer, failure) &&
           (!peer.gives || buffers.receive(call.buffer, own.data, out.data, bytes, failure));
  });
  std::array<PyObject*, most_matmul_tensors> read{};
  for (Py_ssize_t i = 0; i < given; ++i) read[static_cast<size_t>(i)] = i == 0 ? x : inputs[i];
  if (!sent || !make_whole(*peer.product, read.data(), given, call.ranks(), whole)) return false;
  if (!multiply(peer, whole, x, buffers.rank(), rows, call)) return false;
  PyObject* parts = peer.gives ? nullptr : blocks(peer, call, x);
  if (!peer.gives && parts == nullptr) return false;
  for (size_t k = 1; k < buffers.ranks(); ++k) {
    const size_t from = buffers.sender(k);
    const bool there = without_gil(nullptr, [&](Failure& failure) {
      return peer.gives ? buffers.received(call.buffer, from, call.stream, failure)
                        : buffers.await(call.buffer, from, call.stream, failure);
    });
    if (!there) return false;
    PyObject* a = peer.gives ? rows_of(gathered.get(), from, rows, call) : item(parts, from);
    if (a == nullptr || !multiply(peer, whole, a, from, rows, call)) return false;
  }
  return without_gil(nullptr, [&](Failure& failure) { return buffers.close(call.buffer, call.stream, failure); });
}

PeerMatmul& peer_of(PyObject* self) { return owned_by<PeerMatmul>(self); }

bool check_given(const PeerMatmul& peer, size_t flags, PyObject* keywords, Py_ssize_t* given) {
  *given = PyVectorcall_NARGS(flags);
  if (*given >= 2 && *given <= static_cast<Py_ssize_t>(most_matmul_tensors) && keywords == nullptr) return true;
  PyErr_Format(PyExc_TypeError, "product '%s' takes the tensors that it reads", peer.product->name());
  return false;
}

PyObject* call_gather(PyObject* self, PyObject* const* inputs, size_t flags, PyObject* keywords) {
  const PeerMatmul& peer = peer_of(self);
  Py_ssize_t given = 0;
  Exchanging call;
  MatmulTensors whole;
  Reference gathered;
  if (!check_given(peer, flags, keywords, &given)) return nullptr;
  if (!gather(peer, inputs, given, call, whole, gathered)) return nullptr;
  if (!peer.gives) return take_outputs(whole);
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(whole.made_count) + 1);
  if (found == nullptr) return nullptr;
  for (size_t i = 0; i < whole.made_count; ++i) {
    PyTuple_SET_ITEM(found, static_cast<Py_ssize_t>(i), whole.made[i].release());
  }
  PyTuple_SET_ITEM(found, static_cast<Py_ssize_t>(whole.made_count), gathered.release());
  return found;
}

// ---- multiply, then scatter --------------------------------------------------------------------------------------

// The inputs of one rank's rows, and what is written made, or `out` for it.
bool multiply_part(const PeerMatmul& peer, PyObject* const* inputs, Py_ssize_t given, size_t rank, int64_t rows,
                   PyObject* out, Exchanging& call, MatmulTensors& part) {
  std::array<PyObject*, most_matmul_tensors> read{};
  size_t next = 0;
  for (const MatmulArgument& argument : peer.product->arguments) {
    if (argument.written || next >= static_cast<size_t>(given)) continue;
    read[next] = is_cut(argument) ? rows_of(inputs[next], rank, rows, call) : inputs[next];
    if (read[next++] == nullptr) return false;
  }
  if (out == nullptr) {
    if (!make_outputs(*peer.product, read.data(), given, part)) return false;
  } else {
    next = 0;
    for (const MatmulArgument& argument : peer.product->arguments) {
      part.all[part.count++] = argument.written ? out : read[next++];
    }
  }
  return run_product(*peer.product, part.all.data(), part.count, call.workspace);
}

// The parts of all ranks, and (buffers, number): who has read them closes that.
Reference left_open(PyObject* parts, size_t ranks, const Exchanging& call) {
  Reference found = Reference::steal(PyTuple_New(static_cast<Py_ssize_t>(ranks) + 1));
  Reference number = Reference::steal(PyLong_FromSize_t(call.buffer));
  if (!found || !number) return Reference();
  PyObject* open = PyTuple_Pack(2, call.owner.get(), number.get());
  if (open == nullptr) return Reference();
  for (size_t i = 0; i < ranks; ++i) {
    PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item(parts, i)));
  }
  PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(ranks), open);
  return found;
}

Reference scatter(const PeerMatmul& peer, PyObject* const* inputs, Py_ssize_t given, Exchanging& call) {
  const CudaMatmul& product = *peer.product;
  TensorView view;
  if (!view_tensor(inputs[0], {product.name(), 0}, &view)) return Reference();
  const Reference ranks = Reference::steal(PyObject_GetAttrString(peer.peers.get(), "ranks"));
  const size_t count = ranks ? PyLong_AsSize_t(ranks.get()) : 0;
  if (count < 2 || view.dimensions < 2 || view.shape[0] % static_cast<int64_t>(count) != 0) {
    if (PyErr_Occurred() == nullptr) {
      PyErr_Format(PyExc_ValueError, "product '%s': its rows are no equal parts for each rank", product.name());
    }
    return Reference();
  }
  const int64_t rows = view.shape[0] / static_cast<int64_t>(count);
  PyObject* parts = nullptr;
  const auto out = std::find_if(product.arguments.begin(), product.arguments.end(),
                                [](const MatmulArgument& argument) { return argument.role == Role::out; });
  for (size_t k = 1; k <= count; ++k) {
    MatmulTensors part;
    if (k == count) {
      const size_t own = call.buffers->rank();
      if (!multiply_part(peer, inputs, given, own, rows, item(parts, own), call, part)) return Reference();
      break;
    }
    // Which rank is first is known when there are buffers, which need the bytes of a block: those of a first product.
    const Reference rank = Reference::steal(PyObject_GetAttrString(peer.peers.get(), "rank"));
    if (!rank) return Reference();
    const size_t to = (PyLong_AsSize_t(rank.get()) + k) % count;
    if (!multiply_part(peer, inputs, given, to, rows, nullptr, call, part)) return Reference();
    Memory made;
    int32_t device = -1;
    if (!read_cuda_tensor(part.made[0].get(), *out->dtype, {product.name(), 2}, &device, &made)) return Reference();
    const auto bytes = static_cast<size_t>(made.bytes);
    if (k == 1) {
      if (!begin(peer, device, bytes, call)) return Reference();
      parts = blocks(peer, call, part.made[0].get());
      if (parts == nullptr) return Reference();
    }
    call.held.push_back(part.made[0]);
    const bool sent = without_gil(nullptr, [&](Failure& failure) {
      return call.buffers->send(call.buffer, to, made.data, bytes, call.stream, true, failure);
    });
    if (!sent) return Reference();
  }
  const bool there = without_gil(nullptr, [&](Failure& failure) {
    // What is sent may be freed when this returns.
    return call.buffers->end_sending(call.buffer, failure) &&
           await_all(*call.buffers, call.buffer, call.stream, failure) &&
           call.buffers->sent(call.buffer, call.stream, failure);
  });
  if (!there) return Reference();
  if (peer.gives) return left_open(parts, count, call);
  const Reference dim = Reference::steal(PyLong_FromLong(0));
  if (!dim) return Reference();
  Reference sum = Reference::steal(PyObject_CallMethodOneArg(item(parts, count), names.sum, dim.get()));
  if (!sum) return sum;
  const bool closed = without_gil(
      nullptr, [&](Failure& failure) { return call.buffers->close(call.buffer, call.stream, failure); });
  return closed ? sum : Reference();
}

PyObject* call_scatter(PyObject* self, PyObject* const* inputs, size_t flags, PyObject* keywords) {
  const PeerMatmul& peer = peer_of(self);
  Py_ssize_t given = 0;
  Exchanging call;
  if (!check_given(peer, flags, keywords, &given)) return nullptr;
  return scatter(peer, inputs, given, call).release();
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
  return peer;
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
