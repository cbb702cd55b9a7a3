#include "arena.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "interpose.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels answer EINVAL
#endif

namespace offload {

Mapping::Mapping(size_t nbytes) : nbytes_(RoundUp(nbytes, kPageBytes)) {
  // mmap aligns to 4 KiB only: map one huge page more and give the ragged ends back.
  const size_t mapped_bytes = nbytes_ + kHugePageBytes;
  void* const mapped =
      mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot map " + std::to_string(nbytes_) + " bytes of host memory");
  }
  auto* const begin = static_cast<std::byte*>(mapped);
  const size_t head = RoundUp(reinterpret_cast<uintptr_t>(begin), kHugePageBytes) -
                      reinterpret_cast<uintptr_t>(begin);
  data_ = begin + head;
  if (head > 0) munmap(begin, head);
  if (head < kHugePageBytes) munmap(data_ + nbytes_, kHugePageBytes - head);
  // Advice only: without huge pages everything works, slower.
  madvise(data_, nbytes_, MADV_HUGEPAGE);
  madvise(data_, nbytes_, MADV_DONTFORK);
}

Mapping::~Mapping() {
  // In a forked child this address may belong to something else by now.
  if (data_ != nullptr && owner_.IsCurrent()) munmap(data_, nbytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : owner_(other.owner_),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

namespace {

int64_t ThreadFaults() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

// Makes [data, data + nbytes) resident without changing a byte of it, as its slots may be in use.
void Populate(std::byte* data, size_t nbytes) {
  if (madvise(data, nbytes, MADV_POPULATE_WRITE) == 0 || errno != EINVAL) return;
  for (size_t i = 0; i < nbytes; i += kPageBytes) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data + i), 0, __ATOMIC_RELAXED);
  }
}

// Tells from the faults of populated memory which pages the kernel gives: one fault fills a huge
// page, 512 faults as many small ones.
class PageCensus {
 public:
  // Populates one huge page worth of memory. Somebody else may have touched it before.
  void Populate(std::byte* data) {
    const int64_t before = ThreadFaults();
    offload::Populate(data, kHugePageBytes);
    const int64_t faults = ThreadFaults() - before;
    if (faults == 0) return;  // was resident already: tells nothing
    faults < kSmallPages / 2 ? ++huge_blocks_ : ++small_blocks_;
  }

  // The size of most pages seen.
  size_t page_bytes() const { return huge_blocks_ > small_blocks_ ? kHugePageBytes : kPageBytes; }

 private:
  static constexpr int64_t kSmallPages = kHugePageBytes / kPageBytes;
  std::atomic<int64_t> huge_blocks_{0};
  std::atomic<int64_t> small_blocks_{0};
};

}  // namespace

// The mapping, its bookkeeping and its prefaulting thread; shared by the arena and all its slots.
class Slab {
 public:
  explicit Slab(size_t capacity_bytes) : ranges_(capacity_bytes), mapping_(capacity_bytes) {
    census_.Populate(mapping_.data());
  }

  ~Slab() { SetTouched(0); }

  void StartPrefault() {
    // The constructor did the first block.
    std::byte* const begin = mapping_.data() + kHugePageBytes;
    std::byte* const end = mapping_.data() + mapping_.nbytes();
    prefault_ = std::make_unique<Thread>("offload-fault", [=] { Prefault(begin, end); });
  }

  // Null when there is no room.
  std::byte* Take(size_t nbytes, size_t* offset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    RequireOpen();
    const std::optional<size_t> taken = ranges_.Take(nbytes);
    if (!taken) return nullptr;
    ++live_slots_;
    SetTouched(std::max(touched_bytes_, *taken + RoundUp(nbytes, kPageBytes)));
    *offset = *taken;
    return mapping_.data() + *taken;
  }

  void TakeOutside(size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    RequireOpen();
    ++live_slots_;
    outside_bytes_ += nbytes;
  }

  void Give(size_t offset) {
    Mapping unmapped_after_unlock;
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_.Give(offset);  // cannot be a double free: a slot dies once
    --live_slots_;
    unmapped_after_unlock = TakeMappingIfUnused();
  }

  void GiveOutside(size_t nbytes) {
    Mapping unmapped_after_unlock;
    const std::lock_guard<std::mutex> lock(mutex_);
    outside_bytes_ -= nbytes;
    --live_slots_;
    unmapped_after_unlock = TakeMappingIfUnused();
  }

  void Trim(size_t keep_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Larger pages would be shared by what is free and what is not.
    if (mapping_.data() == nullptr || sysconf(_SC_PAGESIZE) != kPageBytes) return;
    for (const auto& [offset, nbytes] : ranges_.free().From(keep_bytes)) {
      madvise(mapping_.data() + offset, nbytes, MADV_DONTNEED);
      if (offset + nbytes == mapping_.nbytes()) SetTouched(std::min(touched_bytes_, offset));
    }
  }

