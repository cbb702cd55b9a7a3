// A bounded queue of transfers between slots and the scratch file, served by a few threads.
//
// Order: urgent reads, reads, writes; each first come, first served. A request is cut into pieces
// of `block_bytes`, so that several threads serve one large request and an urgent read overtakes a
// write that has begun. A request that has begun always finishes; one that has not can be cancelled
// and then never runs.
//
// [Note: why not io_uring]
// At blocks of 1 MiB and more a pool of 2-4 threads moves as much as io_uring and libaio do at any
// depth, within a tenth: 5.3-6.1 GB/s of writes on an NVMe-backed virtio disk. The pages of the
// buffer decide: with huge pages writes ran at 4.6 instead of 2.3 GB/s and reads at 2.6 instead of
// 1.2 ([Note: huge pages] in arena.h).
//
// What the others save is CPU, and it is their depth that saves it: of many blocks that the kernel
// has at a time several share a notification of the disk, an interrupt and a wake-up of the thread.
// With 16 blocks of 4 MiB in flight, libaio (or io_uring) in place of the pool's threads used
// 0.0045 s per GB written and 0.0052 read, where two threads use 0.010 and four 0.009; with 4
// blocks 0.0075 and 0.0095. (io_uring with registered buffers, which are not looked up page by
// page: 0.0037 and 0.0041, but they count against RLIMIT_MEMLOCK, and io_uring is forbidden in many
// containers.) What is with the kernel cannot be overtaken, though: an urgent read of 1 MiB behind
// writes took 1.6-1.9 ms with two threads, 4.5 with four, 9.8 at a depth of 8 and 10.6 at 16.
// Backward waits for that read; the CPU time is 3 % of one core at full rate. scripts/bench_io.py
// measures the depths.
#ifndef OFFLOAD_CSRC_QUEUE_H_
#define OFFLOAD_CSRC_QUEUE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "arena.h"
#include "file.h"
#include "process.h"

namespace offload {

class QueueCore;

// What to transfer. The bytes are those of the slot: its nbytes() when the file is buffered, whole
// pages (the padding included) when it is direct, so extents must not share a page.
struct Transfer {
  enum class Kind { kRead, kWrite };

  Kind kind = Kind::kRead;
  std::shared_ptr<Slot> slot;
  uint64_t offset = 0;
  bool urgent = false;          // reads only
  std::optional<uint32_t> crc;  // reads only: the CRC-32C the slot's nbytes() must have
};

// A transfer that was accepted. All functions may be called from any thread; those marked (*) throw
// std::runtime_error in a forked child.
class Request {
 public:
  Request(std::shared_ptr<QueueCore> core, Transfer transfer);

  // (*) True once it has completed, failed or been cancelled.
  bool Done() const;

  // (*) Blocks until it is done, for at most `timeout`; returns whether it is. Throws
  // std::system_error if the transfer failed, each time it is called: the errno of the first piece
  // that failed, EBADMSG when the checksum did not match, ECANCELED when it was cancelled. After a
  // failed read the content of the slot is undefined.
  bool Wait(std::chrono::nanoseconds timeout) const;

  // (*) True if no byte of it had been started: it then never runs, and its slot is let go.
  bool Cancel();

  // (*) Makes a read that still waits urgent. Otherwise does nothing.
  void Promote();

  // CLOCK_MONOTONIC when the first piece began and when the last ended; 0 until then.
  int64_t start_ns() const { return start_ns_; }
  int64_t end_ns() const { return end_ns_; }
  size_t nbytes() const { return nbytes_; }
  uint64_t offset() const { return transfer_.offset; }

 private:
  friend class QueueCore;

  const Owner owner_;
  const std::shared_ptr<QueueCore> core_;
  const size_t nbytes_;  // of the slot; transfer_.slot is let go when the request is done
  Transfer transfer_;

  // Written under the mutex of core_.
  size_t total_bytes_ = 0;   // to move, padding included
  size_t handed_bytes_ = 0;  // in pieces that were given to a worker
  int pieces_in_flight_ = 0;
  int error_ = 0;
  std::atomic<int64_t> start_ns_{0};
  std::atomic<int64_t> end_ns_{0};
  std::atomic<bool> done_{false};
  mutable std::condition_variable done_changed_;

  // One per piece when a checksum is wanted, each written by the worker of that piece.
  std::vector<uint32_t> piece_crcs_;
};

class Queue {
 public:
  struct Options {
    int threads = 2;
    size_t block_bytes = size_t{4} << 20;  // a multiple of a page
    size_t capacity = 64;                  // waiting reads, and as many waiting writes
  };

  struct Stats {
    uint64_t read_bytes = 0;  // moved, padding included
    uint64_t written_bytes = 0;
    uint64_t reads = 0;  // requests that completed without error
    uint64_t writes = 0;
    uint64_t read_ns = 0;  // summed over workers; exceeds elapsed time when they overlap
    uint64_t write_ns = 0;
    uint64_t cpu_ns = 0;  // used by the workers, for the queue itself too
    uint64_t depth = 0;   // requests accepted and not done
    uint64_t peak_depth = 0;
  };

  // Starts the workers. Throws std::invalid_argument for impossible options and std::system_error
  // (EAGAIN) when no thread can be started.
  Queue(std::shared_ptr<File> file, const Options& options);

  // Like Close.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Accepts `transfer`, waiting for at most `timeout` while `capacity` requests of its kind wait
  // already (so reads never wait for room behind writes); null if there was no room in time. The
  // request shares the slot until it is done. Throws std::invalid_argument when the offset is not
  // a multiple of the file's alignment or too large, or after Close.
  std::shared_ptr<Request> Submit(Transfer transfer, std::chrono::nanoseconds timeout);

  // Refuses further requests and waits until the accepted ones are done, for at most `timeout`;
  // returns whether they are, and then has joined the workers. May be called again.
  bool Close(std::chrono::nanoseconds timeout);

  Stats GetStats() const;

 private:
  Owner owner_;
  std::shared_ptr<QueueCore> core_;
  std::vector<Thread> workers_;
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_QUEUE_H_
