// Streams of tasks, and the four ways to run them.
//
// A stream runs its tasks one after the other, in the order in which they were queued. Whatever a
// scheduler does beyond that is what real hardware may do, too.
//
// All functions take the lock on the device's mutex. They release it while the body of a task runs
// and while they wait, and hold it again when they return.
#ifndef SIMDEV_RUNTIME_EXECUTOR_H_
#define SIMDEV_RUNTIME_EXECUTOR_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "runtime/config.h"
#include "runtime/types.h"

namespace sim {

using Lock = std::unique_lock<std::mutex>;

struct Task {
  std::string name;
  TaskKind kind = TaskKind::kInternal;
  std::function<void()> body;     // without the lock; what it throws becomes the device's error
  std::function<void()> on_done;  // with the lock, whether or not the body failed
  int64_t sleep_ns = 0;           // kThreads: before the body runs
  MarkPtr wait;                   // must be done first
  MarkPtr signal;                 // done with this task
  bool fails = false;             // an injected fault: instead of the body
  uint64_t number = 0;            // set by Push: how many were queued before, on all streams
};

class Executor {
 public:
  explicit Executor(std::mutex* mutex) : mutex_(mutex) {}

  // Queues `task` at the end of `stream`. Runs tasks, of any stream, as the scheduler wants.
  void Push(Lock& lock, StreamId stream, Task task);

  // Returns when the first `position` tasks of `stream` are done.
  void WaitFor(Lock& lock, StreamId stream, uint64_t position);

  // For who polls: runs one task of `stream` if nothing else would ever run it.
  void Nudge(Lock& lock, StreamId stream);

  // Returns at a moment at which no stream has anything left to do.
  void Drain(Lock& lock);

  // Drains, ends the threads and goes on with another scheduler.
  void Restart(Lock& lock, Scheduler scheduler, uint64_t seed);

  // How many tasks of `stream` were queued so far, and how many of them are done.
  uint64_t Queued(StreamId stream) const { return streams_[stream].queued; }
  uint64_t Done(StreamId stream) const { return streams_[stream].done; }
  uint64_t tasks_run() const { return tasks_run_; }

  // What the first task that failed since the last call threw; empty if none did.
  std::string TakeError() { return std::exchange(error_, {}); }

 private:
  struct Stream {
    std::deque<Task> waiting;
    uint64_t queued = 0;
    uint64_t done = 0;
    bool is_running = false;  // a task of it, on whatever thread
    std::thread worker;       // kThreads: started by the first task
    std::condition_variable has_work;
  };

  // Body of a worker.
  void Serve(Stream& stream);
  // Takes the first waiting task, runs it when what it waits for is done, and marks it done.
  void RunNext(Lock& lock, Stream& stream);
  void RunBody(Lock& lock, Task& task);
  void Sleep(const Task& task);
  // Not kThreads: runs the first `position` tasks of `stream` on this thread.
  void Force(Lock& lock, StreamId stream, uint64_t position);
  void RunSome(Lock& lock);
  void EndWorkers(Lock& lock);

  std::mutex* const mutex_;
  std::condition_variable progress_;  // a task is done
  std::array<Stream, kStreams> streams_;
  Scheduler scheduler_ = Scheduler::kEager;
  std::mt19937_64 random_;
  uint64_t progress_odds_ = 0;  // kRandom: drawn with each seed, as no one pace finds all
  bool is_stopping_ = false;
  uint64_t tasks_queued_ = 0;
  uint64_t tasks_run_ = 0;
  std::string error_;
  std::array<std::mutex, 2> links_;  // held while a copy sleeps: H2D, D2H
};

}  // namespace sim

#endif  // SIMDEV_RUNTIME_EXECUTOR_H_
