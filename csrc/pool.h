// Memory for large tensors of the CPU, used again as soon as it is free.
//
// [Note: why not malloc]
// Offloading frees a tensor in the middle of a forward so that the next one may have its memory.
// glibc cannot do that: before 2.38 it does not reuse a freed block for an aligned request, which
// every tensor is, of the same size, and what is larger than 32 MiB it maps and unmaps each time.
// The process keeps the size of a run without offloading, or pays a page fault for each page of
// each tensor (measured: a third of the step of a convolutional model). A pool that knows only
// large blocks is simple and does better at both.
//
// [Note: small pages]
// The pool does not ask for huge pages, unlike the arena: tensors that all begin at the same offset
// within a huge page compete for the same lines of the processor's caches (measured: 4 % of a
// step).
#ifndef OFFLOAD_CSRC_POOL_H_
#define OFFLOAD_CSRC_POOL_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>

#include "pages.h"
#include "ranges.h"

namespace offload {

// Hands out page-aligned memory of one reserved range of addresses, first fit at the lowest.
//
// [Note: what stays resident]
// Free memory stays, which spares its next user the page faults, as long as it does not make the
// process larger than it had to be anyway: together with what is in use, here and elsewhere, it is
// no more than the most that was in use at one time lately. Beyond that (and kMinKeepBytes) it goes
// back to the system, from the highest address down. Its pages also go where the next user is, if
// that is elsewhere (`pages.h`). "Lately" is this period and the one before: a
// period is a training step, and where there are none kLongestPeriod. "Elsewhere" is what the
// arenas have touched.
//
// All functions may be called from any thread, and in a forked child, which has a copy of the pool
// like of all other memory, if BeforeFork and AfterFork were called around the fork.
//
// [Note: during a fork]
// Other libraries have handlers of forks, too. They may free a tensor, or wait for a mutex under
// which another thread frees one: a pool that is locked meanwhile, as malloc is (which the C
// library locks after all handlers), would never be unlocked. So it is not locked but left alone:
// it hands nothing out, and what is freed waits in a list, linked through the freed memory itself.
class Pool {
 public:
  static constexpr size_t kMinKeepBytes = size_t{16} << 20;
  static constexpr std::chrono::seconds kLongestPeriod{30};

  struct Stats {
    size_t used_bytes = 0;   // of allocations now alive, in whole pages
    size_t most_bytes = 0;   // in use at one time lately, elsewhere included
    size_t kept_bytes = 0;   // free, and not given back to the system
    size_t allocations = 0;  // so far
  };

  // Reserves addresses, not memory. Null if there are not so many.
  static std::unique_ptr<Pool> Make(size_t reserved_bytes);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Page-aligned memory of undefined content, or null: there is no range of addresses or no memory
  // for it.
  void* Allocate(size_t nbytes);

  // Gives back what Allocate returned. Ends the process with a message, as free() does, if
  // `pointer` is not the beginning of memory that is in use.
  void Free(void* pointer);

  // Whether `pointer` is into the pool's addresses. Takes no lock.
  bool Owns(const void* pointer) const {
    return pointer >= data_ && pointer < data_ + reserved_bytes_;
  }

  // Memory in use elsewhere has grown by so much, or shrunk.
  void CountElsewhere(ptrdiff_t nbytes);

  // A new period begins: a training step, say. Two in a row: what was needed is needed no more.
  void BeginPeriod();

  Stats GetStats() const;

  void BeforeFork();
  void AfterFork() { --forks_; }
  void AfterForkInChild();

 private:
  Pool(std::byte* data, size_t reserved_bytes);

  struct Freed {
    Freed* next;
  };

  // Owns no lock during a fork.
  std::unique_lock<std::mutex> Enter();
  void Give(void* pointer);
  bool Commit(size_t end_bytes);
  size_t InUseBytes() const { return ranges_.used_bytes() + elsewhere_bytes_; }
  size_t MostBytes() const { return std::max(most_bytes_, most_bytes_before_); }
  void StartPeriod();
  void Trim();

  mutable std::mutex mutex_;
  std::atomic<int> forks_{0};           // under way, in as many threads
  std::atomic<Freed*> freed_{nullptr};  // during them
  std::byte* data_;
  size_t reserved_bytes_;
  size_t committed_bytes_ = 0;  // may be read and written
  FirstFit ranges_;
  Pages pages_;  // of what is free
  std::atomic<size_t> elsewhere_bytes_{0};
  size_t most_bytes_ = 0;         // in use at one time in this period
  size_t most_bytes_before_ = 0;  // in the one before
  std::chrono::steady_clock::time_point period_began_ = std::chrono::steady_clock::now();
  size_t allocations_ = 0;
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_POOL_H_
