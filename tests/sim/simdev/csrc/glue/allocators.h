// torch's allocators of device and of pinned memory.
#ifndef SIMDEV_GLUE_ALLOCATORS_H_
#define SIMDEV_GLUE_ALLOCATORS_H_

#include <ATen/core/CachingHostAllocator.h>

namespace sim {

// torch's own caching host allocator: the reuse of pinned memory is that of production.
at::HostAllocator& PinnedMemoryAllocator();

// Copies `nbytes` between addresses of the device, in the order of the current stream.
void CopyOnDevice(void* to, const void* from, size_t nbytes);

}  // namespace sim

#endif  // SIMDEV_GLUE_ALLOCATORS_H_
