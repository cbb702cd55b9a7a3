#include "copy.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checksum.h"
#include "process.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace offload {
namespace {

// The unit in which threads share a copy: small enough that a helper which wakes late still finds
// work, large enough that handing it out costs nothing.
constexpr size_t kChunkBytes = size_t{1} << 20;
// Copies from here on stream past the cache: into memory that is not in the cache already, which a
// slot never is, that is 1.4 times as fast (scripts/bench_copy.py).
constexpr size_t kStreamFromBytes = size_t{1} << 20;
constexpr int kMaxHelpers = 7;

#if defined(__x86_64__)

constexpr size_t kLineBytes = 64;

// `dst` is aligned to a cache line and `nbytes` a multiple of one.
__attribute__((target("avx2"))) void StreamLinesAvx2(std::byte* dst, const std::byte* src,
                                                     size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kLineBytes) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), high);
  }
}

void StreamLinesSse2(std::byte* dst, const std::byte* src, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += 16) {
    const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), word);
  }
}

void StreamCopy(std::byte* dst, const std::byte* src, size_t nbytes) {
  static const auto stream_lines =
      __builtin_cpu_supports("avx2") ? &StreamLinesAvx2 : &StreamLinesSse2;
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % kLineBytes;
  const size_t head = std::min(nbytes, misaligned == 0 ? 0 : kLineBytes - misaligned);
  const size_t lines = (nbytes - head) / kLineBytes * kLineBytes;
  std::memcpy(dst, src, head);
  stream_lines(dst + head, src + head, lines);
  std::memcpy(dst + head + lines, src + head + lines, nbytes - head - lines);
  // Streaming stores are not ordered with later ones: without the fence another thread could see
  // "copied" before it sees the bytes.
  _mm_sfence();
}

#else

void StreamCopy(std::byte* dst, const std::byte* src, size_t nbytes) {
  std::memcpy(dst, src, nbytes);
}

#endif

Stores StoresFor(size_t nbytes) {
  return nbytes >= kStreamFromBytes ? Stores::kStreaming : Stores::kCached;
}

void CopyPart(void* dst, const void* src, size_t nbytes, Stores stores) {
  if (stores == Stores::kStreaming) {
    StreamCopy(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), nbytes);
  } else {
    std::memcpy(dst, src, nbytes);
  }
}

// One copy, shared by the threads that work on it.
class Job {
 public:
  Job(void* dst, const void* src, size_t nbytes, bool checked)
      : dst_(static_cast<std::byte*>(dst)),
        src_(static_cast<const std::byte*>(src)),
        nbytes_(nbytes),
        chunks_((nbytes + kChunkBytes - 1) / kChunkBytes),
        crcs_(checked ? chunks_ : 0) {}

  // Copies chunks until none is left to take; others may still be busy with theirs.
  void Help() {
    size_t copied = 0;
    for (size_t i = next_.fetch_add(1); i < chunks_; i = next_.fetch_add(1)) {
      CopyChunk(i);
      ++copied;
    }
    if (copied == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    copied_ += copied;
    if (copied_ == chunks_) all_copied_.notify_all();
  }

  void WaitForAll() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_copied_.wait(lock, [this] { return copied_ == chunks_; });
  }

  uint32_t Checksum() const {
    uint32_t crc = 0;
    for (size_t i = 0; i < chunks_; ++i) crc = Crc32cCombine(crc, crcs_[i], ChunkBytes(i));
    return crc;
  }

  size_t chunks() const { return chunks_; }

 private:
  size_t ChunkBytes(size_t i) const { return std::min(kChunkBytes, nbytes_ - i * kChunkBytes); }

  void CopyChunk(size_t i) {
    std::byte* dst = dst_ + i * kChunkBytes;
    const std::byte* src = src_ + i * kChunkBytes;
    const Stores stores = StoresFor(nbytes_);
    if (crcs_.empty()) {
      CopyPart(dst, src, ChunkBytes(i), stores);
    } else {
      crcs_[i] = Crc32cCopy(dst, src, ChunkBytes(i), stores);
    }
  }

  std::byte* const dst_;
  const std::byte* const src_;
  const size_t nbytes_;
  const size_t chunks_;
  std::vector<uint32_t> crcs_;  // one per chunk, empty when no checksum is wanted
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_copied_;
  size_t copied_ = 0;
};

// The helpers of all copies. They start with the first copy that wants them and live as long as the
// process.
class Pool {
 public:
  // Never destroyed: at exit a helper may still be waiting here.
  static Pool& Get() {
    static Pool* const pool = std::make_unique<Pool>().release();
    return *pool;
  }

  // Asks `helpers` threads to help with `job`. They hold it until they have looked at it.
  void Invite(const std::shared_ptr<Job>& job, int helpers) {
    if (!owner_.IsCurrent()) return;  // [Note: fork]
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Grow(std::min(helpers, kMaxHelpers));
      invitations_.insert(invitations_.end(), helpers, job);
    }
    invited_.notify_all();
  }

 private:
  void Grow(int threads) {
    try {
      while (static_cast<int>(threads_.size()) < threads) {
        threads_.emplace_back("offload-copy" + std::to_string(threads_.size()),
                              [this] { Serve(); });
      }
    } catch (const std::system_error&) {
      return;  // no more threads for this process: those there are, or the caller alone, will do
    }
  }

  [[noreturn]] void Serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      invited_.wait(lock, [this] { return !invitations_.empty(); });
      const std::shared_ptr<Job> job = std::move(invitations_.front());
      invitations_.pop_front();
      lock.unlock();
      job->Help();
    }
  }

  Owner owner_;
  std::mutex mutex_;
  std::condition_variable invited_;
  std::deque<std::shared_ptr<Job>> invitations_;
  std::vector<Thread> threads_;
};

std::shared_ptr<Job> Run(void* dst, const void* src, size_t nbytes, int threads, bool checked) {
  auto job = std::make_shared<Job>(dst, src, nbytes, checked);
  const int helpers = static_cast<int>(std::min<size_t>(std::max(threads, 1), job->chunks())) - 1;
  if (helpers > 0) Pool::Get().Invite(job, helpers);
  job->Help();
  job->WaitForAll();
  return job;
}

}  // namespace

void Copy(void* dst, const void* src, size_t nbytes, int threads) {
  if (nbytes <= kChunkBytes) return CopyPart(dst, src, nbytes, StoresFor(nbytes));
  Run(dst, src, nbytes, threads, false);
}

uint32_t CopyCrc32c(void* dst, const void* src, size_t nbytes, int threads) {
  if (nbytes <= kChunkBytes) return Crc32cCopy(dst, src, nbytes, StoresFor(nbytes));
  return Run(dst, src, nbytes, threads, true)->Checksum();
}

}  // namespace offload
