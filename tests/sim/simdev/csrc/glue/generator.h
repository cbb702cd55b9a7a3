// Random numbers: a counter-based generator, like those of GPUs.
//
// Each operator draws the seed of its own CPU generator when it is queued, so the state advances in
// program order and can be saved and restored while kernels are still waiting.
#ifndef SIMDEV_GLUE_GENERATOR_H_
#define SIMDEV_GLUE_GENERATOR_H_

#include <ATen/core/Generator.h>

namespace sim {

class SimGenerator final : public c10::GeneratorImpl {
 public:
  SimGenerator();

  // The seed for one operator. The caller holds the generator's mutex.
  uint64_t Draw();

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  SimGenerator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;  // draws so far
};

at::Generator NewGenerator();

// Lives as long as the process.
const at::Generator& DefaultGenerator();

// A CPU generator for one operator, seeded by the next draw from `generator`; a generator of
// another device is returned as it is.
at::Generator GeneratorForTask(at::Generator generator);

}  // namespace sim

#endif  // SIMDEV_GLUE_GENERATOR_H_
