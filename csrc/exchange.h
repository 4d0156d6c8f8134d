// Rows that the GPUs of a group exchange by copies, through buffers of each other, without a kernel of a collective. Knows
// nothing of Python.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "failure.h"

namespace te {

// Buffers and flags that every rank of a group has in memory of its own and the others can write, at the same places in
// each. There are several buffers, which exchanges take in turn. One has a block for each rank that sends, and two flags
// for each other rank: `arrived`, raised by a sender when its block is there, and `free`, raised by a receiver when it has
// read what this rank sent. A flag is lowered by who has waited for it, so a replayed CUDA graph finds all as it was.
class PeerBuffers {
 public:
  using Stream = CudaDriver::Stream;

  // What each rank has: addresses as this process sees them.
  struct Memory {
    std::vector<CudaDriver::Pointer> buffers, flags;
    size_t block_bytes = 0;  // of a block; a buffer has one for each rank
    size_t buffers_of_a_rank = 0;
  };

  PeerBuffers(std::string group, int32_t device, size_t rank, Memory memory);
  PeerBuffers(const PeerBuffers&) = delete;
  PeerBuffers& operator=(const PeerBuffers&) = delete;

  // How many bytes the flags of a rank take.
  static size_t flag_bytes(size_t ranks, size_t buffers) { return 2 * ranks * buffers * sizeof(uint32_t); }

  // These need no interpreter lock, and return false with what went wrong.

  // Makes the streams and events.
  bool load(Failure& failure);

  // Takes the next buffer, in which blocks of so many bytes may be sent when `stream` has come so far and all ranks have
  // read what was sent in it before. Refused for good where an exchange was broken off.
  bool open(size_t block_bytes, Stream stream, size_t& buffer, Failure& failure);

  // Sends a block to another rank, behind what `stream` has been given so far where `follows`.
  bool send(size_t buffer, size_t to, const void* data, size_t bytes, Stream stream, bool follows, Failure& failure);

  // No more is sent; `sent` has a stream wait until all is, and so does `close`.
  bool end_sending(size_t buffer, Failure& failure);
  bool sent(size_t buffer, Stream stream, Failure& failure);

  // Has a stream wait until the block of a rank is there.
  bool await(size_t buffer, size_t from, Stream stream, Failure& failure);

  // Copies the blocks of all ranks, its own from `own`, to `out` as they arrive, one behind the other, on a stream of its
  // own, and lets the others send anew; `close` has a stream wait for that.
  bool receive(size_t buffer, const void* own, void* out, size_t bytes, Failure& failure);

  // Copies something beside what a stream does, when that has come so far; `close` has it wait for that.
  bool copy_beside(size_t buffer, void* to, const void* from, size_t bytes, Stream stream, Failure& failure);

  // Has a stream wait for what is sent and copied, and lets the others send anew, as what the stream was given before has
  // read the blocks.
  bool close(size_t buffer, Stream stream, Failure& failure);

  // After something failed between: a stream waits for all that is under way, so that memory may be freed. Nothing is
  // exchanged any more, as other ranks may have come to something else.
  void break_off(size_t buffer, Stream stream, const std::string& why);

  // Notes that a stream has come so far, as behind the replay of a graph with exchanges, for `is_done`.
  bool mark(Stream stream, Failure& failure);

  // Lets what waits for a flag here go on, whoever is gone: what is computed then is void. Once for each wait. This and the
  // next may be called by another thread, while graphs are captured too.
  bool release(Failure& failure);

  // Whether what was closed last is done, as far as that can be asked.
  bool is_done() const;

  // The rank whose block arrives as the k-th, from 1 on, and the one that this rank sends to as the k-th: each link has
  // one block at a time.
  size_t sender(size_t k) const { return (rank_ + ranks() - k) % ranks(); }
  size_t receiver(size_t k) const { return (rank_ + k) % ranks(); }

  CudaDriver::Pointer block(size_t buffer, size_t from) const { return at(rank_, buffer, from); }
  size_t ranks() const { return memory_.buffers.size(); }
  size_t rank() const { return rank_; }
  size_t block_bytes() const { return memory_.block_bytes; }
  int32_t device() const { return device_; }
  size_t under_way() const;

 private:
  struct Buffer {
    bool open = false;
    bool captured = false;  // the exchange that it is open for is part of a graph
    bool copies = false;    // something is copied by the receiving stream
    bool let_go = false;    // and that has let the others go on
    Stream stream = nullptr;  // that it was closed on last
    CudaDriver::Event made = nullptr, sent = nullptr, arrived = nullptr, copied = nullptr, closed = nullptr;
    std::vector<CudaDriver::Event> gone;  // by ranks: what a graph is told of the order that flags give
  };
  using Operations = std::vector<CudaDriver::MemoryOperation>;

  CudaDriver::Pointer at(size_t rank, size_t buffer, size_t from) const;
  CudaDriver::Pointer arrived(size_t rank, size_t buffer, size_t from) const;
  CudaDriver::Pointer free(size_t rank, size_t buffer, size_t to) const;
  static void take_back(Operations& operations, CudaDriver::Pointer flag);
  static void raise(Operations& operations, CudaDriver::Pointer flag);
  bool copy(CudaDriver::Pointer to, const void* from, size_t bytes, Stream stream, Failure& failure) const;
  bool tell_read(size_t buffer, Stream stream, Failure& failure) const;
  bool follow(Stream stream, CudaDriver::Event event, Failure& failure) const;
  bool record(CudaDriver::Event event, Stream stream, Failure& failure) const;
  bool record_latest(CudaDriver::Event event, Stream stream, Failure& failure);
  bool run(Operations& operations, Stream stream, Failure& failure) const;
  bool refuse(const char* what, CudaDriver::Result error, Failure& failure) const;
  bool check(size_t buffer, size_t rank, Failure& failure) const;

  std::string group_;
  int32_t device_;
  size_t rank_;
  Memory memory_;
  const CudaDriver* driver_ = nullptr;
  CudaDriver::Context context_ = nullptr;
  Stream sending_ = nullptr, receiving_ = nullptr, releasing_ = nullptr;
  std::vector<Buffer> buffers_;
  size_t next_ = 0;
  std::string broken_;
  CudaDriver::Event marked_ = nullptr;
  std::atomic<CudaDriver::Event> latest_{nullptr};  // recorded by what was closed or marked last
};

}  // namespace te
