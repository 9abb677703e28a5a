# One command each for what a person and CI do; `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
DOCS_VENV ?= .venv-docs
NEWEST_VENV ?= .venv-newest
OLDEST_VENV ?= .venv-oldest
# of a Python that the newest Axolotl asks for
NEWEST_PYTHON ?= python3.12
# Named beside the package, so that pip takes this build of torch (a CPU build, where
# that is what the index has) instead of the one axolotl would pull.
TORCH ?= torch==2.13.0

# Each process imports torch and axolotl: more of them than this only take memory.
PARALLEL := -n auto --maxprocesses 4

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Bytecode is compiled and kept when it is first imported: most of what comes along never
# is, and without it each process takes twice as long to import the rest.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(PIP) install --no-compile "$(TORCH)" -e

export HF_HUB_OFFLINE := 1
export AXOLOTL_DO_NOT_TRACK := 1

.DEFAULT_GOAL := help
.PHONY: help install install-dev install-bench demo demo-2 test test-full \
	test-full-core test-full-parity test-full-rest test-cuda test-cuda-device \
	test-newest test-oldest gpu-rehearsal everything \
	matrix mutants chaos sweep reference pictures site dist lint format bench compare clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)/.installed ## .venv with axolotl, this package (editable) and the test tools

install-dev: $(VENV)/.installed-dev ## the same and the lint tools

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (minutes the first time)"
	@$(INSTALL) ".[test]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (minutes the first time)"
	@$(INSTALL) ".[dev]"
	@touch $(VENV)/.installed $@

demo: install ## train a small Llama paged and plain on this machine, and compare
	@$(BIN)/python examples/demo.py

demo-2: install ## the same on two ranks, beside DistributedDataParallel
	@$(BIN)/python examples/demo.py --ranks 2 --steps 4

test: install ## the tests, without the whole grid
	@$(BIN)/python -m pytest $(PARALLEL)

# In three parts: the whole takes more than three hours on a slow machine.
CORE := tests/protrain/core
PARITY := tests/protrain/test_parity.py tests/protrain/test_chaos.py

test-full: test-full-core test-full-parity test-full-rest ## all tests

test-full-core: install
	@$(BIN)/python -m pytest $(PARALLEL) -m "" $(CORE)

test-full-parity: install
	@$(BIN)/python -m pytest $(PARALLEL) -m "" $(PARITY)

test-full-rest: install
	@$(BIN)/python -m pytest $(PARALLEL) -m "" --ignore=$(CORE) $(PARITY:%=--ignore=%)

