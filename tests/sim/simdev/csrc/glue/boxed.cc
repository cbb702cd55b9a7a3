#include "glue/boxed.h"

namespace sim {

bool TakesGenerator(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

bool IsTensorResult(const c10::Argument& result) {
  c10::TypePtr type = result.real_type();
  if (const auto list = type->cast<c10::ListType>()) type = list->getElementType();
  return type->kind() == c10::TypeKind::TensorType;
}

std::optional<size_t> AliasedArgument(const c10::FunctionSchema& schema,
                                      const c10::Argument& result) {
  if (result.alias_info() == nullptr) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (!IsWrite(argument)) continue;
    if (argument.alias_info()->beforeSets() == result.alias_info()->beforeSets()) return i;
  }
  return std::nullopt;
}

double EstimateFlops(const std::string& name, const std::vector<c10::IValue>& arguments) {
  const auto product = [&](size_t left, size_t right) {
    const at::Tensor& matrix = arguments[right].toTensor();
    return 2.0 * static_cast<double>(arguments[left].toTensor().numel()) *
           static_cast<double>(matrix.size(-1));
  };
  if (name == "aten::mm" || name == "aten::bmm") return product(0, 1);
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(1, 2);
  if (name.find("scaled_dot_product_flash") != std::string::npos) {
    const bool is_backward = name.find("backward") != std::string::npos;
    // Forward: query, key, ...; backward: gradient, query, key, ...
    const at::Tensor& query = arguments[is_backward ? 1 : 0].toTensor();
    const at::Tensor& key = arguments[is_backward ? 2 : 1].toTensor();
    const double forward =
        4.0 * static_cast<double>(query.numel()) * static_cast<double>(key.size(-2));
    return is_backward ? 2.5 * forward : forward;  // five products instead of two
  }
  return 0;
}

}  // namespace sim
