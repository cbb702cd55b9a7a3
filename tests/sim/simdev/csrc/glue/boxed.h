// Helpers for the boxed arguments and results of operators.
#ifndef SIMDEV_GLUE_BOXED_H_
#define SIMDEV_GLUE_BOXED_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace sim {

// `value` with `map` applied to each tensor in it; what holds no tensors comes back as it is.
template <typename Map>
c10::IValue MapTensors(const c10::IValue& value, Map map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (!value.isList()) return value;
  // A list of optional tensors, such as the indices of aten::index.
  c10::List<std::optional<at::Tensor>> mapped;
  bool has_tensor = false;
  for (const c10::IValue& element : value.toListRef()) {
    has_tensor |= element.isTensor();
    mapped.push_back(element.isTensor() ? std::optional<at::Tensor>(map(element.toTensor()))
                                        : std::nullopt);
  }
  return has_tensor ? c10::IValue(mapped) : value;
}

inline bool IsWrite(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// A generator or an optional one.
bool TakesGenerator(const c10::Argument& argument);

// A tensor or a list of tensors.
bool IsTensorResult(const c10::Argument& result);

// The index of the argument that is returned as `result`, as by in-place operators.
std::optional<size_t> AliasedArgument(const c10::FunctionSchema& schema,
                                      const c10::Argument& result);

// The floating-point operations of matrix products and attention; 0 for all others, which memory
// bounds.
double EstimateFlops(const std::string& name, const std::vector<c10::IValue>& arguments);

}  // namespace sim

#endif  // SIMDEV_GLUE_BOXED_H_
