# Each target sets up what it needs, so one command is enough on a new machine. `make` lists the targets.

VENV := .venv
PYTHON := $(VENV)/bin/python
DEMO_STAMP := $(VENV)/.qsync-demo-installed
STAMP := $(VENV)/.qsync-installed
LAYOUT := build/layout
WORKERS ?= 2
PYTEST_FLAGS ?=
# A worker that dies ends the run: a replacement would run the same test, and the run might never end.
# The order of files is that of tests/support/tiers.py, which estimates durations better than a count of tests.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
BENCH_FLAGS ?=
# Folders that `make bench` runs. bench-gpu runs benchmarks/gpu. Each experiment of benchmarks/paper takes hours.
BENCHED := steps kernels predictor plans communication published
# Each test process imports torch, which takes three times as long without compiled modules.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(PYTHON) -m pip --disable-pip-version-check -qq

# Packages have thousands of modules, of which a few hundred are imported. Python compiles these at import.
LAZILY := --no-compile
PROJECT := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"];
RUNTIME := $(PROJECT) print(*project["dependencies"], *extras["demo"])
DEVELOPMENT := $(PROJECT) print(*extras["dev"])
NEEDED := $(PROJECT) print(*project["dependencies"], *extras["dev"])
# On a terminal pip shows its progress; a log gets a line per download from 5 MB, and the number of packages.
SHOWN_PIP := $(PYTHON) -m pip --disable-pip-version-check
LOGGED := awk '/ Downloading .* \([0-9.]+ [MG]B\)/ && ($$NF ~ /^GB/ || substr($$(NF - 1), 2) >= 5) { print "setup:   " $$2, $$(NF - 1), $$NF } \
  /^Successfully installed/ { print "setup:   " NF - 2 " packages installed" } { fflush() }'
INSTALLED = if [ -t 1 ]; then $(SHOWN_PIP) install $(LAZILY) -c constraints.txt $(1); \
  else $(SHOWN_PIP) install $(LAZILY) -c constraints.txt --progress-bar off $(1) | $(LOGGED); fi

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
CUDA_PACKAGES := nvidia-cutlass nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
COMPILE_FLAGS ?=
# Version of Triton for which the pinned torch generates code.
TRITON ?= 3.7.1

