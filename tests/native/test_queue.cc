#include <doctest.h>

#include <thread>

#include "checksum.h"
#include "support.h"

namespace offload {
namespace {

using namespace testing;
using std::chrono::milliseconds;

Transfer Write(std::shared_ptr<Slot> slot, uint64_t offset) {
  return {Transfer::Kind::kWrite, std::move(slot), offset, false, std::nullopt};
}

Transfer Read(std::shared_ptr<Slot> slot, uint64_t offset, bool urgent = false,
              std::optional<uint32_t> crc = std::nullopt) {
  return {Transfer::Kind::kRead, std::move(slot), offset, urgent, crc};
}

// One worker and small pieces on a gated disk, so that the order of service is exact. A first write
// at offset 0 is already at the gate and holds the worker.
struct Gated {
  explicit Gated(size_t capacity = 64, size_t first_bytes = kPageBytes) {
    Queue::Options options;
    options.threads = 1;
    options.block_bytes = kPageBytes;
    options.capacity = capacity;
    queue = std::make_unique<Queue>(std::make_shared<File>(ScratchDirectory(), true, io), options);
    first = Submit(Write(arena.Allocate(first_bytes), 0));
    io->AwaitArrivals(1);
  }
  // Or the worker never leaves the gate, should a check have thrown.
  ~Gated() { io->Open(); }

  std::shared_ptr<Request> Submit(Transfer transfer) {
    return queue->Submit(std::move(transfer), kForever);
  }
  std::shared_ptr<Slot> Page() { return arena.Allocate(kPageBytes); }

  Arena arena{2 * kMiB, false};
  std::shared_ptr<GatedIo> io = std::make_shared<GatedIo>();
  std::unique_ptr<Queue> queue;
  std::shared_ptr<Request> first;
};

constexpr uint64_t Page(int number) { return number * kPageBytes; }

TEST_CASE("urgent reads go before reads, reads before writes, each in turn") {
  Gated gated;
  gated.Submit(Write(gated.Page(), Page(1)));
  gated.Submit(Write(gated.Page(), Page(2)));
  gated.Submit(Read(gated.Page(), Page(3)));
  gated.Submit(Read(gated.Page(), Page(4)));
  gated.Submit(Read(gated.Page(), Page(5), /*urgent=*/true));
  gated.Submit(Read(gated.Page(), Page(6), /*urgent=*/true));
  gated.io->Open();
  REQUIRE(gated.queue->Close(kForever));
  const std::vector<GatedIo::Call> expected = {{'w', Page(0)}, {'r', Page(5)}, {'r', Page(6)},
                                               {'r', Page(3)}, {'r', Page(4)}, {'w', Page(1)},
                                               {'w', Page(2)}};
  CHECK(gated.io->Calls() == expected);
}

TEST_CASE("an urgent read overtakes a write that has begun") {
  Gated gated(64, 3 * kPageBytes);
  gated.Submit(Read(gated.Page(), Page(9), /*urgent=*/true));
  gated.io->Open();
  REQUIRE(gated.queue->Close(kForever));
  const std::vector<GatedIo::Call> expected = {
      {'w', Page(0)}, {'r', Page(9)}, {'w', Page(1)}, {'w', Page(2)}};
  CHECK(gated.io->Calls() == expected);
}

TEST_CASE("a promoted read goes first; promoting anything else does nothing") {
  Gated gated;
  const auto write = gated.Submit(Write(gated.Page(), Page(1)));
  gated.Submit(Read(gated.Page(), Page(2)));
  const auto read = gated.Submit(Read(gated.Page(), Page(3)));
  read->Promote();
  read->Promote();
  write->Promote();
  gated.first->Promote();
  gated.io->Open();
  REQUIRE(gated.queue->Close(kForever));
  read->Promote();
  const std::vector<GatedIo::Call> expected = {
      {'w', Page(0)}, {'r', Page(3)}, {'r', Page(2)}, {'w', Page(1)}};
  CHECK(gated.io->Calls() == expected);
}

TEST_CASE("a cancelled request never runs and lets its slot go; one that began is not cancelled") {
  Gated gated;
  auto slot = gated.Page();
  const auto waiting = gated.Submit(Write(std::move(slot), Page(1)));
  CHECK(gated.arena.GetStats().live_slots == 2);
  CHECK_FALSE(gated.first->Cancel());
  CHECK(waiting->Cancel());
  CHECK(gated.arena.GetStats().live_slots == 1);
  CHECK_FALSE(waiting->Cancel());
  CHECK(waiting->Done());
  CHECK(ErrorOf([&] { waiting->Wait(kForever); }) == ECANCELED);
  gated.io->Open();
  REQUIRE(gated.queue->Close(kForever));
  CHECK(gated.io->Calls() == std::vector<GatedIo::Call>{{'w', 0}});
  CHECK(gated.queue->GetStats().writes == 1);
}

TEST_CASE("the queue is bounded, reads and writes apart") {
  Gated gated(/*capacity=*/2);
  gated.Submit(Write(gated.Page(), Page(1)));
  const auto last = gated.Submit(Write(gated.Page(), Page(2)));
  CHECK((gated.queue->Submit(Write(gated.Page(), Page(3)), milliseconds(1)) == nullptr));
  CHECK((gated.queue->Submit(Read(gated.Page(), Page(4)), milliseconds(1)) != nullptr));
  CHECK(gated.queue->GetStats().depth == 4);

  SUBCASE("cancelling makes room") {
    CHECK(last->Cancel());
    CHECK((gated.queue->Submit(Write(gated.Page(), Page(3)), milliseconds(1)) != nullptr));
  }
  SUBCASE("beginning makes room, and whoever waits for it is woken") {
    std::thread submitter([&] { CHECK((gated.Submit(Write(gated.Page(), Page(3))) != nullptr)); });
    gated.io->Open();
    submitter.join();
  }
  SUBCASE("closing refuses whoever waits for room") {
    std::thread submitter([&] {
      CHECK_THROWS_AS(gated.Submit(Write(gated.Page(), Page(3))), std::invalid_argument);
    });
    CHECK_FALSE(gated.queue->Close(milliseconds(1)));
    submitter.join();
  }
}

// One of three workers is held at the gate by a page; another page would wait for it.
struct GatedOfThree {
  GatedOfThree() {
    queue = std::make_unique<Queue>(std::make_shared<File>(ScratchDirectory(), true, io),
                                    Queue::Options{3, kPageBytes, 64});
    Submit(Write(arena.Allocate(kPageBytes), 0));
    io->AwaitArrivals(1);
  }
  ~GatedOfThree() { io->Open(); }

