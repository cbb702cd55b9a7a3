// What the engine needs from the process it runs in: threads, signals and the fork rule.
//
// [Note: fork]
// A forked child inherits the bytes of every object of its parent but none of the parent's threads.
// A mutex that one of those held stays locked for ever, and the slab is not even mapped
// (MADV_DONTFORK, see arena.h). So every object remembers the process that made it: in a child its
// calls throw before they take a lock, and its destructor neither locks, joins, unmaps nor closes.
// getpid() is a system call, and every call asks; so fork() leaves word in a variable of the child.
#ifndef OFFLOAD_CSRC_PROCESS_H_
#define OFFLOAD_CSRC_PROCESS_H_

#include <signal.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace offload {

// Remembers the process that made an object. Any thread may call it; it takes no lock.
class Owner {
 public:
  Owner() : pid_(CurrentPid()) {}

  // True in the process that made this object, false in a child forked from it.
  bool IsCurrent() const { return pid_ == CurrentPid(); }

  // Throws std::runtime_error, naming `what`, in a child forked from the owning process.
  void Require(const char* what) const;

 private:
  static pid_t CurrentPid();

  pid_t pid_;
};

// While it lives, growing a file past RLIMIT_FSIZE fails with EFBIG on the calling thread and
// nothing else: SIGXFSZ, which would end the process, is held back and thrown away. Destroy it on
// the thread that made it.
class FileSizeSignalBlock {
 public:
  FileSizeSignalBlock();
  ~FileSizeSignalBlock();
  FileSizeSignalBlock(const FileSizeSignalBlock&) = delete;
  FileSizeSignalBlock& operator=(const FileSizeSignalBlock&) = delete;

 private:
  sigset_t previous_;
};

// A named thread that takes no asynchronous signal (SIGXFSZ included) and is joined by its
// destructor, so its body must have been told to end by then. In a forked child the destructor
// abandons the handle instead.
class Thread {
 public:
  // `name` is what top and gdb show; the kernel keeps 15 characters. Throws std::system_error
  // (EAGAIN) when the process may start no more threads.
  Thread(const std::string& name, std::function<void()> body);
  ~Thread();
  Thread(Thread&&) = default;
  Thread& operator=(Thread&&) = delete;

 private:
  Owner owner_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_PROCESS_H_
