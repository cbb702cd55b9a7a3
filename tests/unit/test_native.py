"""The Python face of the native engine: buffers, lifetimes, errors, threads, forks."""

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

native = pytest.importorskip("offload._native", reason="the extension is not built")

MIB = 1 << 20


@pytest.fixture
def arena():
    arena = native.Arena(16 * MIB)
    yield arena
    gc.collect()
    assert arena.close() == 0


@pytest.fixture
def file(tmp_path):
    return native.File(str(tmp_path))


@pytest.fixture
def queue(file):
    queue = native.Queue(file)
    yield queue
    queue.close()


def random_bytes(nbytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def in_child(body):
    """Run `body` in a forked child; return its exit status, 1 if it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads are alive: that is the point
        pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that hangs is a failure, not a wait
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestSlot:
    def test_is_a_writable_buffer_of_bytes(self, arena):
        slot = arena.allocate(1000)
        view = memoryview(slot)
        assert (view.format, view.nbytes, view.itemsize, view.readonly) == ("B", 1000, 1, False)
        view[:3] = b"abc"
        assert bytes(slot)[:3] == b"abc"
        assert slot.address % 4096 == 0
        assert slot.nbytes == 1000

    def test_release_gives_the_memory_back_once(self, arena):
        slot = arena.allocate(5000)
        assert (arena.used_bytes, arena.live_slots) == (8192, 1)
        slot.release()
        assert (arena.used_bytes, arena.live_slots) == (0, 0)
        with pytest.raises(ValueError, match="released already"):
            slot.release()
        with pytest.raises(ValueError, match="released already"):
            _ = slot.address
        with pytest.raises(BufferError):
            memoryview(slot)

    def test_the_destructor_gives_the_memory_back(self, arena):
        slot = arena.allocate(1)
        del slot
        assert arena.live_slots == 0

    def test_release_is_refused_while_a_view_is_exported(self, arena):
        slot = arena.allocate(100)
        view = memoryview(slot)
        with pytest.raises(BufferError, match="in use"):
            slot.release()
        view.release()
        slot.release()

    def test_release_is_refused_while_a_tensor_views_it(self, arena):
        slot = arena.allocate(400)
        tensor = torch.frombuffer(slot, dtype=torch.float32)
        part = tensor[10:20]
        del tensor
        with pytest.raises(BufferError):
            slot.release()
        del part
        slot.release()

    def test_memory_lives_as_long_as_a_tensor_that_views_it(self, arena):
        slot = arena.allocate(400)
        tensor = torch.frombuffer(slot, dtype=torch.float32)
        tensor.fill_(3.0)
        del slot
        assert arena.live_slots == 1
        view = tensor.view(10, 10).t()
        del tensor
        assert view.sum().item() == 300.0
        del view
        assert arena.live_slots == 0

    def test_a_tensor_outlives_arena_and_slot(self):
        arena = native.Arena(MIB)
        tensor = torch.frombuffer(arena.allocate(400), dtype=torch.float32)
        assert arena.close() == 1
        del arena
        gc.collect()
        assert tensor.fill_(2.0).sum().item() == 200.0

    def test_a_tensor_may_die_on_another_thread(self, arena):
        tensors = [torch.frombuffer(arena.allocate(4096), dtype=torch.uint8) for _ in range(50)]
        thread = threading.Thread(target=tensors.clear)
        thread.start()
        thread.join()
        assert arena.live_slots == 0

    def test_cannot_be_made_by_hand(self):
        with pytest.raises(TypeError):
            native.Slot()


class TestArena:
    def test_capacity_is_rounded_up_and_bounds_what_is_out(self):
        arena = native.Arena(3 * MIB, prefault=False)
        assert arena.capacity_bytes == 4 * MIB
        slot = arena.allocate(3 * MIB)
        assert arena.allocate(2 * MIB) is None
        assert arena.peak_bytes == 3 * MIB
        slot.release()
        assert arena.allocate(4 * MIB) is not None

    @pytest.mark.parametrize("nbytes", [0, -1, 16 * MIB + 1])
    def test_impossible_sizes(self, arena, nbytes):
        with pytest.raises(ValueError):
            arena.allocate(nbytes)

    def test_impossible_capacities(self):
        for capacity in (0, -5):
            with pytest.raises(ValueError):
                native.Arena(capacity)
        with pytest.raises(OSError) as caught:
            native.Arena(1 << 60, prefault=False)
        assert caught.value.errno == errno.ENOMEM

    def test_outside_is_counted_apart(self, arena):
        slot = arena.allocate_outside(20 * MIB)
        assert (arena.outside_bytes, arena.used_bytes, arena.live_slots) == (20 * MIB, 0, 1)
        memoryview(slot)[-1] = 1
        slot.release()
        assert (arena.outside_bytes, arena.live_slots) == (0, 0)

    def test_page_bytes_is_one_of_two(self, arena):
        assert arena.page_bytes in (4096, 2 * MIB)

    def test_close_counts_leaks_and_ends_allocation(self):
        arena = native.Arena(MIB)
        slot = arena.allocate(1)
        assert arena.close() == 1
        for allocate in (arena.allocate, arena.allocate_outside):
            with pytest.raises(ValueError, match="closed"):
                allocate(1)
        slot.release()
        assert arena.close() == 0


class TestFile:
    def test_leaves_no_name(self, tmp_path):
        file = native.File(str(tmp_path))
        file.reserve(MIB)
        assert list(tmp_path.iterdir()) == []
        assert file.allocated_bytes == MIB

    def test_alignment(self, tmp_path):
        file = native.File(str(tmp_path))
        assert file.alignment_bytes == (4096 if file.is_direct else 1)
        assert not native.File(str(tmp_path), direct=False).is_direct

    def test_is_not_inherited_by_programs(self, tmp_path):
        def mine():
            links = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
            return {
                int(fd)
                for fd, link in links.items()
                if os.path.islink(link) and os.readlink(link).startswith(str(tmp_path))
            }

        file = native.File(str(tmp_path))
        assert [os.get_inheritable(fd) for fd in mine()] == [False]
        del file
        assert mine() == set()

    def test_errors_of_the_system(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="scratch file in /nowhere"):
            native.File("/nowhere")
        plain = tmp_path / "plain"
        plain.touch()
        with pytest.raises(NotADirectoryError):
            native.File(str(plain))

    def test_negative_sizes(self, file):
        with pytest.raises(ValueError):
            file.reserve(-1)

    def test_the_file_size_limit_is_an_error(self, tmp_path):
        def body():
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
            file = native.File(str(tmp_path))
            with pytest.raises(OSError) as caught:
                file.reserve(2 * MIB)
            assert caught.value.errno == errno.EFBIG
            slot = native.Arena(2 * MIB).allocate(2 * MIB)
            with pytest.raises(OSError) as caught:
                native.Queue(file).write(slot, 0).wait()
            assert caught.value.errno == errno.EFBIG

        assert in_child(body) == 0


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


class TestCopy:
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, MIB + 1, 9 * MIB + 7])
    @pytest.mark.parametrize("threads", [1, 2, 4])
    def test_copies_and_checksums(self, nbytes, threads):
        source = random_bytes(nbytes)
        for copy in (native.copy, native.copy_crc32c):
            target = torch.zeros_like(source)
            result = copy(target.data_ptr(), source.data_ptr(), nbytes, threads)
            assert torch.equal(target, source)
        assert result == native.crc32c(source.data_ptr(), nbytes)

    def test_check_value(self):
        text = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
        assert native.crc32c(text.data_ptr(), 9) == 0xE3069283

    def test_impossible_arguments(self):
        tensor = torch.zeros(100, dtype=torch.uint8)
        address = tensor.data_ptr()
        for arguments in ((address + 10, address, 50), (0, address, 1), (address, 0, 1)):
            with pytest.raises(ValueError):
                native.copy(*arguments)
        with pytest.raises(ValueError):
            native.copy(address, address + 50, -1)
        with pytest.raises(ValueError):
            native.copy(address, address + 50, 50, 0)
        with pytest.raises(ValueError):
            native.crc32c(0, 1)


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