# Tests and benchmarks on a GPU use the machine's torch. Missing packages are installed from .wheels if it exists.
GPU_PYTHON ?= python3
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.qsync-installed
GPU_OUT ?= runs/gpu
GPU_PARTS ?= kernels numerics models sanitize
GPU_BENCHES ?= tune linear conv quantize step products
GPU_SECONDS ?= 480
GPU_JOBS ?=
WHEELS := .wheels
WHEELS_FOR := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
GPU_PIP := $(GPU_VENV)/bin/python -m pip --disable-pip-version-check -q install $(if $(wildcard $(WHEELS)/*.whl),--no-index --find-links $(WHEELS))

# Tests on another torch. pyproject.toml may exclude its version; the tests show whether it works.
VERSION ?=
TESTS ?=
TORCH_PYTHON = $(if $(filter command,$(origin PYTHON)),$(PYTHON),python3)
TORCH_VENV = .venv-torch-$(VERSION)$(if $(filter command,$(origin PYTHON)),-$(notdir $(PYTHON)))
# Replaces pip constraints of the machine, which may pin torch.
TORCH_PIP = PIP_CONSTRAINT='$(CURDIR)/$(TORCH_VENV)/constraints.txt' $(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install

.PHONY: FORCE help setup demo test test-all test-torch test-cuda-compile test-gpu-code smoke-gpu test-gpu bench-gpu wheel wheels gpu lint style format bench docs docs-figures report-bundle clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv, build the native module and install qsync_fx (editable)
	@:

# Rebuild if a package was added: an editable install maps modules to files, and would not find a module that became a package.
$(LAYOUT): FORCE
	@mkdir -p $(@D)
	@find qsync_fx/ passes/ backend/ -name __init__.py | LC_ALL=C sort | cmp -s - $@ || find qsync_fx/ passes/ backend/ -name __init__.py | LC_ALL=C sort > $@

$(DEMO_STAMP) $(STAMP): SHELL := /bin/bash
$(DEMO_STAMP) $(STAMP): .SHELLFLAGS := -o pipefail -c
$(DEMO_STAMP): pyproject.toml constraints.txt CMakeLists.txt $(LAYOUT) $(wildcard cpp/*.cpp cpp/*.h cpp/*/*.cpp cpp/*/*.h cpp/*/*/*.cpp cpp/*/*/*.h)
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2>/dev/null; then \
	  for python in python3.11 python3.12 python3.13 python3 ''; do \
	    if [ -z "$$python" ]; then echo "setup: qsync_fx needs Python 3.11, 3.12 or 3.13; install one of them" >&2; exit 1; fi; \
	    "$$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2>/dev/null && break; \
	  done; \
	  echo "setup: virtual environment with $$("$$python" --version)"; \
	  rm -rf $(VENV); \
	  "$$python" -m venv $(VENV) || { \
	    rm -rf $(VENV); echo "setup: 'python -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	fi
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "setup: no C++17 compiler found; on Debian: apt-get install g++" >&2; exit 1; }
	@echo "setup: build tools"
	@$(call INSTALLED,'scikit-build-core>=0.10' 'pybind11>=2.13' ninja \
	  $$(command -v cmake >/dev/null && cmake --version | awk '{ split($$3, v, "."); exit !(v[1] > 3 || v[2] >= 18) }' || echo cmake))
	@packages=$$($(PYTHON) -c '$(RUNTIME)'); \
	  echo "setup: compile the native module, and download torch, $$(echo $$packages | wc -w | awk '{ print $$1 - 1 }') other packages and their dependencies"; \
	  PATH="$$PWD/$(VENV)/bin:$$PATH" $(PIP) install --no-build-isolation --no-deps -e . & native=$$!; \
	  $(call INSTALLED,$$packages) || { kill $$native 2>/dev/null; exit 1; }; \
	  echo "setup: wait for the compiler"; wait $$native
	@$(PYTHON) -c 'import torch, qsync_fx; from qsync_fx import _C; print(f"setup: done, torch {torch.__version__}, {_C.isa()} kernels")'
	@touch $@

# The extra "dev" comes on top: `make demo` does not need it.
$(STAMP): $(DEMO_STAMP)
	@packages=$$($(PYTHON) -c '$(DEVELOPMENT)'); \
	  echo "setup: $$(echo $$packages | wc -w) packages for tests and documentation, with their dependencies"; \
	  $(call INSTALLED,$$packages)
	@$(PIP) install $(LAZILY) --no-deps -c constraints.txt $(CUDA_PACKAGES) || \
	  echo "setup: without $(CUDA_PACKAGES), no CUDA kernel is compiled or checked here" >&2
	@touch $@

# Without the Debian package, the demo uses smaller data from scikit-learn.
demo: $(DEMO_STAMP) ## measure two unequal ranks, find a plan and train a ResNet under it (5 to 10 minutes the first time)
	@if [ ! -d /usr/share/datasets/fashion-mnist ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "demo: fetching Fashion-MNIST"; \
	  install="timeout 120 apt-get install -y -q -o DPkg::Lock::Timeout=30 dataset-fashion-mnist"; \
	  { $$install || { timeout 60 apt-get update -q && $$install; }; } </dev/null >/dev/null 2>&1 || true; \
	fi
	@$(PYTHON) examples/demo.py

# mypy runs in parallel with the tests, and its errors are printed after them. The trap stops it on Ctrl-C, which background jobs ignore.
test: setup style ## lint, mypy and the fast tests (8 minutes on two cores)
	@echo "lint: ruff passed, mypy --strict runs in parallel with the tests"; mkdir -p build; \
	  $(PYTHON) -m mypy --strict >build/types.log 2>&1 & types=$$!; trap 'kill $$types 2>/dev/null' EXIT; \
	  $(PYTHON) -m pytest $(SPREAD) $(PYTEST_FLAGS); status=$$?; \
	  wait $$types || { echo "lint: mypy --strict" >&2; cat build/types.log >&2; exit 1; }; exit $$status

# Many tests start processes with time limits, which a busy machine may exceed. Failed tests therefore run again, alone.
# pytest's exit status 1 means that all tests ran and some failed. Any other failure, such as a dead worker, ends the run.
test-all: setup lint ## all models, formats and kernels (45 minutes on two cores), and the fast tests in each .venv-torch-*
	@for folder in $(wildcard .venv-torch-*/.qsync-installed); do \
	  echo "test-all: $$(dirname $$folder)"; \
	  $$(dirname $$folder)/bin/python -m pytest $(SPREAD) $(PYTEST_FLAGS) || exit 1; \
	done
	@$(PYTHON) -m pytest $(SPREAD) --tier all $(PYTEST_FLAGS) || { [ $$? = 1 ] || exit 1; \
	  echo "test-all: failed tests run again, alone"; \
	  $(PYTHON) -m pytest --tier all --last-failed --last-failed-no-failures none || exit 1; \
	  echo "test-all: the failed tests passed alone: they are flaky, or hide a race; please fix them"; }

test-torch: ## run tests on another torch in .venv-torch-VERSION (VERSION=2.14.1, optionally PYTHON=python3.13 and TESTS='tests/models/test_models.py')
	@[ -n '$(VERSION)' ] || { echo "test-torch: set the version of torch: make test-torch VERSION=2.14.1" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(TORCH_VENV)/.qsync-installed
	@$(TORCH_VENV)/bin/python -m pytest $(SPREAD) $(PYTEST_FLAGS) $(TESTS) --junitxml=$(TORCH_VENV)/tests.xml; status=$$?; \
	  [ -n '$(TESTS)' ] || PYTHONPATH=. $(TORCH_VENV)/bin/python tests/support/compatibility.py $(TORCH_VENV)/tests.xml; exit $$status

# A torch with CUDA needs 6 GB. The limits of pyproject.toml for torch and Python are ignored, its other dependencies are installed.
.venv-torch-%/.qsync-installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/*.cpp cpp/*.h cpp/*/*.cpp cpp/*/*.h cpp/*/*/*.cpp cpp/*/*/*.h)
	@echo "test-torch: $(@D), torch $(VERSION) on $$($(TORCH_PYTHON) --version)"
	@[ -x $(@D)/bin/python ] || $(TORCH_PYTHON) -m venv $(@D)
	@{ grep -v '^torch==' constraints.txt; echo 'torch==$(VERSION)'; } > $(@D)/constraints.txt
	@$(TORCH_PIP) torch cmake $$($(@D)/bin/python -c '$(NEEDED)' | tr ' ' '\n' | grep -v '^torch>')
	@$(TORCH_PIP) --no-deps $(CUDA_PACKAGES) || echo "test-torch: without $(CUDA_PACKAGES)" >&2
	@PATH="$(CURDIR)/$(@D)/bin:$$PATH" $(TORCH_PIP) --no-build-isolation --no-deps --ignore-requires-python -e .
	@$(@D)/bin/python -c 'import torch, qsync_fx; from qsync_fx import _C; print("test-torch: torch", torch.__version__)'
	@touch $@

test-cuda-compile: setup ## compile and inspect every CUDA kernel with nvcc, without a GPU (an hour on two cores; COMPILE_FLAGS='--arch sm_80' for one architecture)
	@mkdir -p runs
	@$(PYTHON) tests/support/cuda/compiled/cuda_compile_all.py --heavy --json runs/cuda-compile.json $(COMPILE_FLAGS)

# Triton has its own folder, because torch chooses other code paths in all tests if it can import Triton.
test-gpu-code: setup ## without a GPU: compile models to machine code for T4, A100 and H100; registers and spills in runs/gpu-code.json
	@[ -d .triton/triton ] || $(PIP) install --no-deps --target .triton 'triton==$(TRITON)'
	@rm -f runs/gpu-code.json
	@QSYNC_GPU_CODE='$(CURDIR)/runs/gpu-code.json' PYTHONPATH='$(CURDIR)/.triton' $(PYTHON) -m pytest $(SPREAD) --tier all $(PYTEST_FLAGS) \
	  tests/backend/cuda/test_gpu_code.py

smoke-gpu: ## on an NVIDIA GPU, with the machine's python and torch: versions, kernels, training and speed in one report (10 minutes)
	@$(GPU_PYTHON) tests/gpu/smoke.py --install --out '$(GPU_OUT)/smoke'

test-gpu: gpu ## on an NVIDIA GPU: numerics of kernels, models, compute-sanitizer (GPU_PARTS='kernels numerics' for a part); see docs/gpu-testing.md
	@$(GPU_VENV)/bin/python tests/gpu/run.py --out '$(GPU_OUT)' --seconds $(GPU_SECONDS) $(if $(GPU_JOBS),--jobs $(GPU_JOBS)) --parts $(GPU_PARTS)

bench-gpu: gpu ## on an NVIDIA GPU: tune, then measure against other libraries, JSON in benchmarks/results (GPU_BENCHES='tune linear' for a part)
	@$(GPU_VENV)/bin/python benchmarks/gpu/parts.py --seconds $(GPU_SECONDS) --parts $(GPU_BENCHES) -- $(BENCH_FLAGS)

# A separate build folder, because an editable build includes fault injection: with a shared folder, each build would recompile the other's files.
wheel: setup ## build a wheel for this Python and Linux into dist, with a manylinux tag by auditwheel
	@echo "wheel: build"
	@rm -rf build/wheel && mkdir -p dist
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) wheel --no-deps --no-build-isolation -C build-dir='build/wheel-{wheel_tag}' -w build/wheel .
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl >build/auditwheel.log 2>&1 || { \
	  cat build/auditwheel.log >&2; exit 1; }
	@echo "wheel: $$(ls -t dist/*.whl | head -n 1)"

# Packages for Python 3.12. The dependencies of nvidia-cutlass are omitted, because only its headers are used.
wheels: setup ## download into .wheels the packages that a GPU machine without network needs
	@mkdir -p $(WHEELS)
	@$(PIP) download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $(addprefix --platform ,$(WHEELS_FOR)) \
	  -c constraints.txt -d $(WHEELS) pybind11 expecttest nvidia-cutlass attrs cattrs platformdirs highspy
	@du -sh $(WHEELS)

gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { \
	  echo "no GPU: nothing was tested or measured (the torch of GPU_PYTHON=$(GPU_PYTHON) finds none)" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(GPU_STAMP)

# If GPU_PYTHON is in a virtual environment, --system-site-packages omits the packages of that environment: a .pth file adds them.
$(GPU_STAMP): pyproject.toml CMakeLists.txt $(wildcard cpp/*.cpp cpp/*.h cpp/*/*.cpp cpp/*/*.h cpp/*/*/*.cpp cpp/*/*/*.h)
	@echo "gpu: virtual environment with the packages of $$($(GPU_PYTHON) --version)"
	@rm -rf $(GPU_VENV) && $(GPU_PYTHON) -m venv --system-site-packages $(GPU_VENV)
	@$(GPU_PYTHON) -c 'import sysconfig; print(*{sysconfig.get_path(name) for name in ("purelib", "platlib")}, sep="\n")' \
	  > "$$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/around.pth"
	@before=$$($(GPU_PYTHON) -c 'import torch; print(torch.__version__)'); \
	  echo "gpu: build tools and headers $(if $(wildcard $(WHEELS)/*.whl),from $(WHEELS),from the index)"; \
	  $(GPU_PIP) --no-deps -c constraints.txt pybind11 expecttest nvidia-cutlass && \
	  for name in ninja scikit_build_core pathspec packaging attrs cattrs filelock platformdirs networkx sympy rich hypothesis pytest pytest_timeout xdist transformers; do \
	    $(GPU_VENV)/bin/python -c "import $$name" 2>/dev/null || missing="$$missing $$name"; \
	  done; \
	  if [ -n "$$missing" ]; then $(GPU_PIP) -c constraints.txt $$(echo $$missing | sed 's/xdist/pytest-xdist/; s/_/-/g') || exit 1; fi; \
	  echo "gpu: the native module, qsync_fx"; \
	  PATH="$$PWD/$(GPU_VENV)/bin:$$($(GPU_PYTHON) -c 'import os, sys; print(os.path.dirname(sys.executable))'):$$PATH" \
	    $(GPU_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-build-isolation --no-deps --no-index \
	    -C build-dir='build/gpu-{wheel_tag}' -e . && \
	  $(GPU_VENV)/bin/python -c 'import sys, torch, qsync_fx; from qsync_fx import _C; \
	    assert torch.__version__ == sys.argv[1], "torch was replaced"; print("gpu: done, torch", torch.__version__)' "$$before"
	@touch $@

lint: style ## run ruff and mypy --strict
	@$(PYTHON) -m mypy --strict

style: setup
	@$(PYTHON) -m ruff check --quiet .
	@$(PYTHON) -m ruff format --quiet --check . || { $(PYTHON) -m ruff format --check . | tail -n 5; echo "lint: make format" >&2; exit 1; }

format: setup ## format the code and apply ruff's automatic fixes
	@$(PYTHON) -m ruff check --quiet --fix-only . ; $(PYTHON) -m ruff format .

docs: setup ## build the documentation site into build/docs; warnings are errors
	@$(PYTHON) -m sphinx -q -W --keep-going -b html docs build/docs && echo "docs: build/docs/index.html"

docs-figures: setup ## draw the charts and write the pages of benchmarks and claims from benchmarks/results
	@$(PYTHON) benchmarks/plots.py && $(PYTHON) benchmarks/support/benchmarks_page.py && $(PYTHON) benchmarks/support/claims_page.py

report-bundle: ## build the web page of `qsync report` from qsync_fx/report/web (needs node and npm)
	@mkdir -p build && rm -rf build/report-web && cp -r qsync_fx/report/web build/report-web
	@cd build/report-web && npm ci --no-audit --no-fund --silent && npm run --silent build
	@cp build/report-web/dist/bundle.js build/report-web/dist/bundle.css qsync_fx/report/
	@cd qsync_fx/report/web && echo "// sources $$(LC_ALL=C; export LC_ALL; cat package-lock.json src/* | sha256sum | cut -c1-64)" >> ../bundle.js
	@ls -l qsync_fx/report/bundle.js qsync_fx/report/bundle.css

bench: setup ## run the CPU benchmarks, JSON in benchmarks/results (BENCH_FLAGS=--quick for a short run)
	@for file in $$(grep -l __main__ $(BENCHED:%=benchmarks/%/*.py)); do \
	  case "$$file" in */links.py|*/against.py) continue;; esac; \
	  name=$$(basename "$$file" .py); echo "== $$name"; \
	  $(PYTHON) "$$file" $(BENCH_FLAGS) --json "benchmarks/results/$$name.json" || exit 1; \
	done

clean: ## remove build outputs, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## also remove all virtual environments
	rm -rf $(VENV) $(GPU_VENV) .venv-torch-* .triton
