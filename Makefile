# smoe-mp: what one can do here.  `make help` reads this file.
# Everything sets itself up: a virtual environment in .venv, the C core built into it.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SOURCES := pyproject.toml $(wildcard csrc/*.c csrc/*.h csrc/*.py csrc/CMakeLists.txt csrc/install/* configs/*)
CTEST_FLAGS ?=

CHAOS_ROUNDS ?= 1000
SOAK_SECONDS ?= 3600
FUZZ_SECONDS ?= 600
COVER ?= tests
# Tests that want the machine for themselves; all others run two at a time.
ALONE := tests/process/test_chaos_short.py
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help demo test ctest pytest lint format asan tsan macos arm model coverage wheels chaos soak fuzz bench tiny clean setup torch

help: ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  \1\t/' | expand -t 12

demo: $(VENV)/.ready ## have the small model that comes along write text, half of its experts in memory
	$(VENV)/bin/smoe-mp demo

test: ctest pytest ## all tests

ctest: $(VENV)/.ready ## the C tests alone
	@csrc/ctest.sh build/ctest

pytest: $(VENV)/.torch ## the Python tests alone
	@status=0; \
	$(PY) -m pytest -q -n 2 --durations=25 $(ALONE:%=--ignore=%) || status=1; \
	$(PY) -m pytest -q $(ALONE) || status=1; \
	exit $$status

lint: $(VENV)/.ready ## ruff, mypy --strict, clang-format, no change made
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy & linux=$$!; \
	$(VENV)/bin/mypy --platform darwin --cache-dir .mypy_cache/darwin; status=$$?; wait $$linux && exit $$status
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.c' '*.h' '*.cpp')

format: $(VENV)/.ready ## let ruff and clang-format have their way
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files '*.c' '*.h' '*.cpp')

asan: $(VENV)/.ready ## the C tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@csrc/ctest.sh build/ctest-asan address,undefined

tsan: $(VENV)/.ready ## the C tests under ThreadSanitizer
	@csrc/ctest.sh build/ctest-tsan thread

macos: $(VENV)/.ready ## compile and link everything in C for macOS on arm64 and x86-64
	@csrc/cross.sh aarch64-macos
	@csrc/cross.sh x86_64-macos

arm: $(VENV)/.ready ## compile everything in C for Linux on arm64 and run its tests under qemu
	@csrc/cross.sh aarch64-linux-gnu

model: ## check the protocol's model with spin
	@tests/model/run.sh

coverage: ## which lines of C and Python the tests run, into build/coverage; COVER=tests/unit for a part of them
	TORCH_INDEX=$(TORCH_INDEX) tools/coverage.sh $(PYTHON) $(COVER)

wheels: $(VENV)/.ready ## sdist and wheel, built and tried in a new environment of every Python from 3.11 on
	$(PY) tools/wheels.py

chaos: $(VENV)/.ready ## kill and stop processes under load, CHAOS_ROUNDS times, then half as often beside other faults
	$(PY) tests/chaos/chaos.py --rounds $(CHAOS_ROUNDS)
	$(PY) tests/chaos/faults.py --rounds $$(($(CHAOS_ROUNDS) / 2))

soak: $(VENV)/.ready ## a mixed load for SOAK_SECONDS: memory, descriptors and segments must not grow
	$(PY) tests/chaos/soak.py --seconds $(SOAK_SECONDS)

fuzz: $(VENV)/.ready ## fuzz the C core, the parsers and the control plane, FUZZ_SECONDS each (FUZZ=TARGETS)
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) tests/fuzz/fuzz.py $(FUZZ)

bench: $(VENV)/.ready ## the short benchmarks
	for what in hit miss wake idle io dequant; do $(VENV)/bin/smoe-mp bench $$what --quick || exit 1; done

tiny: $(VENV)/.ready ## pack the small model anew from its checkpoint, CHECKPOINT=FOLDER
	$(VENV)/bin/smoe-mp pack $(CHECKPOINT) smoe_mp/tiny/tiny.smoe --checksums --force
	cp $(CHECKPOINT)/config.json smoe_mp/tiny/config.json

setup: $(VENV)/.ready ## only the virtual environment

torch: $(VENV)/.torch ## torch into it, for tests/torch

$(VENV)/.ready: $(SOURCES)
	@csrc/toolcheck.sh $(PYTHON)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

# Only for tests/torch, which are skipped by name where it cannot be had.
$(VENV)/.torch: $(VENV)/.ready .ci/torch.txt
	@$(PY) -m pip install -q --disable-pip-version-check --retries 1 --extra-index-url $(TORCH_INDEX) \
	    -r .ci/torch.txt && touch $@ || echo "note: no torch here (.ci/torch.txt): tests/torch are skipped"

clean: ## remove what was built
	rm -rf build dist $(VENV) .bench
