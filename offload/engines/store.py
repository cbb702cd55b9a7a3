"""DiskStore: space in the scratch file, and reads and writes of it with clear errors."""

import errno as errno_codes
import os
import shutil

from offload.engines import PAGE_BYTES, Engine, Request, Slot, padded
from offload.engines.freelist import FreeList
from offload.errors import StorageError
from offload.units import format_bytes

# The file grows by this much at a time: rewriting blocks that exist is 20-60 % faster than growing
# a file.
SEGMENT_BYTES = 64 << 20


class Extent:
    """A range of the scratch file, given back when this object dies."""

    __slots__ = ("__weakref__", "nbytes", "offset")

    def __init__(self) -> None:
        self.offset = self.nbytes = 0


class DiskStore:
    """The disk tier: one nameless file, its space reused lowest first, within a budget of bytes:
    the file never grows beyond it.
    """

    def __init__(self, engine: Engine, directory: str, budget_bytes: int | None) -> None:
        self.limit_bytes = (
            budget_bytes // PAGE_BYTES * PAGE_BYTES if budget_bytes is not None else 1 << 62
        )
        self.peak_bytes = 0  # the most in use since it was set
        self.directory = directory
        self._engine = engine
        self._free = FreeList()

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents that are alive."""
        self._free.settle()
        return self._free.size_bytes - self._free.free_bytes

    def allocate(self, nbytes: int) -> Extent | None:
        """Space for ``nbytes``, or ``None`` where the disk budget leaves no room for it.

        Raises:
            StorageError: the file system refuses more space.
        """
        nbytes = padded(nbytes)
        used_bytes = self.used_bytes
        if used_bytes + nbytes > self.limit_bytes:
            return None
        extent = Extent()
        offset = self._free.take(nbytes, extent)
        if offset is None and self._grow(nbytes - self._free.tail_bytes()):
            offset = self._free.take(nbytes, extent)
        if offset is None:  # room in all, but in pieces, and the file may not grow further
            return None
        extent.offset, extent.nbytes = offset, nbytes
        if used_bytes + nbytes > self.peak_bytes:
            self.peak_bytes = used_bytes + nbytes
        return extent

    def _grow(self, lacking_bytes: int) -> bool:
        """Make the file larger by what is lacking, better by a segment; False beyond the budget."""
        size_bytes = self._free.size_bytes
        allowed_bytes = self.limit_bytes - size_bytes
        if lacking_bytes > allowed_bytes:
            return False
        segment_bytes = min(max(SEGMENT_BYTES, lacking_bytes), allowed_bytes)
        for more_bytes in (segment_bytes, lacking_bytes):  # a disk that is nearly full: just that
            try:
                self._engine.reserve(size_bytes + more_bytes)
            except OSError as e:
                refused = e.errno  # and not e, which would hold this frame and what that holds
            else:
                self._free.grow(more_bytes)
                return True
        cause = OSError(refused, "")
        raise self.error("reserving space for", cause, size_bytes, lacking_bytes)

    def write(self, slot: Slot, extent: Extent) -> Request:
        """Start writing ``slot`` to ``extent``. Both must live until the request has completed."""
        return self._engine.write(slot, extent.offset)

    def read(self, slot: Slot, extent: Extent, *, urgent: bool, checksum: int | None) -> Request:
        """Start reading ``extent`` into ``slot``."""
        return self._engine.read(slot, extent.offset, urgent=urgent, checksum=checksum)

    def error(
        self, doing: str, cause: OSError, offset: int, nbytes: int, what: str = ""
    ) -> StorageError:
        """A ``StorageError``: what failed, where, how much, why, and what to do."""
        code = cause.errno or 0
        name = errno_codes.errorcode.get(code, str(code))
        if code == errno_codes.EBADMSG:
            name, reason = "checksum", "the bytes that came back are not those that were written"
        else:
            reason = os.strerror(code)
        message = (
            f"{doing} {format_bytes(nbytes)}{what} at offset {offset} of the scratch file in "
            f"{self.directory!r} failed: {name} ({reason}); {self._advice(code)}"
        )
        return StorageError(message, code)

    def _advice(self, code: int) -> str:
        if code in (errno_codes.ENOSPC, errno_codes.EDQUOT):
            free_bytes = shutil.disk_usage(self.directory).free
            return (
                f"{format_bytes(free_bytes)} are free there: free some space, lower disk_budget, "
                "or name another disk_dir"
            )
        if code == errno_codes.EFBIG:
            return "the size of a file is limited (ulimit -f): raise that or lower disk_budget"
        return "check the disk (dmesg, smartctl), or name another disk_dir"
