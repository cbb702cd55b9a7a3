#include "glue/fallback.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>

#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "glue/boxed.h"
#include "glue/copies.h"
#include "glue/generator.h"
#include "glue/tensors.h"

namespace sim {
namespace {

std::mutex counts_mutex;
OperatorCounts counts;

// Threads of the device compute with as many threads as torch.set_num_threads said: results can
// depend on that number.
void InitThread() {
  thread_local const bool is_done = [] {
    at::init_num_threads();
    return true;
  }();
  (void)is_done;
}

// One call of an operator. `stack` is that of the boxed kernel: arguments in, results out.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), stream_(Device::CurrentStream()) {
    const auto arguments = torch::jit::last(*stack, schema_.arguments().size());
    arguments_.assign(arguments.begin(), arguments.end());
  }

  void Run() {
    PrepareTask();
    why_synchronous_ = WhySynchronous();
    if (why_synchronous_.empty() && NeedsMeta()) RunMeta();
    Count();
    std::vector<c10::IValue> results = why_synchronous_.empty() ? Queue() : RunAndWait();
    torch::jit::drop(*stack_, arguments_.size());
    for (c10::IValue& result : results) stack_->push_back(std::move(result));
  }

 private:
  // A result that the task computes: its place among all fresh result tensors, and where it goes.
  struct Target {
    size_t index;
    at::Tensor view;
  };

  void PrepareTask();
  c10::IValue TaskArgument(const c10::Argument& argument, const c10::IValue& value);
  std::string WhySynchronous() const;
  bool NeedsMeta() const;
  void RunMeta();
  void ResizeOutputs(const torch::jit::Stack& meta_arguments);
  void Count() const;
  std::vector<c10::IValue> Queue();
  std::vector<Target> AllocateResults(std::vector<c10::IValue>* results);
  std::vector<c10::IValue> RunAndWait();
  void TakeOverResizedOutputs(const torch::jit::Stack& task_arguments);
  void Uses(const at::Tensor& tensor, bool is_write) {
    work_.accesses.push_back(AccessTo(tensor, is_write));
    work_.nbytes += BytesOf(tensor);
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* const stack_;
  const StreamId stream_;
  std::vector<c10::IValue> arguments_;
  torch::jit::Stack task_arguments_;
  torch::jit::Stack meta_results_;
  std::string why_synchronous_;  // empty: the host need not wait
  Work work_;
};

void Call::PrepareTask() {
  work_.name = c10::toString(schema_.operator_name());
  for (const c10::Argument& result : schema_.returns()) {
    const bool is_view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    TORCH_CHECK(!is_view, "simdev: no kernel for ", work_.name, ", which returns a view");
  }
  for (size_t i = 0; i < arguments_.size(); ++i) {
    task_arguments_.push_back(TaskArgument(schema_.arguments()[i], arguments_[i]));
  }
  work_.flops = EstimateFlops(schema_.name(), arguments_);
}

c10::IValue Call::TaskArgument(const c10::Argument& argument, const c10::IValue& value) {
  if (TakesGenerator(argument)) {
    return GeneratorForTask(value.isNone() ? DefaultGenerator() : value.toGenerator());
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  return MapTensors(value, [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    // The host may change its tensor before the task runs.
    if (!tensor.is_privateuseone()) return tensor.clone();
    Uses(tensor, IsWrite(argument));
    return TaskView(tensor);
  });
}

std::string Call::WhySynchronous() const {
  if (!Device::Get().config().async_operators) return "asynchronous operators are off";
  if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) {
    return "its result depends on data";
  }
  for (const c10::Argument& result : schema_.returns()) {
    if (!IsTensorResult(result)) return "it returns something that is not a tensor";
  }
  return {};
}

bool Call::NeedsMeta() const {
  for (const c10::Argument& result : schema_.returns()) {
    if (result.alias_info() == nullptr) return true;
  }
  for (size_t i = 0; i < arguments_.size(); ++i) {
    // Structured operators come here as their out= variant with a result of the right size. Only
    // an empty one may still have to grow; asking the Meta kernel each time would cost a lot.
    if (!schema_.arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
    if (arguments_[i].toTensor().numel() == 0) return true;
  }
  return false;
}

void Call::RunMeta() {
  const auto to_meta = [](const at::Tensor& tensor) -> at::Tensor {
    const bool is_host_scalar = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0;
    if (!tensor.defined() || is_host_scalar) return tensor;
    const auto options =
        tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  };
  torch::jit::Stack stack;
  for (const c10::IValue& value : arguments_) {
    c10::IValue mapped = MapTensors(value, to_meta);
    if (mapped.isDevice()) mapped = c10::Device(at::kMeta);
    if (mapped.isGenerator()) mapped = c10::IValue();
    stack.push_back(std::move(mapped));
  }
  const torch::jit::Stack meta_arguments = stack;
  try {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    op_.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    why_synchronous_ = "it has no Meta kernel";
    return;
  } catch (const std::exception& e) {
    // Wrong arguments must be reported at once. The CPU kernel says it in its own words.
    why_synchronous_ = std::string("its Meta kernel failed: ") + e.what();
    return;
  }
  meta_results_ = std::move(stack);
  ResizeOutputs(meta_arguments);
}

void Call::ResizeOutputs(const torch::jit::Stack& meta_arguments) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!schema_.arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
    const at::Tensor out = arguments_[i].toTensor();
    if (!out.defined()) continue;
    const at::Tensor meta = meta_arguments[i].toTensor();
    if (out.sizes() == meta.sizes()) continue;
    at::native::resize_(out, meta.sizes(), std::nullopt);
    task_arguments_[i] = TaskView(out);
    Uses(out, true);
  }
}