  size_t Close() {
    StopPrefault();
    Mapping unmapped_after_unlock;
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    unmapped_after_unlock = TakeMappingIfUnused();
    return live_slots_;
  }

  Arena::Stats GetStats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Arena::Stats stats;
    stats.used_bytes = ranges_.used_bytes();
    stats.peak_bytes = ranges_.peak_bytes();
    stats.outside_bytes = outside_bytes_;
    stats.live_slots = live_slots_;
    stats.page_bytes = census_.page_bytes();
    return stats;
  }

 private:
  void RequireOpen() const {
    if (closed_) throw std::invalid_argument("the arena is closed");
  }

  // Nothing can be allocated any more and nothing is: the memory may go.
  Mapping TakeMappingIfUnused() {
    return closed_ && live_slots_ == 0 ? std::move(mapping_) : Mapping();
  }

  // First fit takes the lowest address: what was touched is the beginning of the slab.
  void SetTouched(size_t nbytes) {
    if (nbytes == touched_bytes_) return;
    if (pool_ != nullptr) pool_->CountElsewhere(static_cast<ptrdiff_t>(nbytes - touched_bytes_));
    touched_bytes_ = nbytes;
  }

  void Prefault(std::byte* begin, std::byte* end) {
    for (std::byte* block = begin; block != end && !stop_; block += kHugePageBytes) {
      census_.Populate(block);
    }
  }

  void StopPrefault() {
    std::unique_ptr<Thread> joined_after_unlock;
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    joined_after_unlock = std::move(prefault_);
  }

  mutable std::mutex mutex_;
  FirstFit ranges_;
  Mapping mapping_;
  Pool* const pool_ = TorchPool();  // counts the arenas that were made since it is in use
  size_t touched_bytes_ = 0;
  size_t outside_bytes_ = 0;
  size_t live_slots_ = 0;
  bool closed_ = false;
  PageCensus census_;
  std::atomic<bool> stop_{false};
  std::unique_ptr<Thread> prefault_;
};

Slot::Slot(std::shared_ptr<Slab> slab, size_t offset, std::byte* data, size_t nbytes)
    : slab_(std::move(slab)), offset_(offset), data_(data), nbytes_(nbytes) {}

Slot::Slot(std::shared_ptr<Slab> slab, Mapping outside, size_t nbytes)
    : slab_(std::move(slab)),
      outside_(std::move(outside)),
      data_(outside_.data()),
      nbytes_(nbytes) {}

Slot::~Slot() {
  if (!owner_.IsCurrent()) return;  // [Note: fork]
  if (outside_.nbytes() > 0) {
    slab_->GiveOutside(outside_.nbytes());
  } else {
    slab_->Give(offset_);
  }
}

Arena::Arena(size_t capacity_bytes, bool prefault) {
  if (capacity_bytes == 0) throw std::invalid_argument("capacity_bytes must be at least 1");
  if (capacity_bytes > std::numeric_limits<size_t>::max() / 2) {
    throw std::invalid_argument("capacity_bytes is larger than any memory");
  }
  capacity_bytes_ = RoundUp(capacity_bytes, kHugePageBytes);
  slab_ = std::make_shared<Slab>(capacity_bytes_);
  if (prefault) slab_->StartPrefault();
}

Arena::~Arena() {
  if (owner_.IsCurrent()) slab_->Close();
}

std::shared_ptr<Slot> Arena::Allocate(size_t nbytes) {
  owner_.Require("the arena");
  if (nbytes < 1 || nbytes > capacity_bytes_) {
    throw std::invalid_argument("cannot allocate " + std::to_string(nbytes) +
                                " bytes in an arena of " + std::to_string(capacity_bytes_));
  }
  size_t offset = 0;
  std::byte* const data = slab_->Take(nbytes, &offset);
  return data == nullptr ? nullptr : std::make_shared<Slot>(slab_, offset, data, nbytes);
}

std::shared_ptr<Slot> Arena::AllocateOutside(size_t nbytes) {
  owner_.Require("the arena");
  if (nbytes < 1) throw std::invalid_argument("cannot allocate 0 bytes");
  Mapping mapping(nbytes);
  slab_->TakeOutside(mapping.nbytes());
  return std::make_shared<Slot>(slab_, std::move(mapping), nbytes);
}

void Arena::Trim(size_t keep_bytes) {
  owner_.Require("the arena");
  slab_->Trim(RoundUp(keep_bytes, kPageBytes));
}

size_t Arena::Close() {
  owner_.Require("the arena");
  return slab_->Close();
}

Arena::Stats Arena::GetStats() const {
  owner_.Require("the arena");
  return slab_->GetStats();
}

}  // namespace offload
