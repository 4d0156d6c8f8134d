#include "exchange.h"

#include <algorithm>
#include <utility>

namespace te {
namespace {

// Streams of one priority may share a queue of the device, in which a wait holds up what is behind it.
constexpr int high_priority = -1, highest_priority = -5;
constexpr size_t most_operations = 128;  // of one batch; the driver takes fewer than 256

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
  for (size_t first = 0; first < operations.size(); first += most_operations) {
    const size_t count = std::min(most_operations, operations.size() - first);
    const CudaDriver::Result error =
        driver_->stream_batch_memory(stream, static_cast<unsigned>(count), operations.data() + first, 0);
    if (error != CudaDriver::success) return refuse("a stream takes no flags", error, failure);
  }
  return true;
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

// Another thread asks for the latest event, so it is one that was recorded.
bool PeerBuffers::record_latest(CudaDriver::Event event, Stream stream, Failure& failure) {
  if (!record(event, stream, failure)) return false;
  latest_ = event;
  return true;
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
    const int priority = stream == &releasing_ ? highest_priority : high_priority;
    error = driver_->stream_create(stream, CudaDriver::stream_non_blocking, priority);
    if (error != CudaDriver::success) return refuse("there is no stream for copies", error, failure);
  }
  std::vector<CudaDriver::Event*> events = {&marked_};
  for (Buffer& buffer : buffers_) {
    buffer.gone.resize(ranks());
    events.insert(events.end(), {&buffer.made, &buffer.sent, &buffer.arrived, &buffer.copied, &buffer.closed});
    for (CudaDriver::Event& event : buffer.gone) events.push_back(&event);
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
  if (!broken_.empty()) {
    failure.text = "exchange of " + group_ + ": nothing is exchanged any more, as ranks may differ since one failed: " + broken_;
    return false;
  }
  const CurrentContext current(*driver_, context_);
  Buffer& taken = *found;
  buffer = static_cast<size_t>(found - buffers_.begin());
  taken.captured = is_capturing(*driver_, stream);
  // Of its own block no flag tells who has read that on another stream.
  const bool moved = !taken.captured && taken.stream != stream;
  if (moved && !follow(stream, taken.closed, failure)) return false;
  if (!record(taken.made, stream, failure) || !follow(sending_, taken.made, failure)) return false;
  Operations operations;
  for (size_t k = 1; k < ranks(); ++k) take_back(operations, free(rank_, buffer, receiver(k)));
  if (!run(operations, sending_, failure)) return false;
  taken.open = true;
  taken.copies = taken.let_go = false;
  next_ = (buffer + 1) % buffers_.size();
  return true;
}

bool PeerBuffers::send(size_t buffer, size_t to, const void* data, size_t bytes, Stream stream, bool follows,
                       Failure& failure) {
  if (!check(buffer, to, failure)) return false;
  const CurrentContext current(*driver_, context_);
  const Buffer& sending = buffers_[buffer];
  if (follows && (!record(sending.made, stream, failure) || !follow(sending_, sending.made, failure))) return false;
  if (!copy(at(to, buffer, rank_), data, bytes, sending_, failure)) return false;
  if (to == rank_) return true;
  Operations operations;
  raise(operations, arrived(to, buffer, rank_));
  if (!run(operations, sending_, failure)) return false;
  return !sending.captured || record(sending.gone[to], sending_, failure);
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

// Outside of graphs a rank gives its streams what it sends before it has them wait, so nobody waits for what is queued
// behind a wait. A graph keeps no such order, unless it is told: the k-th block is waited for behind the k-th that goes.
bool PeerBuffers::await(size_t buffer, size_t from, Stream stream, Failure& failure) {
  if (!check(buffer, from, failure)) return false;
  const CurrentContext current(*driver_, context_);
  const Buffer& waiting = buffers_[buffer];
  const size_t opposite = (2 * rank_ + ranks() - from) % ranks();
  if (waiting.captured && !follow(stream, waiting.gone[opposite], failure)) return false;
  Operations operations;
  take_back(operations, arrived(rank_, buffer, from));
  return run(operations, stream, failure);
}

bool PeerBuffers::receive(size_t buffer, const void* own, void* out, size_t bytes, Failure& failure) {
  if (!check(buffer, rank_, failure)) return false;
  const CurrentContext current(*driver_, context_);
  Buffer& receiving = buffers_[buffer];
  receiving.copies = receiving.let_go = true;
  const auto target = reinterpret_cast<CudaDriver::Pointer>(out);
  if (!follow(receiving_, receiving.made, failure)) return false;
  if (!copy(target + rank_ * bytes, own, bytes, receiving_, failure)) return false;
  for (size_t k = 1; k < ranks(); ++k) {
    const size_t from = sender(k);
    const auto* arriving = reinterpret_cast<const void*>(block(buffer, from));
    if (!await(buffer, from, receiving_, failure)) return false;
    if (!copy(target + from * bytes, arriving, bytes, receiving_, failure)) return false;
  }
  return tell_read(buffer, receiving_, failure) && record(receiving.copied, receiving_, failure);
}

bool PeerBuffers::copy_beside(size_t buffer, void* to, const void* from, size_t bytes, Stream stream,
                              Failure& failure) {
  if (!check(buffer, rank_, failure)) return false;
  const CurrentContext current(*driver_, context_);
  Buffer& copying = buffers_[buffer];
  copying.copies = true;
  return record(copying.arrived, stream, failure) && follow(receiving_, copying.arrived, failure) &&
         copy(reinterpret_cast<CudaDriver::Pointer>(to), from, bytes, receiving_, failure) &&
         record(copying.copied, receiving_, failure);
}

// Tells the others that the stream has read their blocks.
bool PeerBuffers::tell_read(size_t buffer, Stream stream, Failure& failure) const {
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
  if (closing.copies && !follow(stream, closing.copied, failure)) return false;
  if (!closing.let_go && !tell_read(buffer, stream, failure)) return false;
  if (is_capturing(*driver_, stream)) return true;
  closing.stream = stream;
  return record_latest(closing.closed, stream, failure);
}

void PeerBuffers::break_off(size_t buffer, Stream stream, const std::string& why) {
  const CurrentContext current(*driver_, context_);
  Failure ignored;
  const Buffer& broken = buffers_[buffer];
  if (record(broken.sent, sending_, ignored)) follow(stream, broken.sent, ignored);
  if (record(broken.copied, receiving_, ignored)) follow(stream, broken.copied, ignored);
  broken_ = why;
}

bool PeerBuffers::mark(Stream stream, Failure& failure) {
  const CurrentContext current(*driver_, context_);
  return record_latest(marked_, stream, failure);
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
  const CudaDriver::Event latest = latest_;
  return latest == nullptr || driver_->event_query(latest) != CudaDriver::not_ready;
}

}  // namespace te
