# In a fresh clone, `make demo` or `make test` is the only command needed. The command installs its
# dependencies into .venv.
#
#   PYTHON=...       the interpreter that creates .venv (3.11 or later); if it has torch >= 2.11,
#                    this torch is used, otherwise TORCH_SPEC is installed
#   TORCH_SPEC=...   the torch to install (default torch==2.13.0)
#   ARGS=...         options for the demo, pytest or the benchmarks
#   CMAKE_BUILD_PARALLEL_LEVEL=...   number of compile jobs (default 2) and of test processes

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
TORCH_SPEC ?= torch==2.13.0
export TORCH_SPEC PYTHON

ifeq ($(CI),true)
export AUTOBATCH_WERROR := ON
endif

CPP_FILES = $(shell find include csrc tests/cpp benchmarks/cpp examples -name '*.h' -o -name '*.cpp' -o -name '*.cu')
BOOTSTRAP := scripts/bootstrap.sh $(VENV)

# Builds the library. The first time, also installs the package into .venv in editable mode. Prints
# nothing if nothing has changed.
define build
@$(PY) setup.py --quiet build_ext --inplace $(1)
@cmp -s pyproject.toml $(VENV)/.installed || { \
  $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e . && \
  cp pyproject.toml $(VENV)/.installed; }
endef

.PHONY: all help demo test test-switches test-device launches sanitize sweep fuzz bench bench-quick gpu gpu-wheels bench-real test-real bench-cpp compat cuda-check build wheel wheels docs docs-links format lint clean distclean

all: build

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

build: ## create .venv, build the package and install it (editable)
	@$(BOOTSTRAP) build
	$(call build)

demo: ## train a Tree-LSTM eagerly and batched, side by side; TREEBANK=file or TAGS=file for other data
	@$(BOOTSTRAP) build
	$(call build)
	@$(PY) examples/demo.py $(if $(TREEBANK),--treebank "$(TREEBANK)") $(if $(TAGS),--tags "$(TAGS)") $(ARGS)

test: ## run all Python and C++ tests
	@$(BOOTSTRAP) build test catch2
	$(call build,--cpp-tests)
	@status=0; \
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $${CMAKE_BUILD_PARALLEL_LEVEL:-2} $(ARGS) || status=1; \
	ctest --test-dir build/latest --output-on-failure || status=1; \
	exit $$status

test-switches: ## run the Python tests with each pass and fast path off, one after the other (two hours); SWITCHES="fuse_sums"
	@$(BOOTSTRAP) build test
	$(call build)
	@status=0; export OMP_NUM_THREADS=1; \
	names="$(SWITCHES)"; \
	test -n "$$names" || names=$$($(PY) -c "from torch_autobatch import _C; print(*_C.switches())"); \
	for name in $$names; do \
	  echo "without $$name:"; \
	  AUTOBATCH_DISABLE=$$name $(PY) -m pytest -q -n $${CMAKE_BUILD_PARALLEL_LEVEL:-2} $(ARGS) || status=1; \
	done; \
	exit $$status

# Tests of features that only the CPU has are left out (tests/device/left_out.py).
ON_DEVICE := $(addprefix tests/python/,exact cells backward map/test_reads.py package/test_models.py)

test-device: ## run tests, random programs and examples on the simulated accelerator; ARGS: options for pytest
	@$(BOOTSTRAP) build test catch2
	$(call build,--cpp-tests)
	@status=0; export OMP_NUM_THREADS=1; \
	$(PY) -m pytest -q tests/device || status=1; \
	$(PY) -m pytest -q -p tests.device.plugin -n $${CMAKE_BUILD_PARALLEL_LEVEL:-2} $(ON_DEVICE) $(ARGS) || status=1; \
	$(PY) -m tests.fuzz --device sim --programs 500 || status=1; \
	$(PY) -m tests.fuzz --device sim --programs 200 --map || status=1; \
	$(PY) -m tests.fuzz --device sim --programs 200 --cells || status=1; \
	exit $$status

launches: ## count the launches of a training step on the simulated accelerator, and of hand-batched code
	@$(BOOTSTRAP) build test catch2
	$(call build,--cpp-tests)
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.launches $(ARGS)

SANITIZED := build/sanitize

sanitize: ## run the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer; ARGS: options for Catch2
	@$(BOOTSTRAP) build test catch2
	@export PATH="$(abspath $(VENV))/bin:$$PATH"; \
	cmake -S . -B $(SANITIZED) -G Ninja -DPython_EXECUTABLE="$(abspath $(PY))" \
	  -DAUTOBATCH_BUILD_PYTHON=OFF -DAUTOBATCH_BUILD_TESTS=ON \
	  -DAUTOBATCH_SANITIZE="address;undefined" >/dev/null && \
	cmake --build $(SANITIZED) -j $${CMAKE_BUILD_PARALLEL_LEVEL:-2} --target autobatch_tests && \
	$(SANITIZED)/autobatch_tests $(ARGS)

sweep: ## compare every op of PyTorch's database with eager; ARGS=--write updates docs/ops.md
	@$(BOOTSTRAP) build test
	$(call build)
	@$(PY) scripts/op_sweep.py $(ARGS)

fuzz: ## compare random programs with eager; ARGS="--programs 10000 --seed 1"
	@$(BOOTSTRAP) build
	$(call build)
	@OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(ARGS)

BENCH = OMP_NUM_THREADS=1 TREEBANK="$(TREEBANK)" TAGS="$(TAGS)" $(PY) -m benchmarks

