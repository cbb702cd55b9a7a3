// Host memory for activations in transit: one slab of huge pages, cut into slots.
//
// An Arena hands out Slots. A slot's memory is owned by whoever shares the slot (the caller, a
// request in flight, a tensor that aliases it) and goes back when the last of them lets go. The
// slab outlives its arena until then. All functions may be called from any thread; none but the
// constructors and the unmapping of a whole slab does more than a few map operations, and none ever
// waits for Python.
//
// [Note: huge pages]
// Direct I/O pins every page of a buffer and builds a scatter list of them. With 2 MiB pages that
// list is 512 times shorter: transfers run about twice as fast as from 4 KiB pages and cost a
// fraction of the CPU. No other choice in this engine matters as much.
//
// [Note: MADV_DONTFORK]
// The slab is not inherited by forked children. A direct read that is in flight while the process
// forks could otherwise land in the child's copy of a page (open(2), NOTES), and a fork would copy
// the page tables of gigabytes it does not need. The price: a child that touches a tensor aliasing
// a slot is killed by SIGSEGV. Data-loader workers have no business with saved activations.
#ifndef OFFLOAD_CSRC_ARENA_H_
#define OFFLOAD_CSRC_ARENA_H_

#include <cstddef>
#include <memory>

#include "process.h"
#include "ranges.h"

namespace offload {

// Anonymous memory aligned to a huge page, advised to consist of them, unmapped by the destructor
// (except in a forked child, where it does not exist: see the notes above and in process.h).
class Mapping {
 public:
  Mapping() = default;
  // Maps `nbytes` rounded up to whole pages. Throws std::system_error (ENOMEM).
  explicit Mapping(size_t nbytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  Owner owner_;
  std::byte* data_ = nullptr;
  size_t nbytes_ = 0;
};

class Slab;

// The memory of one allocation. Shared through std::shared_ptr; the destructor gives the memory
// back, on whatever thread that happens.
class Slot {
 public:
  // Made by Arena; `slab` is told when the slot dies.
  Slot(std::shared_ptr<Slab> slab, size_t offset, std::byte* data, size_t nbytes);
  Slot(std::shared_ptr<Slab> slab, Mapping outside, size_t nbytes);
  ~Slot();
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  // Aligned to a page.
  std::byte* data() const { return data_; }
  // What was asked for. The memory reaches up to the next multiple of a page.
  size_t nbytes() const { return nbytes_; }

  const Owner& owner() const { return owner_; }

 private:
  Owner owner_;
  std::shared_ptr<Slab> slab_;
  size_t offset_ = 0;
  Mapping outside_;  // empty for a slot of the slab
  std::byte* data_;
  size_t nbytes_;
};

class Arena {
 public:
  struct Stats {
    size_t used_bytes = 0;     // in the slab, whole pages
    size_t peak_bytes = 0;     // highest used_bytes so far
    size_t outside_bytes = 0;  // held by slots with a mapping of their own
    size_t live_slots = 0;     // of both kinds
    size_t page_bytes = 0;  // of most pages populated so far: what the kernel gave, not asked for
  };

  // Maps `capacity_bytes` rounded up to 2 MiB. With `prefault` a background thread makes the pages
  // resident meanwhile, from the lowest up, so that the first step does not pay for the faults.
  // Throws std::invalid_argument (capacity of 0) or std::system_error (ENOMEM, EAGAIN).
  Arena(size_t capacity_bytes, bool prefault);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns a slot of `nbytes`, or null when there is no room now: try again when others have been
  // given back. Throws std::invalid_argument when `nbytes` is 0 or can never fit, or after Close.
  std::shared_ptr<Slot> Allocate(size_t nbytes);

  // Returns a slot with a mapping of its own, outside the capacity. Throws std::invalid_argument
  // (0 bytes, or after Close) or std::system_error (ENOMEM).
  std::shared_ptr<Slot> AllocateOutside(size_t nbytes);

  // Gives what is free beyond the first `keep_bytes` back to the system: it is made of new pages
  // when it is used again. Not for memory that a device has pinned.
  void Trim(size_t keep_bytes);

  // Ends allocation and prefaulting and returns how many slots are still alive; the slab is
  // unmapped when the last of them goes. May be called again: the count is then the current one.
  size_t Close();

  size_t capacity_bytes() const { return capacity_bytes_; }
  Stats GetStats() const;

 private:
  Owner owner_;
  size_t capacity_bytes_;
  std::shared_ptr<Slab> slab_;
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_ARENA_H_
