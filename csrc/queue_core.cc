#include "queue_core.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "checksum.h"

namespace offload {
namespace {

int64_t ClockNs(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// wait_for adds the timeout to the clock, which must not overflow.
constexpr std::chrono::nanoseconds kLongestWait = std::chrono::hours(24 * 365);

// [Note: wake-ups]
// Waking a thread costs the one that wakes it more than all else that Submit does, and that one is
// busy training. So a sleeping worker is woken only if it is needed: while another is on its way,
// that one wakes the next if it finds more than it can do; and while those that are awake have no
// more than this much to do for each of them, they come to it soon. Who waits already, for an
// urgent read or in Wait, does not wait for that.
constexpr size_t kBytesPerWorker = size_t{128} << 10;

// Awake is also who naps: the worker that was the last to find nothing to do looks again by itself,
// this often, before it sleeps. Small requests that come one by one need not wake anybody then. So
// nobody naps after a large piece: each time it looks a thread that computes loses its processor
// (measured: 700 of 1200 switches in a training step, for 1-2 % of its time).
constexpr std::chrono::microseconds kNap{200};
constexpr int kNaps = 5;

}  // namespace

QueueCore::QueueCore(std::shared_ptr<File> file, const Queue::Options& options)
    : file_(std::move(file)), options_(options) {}

// -- requests -------------------------------------------------------------------------------------

std::shared_ptr<Request> QueueCore::Submit(Transfer transfer, std::chrono::nanoseconds timeout) {
  Validate(transfer);
  const Kind kind = transfer.kind;
  Notices notices;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto decided = [&] { return closing_ || Waiting(kind) < options_.capacity; };
  if (!decided()) {
    if (timeout == timeout.zero()) return nullptr;  // without the system calls of a wait
    if (!room_.wait_for(lock, std::min(timeout, kLongestWait), decided)) return nullptr;
  }
  if (closing_) throw std::invalid_argument("the queue is closed");
  const auto request = std::make_shared<Request>(shared_from_this(), std::move(transfer));
  request->total_bytes_ = RoundUp(request->nbytes_, file_->alignment_bytes());
  if (request->transfer_.crc) request->piece_crcs_.resize(Pieces(request->total_bytes_));
  ++Waiting(kind);
  stats_.peak_depth = std::max(stats_.peak_depth, ++stats_.depth);
  unfinished_bytes_ += request->total_bytes_;
  LaneOf(*request).push_back(request);
  WakeIfNeeded(&notices);
  return request;
}

void QueueCore::Validate(const Transfer& transfer) const {
  const size_t alignment = file_->alignment_bytes();
  if (transfer.offset % alignment != 0) {
    throw std::invalid_argument("offset " + std::to_string(transfer.offset) +
                                " is not a multiple of " + std::to_string(alignment) +
                                ", which direct I/O needs");
  }
  constexpr uint64_t kLargestOffset = std::numeric_limits<off_t>::max();
  if (transfer.offset > kLargestOffset - RoundUp(transfer.slot->nbytes(), kPageBytes)) {
    throw std::invalid_argument("offset " + std::to_string(transfer.offset) + " is too large");
  }
}

bool QueueCore::Wait(const Request& request, std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool is_waiting = !request.done_ && request.handed_bytes_ == 0;
  if (is_waiting && napping_) work_.notify_one();  // [Note: wake-ups]
  return request.done_changed_.wait_for(lock, std::min(timeout, kLongestWait),
                                        [&] { return request.done_.load(); });
}

bool QueueCore::Cancel(Request* request) {
  std::shared_ptr<Slot> freed_after_unlock;
  Notices notices;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (request->done_ || request->handed_bytes_ > 0) return false;
  RemoveFromLane(request);
  LeaveWaiting(request->transfer_.kind, &notices);
  request->error_ = ECANCELED;
  freed_after_unlock = std::move(request->transfer_.slot);
  MarkDone(request, &notices);
  return true;
}

void QueueCore::Promote(Request* request) {
  Notices notices;
  const std::lock_guard<std::mutex> lock(mutex_);
  Transfer& transfer = request->transfer_;
  if (transfer.kind != Kind::kRead || transfer.urgent) return;
  if (request->handed_bytes_ == request->total_bytes_ || request->done_) return;
  std::shared_ptr<Request> moved = RemoveFromLane(request);
  transfer.urgent = true;
  LaneOf(*request).push_back(std::move(moved));
  WakeIfNeeded(&notices);
}

void QueueCore::BeginClose() {
  Notices notices;
  const std::lock_guard<std::mutex> lock(mutex_);
  closing_ = true;
  notices.ToAll(&work_);
  notices.ToAll(&room_);
}

bool QueueCore::WaitUntilIdle(std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, std::min(timeout, kLongestWait),
                        [this] { return stats_.depth == 0; });
}

Queue::Stats QueueCore::GetStats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Queue::Stats stats = stats_;
  for (const clockid_t clock : clocks_) stats.cpu_ns += ClockNs(clock);
  return stats;
}

