// Puts a Pool under torch's CPU allocator.
//
// Torch has an interface for this in C++ (c10::SetCPUAllocator), whose types change from release to
// release; built against them, the engine would fit one of them only. What never changes is that
// the allocator, in libc10.so, gets its memory from posix_memalign and gives it to free: two
// functions of the C standard, which the library finds through its table of imported functions.
// That table is changed, of this one library and no other.
#ifndef OFFLOAD_CSRC_INTERPOSE_H_
#define OFFLOAD_CSRC_INTERPOSE_H_

#include <string>

#include "pool.h"

namespace offload {

// From now on and for the life of the process, torch's CPU allocator takes what is large from the
// pool, which is then returned by TorchPool. Returns an empty text, or why it cannot be done; then
// nothing has changed. Another allocator that somebody has put in the place of the C library's
// (jemalloc, a sanitizer) is such a reason: it was chosen. Does nothing the second time.
std::string UsePoolForTorch();

// Null before that.
Pool* TorchPool();

// The name of the file that the process takes `function` from; "?" if there is none.
std::string ProviderOf(const char* function);

}  // namespace offload

#endif  // OFFLOAD_CSRC_INTERPOSE_H_
