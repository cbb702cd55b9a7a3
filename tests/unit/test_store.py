"""Space in the scratch file: padded, reused, bounded by the budget, errors that say what to do."""

import errno
import gc
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import StorageError
from offload.engines import Engine
from offload.engines.store import SEGMENT_BYTES, DiskStore
from tests.doubles import FaultyEngine
from tests.support import scratch_files

PAGE = 4096


class Reservations(FaultyEngine):
    """Remembers how far the file reaches, without one."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.end_bytes = 0
        self.most_bytes = 1 << 60

    def reserve(self, end_bytes: int) -> None:
        if end_bytes > self.most_bytes:
            raise OSError(errno.ENOSPC, "full")
        self.end_bytes = end_bytes


@given(
    budget_pages=st.integers(0, 12),
    program=st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=40),
)
def test_the_file_never_outgrows_the_budget(
    budget_pages: int, program: list[tuple[bool, int]]
) -> None:
    engine = Reservations()
    store = DiskStore(engine, "/tmp", budget_pages * PAGE + 17)
    held = []
    for allocate, n in program:
        if allocate:
            extent = store.allocate(n)
            if extent is not None:
                assert extent.offset % PAGE == 0
                assert n <= extent.nbytes < n + PAGE
                held.append(extent)
        elif held:
            held.pop(n % len(held))
        extent = None
        assert store.used_bytes == sum(e.nbytes for e in held)
        assert engine.end_bytes <= budget_pages * PAGE
        spans = sorted((e.offset, e.offset + e.nbytes) for e in held)
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "overlap"


def test_all_of_the_budget_can_be_used() -> None:
    store = DiskStore(Reservations(), "/tmp", 3 * PAGE)
    held = [store.allocate(1) for _ in range(3)]
    assert None not in held
    assert store.allocate(1) is None
    del held[1]
    assert store.allocate(PAGE) is not None


def test_grows_by_segments_and_near_the_end_by_what_is_lacking() -> None:
    engine = Reservations()
    store = DiskStore(engine, "/tmp", None)
    held = [store.allocate(PAGE)]
    assert engine.end_bytes == SEGMENT_BYTES
    engine.most_bytes = SEGMENT_BYTES + 10 * PAGE
    held.append(store.allocate(SEGMENT_BYTES))
    assert engine.end_bytes == SEGMENT_BYTES + PAGE
    held.append(store.allocate(9 * PAGE))
    assert engine.end_bytes == engine.most_bytes
    with pytest.raises(StorageError, match=r"reserving space for 4 KiB .*ENOSPC.*are free there"):
        store.allocate(PAGE)


def test_refused_space_is_given_back() -> None:
    engine = Reservations()
    engine.most_bytes = 0
    store = DiskStore(engine, "/tmp", None)
    gc.disable()
    try:
        with pytest.raises(StorageError):
            store.allocate(PAGE)
        assert store.used_bytes == 0
    finally:
        gc.enable()


@pytest.fixture
def closing(real_engine: Engine) -> Iterator[Engine]:
    yield real_engine
    real_engine.close()


def test_bytes_written_are_read(closing: Engine, tmp_path: Path) -> None:
    arena = closing.arena(1 << 20)
    store = DiskStore(closing, str(tmp_path), None)
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (1, 511, 513, 4096, 4097)]
    extents = []
    for tensor in tensors:
        slot, extent = arena.allocate(tensor.nbytes), store.allocate(tensor.nbytes)
        assert slot is not None
        assert extent is not None
        checksum = closing.copy(slot, tensor.untyped_storage(), checksum=True)
        store.write(slot, extent).wait()
        extents.append((extent, checksum))
    for tensor, (extent, checksum) in zip(tensors, extents, strict=True):
        slot = arena.allocate(tensor.nbytes)
        assert slot is not None
        store.read(slot, extent, urgent=False, checksum=checksum).wait()
        again = torch.empty(0, dtype=torch.uint8).set_(closing.alias(slot), 0, tensor.shape, (1,))
        assert torch.equal(again, tensor)
        wrong = store.read(slot, extent, urgent=True, checksum=(checksum or 0) ^ 1)
        with pytest.raises(OSError) as caught:
            wrong.wait()
        assert caught.value.errno == errno.EBADMSG
    (file,) = scratch_files(tmp_path)
    assert file.st_size == SEGMENT_BYTES
    assert file.st_nlink == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "ENOSPC .*are free there: free some space, lower disk_budget"),
        (errno.EDQUOT, "EDQUOT .*name another disk_dir"),
        (errno.EFBIG, "EFBIG .*ulimit -f"),
        (errno.EIO, "EIO .*check the disk"),
        (errno.EBADMSG, "checksum .*not those that were written"),
    ],
)
def test_errors_say_what_where_why_and_what_to_do(tmp_path: Path, code: int, words: str) -> None:
    store = DiskStore(Reservations(), str(tmp_path), None)
    error = store.error("writing", OSError(code, "?"), 8192, 4096, " (saved tensor float32[2])")
    assert isinstance(error, StorageError)
    assert error.errno == code
    text = str(error)
    assert text.startswith("writing 4 KiB (saved tensor float32[2]) at offset 8192 of the scratch")
    assert repr(str(tmp_path)) in text
    assert re.search(words, text)