test-cuda-device: install
	@mkdir -p build
	@[ -e $(CUDA_VENV)/.built ] && [ -z "$$(find tests/cuda_emulation/runtime -type f \
		-not -name '*.pyc' -newer $(CUDA_VENV)/.built)" ] || { \
		bash tests/cuda_emulation/runtime/build.sh $(CUDA_VENV) \
		"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		&& touch $(CUDA_VENV)/.built; }

test-cuda: test-cuda-device ## tests on an emulated CUDA device, no GPU needed (2.5 GB of wheels)
	@PYTHONPATH=src:tests/protrain:tests/protrain/core:tests/cuda_emulation \
		bash tests/cuda_emulation/runtime/run.sh $(CUDA_VENV) -m pytest -rA tests/cuda_emulation

$(NEWEST_VENV)/.installed: pyproject.toml
	@$(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-compile -e ".[test]"
	@touch $@

test-newest: $(NEWEST_VENV)/.installed ## the tests with the newest Axolotl and torch allowed (7 GB)
	@$(NEWEST_VENV)/bin/python -m pytest $(PARALLEL)

$(OLDEST_VENV)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(OLDEST_VENV)
	@$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-compile \
		torch==2.11.0 axolotl==0.19.0 -e ".[test]"
	@touch $@

test-oldest: $(OLDEST_VENV)/.installed ## core's tests with the oldest Axolotl and torch allowed (7 GB)
	@$(OLDEST_VENV)/bin/python -m pytest $(PARALLEL) -m "" $(CORE)

# without what has kernels of its own: bitsandbytes, experts, the profiler
gpu-rehearsal: test-cuda-device ## benchmarks/gpu.sh with small models on the emulated device
	@printf '#!/bin/bash\nexec bash %s/run.sh %s "$$@"\n' \
		$(abspath tests/cuda_emulation/runtime) $(abspath $(CUDA_VENV)) > build/emulated
	@chmod +x build/emulated && rm -rf build/gpu
	@env PYTHON=$(abspath build/emulated) TINY=--tiny PATIENCE=8 EXACT="lora full disk" \
		RUNS="lora-8b-12gb lora-8b-12gb-disk full-3b-16gb" FAKECUDA_POISON=0 \
		FAKECUDA_RANDOM_COPY_US=0 FAKECUDA_RANDOM_WORK_US=0 \
		GPU_WORK=$(abspath build/gpu-work) GPU_DISK=$(abspath build/gpu-disk) \
		bash benchmarks/gpu.sh build/gpu exact doctor runs

everything: install ## run all sets that are not of this tree, write docs/evidence.md
	@$(BIN)/python tools/everything.py

matrix: install ## train every combination and write docs/compatibility.md
	@$(BIN)/python tests/protrain/compatibility.py

mutants: install ## take each call away that orders something: a test must notice
	@$(BIN)/python tests/mutants.py

chaos: install ## attack trainings in every way and write docs/reliability.md
	@$(BIN)/python tests/protrain/chaos.py

sweep: install ## train every model type of transformers and write docs/models.md
	@$(BIN)/python tests/protrain/sweep.py

reference: install ## write docs/reference/keys.md
	@$(BIN)/python tools/reference.py

pictures: install ## draw docs/images; a screenshot needs chromium
	@$(BIN)/python tools/pictures.py

$(DOCS_VENV)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -qq --upgrade pip
	@$(DOCS_VENV)/bin/python -m pip install -qq --group docs
	@touch $@

site: $(DOCS_VENV)/.installed ## build/site, the pages as a site that opens from its folder
	@$(DOCS_VENV)/bin/python tools/site_pages.py
	@$(DOCS_VENV)/bin/zensical build --clean --strict

# from a copy: setuptools writes its metadata beside the sources, where tests read it
dist: $(DOCS_VENV)/.installed ## dist/, sdist and wheel, checked by twine
	@rm -rf dist build/source && mkdir -p build/source
	@git ls-files -z | xargs -0 cp --parents -t build/source
	@$(DOCS_VENV)/bin/python -m build --no-isolation -o dist build/source >/dev/null
	@$(DOCS_VENV)/bin/python -m twine check --strict dist/*

lint: install-dev dist ## ruff, mypy, bandit, words, links, sdist: nothing is changed
	@status=0; \
	for check in "ruff check" "ruff format --check" mypy \
		"bandit -q -c pyproject.toml -r src" "python tools/words.py" "python tools/pages.py"; do \
		$(BIN)/$$check || status=1; \
	done; \
	exit $$status

format: install-dev ## let ruff fix and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

install-bench: $(VENV)/.installed-bench ## the same and what benchmarks compare with

$(VENV)/.installed-bench: $(VENV)/.installed
	@$(PIP) install --no-build-isolation -e ".[bench]"
	@touch $@

compare: install-bench ## side by side with plain training, FSDP2, DeepSpeed, ...
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/compare.py --quick

bench: install ## what the paging hooks cost per step
	@$(BIN)/python benchmarks/hook_cost.py

clean: ## remove the environment, caches and everything the demo wrote
	rm -rf $(VENV) $(DOCS_VENV) $(NEWEST_VENV) $(OLDEST_VENV) .cache build dist src/*.egg-info examples/.demo
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
