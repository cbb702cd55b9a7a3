#include <doctest.h>
#include <sys/mman.h>

#include <csignal>
#include <cstdio>
#include <thread>

#include "pool.h"
#include "support.h"

namespace offload {
namespace {

using namespace testing;

constexpr size_t kReservedBytes = 1024 * kMiB;
constexpr size_t kKept = Pool::kMinKeepBytes;

// A page that was given back reads as zeros.
bool IsZero(const std::byte* data, size_t nbytes) {
  return std::all_of(data, data + nbytes, [](std::byte b) { return b == std::byte{0}; });
}

TEST_CASE("what was freed is used again, at the lowest address") {
  const auto pool = Pool::Make(kReservedBytes);
  void* const first = pool->Allocate(3 * kMiB);
  void* const second = pool->Allocate(3 * kMiB);
  REQUIRE(first != nullptr);
  CHECK(reinterpret_cast<uintptr_t>(first) % kPageBytes == 0);
  pool->Free(first);
  CHECK(pool->Allocate(3 * kMiB) == first);
  pool->Free(second);
  pool->Free(first);
  CHECK(pool->Allocate(6 * kMiB) == first);
  CHECK(pool->GetStats().used_bytes == 6 * kMiB);
}

TEST_CASE("it knows its own addresses") {
  const auto pool = Pool::Make(kReservedBytes);
  auto* const data = static_cast<std::byte*>(pool->Allocate(1));
  int other = 0;
  CHECK(pool->Owns(data));
  CHECK(pool->Owns(data + kReservedBytes - 1));
  CHECK_FALSE(pool->Owns(data + kReservedBytes));
  CHECK_FALSE(pool->Owns(&other));
  CHECK_FALSE(pool->Owns(nullptr));
}

TEST_CASE("without room it says so and goes on") {
  const auto pool = Pool::Make(4 * kMiB);
  CHECK(pool->Allocate(0) == nullptr);
  CHECK(pool->Allocate(5 * kMiB) == nullptr);
  void* const data = pool->Allocate(3 * kMiB);
  CHECK(pool->Allocate(2 * kMiB) == nullptr);
  pool->Free(data);
  CHECK(pool->Allocate(4 * kMiB) == data);
}

TEST_CASE("free memory stays resident while the process had to be as large anyway") {
  const auto pool = Pool::Make(kReservedBytes);
  auto* const data = static_cast<std::byte*>(pool->Allocate(256 * kMiB));
  std::memset(data, 1, 256 * kMiB);
  pool->Free(data);
  CHECK(ResidentBytes(data, 256 * kMiB) == 256 * kMiB);
  CHECK(pool->GetStats().kept_bytes == 256 * kMiB);

  SUBCASE("what is in use elsewhere takes its place, from the highest address down") {
    pool->CountElsewhere(100 * kMiB);
    CHECK(pool->GetStats().kept_bytes == 156 * kMiB);
    CHECK(ResidentBytes(data, 256 * kMiB) == 156 * kMiB);
    CHECK(data[156 * kMiB - 1] == std::byte{1});
    CHECK(IsZero(data + 156 * kMiB, 100 * kMiB));
    pool->CountElsewhere(-ptrdiff_t{100 * kMiB});
    CHECK(pool->GetStats().most_bytes == 256 * kMiB);
  }
  SUBCASE("after two periods that did not need it, it goes") {
    pool->BeginPeriod();
    pool->Free(pool->Allocate(kMiB));
    CHECK(pool->GetStats().kept_bytes == 256 * kMiB);
    pool->BeginPeriod();
    pool->Free(pool->Allocate(kMiB));
    CHECK(pool->GetStats().kept_bytes == kKept);
    CHECK(ResidentBytes(data, 256 * kMiB) == kKept);
  }
}

TEST_CASE("used again, memory counts no longer as kept") {
  const auto pool = Pool::Make(kReservedBytes);
  void* const data = pool->Allocate(8 * kMiB);
  pool->Free(data);
  CHECK(pool->GetStats().kept_bytes == 8 * kMiB);
  CHECK(pool->Allocate(6 * kMiB) == data);
  CHECK(pool->GetStats().kept_bytes == 2 * kMiB);
}

TEST_CASE("threads do not meet in the same memory") {
  const auto pool = Pool::Make(kReservedBytes);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&pool, &wrong, seed] {
      std::mt19937 random(seed);
      const auto mark = static_cast<unsigned char>(seed);
      std::vector<std::pair<unsigned char*, size_t>> live;
      for (int step = 0; step < 500; ++step) {
        if (live.size() > 8 || (random() % 2 == 0 && !live.empty())) {
          const auto [data, nbytes] = live.front();
          live.erase(live.begin());
          if (data[0] != mark || data[nbytes - 1] != mark) ++wrong;
          pool->Free(data);
        } else {
          const size_t nbytes = 1 + random() % (256 << 10);
          auto* const data = static_cast<unsigned char*>(pool->Allocate(nbytes));
          data[0] = data[nbytes - 1] = mark;
          live.emplace_back(data, nbytes);
        }
      }
      for (const auto& [data, nbytes] : live) pool->Free(data);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(pool->GetStats().used_bytes == 0);
}

TEST_CASE("fork: a child has a pool of its own") {
  const auto pool = Pool::Make(kReservedBytes);
  auto* const data = static_cast<std::byte*>(pool->Allocate(kMiB));
  std::memset(data, 7, kMiB);
  pool->BeforeFork();
  const int status = InChild([&] {
    pool->AfterForkInChild();
    std::memset(data, 9, kMiB);
    pool->Free(data);
    return pool->Allocate(kMiB) == data ? 0 : 1;
  });
  pool->AfterFork();
  CHECK(status == 0);
  CHECK(data[0] == std::byte{7});
  CHECK(pool->GetStats().used_bytes == kMiB);
}

TEST_CASE("fork: other handlers of forks may free and allocate") {
  const auto pool = Pool::Make(kReservedBytes);
  void* const first = pool->Allocate(kMiB);
  void* const second = pool->Allocate(kMiB);
  void* const third = pool->Allocate(kMiB);
  pool->BeforeFork();
  pool->Free(first);
  std::thread([&] { pool->Free(second); }).join();
  CHECK(pool->Allocate(kMiB) == nullptr);
  const int status = InChild([&] {
    pool->Free(third);
    pool->AfterForkInChild();
    return pool->Allocate(3 * kMiB) == first ? 0 : 1;
  });
  pool->AfterFork();
  CHECK(status == 0);
  CHECK(pool->Allocate(2 * kMiB) == first);
  CHECK(pool->GetStats().used_bytes == 3 * kMiB);
}

TEST_CASE("fork: what is freed twice, or was never handed out, ends the process") {
  const auto pool = Pool::Make(kReservedBytes);
  auto* const data = static_cast<std::byte*>(pool->Allocate(kMiB));
  const auto status_of_free = [&pool](void* pointer) {
    return InChild([&] {
      std::signal(SIGABRT, SIG_DFL);  // the test framework's handler reports a crash
      std::fclose(stderr);
      pool->Free(pointer);
      return 0;
    });
  };
  CHECK(status_of_free(data + kPageBytes) == 128 + SIGABRT);
  pool->Free(data);
  CHECK(status_of_free(data) == 128 + SIGABRT);
}

Pool* refusing = nullptr;

TEST_CASE("fork: a handler of the abort may fork itself") {
  const auto pool = Pool::Make(kReservedBytes);
  refusing = pool.get();
  CHECK(InChild([&] {
          alarm(20);
          std::fclose(stderr);
          std::signal(SIGABRT, [](int) {
            refusing->BeforeFork();
            _exit(5);
          });
          void* const data = pool->Allocate(kMiB);
          pool->Free(data);
          pool->Free(data);
          return 0;
        }) == 5);
}

}  // namespace
}  // namespace offload
