#include "runtime/device_allocator.h"

#include <cstdio>
#include <exception>

namespace sim {

uintptr_t DeviceAllocator::Allocate(size_t nbytes, StreamId stream, int64_t capacity_bytes) {
  const size_t rounded_bytes = RoundUp(std::max<size_t>(nbytes, 1), kUnitBytes);
  uintptr_t address = 0;
  if (const auto cached = cached_.find({stream, rounded_bytes}); cached != cached_.end()) {
    address = cached->second.back();
    cached->second.pop_back();
    if (cached->second.empty()) cached_.erase(cached);
  } else {
    const auto reserved_bytes = reserved_.current_bytes + static_cast<int64_t>(rounded_bytes);
    if (reserved_bytes > capacity_bytes) return 0;
    address = arena_->Take(rounded_bytes);
    if (address == 0) return 0;
    reserved_.Add(static_cast<int64_t>(rounded_bytes));
  }
  live_[address] = Block{address, rounded_bytes, stream, {}};
  allocated_.Add(static_cast<int64_t>(rounded_bytes));
  return address;
}

DeviceAllocator::Block DeviceAllocator::Free(uintptr_t address) {
  const auto live = live_.find(address);
  if (live == live_.end()) {
    // Called by a deleter, which must not throw.
    std::fprintf(stderr, "simdev: free of device memory that is not allocated\n");
    std::terminate();
  }
  Block block = std::move(live->second);
  live_.erase(live);
  allocated_.Remove(static_cast<int64_t>(block.nbytes));
  return block;
}

void DeviceAllocator::Reuse(const Block& block) {
  cached_[{block.stream, block.nbytes}].push_back(block.address);
}

void DeviceAllocator::Defer(Block block, std::vector<MarkPtr> marks) {
  deferred_.push_back({std::move(block), std::move(marks)});
}

void DeviceAllocator::RecordStream(uintptr_t address, StreamId stream) {
  const auto live = live_.find(address);
  if (live == live_.end() || live->second.stream == stream) return;
  std::vector<StreamId>& others = live->second.other_streams;
  if (std::find(others.begin(), others.end(), stream) == others.end()) others.push_back(stream);
}

void DeviceAllocator::CollectDeferred() {
  const auto is_pending = [](const Deferred& deferred) {
    return !std::all_of(deferred.marks.begin(), deferred.marks.end(),
                        [](const MarkPtr& mark) { return mark->done.load(); });
  };
  const auto first_ready = std::stable_partition(deferred_.begin(), deferred_.end(), is_pending);
  for (auto ready = first_ready; ready != deferred_.end(); ++ready) {
    // Polling orders the block's next owner and nothing else. Were the host to learn what the
    // marks know, a real race could be missed whenever a poll happened to succeed.
    const Block& block = ready->block;
    detector_->Forget(block.address, block.address + block.nbytes);
    Reuse(block);
  }
  deferred_.erase(first_ready, deferred_.end());
}

std::vector<MarkPtr> DeviceAllocator::DeferredMarks() const {
  std::vector<MarkPtr> marks;
  for (const Deferred& deferred : deferred_) {
    marks.insert(marks.end(), deferred.marks.begin(), deferred.marks.end());
  }
  return marks;
}

void DeviceAllocator::ReleaseCached() {
  for (const auto& [key, addresses] : cached_) {
    const size_t nbytes = key.second;
    for (const uintptr_t address : addresses) {
      detector_->Forget(address, address + nbytes);
      arena_->Give(address, nbytes);
      reserved_.Remove(static_cast<int64_t>(nbytes));
    }
  }
  cached_.clear();
}

void DeviceAllocator::ResetPeaks() {
  allocated_.ResetPeak();
  reserved_.ResetPeak();
}

}  // namespace sim
