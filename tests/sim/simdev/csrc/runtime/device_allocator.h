// Device memory, handed out as by a stream-ordered caching allocator.
//
// A freed block goes straight back to its stream: whoever gets it next is ordered after the last
// use by the stream itself. A block that other streams use, too (RecordStream), is deferred until
// the marks recorded on them at the time of the free are done. Blocks are never split or shared
// between streams; a block is reused for its exact rounded size.
//
// Nothing here is locked: the caller serialises.
#ifndef SIMDEV_RUNTIME_DEVICE_ALLOCATOR_H_
#define SIMDEV_RUNTIME_DEVICE_ALLOCATOR_H_

#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/arena.h"
#include "runtime/race_detector.h"
#include "runtime/types.h"

namespace sim {

class DeviceAllocator {
 public:
  struct Block {
    uintptr_t address = 0;
    size_t nbytes = 0;  // rounded up to kUnitBytes
    StreamId stream = 0;
    std::vector<StreamId> other_streams;  // that RecordStream named
  };

  static constexpr size_t kUnitBytes = 512;

  // `detector` forgets what happened to memory that is reused once its marks are done. Both must
  // outlive the allocator.
  DeviceAllocator(Arena* arena, RaceDetector* detector) : arena_(arena), detector_(detector) {}

  // Returns the address of a block for `stream`, or 0 when that would reserve more than
  // `capacity_bytes`.
  uintptr_t Allocate(size_t nbytes, StreamId stream, int64_t capacity_bytes);

  // Ends the use of a block; it must then be given to Reuse or Defer. Terminates the process when
  // nothing is allocated at `address`.
  Block Free(uintptr_t address);
  void Reuse(const Block& block);
  void Defer(Block block, std::vector<MarkPtr> marks);

  // Does nothing if `address` is not allocated.
  void RecordStream(uintptr_t address, StreamId stream);

  // Blocks whose marks are done can be reused from now on.
  void CollectDeferred();
  std::vector<MarkPtr> DeferredMarks() const;

  // Gives cached blocks back to the arena, for any stream: nothing may be queued that uses them.
  void ReleaseCached();

  size_t NbytesOf(uintptr_t address) const { return live_.at(address).nbytes; }
  const MemoryStats& allocated() const { return allocated_; }
  const MemoryStats& reserved() const { return reserved_; }
  void ResetPeaks();

 private:
  struct Deferred {
    Block block;
    std::vector<MarkPtr> marks;
  };

  Arena* const arena_;
  RaceDetector* const detector_;
  std::unordered_map<uintptr_t, Block> live_;
  std::map<std::pair<StreamId, size_t>, std::vector<uintptr_t>> cached_;
  std::vector<Deferred> deferred_;
  MemoryStats allocated_;
  MemoryStats reserved_;
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_DEVICE_ALLOCATOR_H_
