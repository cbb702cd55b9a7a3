#include "runtime/race_detector.h"

#include <iterator>
#include <sstream>
#include <utility>

namespace sim {
namespace {

std::string Describe(const std::string& name, Actor actor) {
  const std::string place = actor < kStreams ? "stream " + std::to_string(actor) : "the host";
  return "'" + name + "' on " + place;
}

}  // namespace

void RaceDetector::Step(Actor actor, const std::string& name, const std::vector<Access>& accesses) {
  clocks_[actor].Tick(actor);
  const Use use{actor, clocks_[actor][actor], std::make_shared<const std::string>(name)};
  for (const Access& access : accesses) {
    if (access.begin >= access.end) continue;
    SplitAt(access.begin);
    SplitAt(access.end);
    access.is_write ? AddWrite(access, use) : AddRead(access, use);
  }
}

void RaceDetector::OrderAll() {
  VectorClock all;
  for (const VectorClock& clock : clocks_) all.Join(clock);
  clocks_.fill(all);
  histories_.clear();
}

void RaceDetector::Forget(uintptr_t begin, uintptr_t end) {
  SplitAt(begin);
  SplitAt(end);
  histories_.erase(histories_.lower_bound(begin), histories_.lower_bound(end));
}

std::vector<std::string> RaceDetector::Reports() const {
  std::vector<std::string> lines;
  for (const Race& race : races_) {
    std::ostringstream line;
    line << race.kind << ": " << Describe(*race.second.name, race.second.actor)
         << " is not ordered after " << Describe(*race.first.name, race.first.actor) << " ("
         << race.nbytes << " bytes at 0x" << std::hex << race.begin << ")";
    lines.push_back(line.str());
  }
  return lines;
}

void RaceDetector::SplitAt(uintptr_t address) {
  auto after = histories_.upper_bound(address);
  if (after == histories_.begin()) return;
  auto& [begin, history] = *std::prev(after);
  if (begin == address || history.end <= address) return;
  History right = history;
  history.end = address;
  histories_.emplace_hint(after, address, std::move(right));
}

void RaceDetector::AddRead(const Access& access, const Use& use) {
  uintptr_t at = access.begin;
  for (auto next = histories_.lower_bound(at); at < access.end; ++next) {
    const bool is_gap = next == histories_.end() || next->first > at;
    if (is_gap) {
      const uintptr_t end =
          next == histories_.end() ? access.end : std::min(access.end, next->first);
      next = histories_.emplace_hint(next, at, History{end, {}, {}});
    }
    History& history = next->second;
    Compare("read after write", history.last_write, use, at, history.end);
    const auto same = std::find_if(history.reads.begin(), history.reads.end(),
                                   [&](const Use& read) { return read.actor == use.actor; });
    if (same == history.reads.end()) {
      history.reads.push_back(use);
    } else {
      *same = use;
    }
    at = history.end;
  }
}

void RaceDetector::AddWrite(const Access& access, const Use& use) {
  const auto first = histories_.lower_bound(access.begin);
  const auto last = histories_.lower_bound(access.end);
  for (auto next = first; next != last; ++next) {
    const auto& [begin, history] = *next;
    Compare("write after write", history.last_write, use, begin, history.end);
    Compare("write after read", history.reads, use, begin, history.end);
  }
  histories_.erase(first, last);
  histories_.emplace(access.begin, History{access.end, {use}, {}});
}

void RaceDetector::Compare(std::string_view kind, const std::vector<Use>& earlier, const Use& use,
                           uintptr_t begin, uintptr_t end) {
  for (const Use& other : earlier) {
    if (other.actor == use.actor || other.step <= clocks_[use.actor][other.actor]) continue;
    // Neighbouring ranges often tell of the same pair of steps: one report will do.
    const auto known = std::find_if(races_.begin(), races_.end(), [&](const Race& race) {
      return race.kind == kind && race.first.name == other.name && race.second.name == use.name;
    });
    if (known != races_.end()) {
      known->nbytes += end - begin;
    } else if (races_.size() < kMaxReports) {
      races_.push_back({kind, other, use, begin, end - begin});
    }
  }
}

}  // namespace sim
