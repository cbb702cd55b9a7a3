"""What the package promises by name."""

import pickle
import warnings

import pytest

import offload
from offload import errors


def test_public_names() -> None:
    assert set(offload.__all__) == {
        "Config", "OffloadError", "Placement", "SavedTensor", "Session", "StepReport",
        "StorageError", "checkpoint", "checkpoint_sequential", "profile", "selective", "tune",
        "Plan", "plan",
    }  # fmt: skip
    assert all(hasattr(offload, name) for name in offload.__all__)
    assert len(offload.__all__) <= 15


def test_tree_of_errors() -> None:
    assert issubclass(offload.OffloadError, RuntimeError)
    for error in (errors.StorageError, errors.ModifiedInPlaceError, errors.StateError):
        assert issubclass(error, offload.OffloadError)
    assert issubclass(errors.OffloadWarning, UserWarning)
    assert offload.StorageError("x", 28).errno == 28
    assert offload.StorageError("x").errno is None


def test_placements() -> None:
    assert {p.value for p in offload.Placement} == {"keep", "host", "disk"}


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(offload.StorageError("disk full", 28)))
    assert (str(error), error.errno) == ("disk full", 28)


def test_importing_warns_of_nothing() -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import offload; print(offload.__version__)"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, offload.__version__), done.stderr
    with warnings.catch_warnings(), pytest.raises(AttributeError):
        _ = offload.no_such_name
