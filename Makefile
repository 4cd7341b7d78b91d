# Everything a developer does. Needs Python >= 3.10, a C++17 compiler and make; the rest is installed into .venv.
#
#   make test PYTHON=/some/python    uses that interpreter and its packages as they are, and installs nothing
#   make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"     another torch, or another source
#   make test ARGS="-k scaled_mm"    ARGS goes to pytest, `lowbit train`, or the benchmark
SHELL := /bin/sh
BASE_PYTHON ?= python3
TORCH ?= torch==2.13.0
ENV ?= .venv
export LOWBIT_ENV := $(ENV)
OLDEST_PYTHON ?= python3.10
JOBS ?= 2
ARGS ?=
CXX_SOURCES = find csrc -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh'
AARCH64 := aarch64-linux-gnu
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifdef PYTHON
  RUN := $(PYTHON)
  setup = @:
else
  RUN := $(ENV)/bin/python
  setup = @$(BASE_PYTHON) tools/setup_env.py --torch '$(TORCH)' $(1)
endif
native = LOWBIT_NATIVE=1 $(RUN) setup.py -q build_ext --inplace
interpreter = $$($(RUN) -c 'import sys; print(sys.executable)')
cmake = PATH="$(dir $(RUN)):$$PATH" cmake

pytest = $(RUN) -m pytest -q $$($(RUN) -c 'import xdist' 2>/dev/null && printf -- '-n %s' $(JOBS))
native_test = -DPython_EXECUTABLE="$(interpreter)" -DLOWBIT_PYTHON=OFF -DLOWBIT_CUDA=OFF -DLOWBIT_NATIVE_TESTS=ON

.DEFAULT_GOAL := help
.PHONY: help build test test-slow test-oldest test-newest format exhaustive faults demo bench lint lint-format lint-python lint-types lint-native tables native-test emulated sanitize neon cuda-compile triton-compile clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

build: ## Build the native libraries in place (only what changed)
	$(call setup,build)
	$(native)

test: ## Build, and run the tests but the slow ones
	$(call setup,test)
	$(native)
	$(pytest) -m "not slow" $(ARGS)

test-slow: ## Those that compile or interpret many GPU kernels, or run a whole benchmark
	$(call setup,test)
	$(native)
	$(pytest) -m slow $(ARGS)

test-oldest: ## The tests with the oldest Python, torch and Triton that are supported, in .venv-oldest
	$(MAKE) test ENV=.venv-oldest BASE_PYTHON=$(OLDEST_PYTHON) TORCH="$(or $(TORCH_OLDEST),torch==2.10.0 triton==3.6.0)"

test-newest: ## The tests with the newest torch that pip finds, in .venv-newest
	$(MAKE) test ENV=.venv-newest TORCH="$(or $(TORCH_NEWEST),torch)"

exhaustive: ## Every fp32 pattern through every format, every pair of schemes (half an hour)
	$(call setup,test)
	$(native)
	$(RUN) tests/exhaustive.py $(ARGS)

faults: ## Processes that are killed or interrupted while they offload and save (minutes)
	$(call setup,test)
	$(native)
	$(RUN) tests/faults.py $(ARGS)

demo: ## Train a small GPT in bf16 and FP8, quantize it with every recipe, write out/demo/report.md (minutes)
	$(call setup,demo)
	$(native)
	$(RUN) -m lowbit train $(or $(strip $(ARGS)),$(if $(wildcard out/demo/report.md),--overwrite))

bench: ## Measure every op beside its peers and the machine's limits; writes bench/results/ (with ARGS: out/bench/)
	$(call setup,bench --optional bench/requirements.txt)
	$(native)
	$(RUN) -m lowbit bench $(or $(strip $(ARGS)),--out bench/results)
	$(if $(strip $(ARGS)),,PYTHONPATH=. $(RUN) docs/generate_tables.py)

lint: ## Every check that needs no test: format, lint, types, C++ format
	$(call setup,lint)
	@$(MAKE) --no-print-directory -k lint-format lint-python lint-types lint-native PYTHON='$(RUN)'

lint-format:
	$(RUN) -m ruff format --check .

lint-python:
	$(RUN) -m ruff check .

lint-types:
	$(RUN) -m mypy
	$(RUN) -m mypy --config-file tools/mypy.ini kernels
	$(RUN) -m mypy --config-file tools/mypy.ini bench

lint-native:
	@echo "clang-format --dry-run -Werror (csrc)"
	@$(CXX_SOURCES) | sort | PATH="$(dir $(RUN)):$$PATH" xargs clang-format --dry-run -Werror

