#include "queue.h"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "queue_core.h"

namespace offload {

Request::Request(std::shared_ptr<QueueCore> core, Transfer transfer)
    : core_(std::move(core)), nbytes_(transfer.slot->nbytes()), transfer_(std::move(transfer)) {}

bool Request::Done() const {
  owner_.Require("the request");
  return done_;
}

bool Request::Wait(std::chrono::nanoseconds timeout) const {
  owner_.Require("the request");
  if (!done_ && !core_->Wait(*this, timeout)) return false;
  if (error_ == 0) return true;
  const char* const verb = transfer_.kind == Transfer::Kind::kWrite ? "write of " : "read of ";
  std::string what = verb + std::to_string(nbytes_) + " bytes at offset " +
                     std::to_string(transfer_.offset) + " of " + core_->file().Describe();
  if (error_ == EBADMSG) what += ": the checksum does not match";
  throw std::system_error(error_, std::generic_category(), what);
}

bool Request::Cancel() {
  owner_.Require("the request");
  return core_->Cancel(this);
}

void Request::Promote() {
  owner_.Require("the request");
  core_->Promote(this);
}

Queue::Queue(std::shared_ptr<File> file, const Options& options) {
  if (options.threads < 1 || options.threads > 64) {
    throw std::invalid_argument("threads must be between 1 and 64");
  }
  if (options.block_bytes == 0 || options.block_bytes % kPageBytes != 0) {
    throw std::invalid_argument("block_bytes must be a positive multiple of 4096");
  }
  if (options.capacity < 1) throw std::invalid_argument("capacity must be at least 1");
  core_ = std::make_shared<QueueCore>(std::move(file), options);
  try {
    for (int i = 0; i < options.threads; ++i) {
      workers_.emplace_back("offload-io" + std::to_string(i), [core = core_] { core->Serve(); });
    }
  } catch (...) {
    core_->BeginClose();  // or the workers already started could not be joined
    throw;
  }
}

Queue::~Queue() {
  if (!owner_.IsCurrent()) return;  // [Note: fork]
  core_->BeginClose();
}

std::shared_ptr<Request> Queue::Submit(Transfer transfer, std::chrono::nanoseconds timeout) {
  owner_.Require("the queue");
  return core_->Submit(std::move(transfer), timeout);
}

bool Queue::Close(std::chrono::nanoseconds timeout) {
  owner_.Require("the queue");
  core_->BeginClose();
  if (!core_->WaitUntilIdle(timeout)) return false;
  workers_.clear();
  return true;
}

Queue::Stats Queue::GetStats() const {
  owner_.Require("the queue");
  return core_->GetStats();
}

}  // namespace offload