bench: ## time eager, hand-batched code and this library on every workload; ARGS="--only tagger --minibatch 1,8,64"
	@$(BOOTSTRAP) build test
	$(call build)
	@$(BENCH) $(ARGS)

bench-quick: ## like bench, with small minibatches and few rounds; then pytest-benchmark's table
	@$(BOOTSTRAP) build test
	$(call build)
	@$(BENCH) --quick $(ARGS)
	@OMP_NUM_THREADS=1 $(PY) -m pytest benchmarks --benchmark-min-rounds=2

DEVICE ?= cuda
OUT ?= build/gpu
WHEELS ?= build/wheels

gpu: ## run all tests and benchmarks for GPUs; results in OUT=build/gpu; DEVICE=cpu for a trial run
	@$(BOOTSTRAP) build test
	@$(PY) -m benchmarks.gpu --device $(DEVICE) --out "$(OUT)" $(ARGS)

gpu-wheels: ## download the packages that make gpu installs into WHEELS=build/wheels, for a machine without network
	@python3 -c 'import tomllib; g = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	  print(*g["build"], *g["test"], sep="\n")' | \
	python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version $(or $(PYTHON_VERSION),3.12) \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
	  --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2010_x86_64 \
	  --platform manylinux_2_12_x86_64 --platform manylinux1_x86_64 --platform manylinux_2_5_x86_64 \
	  --dest $(WHEELS) --requirement /dev/stdin
	@ls $(WHEELS)

bench-real: ## time models of other packages; ARGS="--only transformers" or ARGS=--write
	@$(BOOTSTRAP) build test real
	$(call build)
	@$(PY) -m benchmarks.real --markdown build/bench-real.md $(ARGS)

test-real: ## check the results of models of other packages; ARGS: options for pytest
	@$(BOOTSTRAP) build test real
	$(call build)
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/real $(ARGS)

bench-cpp: ## C++: time capturing an op, and training steps next to hand-batched LibTorch; ARGS="--adam --eager"
	@$(BOOTSTRAP) build benchmark
	$(call build)
	@export PATH="$(abspath $(VENV))/bin:$$PATH"; \
	cmake -DAUTOBATCH_BUILD_BENCHMARKS=ON build/latest >/dev/null && \
	cmake --build build/latest --target capture_benchmark workloads_benchmark >/dev/null && \
	OMP_NUM_THREADS=1 build/latest/capture_benchmark && \
	OMP_NUM_THREADS=1 build/latest/workloads_benchmark --benchmark_repetitions=9 \
	  --benchmark_enable_random_interleaving=true --benchmark_min_time=0.3 $(ARGS)

COMPAT ?= 2.11.0 2.14.0

compat: ## compile with the headers of other PyTorch versions; COMPAT="2.11.0 /path/to/torch"
	@$(BOOTSTRAP) build
	@$(PY) scripts/compat.py $(COMPAT)

CUDA_ARCH ?= all-major

cuda-check: ## compile the CUDA kernels; needs nvcc, but no GPU and no torch with CUDA
	@mkdir -p build/cuda-check
	@set -e; for file in $(wildcard csrc/autobatch/kernels/cuda/*.cu); do \
	  nvcc -std=c++17 -arch=$(CUDA_ARCH) -Xcompiler -Wall,-Wextra -Werror all-warnings -Icsrc \
	    -c $$file -o build/cuda-check/$$(basename $$file).o; \
	  echo "$$file compiles with $$(nvcc --version | sed -n 's/.*release \(.*\), .*/nvcc \1/p')"; \
	done

wheel: ## build and check a wheel in dist/, and try it in a new environment without a compiler
	@$(BOOTSTRAP) build wheel
	@$(PY) scripts/wheel.py

TORCHES ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0

wheels: ## like wheel, for each PyTorch version in TORCHES="2.11.0 2.13.0", in environments in build/venvs
	@for torch in $(TORCHES); do \
	  $(MAKE) --no-print-directory wheel VENV=build/venvs/torch-$$torch TORCH_SPEC=torch==$$torch || exit 1; \
	done

SPHINX = $(PY) -m sphinx --fail-on-warning --keep-going --quiet

docs: ## build the documentation in build/docs/html and run its tutorials; warnings are errors
	@$(BOOTSTRAP) build docs
	$(call build)
	@OMP_NUM_THREADS=1 $(SPHINX) -b html docs build/docs/html
	@! grep -rE '<(script|link|img)[^>]*(src|href)="https?:' --include='*.html' build/docs/html || \
	  { echo "error: these pages fetch something from the web" >&2; exit 1; }
	@echo "build/docs/html/index.html"

docs-links: docs ## like docs, and check every link to the web
	@OMP_NUM_THREADS=1 $(SPHINX) -b linkcheck docs build/docs/linkcheck

format: ## format the code
	@$(BOOTSTRAP) lint
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .
	$(if $(CPP_FILES),$(VENV)/bin/clang-format -i $(CPP_FILES))

lint: ## check format, style and types
	@$(BOOTSTRAP) build lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(if $(CPP_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES))
	$(VENV)/bin/mypy
	$(VENV)/bin/python scripts/layers.py

clean: ## remove all build results
	rm -rf build dist compile_commands.json python/*.egg-info
	rm -rf python/torch_autobatch/{*.so,_build_info.py,include,share}

distclean: clean ## like clean, and remove .venv
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
