# Every target does its own set-up, so that a fresh machine needs one command. `make` alone lists them.

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.qsync-installed
WORKERS ?= 2
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
PIP := $(PYTHON) -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
CUDA_PACKAGES := nvidia-cutlass nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
COMPILE_FLAGS ?=

.PHONY: help setup demo test test-cuda-compile lint format bench clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv, build the native module, install qsync_fx into it (editable); quick when nothing changed
	@:

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/*.cpp cpp/*.h)
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
	  for python in python3.11 python3.12 python3 ''; do \
	    if [ -z "$$python" ]; then echo "setup: qsync_fx needs Python 3.11 or 3.12; install one of them" >&2; exit 1; fi; \
	    "$$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && break; \
	  done; \
	  echo "setup: virtual environment with $$("$$python" --version)"; \
	  rm -rf $(VENV); \
	  "$$python" -m venv $(VENV) || { \
	    rm -rf $(VENV); echo "setup: 'python -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	fi
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "setup: no C++17 compiler found; on Debian: apt-get install g++" >&2; exit 1; }
	@echo "setup: build tools"
	@$(PIP) install -c constraints.txt 'scikit-build-core>=0.10' 'pybind11>=2.13' ninja \
	  $$(command -v cmake >/dev/null && cmake --version | awk '{ split($$3, v, "."); exit !(v[1] > 3 || v[2] >= 18) }' || echo cmake)
	@echo "setup: dependencies, the native module, qsync_fx (torch is large: minutes the first time)"
	@PATH="$$PWD/$(VENV)/bin:$$PATH" $(PIP) install --no-build-isolation -c constraints.txt -e '.[dev]'
	@$(PIP) install --no-deps -c constraints.txt $(CUDA_PACKAGES) || \
	  echo "setup: without $(CUDA_PACKAGES), CUDA kernels are neither compiled nor looked at here" >&2
	@$(PYTHON) -c 'import torch, qsync_fx; from qsync_fx import _C; print(f"setup: done, torch {torch.__version__}, {_C.isa()} kernels")'
	@touch $@

# The demo falls back to smaller data that scikit-learn ships, so a machine without the package is fine.
demo: setup ## train a ResNet in mixed precision over two processes, in three minutes
	@if [ ! -d /usr/share/datasets/fashion-mnist ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "demo: fetching Fashion-MNIST"; \
	  install="timeout 120 apt-get install -y -q -o DPkg::Lock::Timeout=30 dataset-fashion-mnist"; \
	  { $$install || { timeout 60 apt-get update -q && $$install; }; } </dev/null >/dev/null 2>&1 || true; \
	fi
	@$(PYTHON) examples/demo.py

test: setup lint ## lint, then run the tests
	@$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS)

test-cuda-compile: setup ## compile every CUDA kernel and look at what comes out; needs nvcc, no GPU; hours (COMPILE_FLAGS='--arch sm_80' for less)
	@mkdir -p runs
	@$(PYTHON) tests/cuda_compile_all.py --heavy --json runs/cuda-compile.json $(COMPILE_FLAGS)

lint: setup ## ruff and mypy --strict
	@$(PYTHON) -m ruff check --quiet .
	@$(PYTHON) -m ruff format --quiet --check . || { $(PYTHON) -m ruff format --check . | tail -n 5; echo "lint: make format" >&2; exit 1; }
	@$(PYTHON) -m mypy --strict

format: setup ## let ruff format and repair what it can
	@$(PYTHON) -m ruff check --quiet --fix-only . ; $(PYTHON) -m ruff format .

bench: setup ## run every benchmark, JSON to benchmarks/results; BENCH_FLAGS=--quick for a short one
	@for file in benchmarks/[!_]*.py; do \
	  name=$$(basename "$$file" .py); echo "== $$name"; \
	  $(PYTHON) "$$file" $(BENCH_FLAGS) --json "benchmarks/results/$$name.json" || exit 1; \
	done

clean: ## remove what was built, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
