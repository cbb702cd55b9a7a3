// The scratch file: a nameless file that bypasses the page cache where the file system allows it.
//
// Nothing of it survives the process, not even kill -9: it is opened with O_TMPFILE or unlinked at
// once. Read and Write may be called from any number of threads at once, on ranges that do not
// overlap. Functions returning `int` return 0 or an errno value; others throw std::system_error.
#ifndef OFFLOAD_CSRC_FILE_H_
#define OFFLOAD_CSRC_FILE_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "process.h"

namespace offload {

// The system calls that move data, with the results and errno of the calls they are named after.
// Tests derive from it to make a disk slow, short or broken. Called from several threads at once.
class Io {
 public:
  virtual ~Io() = default;
  virtual ssize_t Pread(int fd, void* data, size_t nbytes, off_t offset);
  virtual ssize_t Pwrite(int fd, const void* data, size_t nbytes, off_t offset);
  virtual int Fallocate(int fd, off_t offset, off_t nbytes);
};

class File {
 public:
  // Creates the file in `directory`. With `direct` it bypasses the page cache if the file system
  // can; tmpfs and the like are used through the cache. Throws std::system_error (ENOENT, EACCES,
  // ENOTDIR, EROFS, ENOSPC, ...).
  File(std::string directory, bool direct, std::shared_ptr<Io> io = std::make_shared<Io>());
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Moves all `nbytes` at `offset`, however many calls that takes: interrupted calls are repeated
  // and short ones continued. Direct: address, offset and size must be multiples of
  // alignment_bytes. Reading past the end is EIO: those bytes were never written.
  int Read(void* data, size_t nbytes, uint64_t offset) const;
  int Write(const void* data, size_t nbytes, uint64_t offset) const;

  // Gives [allocated_bytes, end_bytes) its disk space, so that later writes there cannot fail for
  // want of it. Does nothing when `end_bytes` is not beyond allocated_bytes, and on file systems
  // without fallocate merely notes the new end. Throws std::system_error (ENOSPC, EFBIG, EIO, ...);
  // what a failed call had taken is given back. Nothing may be written beyond allocated_bytes
  // meanwhile. One call at a time; reads and writes of reserved space may run.
  void Reserve(uint64_t end_bytes);

  // Multiple that offsets must have, and that sizes are rounded up to: a page when direct, else 1.
  // The device may allow 512, but a file system takes a lock and zeroes when part of one of its
  // blocks is written.
  size_t alignment_bytes() const { return direct_ ? kDirectAlignmentBytes : 1; }
  bool is_direct() const { return direct_; }
  // The end of the space reserved so far.
  uint64_t allocated_bytes() const { return allocated_bytes_; }
  // "the scratch file in DIRECTORY", for error messages.
  std::string Describe() const { return "the scratch file in " + directory_; }
  const Owner& owner() const { return owner_; }

 private:
  static constexpr size_t kDirectAlignmentBytes = 4096;

  void TurnOnDirect();

  Owner owner_;
  std::string directory_;
  std::shared_ptr<Io> io_;
  int fd_ = -1;
  bool direct_ = false;
  std::atomic<uint64_t> allocated_bytes_{0};
};

}  // namespace offload

#endif  // OFFLOAD_CSRC_FILE_H_
