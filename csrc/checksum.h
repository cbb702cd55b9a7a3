// CRC-32C (Castagnoli), the checksum that SSE 4.2 computes in hardware.
//
// All functions are pure and may be called from any thread. A checksum starts from 0 and is the
// usual inverted form: Crc32c(0, "123456789", 9) == 0xE3069283.
#ifndef OFFLOAD_CSRC_CHECKSUM_H_
#define OFFLOAD_CSRC_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace offload {

// Returns the checksum of the bytes `crc` covers followed by `nbytes` bytes at `data`. Uses the
// CPU's instruction where it has one (decided at run time), else tables; the result is the same.
uint32_t Crc32c(uint32_t crc, const void* data, size_t nbytes);

// The same by tables on every CPU: the fallback, exported so that tests can compare the two.
uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t nbytes);

enum class Stores { kCached, kStreaming };

// Copies `nbytes` from `src` to `dst`, which must not overlap, and returns their checksum. Nearly
// as fast as the copy alone. With kStreaming the bytes go past the cache and are visible to other
// threads when it returns.
uint32_t Crc32cCopy(void* dst, const void* src, size_t nbytes, Stores stores);

// Returns the checksum of A followed by B from those of A and of B; B is `second_bytes` long. Lets
// pieces be checked by different threads, in any order. Costs well under a microsecond.
uint32_t Crc32cCombine(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace offload

#endif  // OFFLOAD_CSRC_CHECKSUM_H_
