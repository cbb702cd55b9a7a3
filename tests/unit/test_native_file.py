"""The native engine's scratch file."""

import errno
import os
import resource
import signal

import pytest

from offload.units import MIB
from tests.unit.native_support import in_child

native = pytest.importorskip("offload._native", reason="the extension is not built")


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
