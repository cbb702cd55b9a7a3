#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

namespace offload {
namespace {

// Each step is a system call that extends one mapping.
constexpr size_t kCommitBytes = size_t{64} << 20;

}  // namespace

std::unique_ptr<Pool> Pool::Make(size_t reserved_bytes) {
  reserved_bytes = RoundUp(reserved_bytes, kPageBytes);
  void* const mapped =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  return std::unique_ptr<Pool>(new Pool(static_cast<std::byte*>(mapped), reserved_bytes));
}

Pool::Pool(std::byte* data, size_t reserved_bytes)
    : data_(data), reserved_bytes_(reserved_bytes), ranges_(reserved_bytes), pages_(data) {}

Pool::~Pool() { munmap(data_, reserved_bytes_); }

void* Pool::Allocate(size_t nbytes) {
  if (nbytes == 0 || nbytes > reserved_bytes_) return nullptr;
  const std::unique_lock<std::mutex> lock = Enter();
  if (!lock) return nullptr;
  const std::optional<size_t> offset = ranges_.Take(nbytes);
  if (!offset) return nullptr;
  if (!Commit(*offset + RoundUp(nbytes, kPageBytes))) {
    ranges_.Give(*offset);
    return nullptr;
  }
  pages_.Take(*offset, RoundUp(nbytes, kPageBytes));
  ++allocations_;
  Trim();
  return data_ + *offset;
}

void Pool::Free(void* pointer) {
  if (const std::unique_lock<std::mutex> lock = Enter()) return Give(pointer);
  auto* const freed = new (pointer) Freed{freed_};
  while (!freed_.compare_exchange_weak(freed->next, freed)) {
  }
}

void Pool::Give(void* pointer) {
  const auto offset = static_cast<size_t>(static_cast<std::byte*>(pointer) - data_);
  const size_t nbytes = ranges_.Give(offset);
  if (nbytes == 0) {
    std::fputs("offload: free() of a tensor's memory that is not in use\n", stderr);
    mutex_.unlock();  // a handler of SIGABRT may fork, to have the stack printed
    std::abort();
  }
  pages_.Give(offset, nbytes);
  Trim();
}

std::unique_lock<std::mutex> Pool::Enter() {
  if (forks_ > 0) return {};  // not even for a moment: the child would find the mutex locked
  std::unique_lock<std::mutex> lock(mutex_);
  if (forks_ > 0) return {};
  for (Freed* freed = freed_.exchange(nullptr); freed != nullptr;) {
    Give(std::exchange(freed, freed->next));
  }
  return lock;
}

void Pool::BeforeFork() {
  const std::lock_guard<std::mutex> lock(mutex_);  // nobody is in the middle of something
  ++forks_;
}

void Pool::AfterForkInChild() {
  new (&mutex_) std::mutex;  // may have been locked by a thread that saw the fork and turned back
  forks_ = 0;                // those of other threads are not this process's
  StartPeriod();             // nor is what they needed
  StartPeriod();
}

Pool::Stats Pool::GetStats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {ranges_.used_bytes(), MostBytes(), pages_.nbytes(), allocations_};
}

void Pool::CountElsewhere(ptrdiff_t nbytes) {
  elsewhere_bytes_ += static_cast<size_t>(nbytes);  // modulo 2^64, so it may shrink, too
  if (const std::unique_lock<std::mutex> lock = Enter()) Trim();
}

void Pool::BeginPeriod() {
  if (const std::unique_lock<std::mutex> lock = Enter()) {
    StartPeriod();
    Trim();
  }
}

void Pool::StartPeriod() {
  most_bytes_before_ = std::exchange(most_bytes_, InUseBytes());
  period_began_ = std::chrono::steady_clock::now();
}

bool Pool::Commit(size_t end_bytes) {
  if (end_bytes <= committed_bytes_) return true;
  const size_t wanted = std::min(RoundUp(end_bytes, kCommitBytes), reserved_bytes_);
  const int result =
      mprotect(data_ + committed_bytes_, wanted - committed_bytes_, PROT_READ | PROT_WRITE);
  if (result != 0) return false;  // ENOMEM where the system does not overcommit
  pages_.AddSeam(committed_bytes_);
  committed_bytes_ = wanted;
  return true;
}

void Pool::Trim() {
  if (std::chrono::steady_clock::now() - period_began_ > kLongestPeriod) StartPeriod();
  const size_t in_use_bytes = InUseBytes();  // once: what is elsewhere changes meanwhile
  most_bytes_ = std::max(most_bytes_, in_use_bytes);
  const size_t keep_bytes = std::max(kMinKeepBytes, MostBytes() - in_use_bytes);
  pages_.Shrink(keep_bytes);
}

}  // namespace offload
