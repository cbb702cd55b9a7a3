#include "pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace offload {
namespace {

constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

void Pages::Take(size_t offset, size_t nbytes) {
  const std::vector<RangeSet::Range> missing = kept_.Missing(offset, nbytes);
  kept_.Remove(offset, nbytes);
  for (const RangeSet::Range& range : missing) {
    if (!Fill(range.offset, range.nbytes)) return;
  }
}

bool Pages::Fill(size_t offset, size_t nbytes) {
  while (nbytes > 0) {
    if (refused_ || seams_.size() >= kMostSeams) return false;
    const RangeSet::Range range = kept_.RemoveHighest(nbytes);
    if (range.nbytes == 0) return false;
    if (!Move(range.offset, offset, range.nbytes)) return false;
    offset += range.nbytes;
    nbytes -= range.nbytes;
  }
  return true;
}

bool Pages::Move(size_t from, size_t to, size_t nbytes) {
  while (nbytes > 0) {
    const auto seam = seams_.upper_bound(from);
    const size_t part = seam == seams_.end() ? nbytes : std::min(nbytes, *seam - from);
    const void* const moved = mremap(data_ + from, part, part,
                                     MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, data_ + to);
    if (moved == MAP_FAILED) {
      refused_ = true;
      // Its old mapping may be gone by then. Where it is still there, this does nothing.
      (void)mmap(data_ + to, part, PROT_READ | PROT_WRITE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
      kept_.Add(from, nbytes);
      return false;
    }
    seams_.erase(seams_.lower_bound(to), seams_.upper_bound(to + part));
    seams_.insert({to, to + part});
    from += part;
    to += part;
    nbytes -= part;
  }
  return true;
}

void Pages::Shrink(size_t keep_bytes) {
  keep_bytes = RoundUp(keep_bytes, kPageBytes);
  while (kept_.nbytes() > keep_bytes) {
    const RangeSet::Range range = kept_.RemoveHighest(kept_.nbytes() - keep_bytes);
    Discard(range);
  }
}

void Pages::Discard(RangeSet::Range range) {
  const size_t end = range.offset + range.nbytes;
  const auto first = seams_.upper_bound(range.offset), last = seams_.lower_bound(end);
  std::byte* const data = data_ + range.offset;
  if (first == last ||
      mmap(data, range.nbytes, PROT_READ | PROT_WRITE, kFlags | MAP_FIXED, -1, 0) == MAP_FAILED) {
    madvise(data, range.nbytes, MADV_DONTNEED);
    return;
  }
  seams_.erase(first, last);  // it is one mapping now
  seams_.insert({range.offset, end});
}

}  // namespace offload
