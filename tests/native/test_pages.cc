#include <doctest.h>
#include <sys/mman.h>

#include <fstream>

#include "pages.h"
#include "pool.h"
#include "support.h"

namespace offload {
namespace {

using namespace testing;

constexpr size_t kReservedBytes = 64 * kMiB;

// A mapping that is all free, and whose pages are resident up to `resident_bytes`.
struct Mapping {
  explicit Mapping(size_t resident_bytes)
      : data(static_cast<std::byte*>(mmap(nullptr, kReservedBytes, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))),
        pages(data) {
    std::memset(data, 1, resident_bytes);
    pages.Give(0, resident_bytes);
  }
  ~Mapping() { munmap(data, kReservedBytes); }

  // Where the kernel's mappings end inside, as offsets.
  std::vector<size_t> Ends() const {
    std::vector<size_t> found;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      const size_t end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
      const size_t offset = end - reinterpret_cast<uintptr_t>(data);
      if (offset - 1 < kReservedBytes - 1) found.push_back(offset);  // 0 < offset < all
    }
    return found;
  }

  std::byte* const data;
  Pages pages;
};

// Before Linux 5.7, and under some emulators, pages stay where they are.
bool PagesMove() {
  static const bool move = [] {
    Mapping mapping(kPageBytes);
    mapping.pages.Take(kMiB, kPageBytes);
    return mapping.pages.nbytes() == 0;
  }();
  return move;
}

TEST_CASE("what is used anew gets the pages that are left over, the highest first" *
          doctest::skip(!PagesMove())) {
  Mapping mapping(4 * kMiB);
  std::byte* const there = mapping.data + 32 * kMiB;
  mapping.pages.Take(32 * kMiB, 3 * kMiB);
  CHECK(ResidentBytes(there, 3 * kMiB) == 3 * kMiB);
  CHECK(ResidentBytes(mapping.data, 4 * kMiB) == kMiB);
  CHECK(mapping.pages.nbytes() == kMiB);
  mapping.pages.Take(40 * kMiB, 3 * kMiB);  // more than there are
  CHECK(ResidentBytes(mapping.data + 40 * kMiB, 3 * kMiB) == kMiB);
  CHECK(mapping.pages.nbytes() == 0);
  CHECK(there[0] == std::byte{1});
  mapping.data[0] = std::byte{2};  // where they were, there is memory still
}

TEST_CASE("what is there already stays, and gaps in it are filled" * doctest::skip(!PagesMove())) {
  Mapping mapping(4 * kMiB);
  mapping.pages.Take(8 * kMiB, kMiB);  // of [3, 4)
  mapping.pages.Give(8 * kMiB, kMiB);
  mapping.pages.Take(2 * kMiB, 2 * kMiB);
  CHECK(ResidentBytes(mapping.data, 16 * kMiB) == 4 * kMiB);
  CHECK(ResidentBytes(mapping.data + 2 * kMiB, 2 * kMiB) == 2 * kMiB);
  CHECK(mapping.pages.nbytes() == 2 * kMiB);
}

TEST_CASE("what the kernel will not move is faulted in") {
  Mapping mapping(4 * kMiB);
  munmap(mapping.data, kMiB);  // no mapping begins there
  mapping.pages.Take(32 * kMiB, 4 * kMiB);
  CHECK(mapping.pages.nbytes() == 4 * kMiB);
  std::memset(mapping.data + 32 * kMiB, 3, 4 * kMiB);
  mapping.pages.Give(32 * kMiB, 4 * kMiB);
  mapping.pages.Shrink(0);
  CHECK(ResidentBytes(mapping.data + 32 * kMiB, 4 * kMiB) == 0);
}

TEST_CASE("seams are few, and go with what is given back" * doctest::skip(!PagesMove())) {
  Mapping mapping(kReservedBytes / 2);
  // Every second page moves, which is as bad as can be.
  for (size_t page = 0; page < kReservedBytes / 4 / kPageBytes; ++page) {
    mapping.pages.Take(kReservedBytes / 2 + 2 * page * kPageBytes, kPageBytes);
    CHECK(mapping.pages.seams().size() <= Pages::kMostSeams + 2);
  }
  CHECK(mapping.pages.seams().size() >= Pages::kMostSeams);
  for (size_t page = 0; page < kReservedBytes / 4 / kPageBytes; ++page) {
    mapping.pages.Give(kReservedBytes / 2 + 2 * page * kPageBytes, kPageBytes);
  }
  for (size_t page = 0; page < kReservedBytes / 4 / kPageBytes; ++page) {
    mapping.pages.Give(kReservedBytes / 2 + (2 * page + 1) * kPageBytes, kPageBytes);
  }
  mapping.pages.Shrink(0);
  CHECK(mapping.pages.seams().size() <= 4);
  CHECK(ResidentBytes(mapping.data, kReservedBytes) == 0);
}

// The kernel moves parts of one mapping at a time (before Linux 6.17), so all of its seams are
// known.
TEST_CASE("property: no mapping ends where none is known to, and all moves are made") {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Mapping mapping(0);
    FirstFit ranges(kReservedBytes);
    std::vector<size_t> live;
    size_t most_ends = 0;
    for (int step = 0; step < 300; ++step) {
      if (random() % 5 < 2 && !live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        mapping.pages.Give(live.back(), ranges.Give(live.back()));
        live.pop_back();
      } else if (ranges.used_bytes() < 16 * kMiB) {
        const size_t nbytes = kPageBytes * (1 + random() % 256);
        const size_t offset = ranges.Take(nbytes).value();
        const size_t before = mapping.pages.nbytes();
        mapping.pages.Take(offset, nbytes);
        if (PagesMove()) REQUIRE(mapping.pages.nbytes() == before - std::min(before, nbytes));
        std::memset(mapping.data + offset, 1, nbytes);
        live.push_back(offset);
      }
      if (random() % 16 == 0) mapping.pages.Shrink(mapping.pages.nbytes() / 2);
      const std::vector<size_t> ends = mapping.Ends();
      most_ends = std::max(most_ends, ends.size());
      for (const size_t end : ends) REQUIRE(mapping.pages.seams().count(end) == 1);
    }
    if (PagesMove()) CHECK(most_ends > 10);
  }
}

