#include "exchange.h"

#include <algorithm>
#include <utility>

namespace te {
namespace {

constexpr int high_priority = -1;

}  // namespace

PeerBuffers::PeerBuffers(std::string group, int32_t device, size_t rank, Memory memory)
    : group_(std::move(group)),
      device_(device),
      rank_(rank),
      memory_(std::move(memory)),
      buffers_(memory_.buffers_of_a_rank) {}

bool PeerBuffers::refuse(const char* what, CudaDriver::Result error, Failure& failure) const {
  failure.text = "exchange of " + group_ + ": " + what + ": " + cuda_error_text(*driver_, error);
  return false;
}

bool PeerBuffers::check(size_t buffer, size_t rank, Failure& failure) const {
  if (buffer < buffers_.size() && buffers_[buffer].open && rank < ranks()) return true;
  failure = {Failure::Kind::value, "exchange of " + group_ + ": buffer " + std::to_string(buffer) + " is not open"};
  return false;
}

// ---- places ----------------------------------------------------------------------------------------------------

CudaDriver::Pointer PeerBuffers::at(size_t rank, size_t buffer, size_t from) const {
  return memory_.buffers[rank] + (buffer * ranks() + from) * memory_.block_bytes;
}

CudaDriver::Pointer PeerBuffers::arrived(size_t rank, size_t buffer, size_t from) const {
  return memory_.flags[rank] + (2 * buffer * ranks() + from) * sizeof(uint32_t);
}

CudaDriver::Pointer PeerBuffers::free(size_t rank, size_t buffer, size_t to) const {
  return memory_.flags[rank] + ((2 * buffer + 1) * ranks() + to) * sizeof(uint32_t);
}

// ---- flags -----------------------------------------------------------------------------------------------------

void PeerBuffers::take_back(Operations& operations, CudaDriver::Pointer flag) {
  using Operation = CudaDriver::MemoryOperation;
  operations.push_back({Operation::wait, flag, 1, Operation::until_equal, 0, 0});
  operations.push_back({Operation::write, flag, 0, 0, 0, 0});
}

void PeerBuffers::raise(Operations& operations, CudaDriver::Pointer flag) {
  operations.push_back({CudaDriver::MemoryOperation::write, flag, 1, 0, 0, 0});
}

bool PeerBuffers::run(Operations& operations, Stream stream, Failure& failure) const {
  const auto count = static_cast<unsigned>(operations.size());
  const CudaDriver::Result error = driver_->stream_batch_memory(stream, count, operations.data(), 0);
  return error == CudaDriver::success || refuse("a stream takes no flags", error, failure);
}

// ---- what streams are given ------------------------------------------------------------------------------------

bool PeerBuffers::copy(CudaDriver::Pointer to, const void* from, size_t bytes, Stream stream, Failure& failure) const {
  if (bytes == 0) return true;
  const auto source = reinterpret_cast<CudaDriver::Pointer>(from);
  const CudaDriver::Result error = driver_->copy_on_device(to, source, bytes, stream);
  return error == CudaDriver::success || refuse("a block cannot be copied", error, failure);
}

bool PeerBuffers::follow(Stream stream, CudaDriver::Event event, Failure& failure) const {
  const CudaDriver::Result error = driver_->stream_wait_event(stream, event, 0);
  return error == CudaDriver::success || refuse("a stream cannot wait for another", error, failure);
}

bool PeerBuffers::record(CudaDriver::Event event, Stream stream, Failure& failure) const {
  const CudaDriver::Result error = driver_->event_record(event, stream);
  return error == CudaDriver::success || refuse("nothing can be recorded", error, failure);
}

// ---- exchanges -------------------------------------------------------------------------------------------------

bool PeerBuffers::load(Failure& failure) {
  driver_ = cuda_driver(failure.text);
  if (driver_ == nullptr) return false;
  CudaDriver::Device ordinal = 0;
  CudaDriver::Result error = driver_->device_get(&ordinal, device_);
  if (error == CudaDriver::success) error = driver_->primary_context_retain(&context_, ordinal);
  if (error != CudaDriver::success) return refuse("the device gives no context", error, failure);
  const CurrentContext current(*driver_, context_);
  for (Stream* stream : {&sending_, &receiving_, &releasing_}) {
    error = driver_->stream_create(stream, CudaDriver::stream_non_blocking, high_priority);
    if (error != CudaDriver::success) return refuse("there is no stream for copies", error, failure);
  }
  std::vector<CudaDriver::Event*> events = {&closed_};
  for (Buffer& buffer : buffers_) {
    buffer.received.resize(ranks());
    events.insert(events.end(), {&buffer.made, &buffer.sent});
    for (CudaDriver::Event& event : buffer.received) events.push_back(&event);
  }
  for (CudaDriver::Event* event : events) {
    error = driver_->event_create(event, CudaDriver::event_disable_timing);
    if (error != CudaDriver::success) return refuse("there is no event", error, failure);
  }
  return true;
}

size_t PeerBuffers::under_way() const {
  return static_cast<size_t>(std::count_if(buffers_.begin(), buffers_.end(), [](const Buffer& b) { return b.open; }));
}

bool PeerBuffers::open(size_t block_bytes, Stream stream, size_t& buffer, Failure& failure) {
  const auto is_free = [](const Buffer& b) { return !b.open; };
  auto found = std::find_if(buffers_.begin() + static_cast<std::ptrdiff_t>(next_), buffers_.end(), is_free);
  if (found == buffers_.end()) found = std::find_if(buffers_.begin(), buffers_.end(), is_free);
  if (block_bytes > memory_.block_bytes || found == buffers_.end()) {
    failure = {Failure::Kind::value,
               "exchange of " + group_ + ": blocks of " + std::to_string(block_bytes) + " bytes, beside " +
                   std::to_string(under_way()) + " exchanges under way, and there are " +
                   std::to_string(buffers_.size()) + " buffers for blocks of " + std::to_string(memory_.block_bytes)};
    return false;
  }
  const CurrentContext current(*driver_, context_);
  Buffer& taken = *found;
  buffer = static_cast<size_t>(found - buffers_.begin());
  if (!record(taken.made, stream, failure) || !follow(sending_, taken.made, failure)) return false;
  Operations operations;
  for (size_t k = 1; k < ranks(); ++k) take_back(operations, free(rank_, buffer, receiver(k)));
  if (!run(operations, sending_, failure)) return false;
  taken.open = true;
  taken.receives = false;
  next_ = (buffer + 1) % buffers_.size();
  return true;
}

bool PeerBuffers::send(size_t buffer, size_t to, const void* data, size_t bytes, Stream stream, bool follows,
                       Failure& failure) {
  if (!check(buffer, to, failure)) return false;
  const CurrentContext current(*driver_, context_);
  const CudaDriver::Event made = buffers_[buffer].made;
  if (follows && (!record(made, stream, failure) || !follow(sending_, made, failure))) return false;
  if (!copy(at(to, buffer, rank_), data, bytes, sending_, failure)) return false;
  if (to == rank_) return true;
  Operations operations;
  raise(operations, arrived(to, buffer, rank_));
  return run(operations, sending_, failure);
}

bool PeerBuffers::end_sending(size_t buffer, Failure& failure) {
  if (!check(buffer, rank_, failure)) return false;
  const CurrentContext current(*driver_, context_);
  return record(buffers_[buffer].sent, sending_, failure);
}

bool PeerBuffers::sent(size_t buffer, Stream stream, Failure& failure) {
  if (!check(buffer, rank_, failure)) return false;
  const CurrentContext current(*driver_, context_);
  return follow(stream, buffers_[buffer].sent, failure);
}

bool PeerBuffers::await(size_t buffer, size_t from, Stream stream, Failure& failure) {
  if (!check(buffer, from, failure)) return false;
  const CurrentContext current(*driver_, context_);
  Operations operations;
  take_back(operations, arrived(rank_, buffer, from));
  return run(operations, stream, failure);
}

bool PeerBuffers::receive(size_t buffer, const void* own, void* out, size_t bytes, Failure& failure) {
  if (!check(buffer, rank_, failure)) return false;
  const CurrentContext current(*driver_, context_);
  Buffer& receiving = buffers_[buffer];
  receiving.receives = true;
  const auto target = reinterpret_cast<CudaDriver::Pointer>(out);
  const bool begun = follow(receiving_, receiving.made, failure) &&
                     copy(target + rank_ * bytes, own, bytes, receiving_, failure) &&
                     record(receiving.received[rank_], receiving_, failure);
  if (!begun) return false;
  for (size_t k = 1; k < ranks(); ++k) {
    const size_t from = sender(k);
    const bool there = await(buffer, from, receiving_, failure) &&
                       copy(target + from * bytes, reinterpret_cast<const void*>(block(buffer, from)), bytes,
                            receiving_, failure) &&
                       record(receiving.received[from], receiving_, failure);
    if (!there) return false;
  }
  return let_go(buffer, receiving_, failure);
}

bool PeerBuffers::received(size_t buffer, size_t from, Stream stream, Failure& failure) {
  if (!check(buffer, from, failure)) return false;
  const CurrentContext current(*driver_, context_);
  return follow(stream, buffers_[buffer].received[from], failure);
}

// Tells the others that the stream has read their blocks.
bool PeerBuffers::let_go(size_t buffer, Stream stream, Failure& failure) const {
  Operations read;
  for (size_t k = 1; k < ranks(); ++k) raise(read, free(sender(k), buffer, rank_));
  return run(read, stream, failure);
}

bool PeerBuffers::close(size_t buffer, Stream stream, Failure& failure) {
  if (!check(buffer, rank_, failure)) return false;
  const CurrentContext current(*driver_, context_);
  Buffer& closing = buffers_[buffer];
  closing.open = false;
  if (!follow(stream, closing.sent, failure)) return false;
  const size_t last = sender(ranks() - 1);
  const bool done = closing.receives ? follow(stream, closing.received[last], failure) : let_go(buffer, stream, failure);
  if (!done) return false;
  return is_capturing(*driver_, stream) || record(closed_, stream, failure);
}

bool PeerBuffers::release(Failure& failure) {
  const BesideCaptures beside(*driver_);
  const CurrentContext current(*driver_, context_);
  Operations operations;
  for (size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
    for (size_t k = 1; k < ranks(); ++k) {
      raise(operations, arrived(rank_, buffer, receiver(k)));
      raise(operations, free(rank_, buffer, receiver(k)));
    }
  }
  return run(operations, releasing_, failure);
}

bool PeerBuffers::is_done() const {
  const BesideCaptures beside(*driver_);
  const CurrentContext current(*driver_, context_);
  return driver_->event_query(closed_) != CudaDriver::not_ready;
}

}  // namespace te
