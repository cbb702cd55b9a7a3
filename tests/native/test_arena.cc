#include <doctest.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "support.h"

namespace offload {
namespace {

using namespace testing;

// Bytes of huge pages the kernel reports for the mapping that contains `address`.
size_t HugeBytesAt(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    size_t kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto wanted = reinterpret_cast<uintptr_t>(address);
      inside = begin <= wanted && wanted < end;
    } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %zu kB", &kib) == 1) {
      return kib * 1024;
    }
  }
  return 0;
}

TEST_CASE("page_bytes tells what the kernel gave") {
  Arena arena(8 * kMiB, /*prefault=*/false);
  const auto slot = arena.Allocate(8 * kMiB);
  CHECK(reinterpret_cast<uintptr_t>(slot->data()) % kHugePageBytes == 0);
  const bool huge = HugeBytesAt(slot->data()) > 0;
  CHECK(arena.GetStats().page_bytes == (huge ? kHugePageBytes : kPageBytes));
}

TEST_CASE("the arena is bounded and gives back what dies") {
  Arena arena(3 * kMiB, /*prefault=*/true);
  CHECK(arena.capacity_bytes() == 4 * kMiB);
  auto first = arena.Allocate(3 * kMiB + 1);
  REQUIRE(first);
  CHECK(first->nbytes() == 3 * kMiB + 1);
  CHECK((arena.Allocate(kMiB) == nullptr));
  first.reset();
  CHECK(arena.GetStats().used_bytes == 0);
  CHECK(arena.GetStats().peak_bytes == 3 * kMiB + kPageBytes);
  CHECK((arena.Allocate(4 * kMiB) != nullptr));
  CHECK_THROWS_AS(arena.Allocate(0), std::invalid_argument);
  CHECK_THROWS_AS(arena.Allocate(4 * kMiB + 1), std::invalid_argument);
  CHECK_THROWS_AS(Arena(0, true), std::invalid_argument);
  CHECK(ErrorOf([] { Arena(size_t{1} << 62, false); }) == ENOMEM);
}

TEST_CASE("a slot outside the slab counts apart from it") {
  Arena arena(kMiB, /*prefault=*/false);
  auto slot = arena.AllocateOutside(5 * kMiB + 1);
  std::memset(slot->data(), 1, 5 * kMiB + kPageBytes);
  CHECK(arena.GetStats().outside_bytes == 5 * kMiB + kPageBytes);
  CHECK(arena.GetStats().used_bytes == 0);
  CHECK(arena.GetStats().live_slots == 1);
  slot.reset();
  CHECK(arena.GetStats().outside_bytes == 0);
}

TEST_CASE("slots outlive a closed arena and its handle") {
  auto arena = std::make_unique<Arena>(4 * kMiB, /*prefault=*/true);
  const auto slot = arena->Allocate(kMiB);
  const auto outside = arena->AllocateOutside(kMiB);
  CHECK(arena->Close() == 2);
  CHECK_THROWS_AS(arena->Allocate(1), std::invalid_argument);
  CHECK_THROWS_AS(arena->AllocateOutside(1), std::invalid_argument);
  CHECK(arena->GetStats().live_slots == 2);
  arena.reset();
  std::memset(slot->data(), 7, slot->nbytes());
  std::memset(outside->data(), 7, outside->nbytes());
}

TEST_CASE("prefaulting stops when the arena goes") {
  for (int i = 0; i < 20; ++i) Arena(64 * kMiB, /*prefault=*/true);
}

TEST_CASE("prefaulting leaves the bytes of slots alone") {
  Arena arena(32 * kMiB, /*prefault=*/true);
  const auto slot = arena.Allocate(32 * kMiB);
  for (size_t i = 0; i < slot->nbytes(); i += kPageBytes) slot->data()[i] = std::byte{42};
  arena.Close();
  size_t intact = 0;
  for (size_t i = 0; i < slot->nbytes(); i += kPageBytes)
    intact += slot->data()[i] == std::byte{42};
  CHECK(intact == slot->nbytes() / kPageBytes);
}

TEST_CASE("concurrency: slots are allocated, handed over and freed on several threads") {
  Arena arena(16 * kMiB, /*prefault=*/true);
  std::mutex mutex;
  std::vector<std::shared_ptr<Slot>> shared;
  std::atomic<int> overlaps{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= 4; ++id) {
    threads.emplace_back([&, id] {
      std::minstd_rand random(id);
      for (int step = 0; step < 300; ++step) {
        auto slot = arena.Allocate(1 + random() % (256 << 10));
        if (slot) {
          std::memset(slot->data(), id, slot->nbytes());
          const auto* bytes = reinterpret_cast<const unsigned char*>(slot->data());
          if (std::count(bytes, bytes + slot->nbytes(), id) !=
              static_cast<std::ptrdiff_t>(slot->nbytes())) {
            ++overlaps;
          }
        }
        const std::lock_guard<std::mutex> lock(mutex);
        shared.push_back(std::move(slot));  // freed by whoever picks it
        std::swap(shared[random() % shared.size()], shared.back());
        if (shared.size() > 20) shared.pop_back();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  shared.clear();
  CHECK(overlaps == 0);
  CHECK(arena.GetStats().used_bytes == 0);
  CHECK(arena.Close() == 0);
}

TEST_CASE("what is free beyond the first bytes goes back to the system") {
  Arena arena(8 * kMiB, /*prefault=*/false);
  auto low = arena.Allocate(2 * kMiB);
  auto middle = arena.Allocate(2 * kMiB);
  auto high = arena.Allocate(2 * kMiB);
  for (const auto& slot : {low, middle, high}) std::memset(slot->data(), 5, 2 * kMiB);
  std::byte* const begin = low->data();
  low.reset();
  high.reset();

  arena.Trim(kMiB);
  CHECK(begin[kMiB - 1] == std::byte{5});
  CHECK(begin[kMiB] == std::byte{0});
  CHECK(middle->data()[0] == std::byte{5});
  CHECK(begin[4 * kMiB] == std::byte{0});
  middle.reset();
  arena.Trim(100 * kMiB);
  CHECK(begin[2 * kMiB] == std::byte{5});
  arena.Trim(0);
  CHECK(begin[2 * kMiB] == std::byte{0});
}

TEST_CASE("fork: a child may neither use the arena nor harm it") {
  auto arena = std::make_unique<Arena>(8 * kMiB, /*prefault=*/true);
  auto slot = arena->Allocate(kMiB);
  std::memset(slot->data(), 3, kMiB);
  CHECK(InChild([&] {
          try {
            arena->Allocate(1);
            return 1;
          } catch (const std::runtime_error&) {
          }
          slot.reset();
          arena.reset();
          return 0;
        }) == 0);
  CHECK(slot->data()[kMiB - 1] == std::byte{3});
  CHECK(arena->GetStats().live_slots == 1);
}

}  // namespace
}  // namespace offload
