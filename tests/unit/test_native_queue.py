"""The native engine's queue: bytes, errors, threads, forks."""

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from offload.units import MIB
from tests.unit.native_support import in_child, random_bytes

native = pytest.importorskip("offload._native", reason="the extension is not built")


def switches(name):
    """How often this process's threads of that name have gone to sleep."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            status = (task / "status").read_text()
            count += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return count


class TestQueue:
    @pytest.mark.parametrize("nbytes", [1, 4096, 100_000, 5 * MIB + 3])
    @pytest.mark.parametrize("direct", [True, False])
    def test_bytes_come_back(self, arena, tmp_path, nbytes, direct):
        queue = native.Queue(native.File(str(tmp_path), direct=direct), block_bytes=MIB)
        source = random_bytes(nbytes)
        slot = arena.allocate(nbytes)
        crc = native.copy_crc32c(slot.address, source.data_ptr(), nbytes)
        request = queue.write(slot, 8192)
        slot.release()  # the request shares the memory
        assert request.wait()
        assert arena.live_slots == 0
        back = arena.allocate(nbytes)
        assert queue.read(back, 8192, crc=crc).wait()
        assert torch.equal(torch.frombuffer(back, dtype=torch.uint8), source)
        queue.close()

    def test_a_request_tells_about_itself(self, arena, queue):
        before = time.perf_counter_ns()
        request = queue.write(arena.allocate(MIB), 4096)
        assert request.wait(60.0)
        assert before <= request.start_ns <= request.end_ns <= time.perf_counter_ns()
        assert (request.nbytes, request.offset, request.done()) == (MIB, 4096, True)
        assert request.cancel() is False
        request.promote()

    @pytest.mark.parametrize(("nbytes", "naps"), [(4096, True), (MIB, False)])
    def test_the_worker_looks_again_by_itself_only_after_a_small_piece(
        self, arena, tmp_path, nbytes, naps
    ):
        """Each look takes the processor from a thread that computes."""
        queue = native.Queue(native.File(str(tmp_path)), threads=1)
        slot = arena.allocate(nbytes)
        queue.write(slot, 0).wait()
        time.sleep(0.05)
        before = switches("offload-io0")
        queue.write(slot, 0).wait()
        at_its_end = switches("offload-io0")
        time.sleep(0.05)
        assert at_its_end > before, "it moved the bytes"
        if naps:  # some of them may have been over before this thread could look
            assert switches("offload-io0") - before > 4
        else:
            assert switches("offload-io0") - at_its_end <= 2
        queue.close()

    def test_stats_count(self, arena, queue):
        slot = arena.allocate(MIB)
        queue.write(slot, 0).wait()
        queue.read(slot, 0, urgent=True).wait()
        stats = queue.stats()
        assert (stats["writes"], stats["written_bytes"]) == (1, MIB)
        assert (stats["reads"], stats["read_bytes"]) == (1, MIB)
        assert (stats["depth"], stats["peak_depth"]) == (0, 1)
        assert set(stats) == {
            *("read_bytes", "written_bytes", "reads", "writes"),
            *("read_ns", "write_ns", "cpu_ns", "depth", "peak_depth"),
        }

    def test_a_wrong_checksum_is_ebadmsg_each_time(self, arena, queue):
        slot = arena.allocate(MIB)
        queue.write(slot, 0).wait()
        request = queue.read(slot, 0, crc=native.crc32c(slot.address, MIB) ^ 1)
        for _ in range(2):
            with pytest.raises(OSError, match="checksum") as caught:
                request.wait()
            assert caught.value.errno == errno.EBADMSG

    def test_reading_what_was_never_written_is_eio(self, arena, queue):
        with pytest.raises(OSError, match="read of 4096 bytes at offset 1048576") as caught:
            queue.read(arena.allocate(4096), MIB).wait()
        assert caught.value.errno == errno.EIO

    def test_close_finishes_and_refuses(self, arena, file):
        queue = native.Queue(file)
        requests = [queue.write(arena.allocate(MIB), i * MIB) for i in range(8)]
        queue.close()
        queue.close()
        assert all(request.done() and request.wait(0) for request in requests)
        with pytest.raises(ValueError, match="closed"):
            queue.write(arena.allocate(1), 0)

    def test_dying_finishes_what_was_accepted(self, arena, file):
        request = native.Queue(file).write(arena.allocate(4 * MIB), 0)
        assert request.wait()

    def test_impossible_arguments(self, arena, file, queue):
        for options in ({"threads": 0}, {"block_bytes": 1000}, {"capacity": 0}, {"capacity": -1}):
            with pytest.raises(ValueError):
                native.Queue(file, **options)
        slot = arena.allocate(1)
        with pytest.raises(ValueError):
            queue.write(slot, -4096)
        if file.is_direct:
            with pytest.raises(ValueError, match="multiple of 4096"):
                queue.write(slot, 512)
        with pytest.raises(ValueError):
            queue.write(slot, 0).wait(-1.0)
        slot.release()
        with pytest.raises(ValueError, match="released"):
            queue.write(slot, 0)

    def test_other_threads_run_while_one_waits_for_room(self, arena, file):
        queue = native.Queue(file, threads=1, capacity=1)
        done = threading.Event()

        def submit():
            for i in range(32):
                queue.write(arena.allocate(4096), i * 4096)
            done.set()

        thread = threading.Thread(target=submit)
        thread.start()
        assert done.wait(60)  # with the GIL held by a waiting submit, nobody could set it
        thread.join()
        queue.close()
        assert queue.stats()["writes"] == 32

    def test_many_threads(self, arena, queue):
        def traffic(seed):
            source = random_bytes(300_000, seed)
            offset = seed * MIB
            for _ in range(20):
                slot = arena.allocate(source.numel())
                native.copy(slot.address, source.data_ptr(), source.numel())
                queue.write(slot, offset).wait()
                torch.frombuffer(slot, dtype=torch.uint8).zero_()
                queue.read(slot, offset).wait()
                if not torch.equal(torch.frombuffer(slot, dtype=torch.uint8), source):
                    wrong.append(seed)

        wrong = []
        threads = [threading.Thread(target=traffic, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestFork:
    def test_a_child_may_use_nothing_and_harms_nothing(self, arena, file):
        queue = native.Queue(file)
        slot = arena.allocate(MIB)
        memoryview(slot)[:] = b"x" * MIB
        request = queue.write(slot, 0)

        def body():
            calls = (
                lambda: queue.write(slot, 0),
                queue.stats,
                queue.close,
                request.wait,
                request.done,
                request.cancel,
                lambda: arena.allocate(1),
                lambda: file.reserve(MIB),
                slot.release,
            )
            for call in calls:
                with pytest.raises(RuntimeError, match="forked child"):
                    call()
            with pytest.raises(BufferError):
                memoryview(slot)

        assert in_child(body) == 0
        assert request.wait()
        assert queue.read(slot, 0).wait()
        assert bytes(slot) == b"x" * MIB
        queue.close()

    def test_destructors_in_a_child_return(self, tmp_path):
        holder = [native.Arena(64 * MIB), native.File(str(tmp_path))]
        holder += [native.Queue(holder[1]), holder[0].allocate(MIB)]
        holder.append(holder[2].write(holder[3], 0))
        assert in_child(holder.clear) == 0
        assert holder[-1].wait()

    def test_a_child_can_make_its_own(self, tmp_path):
        source, target = random_bytes(4 * MIB), random_bytes(4 * MIB, seed=1)
        pair = (target.data_ptr(), source.data_ptr(), 4 * MIB)
        native.copy(*pair)  # starts the helpers, which the child will not have

        def body():
            queue = native.Queue(native.File(str(tmp_path)))
            slot = native.Arena(2 * MIB).allocate(MIB)
            assert queue.write(slot, 0).wait()
            queue.close()
            assert native.copy_crc32c(*pair) == native.crc32c(*pair[1:])

        assert in_child(body) == 0


def test_ctrl_c_interrupts_a_wait(tmp_path):
    code = """
import os, signal, threading
from offload import _native as native
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
queue = native.Queue(native.File({directory!r}), threads=1, capacity=1)
slot = native.Arena(1 << 20).allocate(4096)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:  # waits for room most of the time
        queue.write(slot, 0)
except KeyboardInterrupt:
    queue.close()
    print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code.format(directory=str(tmp_path))],
        cwd=Path(native.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "interrupted", done.stderr
