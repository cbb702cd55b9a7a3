"""The native engine's memory: buffers, lifetimes, copies."""

import errno
import gc
import threading

import pytest
import torch

from offload.units import MIB
from tests.unit.native_support import random_bytes

native = pytest.importorskip("offload._native", reason="the extension is not built")


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