void Call::Count() const {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  ++(why_synchronous_.empty() ? counts.asynchronous : counts.synchronous);
  if (!why_synchronous_.empty()) counts.why_synchronous[work_.name] = why_synchronous_;
}

std::vector<Call::Target> Call::AllocateResults(std::vector<c10::IValue>* results) {
  std::vector<Target> targets;
  size_t fresh_tensors = 0;
  for (size_t i = 0; i < schema_.returns().size(); ++i) {
    if (const auto aliased = AliasedArgument(schema_, schema_.returns()[i])) {
      results->push_back(arguments_[*aliased]);
      continue;
    }
    results->push_back(MapTensors(meta_results_[i], [&](const at::Tensor& meta) -> at::Tensor {
      const size_t index = fresh_tensors++;
      if (!meta.defined() || meta.is_cpu()) return meta;  // a scalar on the host
      at::Tensor result = EmptyOnDevice(meta.sizes(), meta.strides(), meta.scalar_type());
      Uses(result, true);
      targets.push_back({index, TaskView(result)});
      return result;
    }));
  }
  return targets;
}

std::vector<c10::IValue> Call::Queue() {
  std::vector<c10::IValue> results;
  std::vector<Target> targets = AllocateResults(&results);
  work_.body = [op = op_, stack = std::move(task_arguments_),
                targets = std::move(targets)]() mutable {
    InitThread();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    op.callBoxed(stack);
    std::vector<at::Tensor> computed;
    for (size_t i = 0; i < stack.size(); ++i) {
      if (op.schema().returns()[i].alias_info() != nullptr) continue;
      MapTensors(stack[i], [&](const at::Tensor& tensor) -> at::Tensor {
        computed.push_back(tensor);
        return tensor;
      });
    }
    for (const Target& target : targets) {
      const at::Tensor& from = computed.at(target.index);
      TORCH_CHECK(from.defined() && from.sizes() == target.view.sizes() &&
                      from.scalar_type() == target.view.scalar_type(),
                  "the CPU kernel and the Meta kernel disagree about result ", target.index);
      target.view.copy_(from);
    }
    stack.clear();
  };
  Device::Get().Enqueue(stream_, std::move(work_));
  return results;
}

std::vector<c10::IValue> Call::RunAndWait() {
  // Shared with the task: the results, or what was thrown instead.
  const auto stack = std::make_shared<torch::jit::Stack>(task_arguments_);
  const auto error = std::make_shared<std::exception_ptr>();
  work_.body = [op = op_, stack, error] {
    InitThread();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    try {
      op.callBoxed(*stack);
    } catch (...) {
      *error = std::current_exception();
    }
  };
  Device::Get().Enqueue(stream_, std::move(work_));
  Device::Get().SynchronizeStream(stream_, SyncReason::kOperator);
  if (*error) std::rethrow_exception(*error);

  TakeOverResizedOutputs(task_arguments_);
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < schema_.returns().size(); ++i) {
    if (const auto aliased = AliasedArgument(schema_, schema_.returns()[i])) {
      results.push_back(arguments_[*aliased]);
      continue;
    }
    results.push_back(MapTensors((*stack)[i], [](const at::Tensor& computed) -> at::Tensor {
      if (!computed.defined()) return computed;
      at::Tensor result =
          EmptyOnDevice(computed.sizes(), computed.strides(), computed.scalar_type());
      StoreOnDevice(computed, result);
      return result;
    }));
  }
  return results;
}

void Call::TakeOverResizedOutputs(const torch::jit::Stack& task_arguments) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!schema_.arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
    const at::Tensor out = arguments_[i].toTensor();
    const at::Tensor computed = task_arguments[i].toTensor();
    if (!out.defined() || !out.is_privateuseone() || out.sizes() == computed.sizes()) continue;
    at::native::resize_(out, computed.sizes(), std::nullopt);
    StoreOnDevice(computed, out);
  }
}

}  // namespace

void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).Run(); }

OperatorCounts GetOperatorCounts() {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  return counts;
}

void ResetOperatorCounts() {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  counts = OperatorCounts();
}

}  // namespace sim
