#include "ranges.h"

#include <algorithm>

namespace offload {
namespace {

size_t Log2(size_t nbytes) {
  size_t result = 0;
  while (nbytes >>= 1) ++result;
  return result;
}

}  // namespace

void RangeSet::Put(size_t offset, size_t nbytes) {
  ranges_.emplace(offset, nbytes);
  by_size_[Log2(nbytes)].insert(offset);
  nbytes_ += nbytes;
}

RangeSet::Ranges::iterator RangeSet::Drop(Ranges::iterator range) {
  by_size_[Log2(range->second)].erase(range->first);
  nbytes_ -= range->second;
  return ranges_.erase(range);
}

void RangeSet::Add(size_t offset, size_t nbytes) {
  if (nbytes == 0) return;
  auto next = ranges_.lower_bound(offset);
  if (next != ranges_.end() && next->first == offset + nbytes) {
    nbytes += next->second;
    next = Drop(next);
  }
  if (next != ranges_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      nbytes += previous->second;
      Drop(previous);
    }
  }
  Put(offset, nbytes);
}

void RangeSet::Remove(size_t offset, size_t nbytes) {
  const size_t end = offset + nbytes;
  auto range = ranges_.lower_bound(offset);
  if (range != ranges_.begin()) {
    const auto previous = std::prev(range);
    if (previous->first + previous->second > offset) range = previous;
  }
  while (range != ranges_.end() && range->first < end) {
    const size_t range_offset = range->first;
    const size_t range_end = range_offset + range->second;
    range = Drop(range);
    if (range_offset < offset) Put(range_offset, offset - range_offset);
    if (range_end > end) Put(end, range_end - end);
  }
}

RangeSet::Range RangeSet::RemoveHighest(size_t nbytes) {
  if (ranges_.empty()) return {0, 0};
  const auto [offset, available] = *ranges_.rbegin();
  const size_t removed = std::min(nbytes, available);
  Remove(offset + available - removed, removed);
  return {offset + available - removed, removed};
}

std::optional<size_t> RangeSet::RemoveLowestFit(size_t nbytes) {
  const size_t size_class = Log2(nbytes);
  std::optional<size_t> lowest;
  for (size_t c = size_class + 1; c < by_size_.size(); ++c) {  // these are long enough
    if (by_size_[c].empty()) continue;
    const size_t offset = *by_size_[c].begin();
    if (!lowest || offset < *lowest) lowest = offset;
  }
  for (const size_t offset : by_size_[size_class]) {  // these may be
    if (lowest && offset > *lowest) break;
    if (ranges_.at(offset) >= nbytes) {
      lowest = offset;
      break;
    }
  }
  if (lowest) Remove(*lowest, nbytes);
  return lowest;
}

std::vector<RangeSet::Range> RangeSet::From(size_t offset) const {
  std::vector<Range> found;
  auto range = ranges_.upper_bound(offset);
  if (range != ranges_.begin()) --range;
  for (; range != ranges_.end(); ++range) {
    const size_t begin = std::max(range->first, offset);
    const size_t end = range->first + range->second;
    if (begin < end) found.push_back({begin, end - begin});
  }
  return found;
}

std::vector<RangeSet::Range> RangeSet::Missing(size_t offset, size_t nbytes) const {
  std::vector<Range> found;
  const size_t end = offset + nbytes;
  auto range = ranges_.upper_bound(offset);
  if (range != ranges_.begin()) --range;
  for (; range != ranges_.end() && range->first < end; ++range) {
    if (range->first > offset) found.push_back({offset, range->first - offset});
    offset = std::max(offset, range->first + range->second);
  }
  if (offset < end) found.push_back({offset, end - offset});
  return found;
}

FirstFit::FirstFit(size_t capacity_bytes) { free_.Add(0, capacity_bytes); }

std::optional<size_t> FirstFit::Take(size_t nbytes) {
  const size_t wanted = RoundUp(nbytes, kPageBytes);
  const std::optional<size_t> offset = free_.RemoveLowestFit(wanted);
  if (!offset) return std::nullopt;
  taken_.emplace(*offset, wanted);
  used_bytes_ += wanted;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return offset;
}

size_t FirstFit::Give(size_t offset) {
  const auto taken = taken_.find(offset);
  if (taken == taken_.end()) return 0;
  const size_t nbytes = taken->second;
  taken_.erase(taken);
  used_bytes_ -= nbytes;
  free_.Add(offset, nbytes);
  return nbytes;
}

}  // namespace offload
