// Bookkeeping of address ranges: which are taken, which are in a set. No memory, no lock.
#ifndef OFFLOAD_CSRC_RANGES_H_
#define OFFLOAD_CSRC_RANGES_H_

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace offload {

inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kHugePageBytes = size_t{2} << 20;

constexpr size_t RoundUp(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

// A set of bytes, held as the ranges it consists of.
class RangeSet {
 public:
  struct Range {
    size_t offset;
    size_t nbytes;
  };

  // Adds a range that is not in the set; neighbours are merged.
  void Add(size_t offset, size_t nbytes);

  // Takes out what the set has of [offset, offset + nbytes).
  void Remove(size_t offset, size_t nbytes);

  // Takes out the highest `nbytes` of the highest range, or all of it if it has no more.
  Range RemoveHighest(size_t nbytes);

  // Takes out `nbytes` from the front of the lowest range that is long enough, and returns their
  // offset, or nothing when no range is. Looks only at ranges of about that size.
  std::optional<size_t> RemoveLowestFit(size_t nbytes);

  // What the set has not of [offset, offset + nbytes), lowest first.
  std::vector<Range> Missing(size_t offset, size_t nbytes) const;

  // What the set has of [offset, end of it all), lowest first.
  std::vector<Range> From(size_t offset) const;

  size_t nbytes() const { return nbytes_; }
  size_t ranges() const { return ranges_.size(); }

 private:
  using Ranges = std::map<size_t, size_t>;  // offset -> bytes

  void Put(size_t offset, size_t nbytes);
  Ranges::iterator Drop(Ranges::iterator range);

  Ranges ranges_;                             // no two of them touch
  std::array<std::set<size_t>, 64> by_size_;  // offsets, by the binary logarithm of the bytes
  size_t nbytes_ = 0;
};

// Which parts of [0, capacity) are taken.
//
// First fit at the lowest address: the upper end is touched only when the lower end is full, so
// the resident size follows the peak, not the history.
class FirstFit {
 public:
  explicit FirstFit(size_t capacity_bytes);

  // Takes `nbytes` rounded up to whole pages and returns their offset, or nothing when no free
  // range is that long.
  std::optional<size_t> Take(size_t nbytes);

  // Gives back what Take returned, and returns its bytes. Returns 0, and does nothing, if `offset`
  // is not taken: it was given back before (a double free), or never came from here.
  size_t Give(size_t offset);

  size_t used_bytes() const { return used_bytes_; }
  size_t peak_bytes() const { return peak_bytes_; }
  size_t taken_ranges() const { return taken_.size(); }
  size_t free_ranges() const { return free_.ranges(); }
  const RangeSet& free() const { return free_; }

 private:
  RangeSet free_;
  std::unordered_map<size_t, size_t> taken_;  // offset -> bytes
  size_t used_bytes_ = 0;
  size_t peak_bytes_ = 0;
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_RANGES_H_
