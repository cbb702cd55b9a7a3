"""Where a framework is not installed."""

import subprocess
import sys

import pytest

from offload.integrations.lightning import step_callback


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, offload.integrations.lightning, offload.integrations.transformers;"
        "print({'lightning', 'pytorch_lightning', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_lightning_is_missing(monkeypatch, open_session) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install lightning"):
        step_callback(open_session())
