// Finds accesses to the same memory that nothing orders.
//
// Vector clocks in program order: everything is decided while tasks are queued, so the scheduler
// and time matter only to a program that asks how far the device is. Two accesses race when they
// overlap, at least one writes, and the later one's actor does not know the step of the earlier
// one. Knowledge flows from the host to a stream when something is queued, from a stream to a Mark
// when it is recorded, and from a Mark to whoever waits for it.
//
// Nothing here is locked: the caller serialises.
#ifndef SIMDEV_RUNTIME_RACE_DETECTOR_H_
#define SIMDEV_RUNTIME_RACE_DETECTOR_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/types.h"

namespace sim {

class RaceDetector {
 public:
  // Records the next step of `actor`, called `name` in reports, and compares its accesses with all
  // earlier ones.
  void Step(Actor actor, const std::string& name, const std::vector<Access>& accesses);

  // From now on `actor` knows what `clock` knows.
  void Learn(Actor actor, const VectorClock& clock) { clocks_[actor].Join(clock); }
  const VectorClock& Knowledge(Actor actor) const { return clocks_[actor]; }

  // Everything so far happened before everything from now on.
  void OrderAll();

  // Drops the history of a range: whoever reuses it is ordered by other means.
  void Forget(uintptr_t begin, uintptr_t end);

  // One line for each pair of steps that race, oldest first; at most kMaxReports are kept.
  std::vector<std::string> Reports() const;
  void ClearReports() { races_.clear(); }

  static constexpr size_t kMaxReports = 1000;

 private:
  using Name = std::shared_ptr<const std::string>;

  // One step's use of a range.
  struct Use {
    Actor actor;
    uint32_t step;
    Name name;
  };

  // What a range has seen since it was last written, that write included.
  struct History {
    uintptr_t end;
    std::vector<Use> last_write;  // none or one
    std::vector<Use> reads;       // at most one per actor
  };

  struct Race {
    std::string_view kind;
    Use first;
    Use second;
    uintptr_t begin;
    uint64_t nbytes;
  };

  // Cuts the history that contains `address` in two there.
  void SplitAt(uintptr_t address);
  void AddRead(const Access& access, const Use& use);
  void AddWrite(const Access& access, const Use& use);
  // Adds races between `use` and `earlier` to races_.
  void Compare(std::string_view kind, const std::vector<Use>& earlier, const Use& use,
               uintptr_t begin, uintptr_t end);

  std::array<VectorClock, kActors> clocks_{};
  std::map<uintptr_t, History> histories_;  // by begin; never overlapping
  std::vector<Race> races_;
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_RACE_DETECTOR_H_
