// Copies between host and device and within the device.
#ifndef SIMDEV_GLUE_COPIES_H_
#define SIMDEV_GLUE_COPIES_H_

#include <ATen/core/Tensor.h>

namespace sim {

// Queues a copy of `from` to `to` on the current stream; dtypes and layouts may differ. Returns
// once it is done if it involves the host and is not `non_blocking`, or the host memory is not
// pinned. Throws what a failed task threw, if it waits.
//
// As on a GPU, a copy in flight keeps no tensor alive: device memory is ordered by streams, memory
// of the caching host allocator is not reused before, and registered memory is its owner's care.
at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

// Resizes `to` like `from`, then copies and waits.
at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to);

// Queues that `result` on the device gets the value of the CPU tensor `computed`, of the same
// sizes, as if a kernel had written it: nothing moves over the link.
void StoreOnDevice(const at::Tensor& computed, const at::Tensor& result);

// The value of the only element; waits for it.
at::Scalar Item(const at::Tensor& tensor);

}  // namespace sim

#endif  // SIMDEV_GLUE_COPIES_H_