format: ## Format Python and C++ in place
	$(call setup,lint)
	$(RUN) -m ruff check -q --fix-only .
	$(RUN) -m ruff format -q .
	@$(CXX_SOURCES) | PATH="$(dir $(RUN)):$$PATH" xargs clang-format -i

tables: ## Write the README's tables anew from the tables in the code
	$(call setup,build)
	PYTHONPATH=. $(RUN) docs/generate_tables.py

native-test: ## Build and run the native self-test: every instruction set here against the scalar code
	$(call setup,build)
	$(cmake) -S . -B build/native-test -DCMAKE_BUILD_TYPE=Release $(native_test)
	$(cmake) --build build/native-test --parallel $(JOBS)
	build/native-test/csrc/tests/lowbit_threads_test
	build/native-test/csrc/tests/lowbit_native_test
	build/native-test/csrc/tests/lowbit_matmul_test

emulated: ## The same for VBMI, BF16 and AMX, whose instructions are computed by loops; half the cases where some are hidden (needs AVX-512 with VNNI)
	$(call setup,build)
	$(cmake) -S . -B build/emulated -DCMAKE_BUILD_TYPE=Release -DLOWBIT_EMULATE=ON $(native_test)
	$(cmake) --build build/emulated --parallel $(JOBS)
	build/emulated/csrc/tests/lowbit_threads_test
	build/emulated/csrc/tests/lowbit_native_test
	for without in "" amx_tile amx_tile,avx512_vbmi amx_tile,avx512_vbmi,avx512_bf16; do \
	  LOWBIT_WITHOUT=$$without build/emulated/csrc/tests/lowbit_matmul_test $${without:+2} & runs="$$runs $$!"; done; \
	for run in $$runs; do wait $$run || exit 1; done

sanitize: ## The native self-test under AddressSanitizer and UBSan, and how threads share work under ThreadSanitizer
	$(call setup,build)
	$(cmake) -S . -B build/sanitize -DCMAKE_BUILD_TYPE=Release $(native_test) \
	  -DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
	$(cmake) --build build/sanitize --parallel $(JOBS)
	build/sanitize/csrc/tests/lowbit_threads_test
	build/sanitize/csrc/tests/lowbit_native_test
	build/sanitize/csrc/tests/lowbit_matmul_test
	$(CXX) -std=c++17 -O1 -g1 -fsanitize=thread -Icsrc csrc/tests/threads_test.cpp csrc/cpu/threads.cpp -pthread \
	  -o build/sanitize/threads_test
	build/sanitize/threads_test

neon: ## The same for aarch64, cross-compiled and run by an emulator (needs the cross compiler and qemu-user)
	$(call setup,build)
	@command -v $(AARCH64)-g++ >/dev/null || { echo "$(AARCH64)-g++ is missing: apt install g++-$(AARCH64) qemu-user"; exit 1; }
	$(cmake) -S . -B build/neon -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=$(AARCH64)-g++ $(native_test)
	$(cmake) --build build/neon --parallel $(JOBS)
	qemu-aarch64 -L /usr/$(AARCH64) build/neon/csrc/tests/lowbit_threads_test
	qemu-aarch64 -L /usr/$(AARCH64) build/neon/csrc/tests/lowbit_native_test 4 & runs=$$!; \
	for without in "" i8mm i8mm,dotprod,bf16; do \
	  LOWBIT_WITHOUT=$$without qemu-aarch64 -L /usr/$(AARCH64) build/neon/csrc/tests/lowbit_matmul_test 8 & runs="$$runs $$!"; done; \
	for run in $$runs; do wait $$run || exit 1; done

cuda-compile: ## Compile the CUDA sources for every architecture; links nothing (needs nvcc)
	$(call setup,build)
	@command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc || { echo "nvcc is missing: install the CUDA toolkit"; exit 1; }
	$(cmake) -S . -B build/cuda -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(interpreter)" -DLOWBIT_PYTHON=OFF \
	  -DLOWBIT_CUDA=COMPILE -DLOWBIT_TORCH_DIR="$$($(RUN) -c 'import torch; print(torch.__path__[0])')"
	$(cmake) --build build/cuda --parallel $(JOBS) --target cuda_compile

triton-compile: ## Compile the Triton kernels for every architecture, and check the PTX; needs no GPU
	$(call setup,build)
	$(RUN) -m lowbit.kernels.aot --workers $(JOBS) $(ARGS)

clean: ## Remove what was built; the environment (.venv) and out/ stay
	rm -rf build dist *.egg-info lowbit/*.so lowbit/*.pyd lowbit/*.dylib lowbit/_build.json
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lowbit kernels tests bench tools docs -name __pycache__ -prune -exec rm -rf {} +
