#include <doctest.h>

#include <thread>

#include "checksum.h"
#include "copy.h"
#include "support.h"

namespace offload {
namespace {

using namespace testing;

// Straight from the definition, one bit at a time.
uint32_t ReferenceCrc32c(const std::byte* data, size_t nbytes) {
  uint32_t state = ~0u;
  for (size_t i = 0; i < nbytes; ++i) {
    state ^= static_cast<uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) state = (state & 1) ? (state >> 1) ^ 0x82F63B78 : state >> 1;
  }
  return ~state;
}

TEST_CASE("the check value of CRC-32C and the vectors of RFC 3720") {
  CHECK(Crc32c(0, "123456789", 9) == 0xE3069283);
  CHECK(Crc32cPortable(0, "123456789", 9) == 0xE3069283);
  CHECK(Crc32c(0, "", 0) == 0);
  std::vector<unsigned char> bytes(32, 0);
  CHECK(Crc32c(0, bytes.data(), 32) == 0x8A9136AA);
  std::fill(bytes.begin(), bytes.end(), 0xFF);
  CHECK(Crc32c(0, bytes.data(), 32) == 0x62A8AB43);
  for (unsigned char i = 0; i < 32; ++i) bytes[i] = i;
  CHECK(Crc32c(0, bytes.data(), 32) == 0x46DD794E);
}

TEST_CASE("property: hardware, tables, definition, split and combined checksums agree") {
  std::vector<std::byte> bytes(100'000);
  FillRandom(bytes.data(), bytes.size(), 1);
  std::mt19937 random(2);
  for (int step = 0; step < 200; ++step) {
    CAPTURE(step);
    const size_t begin = random() % 64;
    const size_t nbytes = random() % (step % 4 == 0 ? bytes.size() - begin : 300);
    const size_t split = nbytes == 0 ? 0 : random() % nbytes;
    const std::byte* const data = bytes.data() + begin;
    const uint32_t expected = ReferenceCrc32c(data, nbytes);
    REQUIRE(Crc32c(0, data, nbytes) == expected);
    REQUIRE(Crc32cPortable(0, data, nbytes) == expected);
    const uint32_t first = Crc32c(0, data, split);
    REQUIRE(Crc32c(first, data + split, nbytes - split) == expected);
    const uint32_t second = Crc32c(0, data + split, nbytes - split);
    REQUIRE(Crc32cCombine(first, second, nbytes - split) == expected);
  }
}

TEST_CASE("copies move every byte and nothing else, at all sizes and alignments") {
  constexpr size_t kGuardBytes = 128;
  std::mt19937 random(3);
  for (const size_t base :
       {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, kMiB, 4 * kMiB, 9 * kMiB}) {
    for (const int threads : {1, 2, 5}) {
      const size_t nbytes = base + random() % 200;
      const size_t src_shift = random() % 64;
      const size_t dst_shift = random() % 64;
      CAPTURE(nbytes);
      CAPTURE(threads);
      std::vector<std::byte> src(nbytes + 64);
      FillRandom(src.data(), src.size(), 4);
      std::vector<std::byte> dst(nbytes + 64 + 2 * kGuardBytes, std::byte{0xAA});
      std::byte* const target = dst.data() + kGuardBytes + dst_shift;
      const std::byte* const source = src.data() + src_shift;

      Copy(target, source, nbytes, threads);
      REQUIRE(std::memcmp(target, source, nbytes) == 0);
      std::fill(target, target + nbytes, std::byte{0xAA});
      REQUIRE(CopyCrc32c(target, source, nbytes, threads) == Crc32c(0, source, nbytes));
      REQUIRE(std::memcmp(target, source, nbytes) == 0);

      std::fill(target, target + nbytes, std::byte{0xAA});
      REQUIRE(std::count(dst.begin(), dst.end(), std::byte{0xAA}) ==
              static_cast<std::ptrdiff_t>(dst.size()));
    }
  }
}

TEST_CASE("concurrency: several threads copy at once and share the helpers") {
  std::vector<std::byte> src(6 * kMiB);
  FillRandom(src.data(), src.size(), 5);
  const uint32_t expected = Crc32c(0, src.data(), src.size());
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int id = 0; id < 3; ++id) {
    threads.emplace_back([&] {
      std::vector<std::byte> dst(src.size());
      for (int step = 0; step < 5; ++step) {
        if (CopyCrc32c(dst.data(), src.data(), src.size(), 3) != expected) ++wrong;
        if (Crc32c(0, dst.data(), dst.size()) != expected) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("fork: a child copies alone") {
  std::vector<std::byte> src(8 * kMiB);
  std::vector<std::byte> dst(src.size());
  FillRandom(src.data(), src.size(), 6);
  Copy(dst.data(), src.data(), src.size(), 2);  // the helpers exist
  CHECK(InChild([&] {
          std::fill(dst.begin(), dst.end(), std::byte{0});
          Copy(dst.data(), src.data(), src.size(), 2);
          return dst == src ? 0 : 1;
        }) == 0);
}

}  // namespace
}  // namespace offload
