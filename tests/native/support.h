// What the tests share: disks that misbehave on purpose, a scratch directory, forked children.
#ifndef OFFLOAD_TESTS_NATIVE_SUPPORT_H_
#define OFFLOAD_TESTS_NATIVE_SUPPORT_H_

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "arena.h"
#include "file.h"
#include "queue.h"

namespace offload::testing {

inline constexpr size_t kMiB = size_t{1} << 20;
// A test that reaches it hangs; nothing here waits that long when it works.
inline constexpr std::chrono::nanoseconds kForever = std::chrono::seconds(60);

inline std::string ScratchDirectory() {
  const char* const directory = std::getenv("TMPDIR");
  return directory != nullptr ? directory : "/tmp";
}

inline void FillRandom(std::byte* data, size_t nbytes, uint32_t seed) {
  std::minstd_rand random(seed);
  for (size_t i = 0; i < nbytes; ++i) data[i] = static_cast<std::byte>(random() >> 8);
}

// Of whole pages from `data` on.
inline size_t ResidentBytes(void* data, size_t nbytes) {
  std::vector<unsigned char> pages(nbytes / kPageBytes);
  if (mincore(data, nbytes, pages.data()) != 0)
    throw std::system_error(errno, std::generic_category());
  return kPageBytes * static_cast<size_t>(std::count_if(pages.begin(), pages.end(),
                                                        [](auto page) { return (page & 1) != 0; }));
}

// The errno of the std::system_error that `call` throws, or 0.
template <typename Call>
int ErrorOf(Call call) {
  try {
    call();
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

// Runs `body` in a forked child and returns its result as an exit status; a signal is 128 + its
// number. The child leaves without destructors of this process's statics.
template <typename Body>
int InChild(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // a child that hangs is a failure, not a wait
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// A disk that moves only an eighth of what it is asked for, after `interrupts` EINTR each time.
class ShortIo : public Io {
 public:
  explicit ShortIo(int interrupts) : interrupts_(interrupts) {}

  ssize_t Pread(int fd, void* data, size_t nbytes, off_t offset) override {
    return Interrupted() ? -1 : Io::Pread(fd, data, Part(nbytes), offset);
  }
  ssize_t Pwrite(int fd, const void* data, size_t nbytes, off_t offset) override {
    return Interrupted() ? -1 : Io::Pwrite(fd, data, Part(nbytes), offset);
  }
  int calls() const { return calls_; }

 private:
  bool Interrupted() {
    if (++calls_ % (interrupts_ + 1) == 0) return false;
    errno = EINTR;
    return true;
  }
  // Whole sectors, as a device may stop at, but not always whole pages.
  static size_t Part(size_t nbytes) {
    return std::min(nbytes, std::max(nbytes / 8 / 512 * 512, kPageBytes));
  }

  const int interrupts_;
  std::atomic<int> calls_{0};
};

// A disk that fails with `error` once `good_bytes` have been moved.
class FailingIo : public Io {
 public:
  FailingIo(int error, size_t good_bytes)
      : error_(error), good_bytes_(static_cast<int64_t>(good_bytes)) {}

  ssize_t Pread(int fd, void* data, size_t nbytes, off_t offset) override {
    return Fails(nbytes) ? -1 : Io::Pread(fd, data, nbytes, offset);
  }
  ssize_t Pwrite(int fd, const void* data, size_t nbytes, off_t offset) override {
    return Fails(nbytes) ? -1 : Io::Pwrite(fd, data, nbytes, offset);
  }
  int Fallocate(int fd, off_t offset, off_t nbytes) override {
    // Like ext4 on a full disk: part of the range is taken before the call fails.
    static_cast<void>(Io::Fallocate(fd, offset, nbytes / 2));
    errno = error_;
    return fd < 0 ? 0 : -1;
  }

 private:
  bool Fails(size_t nbytes) {
    if (good_bytes_.fetch_sub(static_cast<int64_t>(nbytes)) >= static_cast<int64_t>(nbytes)) {
      return false;
    }
    errno = error_;
    return true;
  }

  const int error_;
  std::atomic<int64_t> good_bytes_;
};

// A disk that writes down what it is asked for and does nothing until its gate is opened. Moves no
// bytes.
class GatedIo : public Io {
 public:
  struct Call {
    char kind;  // 'r' or 'w'
    off_t offset;
    bool operator==(const Call& other) const {
      return kind == other.kind && offset == other.offset;
    }
  };

  ssize_t Pread(int, void*, size_t nbytes, off_t offset) override {
    return Pass('r', nbytes, offset);
  }
  ssize_t Pwrite(int, const void*, size_t nbytes, off_t offset) override {
    return Pass('w', nbytes, offset);
  }

  // Returns when `count` calls have arrived at the gate since the beginning.
  void AwaitArrivals(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return calls_.size() >= count; });
  }
  // Lets the next `count` calls pass.
  void Admit(int count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    admitted_ += count;
    changed_.notify_all();
  }
  void Open() { Admit(1 << 30); }

  std::vector<Call> Calls() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  ssize_t Pass(char kind, size_t nbytes, off_t offset) {
    std::unique_lock<std::mutex> lock(mutex_);
    calls_.push_back({kind, offset});
    changed_.notify_all();
    changed_.wait(lock, [this] { return admitted_ > 0; });
    --admitted_;
    return static_cast<ssize_t>(nbytes);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;
  int admitted_ = 0;
};

}  // namespace offload::testing

#endif  // OFFLOAD_TESTS_NATIVE_SUPPORT_H_
