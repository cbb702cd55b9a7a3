#include "ranges.h"

#include <algorithm>

namespace offload {

void RangeSet::Add(size_t offset, size_t nbytes) {
  if (nbytes == 0) return;
  nbytes_ += nbytes;
  auto next = ranges_.lower_bound(offset);
  if (next != ranges_.end() && next->first == offset + nbytes) {
    nbytes += next->second;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += nbytes;
      return;
    }
  }
  ranges_.emplace_hint(next, offset, nbytes);
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
    range = ranges_.erase(range);
    if (range_offset < offset) ranges_.emplace_hint(range, range_offset, offset - range_offset);
    if (range_end > end) range = ranges_.emplace_hint(range, end, range_end - end);
    nbytes_ -= std::min(range_end, end) - std::max(range_offset, offset);
  }
}

RangeSet::Range RangeSet::RemoveHighest(size_t nbytes) {
  if (ranges_.empty()) return {0, 0};
  const auto highest = std::prev(ranges_.end());
  const size_t removed = std::min(nbytes, highest->second);
  nbytes_ -= removed;
  highest->second -= removed;
  const size_t offset = highest->first + highest->second;
  if (highest->second == 0) ranges_.erase(highest);
  return {offset, removed};
}

std::optional<size_t> RangeSet::RemoveLowestFit(size_t nbytes) {
  const auto fit = std::find_if(ranges_.begin(), ranges_.end(),
                                [nbytes](const auto& range) { return range.second >= nbytes; });
  if (fit == ranges_.end()) return std::nullopt;
  const auto [offset, available] = *fit;
  const auto next = ranges_.erase(fit);
  if (available > nbytes) ranges_.emplace_hint(next, offset + nbytes, available - nbytes);
  nbytes_ -= nbytes;
  return offset;
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
