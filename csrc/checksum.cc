#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace offload {
namespace {

// A CRC is a remainder in GF(2)[x] modulo P, kept with its bits reflected: bit 31 is x^0.
constexpr uint32_t kPolynomial = 0x82F63B78;
constexpr uint32_t kOne = 1u << 31;       // x^0
constexpr uint32_t kOneByte = kOne >> 8;  // x^8: one byte further

constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * nbytes): multiplying a remainder by it appends that many zero bytes.
constexpr uint32_t Shift(uint64_t nbytes) {
  uint32_t power = kOne;
  uint32_t square = kOneByte;
  for (; nbytes != 0; nbytes >>= 1) {
    if (nbytes & 1) power = Multiply(power, square);
    square = Multiply(square, square);
  }
  return power;
}

// tables[k][b] is the remainder of byte b, multiplied by `shift(k)`.
using Tables8 = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables8 MakeSliceTables() {
  Tables8 tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = Multiply(kOneByte, byte);
    for (auto& table : tables) {
      table[byte] = remainder;
      remainder = Multiply(kOneByte, remainder);
    }
  }
  return tables;
}

constexpr Tables8 kSlices = MakeSliceTables();

uint64_t LoadWord(const unsigned char* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// The functions named Extend work on the raw register, before the usual inversion.

uint32_t ExtendByByte(uint32_t state, const unsigned char* data, size_t nbytes) {
  for (; nbytes != 0; --nbytes) state = kSlices[0][(state ^ *data++) & 0xFF] ^ (state >> 8);
  return state;
}

uint32_t ExtendPortable(uint32_t state, const unsigned char* data, size_t nbytes) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    const uint64_t word = LoadWord(data) ^ state;
    state = 0;
    for (int byte = 0; byte < 8; ++byte) state ^= kSlices[7 - byte][(word >> (8 * byte)) & 0xFF];
  }
#endif
  return ExtendByByte(state, data, nbytes);
}

// Where the bytes that pass through a checksum go.

struct Nowhere {
  void Put(size_t, uint64_t) const {}
  void Put(size_t, unsigned char) const {}
};

struct ToMemory {
  unsigned char* dst;
  void Put(size_t i, uint64_t word) const { std::memcpy(dst + i, &word, sizeof(word)); }
  void Put(size_t i, unsigned char byte) const { dst[i] = byte; }
};

#if defined(__x86_64__)

struct PastTheCache {
  unsigned char* dst;
  void Put(size_t i, uint64_t word) const {
    _mm_stream_si64(reinterpret_cast<long long*>(dst + i),  // NOLINT(google-runtime-int)
                    static_cast<int64_t>(word));
  }
  void Put(size_t i, unsigned char byte) const { dst[i] = byte; }
};

// The instruction has a latency of three cycles and starts one each cycle, so three lanes run side
// by side and are joined by shifting. The length of a lane is no multiple of 4096: loads and stores
// of equal address modulo 4096 stall each other (copying runs at 14 instead of 2 GB/s). It leaves
// little of a MiB over, and is long enough that joining costs nothing.
constexpr size_t kLaneBytes = size_t{341} * 64;

using Tables4 = std::array<std::array<uint32_t, 256>, 4>;

constexpr Tables4 MakeLaneTables() {
  constexpr uint32_t kShift = Shift(kLaneBytes);
  Tables4 tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (uint32_t k = 0; k < 4; ++k) tables[k][byte] = Multiply(kShift, byte << (8 * k));
  }
  return tables;
}

constexpr Tables4 kLaneShift = MakeLaneTables();

uint32_t ShiftByLane(uint32_t state) {
  return kLaneShift[0][state & 0xFF] ^ kLaneShift[1][(state >> 8) & 0xFF] ^
         kLaneShift[2][(state >> 16) & 0xFF] ^ kLaneShift[3][state >> 24];
}

template <typename Sink>
__attribute__((target("sse4.2"))) uint32_t ExtendSse42(uint32_t state, const unsigned char* data,
                                                       size_t nbytes, Sink sink) {
  size_t i = 0;
  const auto word_at = [data](size_t at) { return LoadWord(data + at); };
  for (; nbytes - i >= 3 * kLaneBytes; i += 2 * kLaneBytes) {
    uint64_t a = state;
    uint64_t b = 0;
    uint64_t c = 0;
    for (const size_t end = i + kLaneBytes; i < end; i += 8) {
      const uint64_t word_a = word_at(i);
      const uint64_t word_b = word_at(i + kLaneBytes);
      const uint64_t word_c = word_at(i + 2 * kLaneBytes);
      a = _mm_crc32_u64(a, word_a);
      b = _mm_crc32_u64(b, word_b);
      c = _mm_crc32_u64(c, word_c);
      sink.Put(i, word_a);
      sink.Put(i + kLaneBytes, word_b);
      sink.Put(i + 2 * kLaneBytes, word_c);
    }
    const uint32_t ab = ShiftByLane(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    state = ShiftByLane(ab) ^ static_cast<uint32_t>(c);
  }
  uint64_t wide = state;
  for (; nbytes - i >= 8; i += 8) {
    const uint64_t word = word_at(i);
    wide = _mm_crc32_u64(wide, word);
    sink.Put(i, word);
  }
  state = static_cast<uint32_t>(wide);
  for (; i < nbytes; ++i) {
    state = _mm_crc32_u8(state, data[i]);
    sink.Put(i, data[i]);
  }
  return state;
}

bool HasSse42() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

#endif

}  // namespace

uint32_t Crc32c(uint32_t crc, const void* data, size_t nbytes) {
#if defined(__x86_64__)
  if (HasSse42()) {
    return ~ExtendSse42(~crc, static_cast<const unsigned char*>(data), nbytes, Nowhere{});
  }
#endif
  return Crc32cPortable(crc, data, nbytes);
}

uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t nbytes) {
  return ~ExtendPortable(~crc, static_cast<const unsigned char*>(data), nbytes);
}

uint32_t Crc32cCopy(void* dst, const void* src, size_t nbytes, Stores stores) {
  auto* const to = static_cast<unsigned char*>(dst);
#if defined(__x86_64__)
  const auto* const from = static_cast<const unsigned char*>(src);
  if (HasSse42() && stores == Stores::kStreaming) {
    const uint32_t state = ExtendSse42(~0u, from, nbytes, PastTheCache{to});
    _mm_sfence();
    return ~state;
  }
  if (HasSse42()) return ~ExtendSse42(~0u, from, nbytes, ToMemory{to});
#endif
  static_cast<void>(stores);
  std::memcpy(to, src, nbytes);
  return Crc32cPortable(0, to, nbytes);
}

uint32_t Crc32cCombine(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return Multiply(Shift(second_bytes), first) ^ second;
}

}  // namespace offload
