#include "bindings.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exchange.h"
#include "gil.h"
#include "peer_matmul.h"
#include "tensor.h"

namespace py = pybind11;

namespace te {
namespace {

using Addresses = std::vector<CudaDriver::Pointer>;

// Bytes and address of a dense tensor, whatever it holds.
struct Dense {
  char* data;
  size_t bytes;
};

template <class Work>
void run(Work work) {
  if (!without_gil(nullptr, work)) throw py::error_already_set();
}

CudaDriver::Stream stream_of(const PeerBuffers& buffers) {
  void* stream = nullptr;
  if (!current_cuda_stream(buffers.device(), &stream)) throw py::error_already_set();
  return static_cast<CudaDriver::Stream>(stream);
}

Dense dense(const py::object& tensor, const char* name, Py_ssize_t index) {
  TensorView view;
  if (!view_tensor(tensor.ptr(), {name, index}, &view)) throw py::error_already_set();
  if (!view.is_row_major) throw py::value_error(std::string(name) + ": its tensors must be contiguous");
  const auto bytes = py::cast<size_t>(tensor.attr("nbytes"));
  return {static_cast<char*>(const_cast<void*>(view.data)), bytes};
}

std::unique_ptr<PeerBuffers> make_buffers(const std::string& group, int32_t device, size_t rank, Addresses buffers,
                                          Addresses flags, size_t block_bytes, size_t count) {
  if (buffers.size() < 2 || buffers.size() != flags.size() || rank >= buffers.size() || count == 0) {
    throw py::value_error("buffers of peers: an address of buffers and of flags for each of several ranks");
  }
  auto made = std::make_unique<PeerBuffers>(
      group, device, rank, PeerBuffers::Memory{std::move(buffers), std::move(flags), block_bytes, count});
  run([&](Failure& failure) { return made->load(failure); });
  return made;
}

// Sends to every other rank: the whole tensor, or of as many equal blocks the one of its number.
size_t send_all(PeerBuffers& buffers, const Dense& x, bool whole, CudaDriver::Stream stream) {
  const size_t bytes = whole ? x.bytes : x.bytes / buffers.ranks();
  size_t buffer = 0;
  run([&](Failure& failure) {
    if (!buffers.open(bytes, stream, buffer, failure)) return false;
    for (size_t k = 1; k < buffers.ranks(); ++k) {
      const size_t to = buffers.receiver(k);
      const char* block = whole ? x.data : x.data + to * bytes;
      if (!buffers.send(buffer, to, block, bytes, stream, false, failure)) return false;
    }
    return true;
  });
  return buffer;
}

// Gathers (`whole`), or exchanges blocks, into `out`, a tensor of a block for each rank.
size_t gather(PeerBuffers& buffers, const py::object& x, const py::object& out, bool whole) {
  const Dense given = dense(x, "gather", 0), made = dense(out, "gather", 1);
  const size_t bytes = made.bytes / buffers.ranks();
  if (made.bytes != (whole ? buffers.ranks() * given.bytes : given.bytes)) {
    throw py::value_error("gather: out has a block for each rank");
  }
  const CudaDriver::Stream stream = stream_of(buffers);
  const size_t buffer = send_all(buffers, given, whole, stream);
  const char* own = whole ? given.data : given.data + buffers.rank() * bytes;
  run([&](Failure& failure) {
    return buffers.end_sending(buffer, failure) && buffers.receive(buffer, own, made.data, bytes, failure);
  });
  return buffer;
}

// Sends each rank its block of x; the own one is put beside those that arrive.
size_t scatter(PeerBuffers& buffers, const py::object& x) {
  const Dense given = dense(x, "scatter", 0);
  const size_t bytes = given.bytes / buffers.ranks();
  const CudaDriver::Stream stream = stream_of(buffers);
  const size_t buffer = send_all(buffers, given, false, stream);
  run([&](Failure& failure) {
    const char* own = given.data + buffers.rank() * bytes;
    return buffers.send(buffer, buffers.rank(), own, bytes, stream, false, failure) &&
           buffers.end_sending(buffer, failure);
  });
  return buffer;
}

void await(PeerBuffers& buffers, size_t buffer) {
  const CudaDriver::Stream stream = stream_of(buffers);
  run([&](Failure& failure) {
    return buffers.sent(buffer, stream, failure) && await_all(buffers, buffer, stream, failure);
  });
}

void close(PeerBuffers& buffers, size_t buffer) {
  const CudaDriver::Stream stream = stream_of(buffers);
  run([&](Failure& failure) { return buffers.close(buffer, stream, failure); });
}

void mark(PeerBuffers& buffers) {
  const CudaDriver::Stream stream = stream_of(buffers);
  run([&](Failure& failure) { return buffers.mark(stream, failure); });
}

}  // namespace

void bind_exchanges(py::module_& module) {
  py::class_<PeerBuffers>(module, "PeerBuffers",
                          "Buffers that the GPUs of a group write to one another by copy engines, and flags of them.")
      .def(py::init(&make_buffers), py::arg("group"), py::arg("device"), py::arg("rank"), py::arg("buffers"),
           py::arg("flags"), py::arg("block_bytes"), py::arg("count"))
      .def_static("flag_bytes", &PeerBuffers::flag_bytes, py::arg("ranks"), py::arg("buffers"))
      .def("gather", &gather, py::arg("x"), py::arg("out"), py::arg("whole") = true,
           "Start to join every rank's x in out, or its block of every rank's x; the number of the buffer it takes.")
      .def("scatter", &scatter, py::arg("x"), "Start to send each rank its block of x; the number of the buffer.")
      .def("wait", &await, py::arg("buffer"), "Have the current stream wait for all blocks, its own among them, of what is scattered.")
      .def("close", &close, py::arg("buffer"), "Have the current stream wait for all, and let others send anew.")
      .def("mark", &mark, "Note that the current stream has come so far, as behind a replay, for is_done().")
      .def("release", [](PeerBuffers& b) { run([&](Failure& failure) { return b.release(failure); }); },
           "Let what waits for other ranks go on; what it computes is void.")
      .def("is_done", &PeerBuffers::is_done, py::call_guard<py::gil_scoped_release>(),
           "Whether the device is done with what was closed.")
      .def_property_readonly("block_bytes", &PeerBuffers::block_bytes)
      .def_property_readonly("under_way", &PeerBuffers::under_way);
}

}  // namespace te
