// Pages of free memory, which go where they are needed next.
#ifndef OFFLOAD_CSRC_PAGES_H_
#define OFFLOAD_CSRC_PAGES_H_

#include <cstddef>
#include <set>

#include "ranges.h"

namespace offload {

// The resident pages of one mapping that nobody uses. No lock.
//
// [Note: pages move]
// Memory that is free at one address is of no use at another: between tensors that stay there are
// gaps, too small for the next, which then faults in new pages while those in the gaps have to be
// given back. A page fault takes 0.4 us and more (measured: 1.6 us in a virtual machine); to hang
// the same page in at another address takes 0.004 us. So what is used anew first gets the pages
// that are left over elsewhere, those at the highest addresses first, whose content it may see.
//
// A move leaves a seam at both of its ends: two parts that were moved differently are two mappings
// to the kernel, which moves parts of one at a time and allows a process 65,530. It is asked for
// none where there are kMostSeams, nor where it has refused once: then pages are faulted in. What
// is given back to the system leaves no seam inside.
class Pages {
 public:
  static constexpr size_t kMostSeams = 8192;

  // `data`: where the mapping begins, private and anonymous.
  explicit Pages(std::byte* data) : data_(data) {}

  // One mapping may end and the next begin at `offset`.
  void AddSeam(size_t offset) { seams_.insert(offset); }

  // [offset, offset + nbytes) is going to be used.
  void Take(size_t offset, size_t nbytes);

  // It is used no more.
  void Give(size_t offset, size_t nbytes) { kept_.Add(offset, nbytes); }

  // Gives pages back to the system until there are `keep_bytes`, the highest first.
  void Shrink(size_t keep_bytes);

  size_t nbytes() const { return kept_.nbytes(); }
  // Where one mapping may end and the next begin.
  const std::set<size_t>& seams() const { return seams_; }

 private:
  bool Fill(size_t offset, size_t nbytes);
  bool Move(size_t from, size_t to, size_t nbytes);
  void Discard(RangeSet::Range range);

  std::byte* data_;
  RangeSet kept_;  // as far as anybody knows, resident
  std::set<size_t> seams_;
  bool refused_ = false;
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_PAGES_H_
