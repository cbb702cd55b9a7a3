#include "runtime/pinned_memory.h"

#include <sys/mman.h>

#include <iterator>

namespace sim {

uintptr_t PinnedMemory::Allocate(size_t nbytes) {
  nbytes = RoundUp(std::max<size_t>(nbytes, 1), kPageBytes);
  const uintptr_t address = arena_->Take(nbytes);
  if (address == 0) return 0;
  ranges_.emplace(address, Range{nbytes, false});
  stats_.Add(static_cast<int64_t>(nbytes));
  return address;
}

size_t PinnedMemory::Free(uintptr_t address) {
  const size_t nbytes = Remove(address, false);
  if (nbytes > 0) arena_->Give(address, nbytes);
  return nbytes;
}

bool PinnedMemory::Register(uintptr_t address, size_t nbytes) {
  if (nbytes == 0) return false;
  const auto next = ranges_.lower_bound(address);
  if (next != ranges_.end() && next->first < address + nbytes) return false;
  if (Contains(address)) return false;
  ranges_.emplace(address, Range{nbytes, true});
  stats_.Add(static_cast<int64_t>(nbytes));
  return true;
}

size_t PinnedMemory::Unregister(uintptr_t address) { return Remove(address, true); }

size_t PinnedMemory::RegisteredBytes(uintptr_t address) const {
  const auto range = ranges_.find(address);
  return range != ranges_.end() && range->second.is_registered ? range->second.nbytes : 0;
}

bool PinnedMemory::Contains(uintptr_t address) const {
  const auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return false;
  const auto& [begin, range] = *std::prev(next);
  return address - begin < range.nbytes;
}

uintptr_t PinnedMemory::Back(uintptr_t address) const {
  return arena_->Contains(address) ? arena_->Back(address) : address;
}

void PinnedMemory::ChangeUse(const Access& access, int change) {
  if (!arena_->Contains(access.begin)) return;
  for (uintptr_t page = RoundUp(access.begin, kPageBytes); page + kPageBytes <= access.end;
       page += kPageBytes) {
    PageUse& use = in_use_[page];
    (access.is_write ? use.writers : use.readers) += change;
    int protection = PROT_READ | PROT_WRITE;
    if (use.readers > 0) protection = PROT_READ;
    if (use.writers > 0) protection = PROT_NONE;
    mprotect(PointerTo(page), kPageBytes, protection);
    if (use.readers == 0 && use.writers == 0) in_use_.erase(page);
  }
}

size_t PinnedMemory::Remove(uintptr_t address, bool is_registered) {
  const auto range = ranges_.find(address);
  if (range == ranges_.end() || range->second.is_registered != is_registered) return 0;
  const size_t nbytes = range->second.nbytes;
  ranges_.erase(range);
  stats_.Remove(static_cast<int64_t>(nbytes));
  return nbytes;
}

}  // namespace sim
