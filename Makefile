# Everything runs in one virtual environment, made on demand: `make test` works on a fresh checkout.
PYTHON3 ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PYTHON) -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0

CPP := $(wildcard csrc/*.cc csrc/*.h)
CPP_TESTS := $(wildcard tests/native/*.cc tests/native/*.h tests/sim/simdev/csrc/*/*.cc \
  tests/sim/simdev/csrc/*/*.h)
JOBS := $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench native-asan native-tsan gpu-check clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make the virtual environment with the package and its tools

# torch goes in by itself first: the version that is tested, whatever the others ask for.
$(STAMP): setup.cfg setup.py pyproject.toml $(CPP)
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install --editable ".[test,plot,planner,integrations,dev]"
	touch $@

demo: $(STAMP)  ## Train a model plain and offloaded, and compare every bit
	$(PYTHON) -m offload demo

test: $(STAMP)  ## Run the tests, C++ and Python
	$(MAKE) -C tests/native plain
	@$(PYTHON) -c "import torch, offload._native" || \
	  { echo "the native engine is not built: see the compiler's output of 'make setup'"; exit 1; }
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) tests/sim

check: $(STAMP)  ## Lint, formats and types, Python and C++
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict offload/
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP) $(CPP_TESTS)
	@includes=$$($(PYTHON) -c "import pybind11, sysconfig as s; \
	  print('-isystem', pybind11.get_include(), '-isystem', s.get_path('include'))"); \
	printf '%s\n' $(filter %.cc,$(CPP)) | xargs -P $(JOBS) -I FILE \
	  $(VENV)/bin/clang-tidy --quiet FILE -- -std=c++17 -Icsrc $$includes

bench: $(STAMP)  ## Step time and memory beside plain training and other ways to save memory
	$(PYTHON) scripts/bench_step.py

native-asan: $(STAMP)  ## C++ tests with the address and undefined-behaviour sanitizers
	$(MAKE) -C tests/native asan

native-tsan: $(STAMP)  ## C++ tests with the thread sanitizer
	$(MAKE) -C tests/native tsan

gpu-check: $(STAMP)  ## Check a machine with an accelerator
	bash scripts/gpu_check.sh

clean:  ## Remove build products, caches and the virtual environment
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f offload/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
