#include <doctest.h>

#include "support.h"

namespace offload {
namespace {

TEST_CASE("first fit takes the lowest range that is long enough") {
  FirstFit ranges(10 * kPageBytes);
  CHECK(ranges.Take(1) == 0);
  CHECK(ranges.Take(2 * kPageBytes) == kPageBytes);
  CHECK(ranges.Take(kPageBytes + 1) == 3 * kPageBytes);
  CHECK(ranges.used_bytes() == 5 * kPageBytes);

  CHECK(ranges.Give(kPageBytes));
  CHECK(ranges.Take(3 * kPageBytes) == 5 * kPageBytes);
  CHECK(ranges.Take(2 * kPageBytes) == kPageBytes);
  CHECK_FALSE(ranges.Take(3 * kPageBytes).has_value());
  CHECK(ranges.peak_bytes() == 8 * kPageBytes);
}

TEST_CASE("free neighbours are merged on both sides") {
  FirstFit ranges(3 * kPageBytes);
  for (size_t i = 0; i < 3; ++i) REQUIRE(ranges.Take(kPageBytes) == i * kPageBytes);
  CHECK(ranges.Give(0));
  CHECK(ranges.Give(2 * kPageBytes));
  CHECK(ranges.free_ranges() == 2);
  CHECK(ranges.Give(kPageBytes));
  CHECK(ranges.free_ranges() == 1);
  CHECK(ranges.Take(3 * kPageBytes) == 0);
}

TEST_CASE("a double free is refused and changes nothing") {
  FirstFit ranges(4 * kPageBytes);
  const size_t offset = ranges.Take(kPageBytes).value();
  REQUIRE(ranges.Take(kPageBytes));
  CHECK(ranges.Give(offset));
  CHECK_FALSE(ranges.Give(offset));
  CHECK_FALSE(ranges.Give(offset + 1));
  CHECK(ranges.used_bytes() == kPageBytes);
}

// The model is a map of pages, taken or not.
TEST_CASE("property: random takes and gives agree with a map of pages") {
  constexpr size_t kPages = 64;
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    std::mt19937 random(seed);
    FirstFit ranges(kPages * kPageBytes);
    std::vector<bool> taken(kPages, false);
    std::vector<std::pair<size_t, size_t>> live;  // first page, pages
    for (int step = 0; step < 400; ++step) {
      CAPTURE(seed);
      CAPTURE(step);
      if (random() % 2 == 0 && !live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        const auto [page, pages] = live.back();
        live.pop_back();
        REQUIRE(ranges.Give(page * kPageBytes));
        std::fill_n(taken.begin() + page, pages, false);
      } else {
        const size_t nbytes = 1 + random() % (12 * kPageBytes);
        const size_t pages = RoundUp(nbytes, kPageBytes) / kPageBytes;
        const auto expected = std::search_n(taken.begin(), taken.end(), pages, false);
        const std::optional<size_t> offset = ranges.Take(nbytes);
        REQUIRE(offset.has_value() == (expected != taken.end()));
        if (!offset) continue;
        REQUIRE(*offset == (expected - taken.begin()) * kPageBytes);
        std::fill_n(expected, pages, true);
        live.emplace_back(*offset / kPageBytes, pages);
      }
      const auto used = std::count(taken.begin(), taken.end(), true);
      REQUIRE(ranges.used_bytes() == used * kPageBytes);
      REQUIRE(ranges.taken_ranges() == live.size());
    }
  }
}

std::vector<bool> BytesOf(const RangeSet& set, size_t size) {
  std::vector<bool> bytes(size, false);
  for (const auto& [offset, nbytes] : set.From(0)) {
    std::fill_n(bytes.begin() + static_cast<ptrdiff_t>(offset), nbytes, true);
  }
  return bytes;
}

TEST_CASE("a set gives up the highest bytes first") {
  RangeSet set;
  set.Add(10, 20);
  set.Add(50, 10);
  const RangeSet::Range part = set.RemoveHighest(4);
  CHECK(part.offset == 56);
  CHECK(part.nbytes == 4);
  CHECK(set.RemoveHighest(100).nbytes == 6);
  CHECK(set.RemoveHighest(100).offset == 10);
  CHECK(set.RemoveHighest(100).nbytes == 0);
  CHECK(set.nbytes() == 0);
}

// The model is a row of bytes, in the set or not.
TEST_CASE("property: random additions and removals agree with a row of bytes") {
  constexpr size_t kSize = 48;
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    RangeSet set;
    std::vector<bool> model(kSize, false);
    for (int step = 0; step < 100; ++step) {
      CAPTURE(step);
      const size_t offset = random() % kSize;
      const size_t nbytes = random() % (kSize - offset);
      const auto begin = model.begin() + static_cast<ptrdiff_t>(offset);
      if (std::count(begin, begin + static_cast<ptrdiff_t>(nbytes), true) == 0) {
        set.Add(offset, nbytes);
        std::fill_n(begin, nbytes, true);
      } else {
        set.Remove(offset, nbytes);
        std::fill_n(begin, nbytes, false);
      }
      REQUIRE(BytesOf(set, kSize) == model);
      REQUIRE(set.nbytes() == static_cast<size_t>(std::count(model.begin(), model.end(), true)));
      size_t beyond = 0;
      for (const auto& range : set.From(offset)) beyond += range.nbytes;
      REQUIRE(beyond == static_cast<size_t>(std::count(begin, model.end(), true)));
    }
  }
}

}  // namespace
}  // namespace offload
