// Reserved addresses that are mapped twice.
//
// The rest of the process sees the front. Tasks use the back, which lies at a fixed distance. So an
// address is unique and real, while the front can be protected from the host: always for device
// memory, during a copy for pinned memory. No protection is ever toggled for a task.
//
// Nothing here is locked: the caller serialises.
#ifndef SIMDEV_RUNTIME_ARENA_H_
#define SIMDEV_RUNTIME_ARENA_H_

#include <map>

#include "runtime/types.h"

namespace sim {

inline constexpr size_t kPageBytes = 4096;

constexpr size_t RoundUp(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

class Arena {
 public:
  // Device memory: a front that faults on every access. Throws std::system_error.
  static Arena Device(size_t nbytes);
  // Pinned memory: front and back are the same pages. Throws std::system_error.
  static Arena Pinned(size_t nbytes);

  // First fit. Returns the front's address, or 0 when no free range is that long. `nbytes` must be
  // a multiple of the unit that the caller sticks to.
  uintptr_t Take(size_t nbytes);

  // Gives back a range that Take returned; its pages go back to the kernel and read as zero.
  void Give(uintptr_t front, size_t nbytes);

  bool Contains(uintptr_t front) const { return front >= front_ && front - front_ < nbytes_; }
  uintptr_t Back(uintptr_t front) const { return front - front_ + back_; }

 private:
  Arena(uintptr_t front, uintptr_t back, size_t nbytes, bool is_shared);

  // Never unmapped: tensors may outlive everything that could own the mappings.
  uintptr_t front_;
  uintptr_t back_;
  size_t nbytes_;
  bool is_shared_;
  std::map<uintptr_t, size_t> free_;  // begin -> bytes; neighbours are always merged
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_ARENA_H_
