// Memory copies between tensors and slots, by several threads, optionally with a checksum.
//
// Both functions block until every byte has arrived and may be called from any number of threads at
// once. The caller copies too; helpers of one process-wide pool join in as they find time, so a
// busy machine makes a copy slower but never makes it wait for a helper that has not started.
// In a forked child there are no helpers and the caller copies alone.
#ifndef OFFLOAD_CSRC_COPY_H_
#define OFFLOAD_CSRC_COPY_H_

#include <cstddef>
#include <cstdint>

namespace offload {

// Two threads reach what memory delivers on small machines and leave most cores to the computation
// on large ones.
inline constexpr int kDefaultCopyThreads = 2;

// Copies `nbytes` from `src` to `dst`, which must not overlap, using at most `threads` threads (the
// caller is one of them; values below 1 mean 1). Large copies bypass the cache on their way out:
// what was offloaded is not needed soon, and what evicts nothing slows nothing down.
void Copy(void* dst, const void* src, size_t nbytes, int threads = kDefaultCopyThreads);

// The same, and returns the CRC-32C of the bytes; memory is read only once.
uint32_t CopyCrc32c(void* dst, const void* src, size_t nbytes, int threads = kDefaultCopyThreads);

}  // namespace offload

#endif  // OFFLOAD_CSRC_COPY_H_