size_t QueueCore::Pieces(size_t nbytes) const {
  return (nbytes + options_.block_bytes - 1) / options_.block_bytes;
}

QueueCore::Lane& QueueCore::LaneOf(const Request& request) {
  if (request.transfer_.kind == Kind::kWrite) return lanes_[2];
  return lanes_[request.transfer_.urgent ? 0 : 1];
}

std::shared_ptr<Request> QueueCore::RemoveFromLane(const Request* request) {
  Lane& lane = LaneOf(*request);
  const auto place = std::find_if(lane.begin(), lane.end(),
                                  [&](const auto& other) { return other.get() == request; });
  std::shared_ptr<Request> removed = std::move(*place);
  lane.erase(place);
  return removed;
}

void QueueCore::LeaveWaiting(Kind kind, Notices* notices) {
  --Waiting(kind);
  notices->ToAll(&room_);  // reads and writes wait on the same condition
}

// The request must outlive the notices.
void QueueCore::MarkDone(Request* request, Notices* notices) {
  request->done_ = true;
  unfinished_bytes_ -= request->total_bytes_;
  notices->ToAll(&request->done_changed_);
  if (--stats_.depth == 0) notices->ToAll(&idle_);
}

// [Note: wake-ups] Called whenever something waits that did not before, or more urgently.
void QueueCore::WakeIfNeeded(Notices* notices) {
  if ((sleeping_ == 0 && !napping_) || one_wakes_up_) return;
  const int awake = options_.threads - sleeping_;
  if (lanes_[0].empty() && unfinished_bytes_ <= awake * kBytesPerWorker) return;
  one_wakes_up_ = true;
  notices->ToOne(&work_);
}

// -- workers --------------------------------------------------------------------------------------

void QueueCore::Serve() {
  const clockid_t clock = BeginWorker();
  bool may_nap = false;
  while (const std::optional<Piece> piece = NextPiece(may_nap)) {
    Run(*piece);
    may_nap = piece->nbytes <= kBytesPerWorker;
  }
  EndWorker(clock);
}

clockid_t QueueCore::BeginWorker() {
  clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
  pthread_getcpuclockid(pthread_self(), &clock);
  const std::lock_guard<std::mutex> lock(mutex_);
  clocks_.push_back(clock);
  return clock;
}

void QueueCore::EndWorker(clockid_t clock) {
  const std::lock_guard<std::mutex> lock(mutex_);
  clocks_.erase(std::find(clocks_.begin(), clocks_.end(), clock));
  stats_.cpu_ns += ClockNs(clock);
}

std::optional<QueueCore::Piece> QueueCore::NextPiece(bool may_nap) {
  Notices notices;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto first_busy = [this] {
    return std::find_if(lanes_.begin(), lanes_.end(),
                        [](const Lane& lane) { return !lane.empty(); });
  };
  int naps = may_nap ? kNaps : 0;
  while (!closing_ && first_busy() == lanes_.end()) Rest(&lock, &naps);
  const auto lane = first_busy();
  if (lane == lanes_.end()) return std::nullopt;  // closing, and all is handed out

  const std::shared_ptr<Request> request = lane->front();
  if (request->handed_bytes_ == 0) {
    request->start_ns_ = ClockNs(CLOCK_MONOTONIC);
    LeaveWaiting(request->transfer_.kind, &notices);
  }
  const size_t begin = request->handed_bytes_;
  const size_t nbytes = std::min(options_.block_bytes, request->total_bytes_ - begin);
  request->handed_bytes_ += nbytes;
  ++request->pieces_in_flight_;
  if (request->handed_bytes_ == request->total_bytes_) lane->pop_front();
  if (first_busy() != lanes_.end()) WakeIfNeeded(&notices);
  return Piece{request, begin, nbytes};
}

