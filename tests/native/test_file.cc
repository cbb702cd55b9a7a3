#include <doctest.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <csignal>

#include "support.h"

namespace offload {
namespace {

using namespace testing;

// Writes 1 MiB through `file`, reads it back and compares.
void CheckRoundTrip(const File& file) {
  Arena arena(2 * kMiB, /*prefault=*/false);
  const auto out = arena.Allocate(kMiB);
  const auto in = arena.Allocate(kMiB);
  FillRandom(out->data(), kMiB, 1);
  REQUIRE(file.Write(out->data(), kMiB, 8192) == 0);
  REQUIRE(file.Read(in->data(), kMiB, 8192) == 0);
  CHECK(std::memcmp(out->data(), in->data(), kMiB) == 0);
}

TEST_CASE("bytes come back, direct and buffered, on disk and in memory") {
  for (const std::string& directory : {ScratchDirectory(), std::string("/dev/shm")}) {
    for (const bool direct : {true, false}) {
      CAPTURE(directory);
      CAPTURE(direct);
      const File file(directory, direct);
      CHECK(file.alignment_bytes() == (file.is_direct() ? 4096 : 1));
      CHECK_FALSE((file.is_direct() && !direct));
      CheckRoundTrip(file);
    }
  }
}

TEST_CASE("tmpfs is used through the cache") {
  CHECK_FALSE(File("/dev/shm", /*direct=*/true).is_direct());
}

TEST_CASE("what the system says about a directory is thrown") {
  CHECK(ErrorOf([] { File("/nowhere/at/all", true); }) == ENOENT);
  CHECK(ErrorOf([] { File("/dev/null", true); }) == ENOTDIR);
}

TEST_CASE("short and interrupted calls are continued") {
  for (const bool direct : {true, false}) {
    const auto io = std::make_shared<ShortIo>(/*interrupts=*/5);
    const File file(ScratchDirectory(), direct, io);
    CheckRoundTrip(file);
    CHECK(io->calls() > 100);
  }
}

TEST_CASE("a disk that never moves a whole block is an error, not a loop") {
  class CrumbIo : public Io {
    ssize_t Pwrite(int, const void*, size_t, off_t) override { return 100; }
  };
  const File file(ScratchDirectory(), /*direct=*/true, std::make_shared<CrumbIo>());
  if (!file.is_direct()) return;
  alignas(kPageBytes) static const std::byte page[2 * kPageBytes] = {};
  CHECK(file.Write(page, sizeof(page), 0) == EIO);
}

TEST_CASE("errors are returned as they are, and the end of the file is EIO") {
  alignas(kPageBytes) static std::byte pages[4 * kPageBytes];
  for (const int error : {ENOSPC, EIO, EDQUOT}) {
    const File file(ScratchDirectory(), true, std::make_shared<FailingIo>(error, kPageBytes));
    CHECK(file.Write(pages, kPageBytes, 0) == 0);
    CHECK(file.Write(pages, kPageBytes, kPageBytes) == error);
  }
  const File file(ScratchDirectory(), true);
  REQUIRE(file.Write(pages, kPageBytes, 0) == 0);
  CHECK(file.Read(pages, 2 * kPageBytes, 0) == EIO);
  CHECK(file.Read(pages, kPageBytes, 1 << 30) == EIO);
}

TEST_CASE("space is reserved in growing segments") {
  File file(ScratchDirectory(), true);
  CHECK(file.allocated_bytes() == 0);
  file.Reserve(kMiB);
  file.Reserve(3 * kMiB);
  file.Reserve(2 * kMiB);  // has it already
  CHECK(file.allocated_bytes() == 3 * kMiB);
  CheckRoundTrip(file);
}

TEST_CASE("a failed reserve gives back what it took; without fallocate the file grows by itself") {
  const auto failing = std::make_shared<FailingIo>(ENOSPC, size_t{1} << 40);
  File full(ScratchDirectory(), true, failing);
  CHECK(ErrorOf([&] { full.Reserve(8 * kMiB); }) == ENOSPC);
  CHECK(full.allocated_bytes() == 0);
  alignas(kPageBytes) static std::byte page[kPageBytes];
  CHECK(full.Read(page, kPageBytes, 0) == EIO);  // cut off again

  class NoFallocateIo : public Io {
    int Fallocate(int, off_t, off_t) override {
      errno = EOPNOTSUPP;
      return -1;
    }
  };
  File sparse(ScratchDirectory(), true, std::make_shared<NoFallocateIo>());
  sparse.Reserve(8 * kMiB);
  CHECK(sparse.allocated_bytes() == 8 * kMiB);
  CheckRoundTrip(sparse);
}

TEST_CASE("fork: the file size limit is an error, not the end of the process") {
  // In a child, as the limit cannot be taken back.
  const int status = InChild([] {
    signal(SIGXFSZ, SIG_DFL);
    const rlimit limit{kMiB, kMiB};
    setrlimit(RLIMIT_FSIZE, &limit);
    File file(ScratchDirectory(), true);
    if (ErrorOf([&] { file.Reserve(4 * kMiB); }) != EFBIG) return 1;

    Arena arena(4 * kMiB, false);
    Queue queue(std::make_shared<File>(ScratchDirectory(), true), {});
    const auto request =
        queue.Submit({Transfer::Kind::kWrite, arena.Allocate(2 * kMiB), 0, false, {}}, kForever);
    if (ErrorOf([&] { request->Wait(kForever); }) != EFBIG) return 2;
    return 0;
  });
  CHECK(status == 0);
}

TEST_CASE("nothing is left in the directory") {
  std::string directory = ScratchDirectory() + "/offload-test-XXXXXX";
  REQUIRE(mkdtemp(directory.data()) != nullptr);
  {
    const File file(directory, true);
    CHECK(rmdir(directory.c_str()) == 0);  // it is empty while the file is open
    CheckRoundTrip(file);
  }
}

TEST_CASE("fork: a child cannot reserve, and does not close the parent's file") {
  auto file = std::make_unique<File>(ScratchDirectory(), true);
  CHECK(InChild([&] {
          try {
            file->Reserve(kMiB);
            return 1;
          } catch (const std::runtime_error&) {
          }
          file.reset();
          return 0;
        }) == 0);
  CheckRoundTrip(*file);
}

}  // namespace
}  // namespace offload
