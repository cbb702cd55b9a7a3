#include "glue/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <mutex>

#include "glue/tensors.h"

namespace sim {

SimGenerator::SimGenerator() : c10::GeneratorImpl(TorchDevice(), kKeys) {}

uint64_t SimGenerator::Draw() {  // splitmix64 of seed and offset
  uint64_t z = seed_ + 0x9E3779B97F4A7C15ull * ++offset_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void SimGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t SimGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void SimGenerator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "simdev: not a state of this generator");
  const auto* words = static_cast<const uint64_t*>(state.data());
  seed_ = words[0];
  offset_ = words[1];
}

c10::intrusive_ptr<c10::TensorImpl> SimGenerator::get_state() const {
  const at::Tensor state = at::empty({2 * sizeof(uint64_t)}, at::kByte);
  auto* words = static_cast<uint64_t*>(state.data_ptr());
  words[0] = seed_;
  words[1] = offset_;
  return state.getIntrusivePtr();
}

SimGenerator* SimGenerator::clone_impl() const {
  auto* clone = new SimGenerator;
  clone->seed_ = seed_;
  clone->offset_ = offset_;
  return clone;
}

at::Generator NewGenerator() { return at::Generator(c10::make_intrusive<SimGenerator>()); }

const at::Generator& DefaultGenerator() {
  static const auto* generator = new at::Generator(NewGenerator());
  return *generator;
}

at::Generator GeneratorForTask(at::Generator generator) {
  if (generator.device().type() != kDeviceType) return generator;
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* impl = static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl());
  return at::detail::createCPUGenerator(impl->Draw());
}

}  // namespace sim