// [Note: wake-ups] Waits for work, napping as often as is left.
void QueueCore::Rest(std::unique_lock<std::mutex>* lock, int* naps) {
  if (!napping_ && *naps > 0) {
    --*naps;
    napping_ = true;
    work_.wait_for(*lock, kNap);
    napping_ = false;
  } else {
    ++sleeping_;
    work_.wait(*lock);
    --sleeping_;
  }
  one_wakes_up_ = false;
}

void QueueCore::Run(const Piece& piece) {
  Request* const request = piece.request.get();
  const Transfer& transfer = request->transfer_;
  std::byte* const data = transfer.slot->data() + piece.begin;
  const uint64_t offset = transfer.offset + piece.begin;

  const int64_t start_ns = ClockNs(CLOCK_MONOTONIC);
  Outcome outcome{};
  if (transfer.kind == Kind::kWrite) {
    outcome.error = file_->Write(data, piece.nbytes, offset);
  } else {
    outcome.error = file_->Read(data, piece.nbytes, offset);
    if (outcome.error == 0 && transfer.crc) {
      const size_t checked_bytes = std::min(piece.nbytes, request->nbytes_ - piece.begin);
      request->piece_crcs_[piece.begin / options_.block_bytes] = Crc32c(0, data, checked_bytes);
    }
  }
  outcome.elapsed_ns = ClockNs(CLOCK_MONOTONIC) - start_ns;
  if (FinishPiece(piece, outcome)) Complete(request);
}

// Returns whether it was the last piece of its request.
bool QueueCore::FinishPiece(const Piece& piece, const Outcome& outcome) {
  Request* const request = piece.request.get();
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_write = request->transfer_.kind == Kind::kWrite;
  (is_write ? stats_.write_ns : stats_.read_ns) += outcome.elapsed_ns;
  if (outcome.error == 0) {
    (is_write ? stats_.written_bytes : stats_.read_bytes) += piece.nbytes;
  } else if (request->error_ == 0) {
    request->error_ = outcome.error;
  }
  --request->pieces_in_flight_;
  if (request->error_ != 0 && request->handed_bytes_ < request->total_bytes_) {
    // The pieces that nobody has begun would only repeat the failure.
    RemoveFromLane(request);
    request->handed_bytes_ = request->total_bytes_;
  }
  return request->pieces_in_flight_ == 0 && request->handed_bytes_ == request->total_bytes_;
}

void QueueCore::Complete(Request* request) {
  const bool mismatch = request->error_ == 0 && request->transfer_.crc &&
                        !ChecksumMatches(*request, options_.block_bytes);
  // Given back before anyone can see that it is done: who waited finds the room.
  request->transfer_.slot.reset();

  Notices notices;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mismatch) request->error_ = EBADMSG;
  if (request->error_ == 0) {
    ++(request->transfer_.kind == Kind::kWrite ? stats_.writes : stats_.reads);
  }
  request->end_ns_ = ClockNs(CLOCK_MONOTONIC);
  MarkDone(request, &notices);
}

bool QueueCore::ChecksumMatches(const Request& request, size_t block_bytes) {
  uint32_t crc = 0;
  size_t begin = 0;
  for (const uint32_t piece_crc : request.piece_crcs_) {
    const size_t piece_bytes = std::min(block_bytes, request.nbytes_ - begin);
    crc = Crc32cCombine(crc, piece_crc, piece_bytes);
    begin += piece_bytes;
  }
  return request.transfer_.crc == crc;
}

}  // namespace offload
