#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>
#include <utility>

namespace offload {
namespace {

constexpr int64_t kTmpfsMagic = 0x01021994;  // linux/magic.h

[[noreturn]] void ThrowErrno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

int OpenNameless(const std::string& directory) {
  const int fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  // NFS, FUSE and others know no nameless files; kernels that know the flag say EOPNOTSUPP then.
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
  std::string path = directory + "/.offload-XXXXXX";
  const int named = mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) unlink(path.c_str());
  return named;
}

// What statx says about direct I/O: the alignment it needs, 0 for impossible, -1 for not told.
int64_t DirectAlignment([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN  // Linux 6.1
  struct statx info = {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0) {
    return std::max(info.stx_dio_mem_align, info.stx_dio_offset_align);
  }
#endif
  return -1;
}

bool IsTmpfs(int fd) {
  struct statfs info = {};
  return fstatfs(fd, &info) == 0 && info.f_type == kTmpfsMagic;
}

// Writes one page directly, and removes it again.
bool TrialSucceeds(int fd) {
  alignas(4096) static constexpr char kPage[4096] = {};
  const bool written = pwrite(fd, kPage, sizeof(kPage), 0) == static_cast<ssize_t>(sizeof(kPage));
  return ftruncate(fd, 0) == 0 && written;
}

// Calls `move(done)` until `nbytes` are moved. Direct I/O goes on from a multiple of `alignment`
// only, so what a short call moved beyond one is moved again.
template <typename Move>
int MoveAll(size_t nbytes, size_t alignment, Move move) {
  constexpr int kMaxIdleCalls = 100;  // a device that moves less than a block each time is broken
  int idle_calls = 0;
  for (size_t done = 0; done < nbytes;) {
    const ssize_t moved = move(done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;  // end of file, or a disk that takes nothing and says no error
    const auto count = static_cast<size_t>(moved);
    const size_t usable = done + count == nbytes ? count : count / alignment * alignment;
    done += usable;
    idle_calls = usable == 0 ? idle_calls + 1 : 0;
    if (idle_calls == kMaxIdleCalls) return EIO;
  }
  return 0;
}

}  // namespace

ssize_t Io::Pread(int fd, void* data, size_t nbytes, off_t offset) {
  return pread(fd, data, nbytes, offset);
}

ssize_t Io::Pwrite(int fd, const void* data, size_t nbytes, off_t offset) {
  return pwrite(fd, data, nbytes, offset);
}

int Io::Fallocate(int fd, off_t offset, off_t nbytes) { return fallocate(fd, 0, offset, nbytes); }

File::File(std::string directory, bool direct, std::shared_ptr<Io> io)
    : directory_(std::move(directory)), io_(std::move(io)) {
  fd_ = OpenNameless(directory_);
  if (fd_ < 0) ThrowErrno(errno, "cannot create a scratch file in " + directory_);
  if (direct) TurnOnDirect();
}

File::~File() {
  // In a forked child the number may name another file by now.
  if (owner_.IsCurrent()) close(fd_);
}

void File::TurnOnDirect() {
  // tmpfs accepts the flag since Linux 6.6 and copies through the page cache all the same.
  if (IsTmpfs(fd_)) return;
  const int64_t alignment = DirectAlignment(fd_);
  if (alignment == 0 || alignment > static_cast<int64_t>(kDirectAlignmentBytes)) return;
  const int flags = fcntl(fd_, F_GETFL);
  if (flags < 0 || fcntl(fd_, F_SETFL, flags | O_DIRECT) != 0) return;
  // Some file systems accept the flag and fail the first write.
  if (alignment > 0 || TrialSucceeds(fd_)) {
    direct_ = true;
  } else {
    fcntl(fd_, F_SETFL, flags);
  }
}

int File::Read(void* data, size_t nbytes, uint64_t offset) const {
  return MoveAll(nbytes, alignment_bytes(), [&](size_t done) {
    return io_->Pread(fd_, static_cast<std::byte*>(data) + done, nbytes - done,
                      static_cast<off_t>(offset + done));
  });
}

int File::Write(const void* data, size_t nbytes, uint64_t offset) const {
  return MoveAll(nbytes, alignment_bytes(), [&](size_t done) {
    return io_->Pwrite(fd_, static_cast<const std::byte*>(data) + done, nbytes - done,
                       static_cast<off_t>(offset + done));
  });
}

void File::Reserve(uint64_t end_bytes) {
  owner_.Require("the scratch file");
  const uint64_t begin_bytes = allocated_bytes_;
  if (end_bytes <= begin_bytes) return;
  struct stat before = {};
  if (fstat(fd_, &before) != 0) ThrowErrno(errno, "cannot stat " + Describe());
  int error = 0;
  {
    const FileSizeSignalBlock no_signal;
    do {
      error = io_->Fallocate(fd_, static_cast<off_t>(begin_bytes),
                             static_cast<off_t>(end_bytes - begin_bytes)) == 0
                  ? 0
                  : errno;
    } while (error == EINTR);
  }
  if (error != 0 && error != EOPNOTSUPP && error != ENOSYS) {
    // A full disk is left as it was found.
    static_cast<void>(ftruncate(fd_, before.st_size) == 0);
    ThrowErrno(error, "cannot reserve " + std::to_string(end_bytes - begin_bytes) +
                          " bytes at offset " + std::to_string(begin_bytes) + " of " + Describe());
  }
  allocated_bytes_ = end_bytes;
}

}  // namespace offload
