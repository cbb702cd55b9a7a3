// The inside of a Queue: what its requests and its workers share, under one mutex.
//
// A request waits in a lane until a worker begins it, is handed out piece by piece, and is done
// when the last piece has ended. Queue and Request (queue.h) are its two faces; they know of forks,
// this does not. It lives as long as either of them or a worker does.
#ifndef OFFLOAD_CSRC_QUEUE_CORE_H_
#define OFFLOAD_CSRC_QUEUE_CORE_H_

#include <sys/types.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "file.h"
#include "queue.h"

namespace offload {

// Notifies when it is destroyed: declared before a lock, after that is let go. Who is woken earlier
// runs into the lock and sleeps again.
class Notices {
 public:
  Notices() = default;
  ~Notices() {
    if (one_ != nullptr) one_->notify_one();
    for (int i = 0; i < count_; ++i) all_[i]->notify_all();
  }
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;

  void ToOne(std::condition_variable* changed) { one_ = changed; }
  void ToAll(std::condition_variable* changed) { all_[count_++] = changed; }

 private:
  std::condition_variable* one_ = nullptr;
  std::array<std::condition_variable*, 3> all_{};
  int count_ = 0;
};

// All public functions may be called from any thread.
class QueueCore : public std::enable_shared_from_this<QueueCore> {
 public:
  QueueCore(std::shared_ptr<File> file, const Queue::Options& options);

  // As the functions of Queue and Request of these names; `request` is one of this queue.
  std::shared_ptr<Request> Submit(Transfer transfer, std::chrono::nanoseconds timeout);
  bool Wait(const Request& request, std::chrono::nanoseconds timeout);  // whether it is done
  bool Cancel(Request* request);
  void Promote(Request* request);
  Queue::Stats GetStats() const;

  // The body of a worker: serves requests until the queue is closing and all are handed out.
  void Serve();

  // Refuses further requests and lets the workers end. May be called again.
  void BeginClose();

  // Blocks until every request is done, for at most `timeout`; returns whether they are.
  bool WaitUntilIdle(std::chrono::nanoseconds timeout);

  const File& file() const { return *file_; }

 private:
  using Kind = Transfer::Kind;
  using Lane = std::deque<std::shared_ptr<Request>>;

  struct Piece {
    std::shared_ptr<Request> request;
    size_t begin;
    size_t nbytes;
  };

  struct Outcome {
    int error;
    int64_t elapsed_ns;
  };

  void Validate(const Transfer& transfer) const;
  clockid_t BeginWorker();
  void EndWorker(clockid_t clock);
  std::optional<Piece> NextPiece(bool may_nap);
  void Run(const Piece& piece);
  bool FinishPiece(const Piece& piece, const Outcome& outcome);
  void Complete(Request* request);
  static bool ChecksumMatches(const Request& request, size_t block_bytes);
  size_t Pieces(size_t nbytes) const;

  // The rest needs mutex_.
  Lane& LaneOf(const Request& request);
  std::shared_ptr<Request> RemoveFromLane(const Request* request);
  size_t& Waiting(Kind kind) { return waiting_[kind == Kind::kWrite ? 1 : 0]; }
  void LeaveWaiting(Kind kind, Notices* notices);
  void MarkDone(Request* request, Notices* notices);
  void WakeIfNeeded(Notices* notices);
  void Rest(std::unique_lock<std::mutex>* lock, int* naps);

  const std::shared_ptr<File> file_;
  const Queue::Options options_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable room_;
  std::condition_variable idle_;
  std::array<Lane, 3> lanes_;        // in order of service: urgent reads, reads, writes
  std::array<size_t, 2> waiting_{};  // reads and writes of which no piece has begun
  size_t unfinished_bytes_ = 0;      // of requests that are not done
  int sleeping_ = 0;                 // workers that wait for work, also the one that wakes up
  bool napping_ = false;             // one waits for work that is not counted among those
  bool one_wakes_up_ = false;        // it was notified and has not had the mutex yet
  bool closing_ = false;
  // The CPU clocks of the workers that run. Read when somebody asks: a worker that read its own
  // around each piece spent 8 % of its CPU time on that.
  std::vector<clockid_t> clocks_;
  Queue::Stats stats_;  // cpu_ns: of the workers that have ended
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_QUEUE_CORE_H_
