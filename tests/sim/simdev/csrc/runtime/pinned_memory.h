// Host memory that copies can use asynchronously: the device's own, and registered ranges.
//
// Nothing here is locked: the caller serialises.
#ifndef SIMDEV_RUNTIME_PINNED_MEMORY_H_
#define SIMDEV_RUNTIME_PINNED_MEMORY_H_

#include <map>
#include <unordered_map>

#include "runtime/arena.h"
#include "runtime/types.h"

namespace sim {

class PinnedMemory {
 public:
  // `arena` must outlive this.
  explicit PinnedMemory(Arena* arena) : arena_(arena) {}

  // Returns the address of whole pages, or 0 when the address space is used up.
  uintptr_t Allocate(size_t nbytes);

  // Ends an allocation and returns its size; 0, and nothing is done, if there is none.
  size_t Free(uintptr_t address);

  // Makes a range that somebody else owns pinned memory until Unregister. Returns false, and does
  // nothing, if it is empty or overlaps pinned memory.
  bool Register(uintptr_t address, size_t nbytes);

  // Ends a registration and returns its size; 0, and nothing is done, if there is none.
  size_t Unregister(uintptr_t address);

  // How many bytes are registered from `address` on; 0 if no registration begins there.
  size_t RegisteredBytes(uintptr_t address) const;

  bool Contains(uintptr_t address) const;

  // Where tasks find the memory at `address`: not affected by Protect.
  uintptr_t Back(uintptr_t address) const;

  // A copy begins to use a range: the host cannot access whole pages that it writes, nor write
  // those that it reads, until Unprotect. Does nothing outside the device's own pinned memory.
  void Protect(const Access& access) { ChangeUse(access, +1); }
  void Unprotect(const Access& access) { ChangeUse(access, -1); }

  // Own and registered memory together.
  const MemoryStats& stats() const { return stats_; }
  void ResetPeak() { stats_.ResetPeak(); }

 private:
  struct Range {
    size_t nbytes;
    bool is_registered;
  };
  // Copies in flight that use a page.
  struct PageUse {
    int readers = 0;
    int writers = 0;
  };

  void ChangeUse(const Access& access, int change);
  size_t Remove(uintptr_t address, bool is_registered);

  Arena* const arena_;
  std::map<uintptr_t, Range> ranges_;  // by begin; never overlapping
  std::unordered_map<uintptr_t, PageUse> in_use_;
  MemoryStats stats_;
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_PINNED_MEMORY_H_