// What is in use keeps its content, and the process is never larger than it had to be.
TEST_CASE("property: random allocations keep what is written to them") {
  struct Live {
    std::byte* data;
    size_t nbytes;
    std::byte content;
  };
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto pool = Pool::Make(kReservedBytes);
    auto* const begin = static_cast<std::byte*>(pool->Allocate(kPageBytes));
    std::vector<Live> live;
    size_t used = 0;
    size_t most = 0;
    for (int step = 0; step < 400; ++step) {
      if (random() % 5 < 2 && !live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        const Live gone = live.back();
        live.pop_back();
        REQUIRE(std::all_of(gone.data, gone.data + gone.nbytes,
                            [&](std::byte b) { return b == gone.content; }));
        pool->Free(gone.data);
        used -= gone.nbytes;
      } else if (used < 16 * kMiB) {
        const size_t nbytes = kPageBytes * (1 + random() % 256);
        const auto content = static_cast<std::byte>(random());
        live.push_back({static_cast<std::byte*>(pool->Allocate(nbytes)), nbytes, content});
        REQUIRE(live.back().data != nullptr);
        std::memset(live.back().data, static_cast<int>(content), nbytes);
        used += nbytes;
        most = std::max(most, used);
      }
      if (step % 16 == 0) {
        const size_t resident = ResidentBytes(begin + kPageBytes, kReservedBytes - kPageBytes);
        REQUIRE(resident <= std::max(most, used + Pool::kMinKeepBytes) + kPageBytes);
      }
    }
  }
}

}  // namespace
}  // namespace offload