  std::shared_ptr<Request> Submit(Transfer transfer) {
    return queue->Submit(std::move(transfer), kForever);
  }

  Arena arena{2 * kMiB, false};
  std::shared_ptr<GatedIo> io = std::make_shared<GatedIo>();
  std::unique_ptr<Queue> queue;
};

TEST_CASE("sleeping workers are woken for what is urgent, becomes urgent, or is much") {
  GatedOfThree gated;
  SUBCASE("urgent") {
    gated.Submit(Read(gated.arena.Allocate(kPageBytes), Page(1), /*urgent=*/true));
    gated.io->AwaitArrivals(2);
    gated.Submit(Read(gated.arena.Allocate(kPageBytes), Page(2), /*urgent=*/true));
    gated.io->AwaitArrivals(3);
  }
  SUBCASE("becomes urgent") {
    const auto read = gated.Submit(Read(gated.arena.Allocate(kPageBytes), Page(1)));
    read->Promote();
    gated.io->AwaitArrivals(2);
  }
  SUBCASE("much at once") {
    gated.Submit(Write(gated.arena.Allocate(kMiB), Page(1)));
    gated.io->AwaitArrivals(3);
  }
  SUBCASE("much by and by") {
    for (int i = 1; i <= 128; ++i) {
      gated.Submit({i % 2 == 0 ? Transfer::Kind::kRead : Transfer::Kind::kWrite,
                    gated.arena.Allocate(kPageBytes), Page(i), false, std::nullopt});
    }
    gated.io->AwaitArrivals(3);
  }
}

TEST_CASE("nothing that waits is forgotten, however workers fall asleep and wake") {
  Arena arena(2 * kMiB, false);
  Queue queue(std::make_shared<File>(ScratchDirectory(), true), {3, kPageBytes, 4});
  std::minstd_rand random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::shared_ptr<Request>> requests;
    for (uint32_t i = random() % 4; i < 4; ++i) {
      requests.push_back(queue.Submit(Write(arena.Allocate(kPageBytes), Page(i)), kForever));
    }
    if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    for (const auto& request : requests) REQUIRE(request->Wait(kForever));
  }
}

TEST_CASE("a little is taken up though nobody waits, whether workers nap or sleep") {
  Arena arena(2 * kMiB, false);
  Queue queue(std::make_shared<File>(ScratchDirectory(), true), {2, kPageBytes, 4});
  std::minstd_rand random(1);
  for (int round = 0; round < 200; ++round) {
    const auto request = queue.Submit(Write(arena.Allocate(kPageBytes), 0), kForever);
    while (!request->Done()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  }
}

TEST_CASE("waiting ends with the timeout or the request") {
  Gated gated;
  CHECK_FALSE(gated.first->Wait(milliseconds(1)));
  CHECK_FALSE(gated.first->Done());
  CHECK(gated.first->start_ns() > 0);
  CHECK(gated.first->end_ns() == 0);
  gated.io->Open();
  CHECK(gated.first->Wait(kForever));
  CHECK(gated.first->Done());
  CHECK(gated.first->end_ns() >= gated.first->start_ns());
}

TEST_CASE("close finishes what was accepted, can be repeated, and ends submission") {
  Gated gated;
  const auto request = gated.Submit(Write(gated.Page(), Page(1)));
  CHECK_FALSE(gated.queue->Close(milliseconds(1)));
  CHECK_THROWS_AS(gated.Submit(Write(gated.Page(), 0)), std::invalid_argument);
  gated.io->Open();
  CHECK(gated.queue->Close(kForever));
  CHECK(gated.queue->Close(kForever));
  CHECK(request->Wait(kForever));
  CHECK(gated.queue->GetStats().depth == 0);
  CHECK(gated.queue->GetStats().peak_depth == 2);
}

TEST_CASE("the slot is given back before the request is seen done") {
  Arena arena(2 * kMiB, false);
  Queue queue(std::make_shared<File>(ScratchDirectory(), true), {});
  for (int i = 0; i < 50; ++i) {
    const auto request = queue.Submit(Write(arena.Allocate(kMiB), 0), kForever);
    REQUIRE(request->Wait(kForever));
    REQUIRE(arena.GetStats().live_slots == 0);
  }
}

TEST_CASE("impossible options and offsets are refused") {
  const auto file = std::make_shared<File>(ScratchDirectory(), true);
  const auto make = [&](int threads, size_t block_bytes, size_t capacity) {
    Queue(file, {threads, block_bytes, capacity});
  };
  CHECK_THROWS_AS(make(0, kMiB, 1), std::invalid_argument);
  CHECK_THROWS_AS(make(65, kMiB, 1), std::invalid_argument);
  CHECK_THROWS_AS(make(1, 0, 1), std::invalid_argument);
  CHECK_THROWS_AS(make(1, 5000, 1), std::invalid_argument);
  CHECK_THROWS_AS(make(1, kMiB, 0), std::invalid_argument);

  Arena arena(kMiB, false);
  Queue queue(file, {});
  const auto slot = arena.Allocate(100);
  if (file->is_direct()) {
    CHECK_THROWS_AS(queue.Submit(Write(slot, 512), kForever), std::invalid_argument);
  }
  CHECK_THROWS_AS(queue.Submit(Write(slot, uint64_t{1} << 63), kForever), std::invalid_argument);
}

// Writes slots of ragged sizes at page-aligned extents, reads them back with checksums.
void CheckTraffic(const std::shared_ptr<File>& file, size_t block_bytes) {
  Arena arena(64 * kMiB, false);
  Queue queue(file, {3, block_bytes, 8});
  std::vector<std::shared_ptr<Slot>> slots;
  std::vector<std::shared_ptr<Request>> requests;
  std::vector<uint64_t> offsets;
  uint64_t end = 0;
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    slots.push_back(arena.Allocate(seed * 200'001));
    FillRandom(slots.back()->data(), slots.back()->nbytes(), seed);
    offsets.push_back(end);
    requests.push_back(queue.Submit(Write(slots.back(), end), kForever));
    end += RoundUp(slots.back()->nbytes(), kPageBytes);
  }
  for (const auto& request : requests) REQUIRE(request->Wait(kForever));
  for (size_t i = 0; i < slots.size(); ++i) {
    const uint32_t crc = Crc32c(0, slots[i]->data(), slots[i]->nbytes());
    const auto copy = arena.Allocate(slots[i]->nbytes());
    const auto request = queue.Submit(Read(copy, offsets[i], i % 2 == 0, crc), kForever);
    REQUIRE(request->Wait(kForever));
    CHECK(std::memcmp(copy->data(), slots[i]->data(), copy->nbytes()) == 0);
  }
  const Queue::Stats stats = queue.GetStats();
  CHECK(stats.reads == slots.size());
  CHECK(stats.writes == slots.size());
  CHECK(stats.read_bytes == stats.written_bytes);
  if (file->is_direct()) CHECK(stats.written_bytes == end);
}

TEST_CASE("ragged sizes come back bit for bit, whole or in pieces, direct or buffered") {
  for (const bool direct : {true, false}) {
    for (const size_t block_bytes : {kPageBytes * 16, kMiB, 8 * kMiB}) {
      CAPTURE(direct);
      CAPTURE(block_bytes);
      CheckTraffic(std::make_shared<File>(ScratchDirectory(), direct), block_bytes);
    }
  }
  const auto io = std::make_shared<ShortIo>(/*interrupts=*/2);
  CheckTraffic(std::make_shared<File>(ScratchDirectory(), true, io), kMiB);
}

TEST_CASE("a checksum that does not match is EBADMSG") {
  Arena arena(4 * kMiB, false);
  Queue queue(std::make_shared<File>(ScratchDirectory(), true), {2, 64 << 10, 8});
  const auto slot = arena.Allocate(kMiB + 5);
  FillRandom(slot->data(), slot->nbytes(), 1);
  const uint32_t crc = Crc32c(0, slot->data(), slot->nbytes());
  slot->data()[700'000] ^= std::byte{1};
  REQUIRE(queue.Submit(Write(slot, 0), kForever)->Wait(kForever));
  const auto request = queue.Submit(Read(slot, 0, false, crc), kForever);
  CHECK(ErrorOf([&] { request->Wait(kForever); }) == EBADMSG);
  CHECK(queue.GetStats().reads == 0);
}

TEST_CASE("a failure is latched on its request, ends its other pieces, and spares the rest") {
  Arena arena(8 * kMiB, false);
  const auto io = std::make_shared<FailingIo>(ENOSPC, kMiB);
  Queue queue(std::make_shared<File>(ScratchDirectory(), true, io), {2, 256 << 10, 8});
  const auto bad = queue.Submit(Write(arena.Allocate(4 * kMiB), 0), kForever);
  CHECK(ErrorOf([&] { bad->Wait(kForever); }) == ENOSPC);
  CHECK(ErrorOf([&] { bad->Wait(kForever); }) == ENOSPC);
  CHECK(queue.GetStats().written_bytes == kMiB);
  CHECK(arena.GetStats().live_slots == 0);
  const auto next = queue.Submit(Write(arena.Allocate(kMiB), 0), kForever);
  CHECK(ErrorOf([&] { next->Wait(kForever); }) == ENOSPC);
  CHECK(queue.Close(kForever));
}

TEST_CASE("concurrency: threads submit, wait, cancel, promote and look at the figures at once") {
  Arena arena(32 * kMiB, true);
  const auto file = std::make_shared<File>(ScratchDirectory(), true);
  file->Reserve(32 * kMiB);
  Queue queue(file, {3, 64 << 10, 4});
  std::atomic<int> lost{0};
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      std::minstd_rand random(id + 1);
      const uint64_t offset = id * 8 * kMiB;
      for (int step = 0; step < 60; ++step) {
        const size_t nbytes = 1 + random() % kMiB;
        const auto out = arena.Allocate(nbytes);
        std::memset(out->data(), step, nbytes);
        const auto write = queue.Submit(Write(out, offset), kForever);
        if (random() % 4 == 0 && write->Cancel()) continue;
        write->Wait(kForever);
        const auto in = arena.Allocate(nbytes);
        const auto read = queue.Submit(Read(in, offset), kForever);
        read->Promote();
        queue.GetStats();
        read->Wait(kForever);
        if (std::memcmp(in->data(), out->data(), nbytes) != 0) ++lost;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(lost == 0);
  CHECK(queue.Close(kForever));
  CHECK(arena.Close() == 0);
}

TEST_CASE("fork: in a child every call throws and every destructor returns") {
  Gated gated;
  auto waiting = gated.Submit(Read(gated.Page(), Page(1)));
  CHECK(InChild([&] {
          int thrown = 0;
          const auto expect_throw = [&](auto call) {
            try {
              call();
            } catch (const std::system_error&) {
            } catch (const std::runtime_error&) {
              ++thrown;
            }
          };
          expect_throw([&] { gated.queue->Submit(Write(nullptr, 0), kForever); });
          expect_throw([&] { gated.queue->GetStats(); });
          expect_throw([&] { gated.queue->Close(kForever); });
          expect_throw([&] { waiting->Done(); });
          expect_throw([&] { waiting->Wait(kForever); });
          expect_throw([&] { waiting->Cancel(); });
          expect_throw([&] { waiting->Promote(); });
          waiting.reset();
          gated.first.reset();
          gated.queue.reset();
          return thrown == 7 ? 0 : 1;
        }) == 0);
  gated.io->Open();
  CHECK(waiting->Wait(kForever));
}

}  // namespace
}  // namespace offload
