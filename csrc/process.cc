#include "process.h"

#include <pthread.h>

#include <atomic>
#include <ctime>
#include <stdexcept>
#include <utility>

namespace offload {
namespace {

sigset_t FileSizeSignal() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGXFSZ);
  return signals;
}

// Everything but what a fault of the thread itself raises: blocking those would hide a crash from
// its handler.
sigset_t AsynchronousSignals() {
  sigset_t signals;
  sigfillset(&signals);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) {
    sigdelset(&signals, fault);
  }
  return signals;
}

// A new thread inherits the mask of its creator: blocking here, not in the body, leaves no moment
// in which the thread could be chosen to run a handler.
class InheritedMask {
 public:
  InheritedMask() {
    const sigset_t signals = AsynchronousSignals();
    pthread_sigmask(SIG_BLOCK, &signals, &previous_);
  }
  ~InheritedMask() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  InheritedMask(const InheritedMask&) = delete;
  InheritedMask& operator=(const InheritedMask&) = delete;

 private:
  sigset_t previous_;
};

std::atomic<pid_t> current_pid{0};

void NotePid() { current_pid = getpid(); }

std::unique_ptr<std::thread> StartMasked(std::function<void()> body) {
  const InheritedMask mask;
  return std::make_unique<std::thread>(std::move(body));
}

}  // namespace

pid_t Owner::CurrentPid() {
  static const int registered = [] {
    NotePid();
    return pthread_atfork(nullptr, nullptr, &NotePid);
  }();
  return registered == 0 ? current_pid.load(std::memory_order_relaxed) : getpid();
}

void Owner::Require(const char* what) const {
  if (IsCurrent()) return;
  throw std::runtime_error(std::string(what) + " belongs to process " + std::to_string(pid_) +
                           " and cannot be used in its forked child; create a new one there");
}

FileSizeSignalBlock::FileSizeSignalBlock() {
  const sigset_t signals = FileSizeSignal();
  pthread_sigmask(SIG_BLOCK, &signals, &previous_);
}

FileSizeSignalBlock::~FileSizeSignalBlock() {
  // Where the caller had blocked it already, a pending one may be his: leave it.
  if (sigismember(&previous_, SIGXFSZ) == 0) {
    const sigset_t signals = FileSizeSignal();
    const timespec no_wait{};
    while (sigtimedwait(&signals, nullptr, &no_wait) > 0) {
    }
  }
  pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
}

Thread::Thread(const std::string& name, std::function<void()> body)
    : thread_(StartMasked(std::move(body))) {
  pthread_setname_np(thread_->native_handle(), name.substr(0, 15).c_str());
}

Thread::~Thread() {
  if (!thread_) return;  // moved from
  if (!owner_.IsCurrent()) {
    // [Note: fork] The thread does not exist here, so its handle can be neither joined nor
    // detached.
    static_cast<void>(thread_.release());
    return;
  }
  thread_->join();
}

}  // namespace offload
