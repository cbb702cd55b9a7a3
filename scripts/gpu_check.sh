#!/usr/bin/env bash
# Checks a machine with an accelerator: bits, budgets and order on the device, then step time and
# peak memory beside other ways to hold activations. Ends at once, successfully, where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())'; then
  echo "no accelerator here: nothing to check"
  exit 0
fi
"$PYTHON" -c 'import torch; print("accelerator:", torch.accelerator.current_accelerator())'
"$PYTHON" -m pytest tests/gpu -q
"$PYTHON" scripts/bench_accelerator.py "$@"
