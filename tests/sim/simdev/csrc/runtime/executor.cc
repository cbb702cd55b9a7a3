#include "runtime/executor.h"

#include <chrono>
#include <stdexcept>
#include <utility>
#include <vector>

namespace sim {
namespace {

constexpr uint64_t kOdds = 8;

}  // namespace

void Executor::Push(Lock& lock, StreamId id, Task task) {
  Stream& stream = streams_[id];
  task.number = tasks_queued_++;
  stream.waiting.push_back(std::move(task));
  ++stream.queued;
  switch (scheduler_) {
    case Scheduler::kEager:
      Force(lock, id, stream.queued);
      break;
    case Scheduler::kThreads:
      if (!stream.worker.joinable()) {
        stream.worker = std::thread([this, &stream] { Serve(stream); });
      }
      stream.has_work.notify_one();
      break;
    case Scheduler::kLazy:
      break;
    case Scheduler::kRandom:
      RunSome(lock);
      break;
  }
}

void Executor::WaitFor(Lock& lock, StreamId id, uint64_t position) {
  if (scheduler_ == Scheduler::kThreads) {
    progress_.wait(lock, [&] { return streams_[id].done >= position; });
  } else {
    Force(lock, id, position);
  }
}

void Executor::Nudge(Lock& lock, StreamId id) {
  const Stream& stream = streams_[id];
  if (scheduler_ != Scheduler::kThreads && !stream.is_running && !stream.waiting.empty()) {
    Force(lock, id, stream.done + 1);
  }
}

void Executor::Drain(Lock& lock) {
  const auto is_busy = [](const Stream& stream) { return stream.done < stream.queued; };
  for (;;) {
    // Others may queue more while this thread waits, so begin again after each wait.
    const auto busy = std::find_if(streams_.begin(), streams_.end(), is_busy);
    if (busy == streams_.end()) return;
    WaitFor(lock, static_cast<StreamId>(busy - streams_.begin()), busy->queued);
  }
}

void Executor::Restart(Lock& lock, Scheduler scheduler, uint64_t seed) {
  Drain(lock);
  EndWorkers(lock);
  scheduler_ = scheduler;
  random_.seed(seed);
  progress_odds_ = random_() % kOdds;
}

void Executor::Serve(Stream& stream) {
  Lock lock(*mutex_);
  for (;;) {
    stream.has_work.wait(lock, [&] { return is_stopping_ || !stream.waiting.empty(); });
    if (stream.waiting.empty()) return;
    RunNext(lock, stream);
  }
}

void Executor::RunNext(Lock& lock, Stream& stream) {
  stream.is_running = true;
  Task task = std::move(stream.waiting.front());
  stream.waiting.pop_front();
  if (task.wait) {
    // Event waits never form a circle: each is for a task that was queued before the wait.
    if (scheduler_ != Scheduler::kThreads) Force(lock, task.wait->stream, task.wait->position);
    progress_.wait(lock, [&] { return task.wait->done.load(); });
  }
  RunBody(lock, task);
  if (task.on_done) task.on_done();
  if (task.signal) task.signal->done = true;
  stream.is_running = false;
  ++stream.done;
  ++tasks_run_;
  progress_.notify_all();
}

void Executor::RunBody(Lock& lock, Task& task) {
  if (!task.body) return;
  std::string error;
  lock.unlock();
  try {
    if (scheduler_ == Scheduler::kThreads && task.sleep_ns > 0) Sleep(task);
    if (task.fails) throw std::runtime_error("injected fault");
    task.body();
  } catch (const std::exception& e) {
    error = task.name + ": " + e.what();
  }
  task.body = nullptr;  // what it captured may take other locks when it goes
  lock.lock();
  if (error_.empty()) error_ = std::move(error);
}

void Executor::Sleep(const Task& task) {
  std::unique_lock<std::mutex> link;
  const bool is_d2h = task.kind == TaskKind::kD2H;
  if (is_d2h || task.kind == TaskKind::kH2D) link = std::unique_lock(links_[is_d2h]);
  std::this_thread::sleep_for(std::chrono::nanoseconds(task.sleep_ns));
}

void Executor::Force(Lock& lock, StreamId id, uint64_t position) {
  Stream& stream = streams_[id];
  while (stream.done < position) {
    if (stream.is_running) {
      progress_.wait(lock);  // another host thread is at it
    } else {
      RunNext(lock, stream);
    }
  }
}

void Executor::RunSome(Lock& lock) {
  while (random_() % kOdds < progress_odds_) {
    // By the age of their next task: the same choices, whichever streams the pool gave out.
    std::vector<Stream*> ready;
    for (Stream& stream : streams_) {
      if (!stream.is_running && !stream.waiting.empty()) ready.push_back(&stream);
    }
    if (ready.empty()) return;
    std::sort(ready.begin(), ready.end(), [](const Stream* a, const Stream* b) {
      return a->waiting.front().number < b->waiting.front().number;
    });
    RunNext(lock, *ready[random_() % ready.size()]);
  }
}

void Executor::EndWorkers(Lock& lock) {
  is_stopping_ = true;
  for (Stream& stream : streams_) stream.has_work.notify_all();
  lock.unlock();
  for (Stream& stream : streams_) {
    if (stream.worker.joinable()) stream.worker.join();
  }
  lock.lock();
  is_stopping_ = false;
}

}  // namespace sim
