#include "runtime/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <string>
#include <system_error>

namespace sim {
namespace {

uintptr_t Map(size_t nbytes, int protection, int flags, int descriptor) {
  void* address = mmap(nullptr, nbytes, protection, flags | MAP_NORESERVE, descriptor, 0);
  if (address == MAP_FAILED) {
    throw std::system_error(
        errno, std::generic_category(),
        "simdev: mmap of " + std::to_string(nbytes) + " bytes of address space failed");
  }
  return AddressOf(address);
}

}  // namespace

Arena Arena::Device(size_t nbytes) {
  constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS;
  const uintptr_t front = Map(nbytes, PROT_NONE, kAnonymous, -1);
  const uintptr_t back = Map(nbytes, PROT_READ | PROT_WRITE, kAnonymous, -1);
  return Arena(front, back, nbytes, false);
}

Arena Arena::Pinned(size_t nbytes) {
  const int descriptor = memfd_create("simdev-pinned", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(nbytes)) != 0) {
    throw std::system_error(errno, std::generic_category(), "simdev: memfd_create failed");
  }
  const uintptr_t front = Map(nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor);
  const uintptr_t back = Map(nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor);
  close(descriptor);
  return Arena(front, back, nbytes, true);
}

Arena::Arena(uintptr_t front, uintptr_t back, size_t nbytes, bool is_shared)
    : front_(front), back_(back), nbytes_(nbytes), is_shared_(is_shared), free_{{front, nbytes}} {}

uintptr_t Arena::Take(size_t nbytes) {
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [begin, available] = *range;
    if (available < nbytes) continue;
    free_.erase(range);
    if (available > nbytes) free_.emplace(begin + nbytes, available - nbytes);
    return begin;
  }
  return 0;
}

void Arena::Give(uintptr_t front, size_t nbytes) {
  // Only a shared mapping needs its file punched; neither call can fail for a range of ours.
  madvise(PointerTo(Back(front)), nbytes, is_shared_ ? MADV_REMOVE : MADV_DONTNEED);
  auto next = free_.lower_bound(front);
  if (next != free_.end() && front + nbytes == next->first) {
    nbytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == front) {
      previous->second += nbytes;
      return;
    }
  }
  free_.emplace(front, nbytes);
}

}  // namespace sim
