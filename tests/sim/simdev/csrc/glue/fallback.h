// Every operator without a kernel of its own: its CPU kernel, queued on the current stream.
//
// The CPU kernel gets views of the memory that tasks see. Shapes and dtypes of results come from
// the Meta kernel, so that the results can be allocated at once and the host need not wait. The
// host does wait, as it would on a GPU, for operators whose results depend on data, and also for
// those without a Meta kernel.
#ifndef SIMDEV_GLUE_FALLBACK_H_
#define SIMDEV_GLUE_FALLBACK_H_

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <string>

namespace sim {

// A boxed kernel. Throws what the CPU kernel throws if the host waits for it; otherwise a failure
// becomes the device's error.
void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

struct OperatorCounts {
  int64_t asynchronous = 0;
  int64_t synchronous = 0;
  std::map<std::string, std::string> why_synchronous;  // by operator: the last reason
};
OperatorCounts GetOperatorCounts();
void ResetOperatorCounts();

}  // namespace sim

#endif  // SIMDEV_GLUE_FALLBACK_H_
