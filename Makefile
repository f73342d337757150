# The verbs of this repository, for people, pre-commit and CI alike.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
CONSTRAINTS := constraints.txt
EXTRAS := server
CUDA := $(wildcard /proc/driver/nvidia/version)
TORCH := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
CODE := minisgl_backend client workbench docker tests tools model_repository

FUZZ := $(addprefix tests/properties/test_,wire_fuzz.py gateway_fuzz.py detokenizer_chunking.py)
MINUTES := 10
# Each worker starts servers of its own; ARGS='-n 0' runs the tests in one process, as a debugger needs it.
WORKERS := 2

.PHONY: help install serve test fuzz lint types format check nightly docs clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 18

# Without an NVIDIA driver take the CPU build: from pip's own sources where they have one, else from
# the index that uv knows. With a driver pip's default build, which brings CUDA, is the right one.
$(VENV)/.torch: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	@if [ -n '$(CUDA)' ]; then \
	  echo "installing torch $(TORCH) (CUDA)"; $(PIP) torch==$(TORCH); \
	else \
	  echo "installing torch $(TORCH) (CPU)"; \
	  $(PIP) torch==$(TORCH)+cpu 2>/dev/null || \
	    { $(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu torch==$(TORCH); }; \
	fi
	@touch $@

$(VENV)/.server: $(VENV)/.torch pyproject.toml
	@echo "installing minisgl and tritonserver"
	@$(PIP) -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.dev: $(VENV)/.server
	@echo "installing the development tools"
	@$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

install: $(VENV)/.server  ## make .venv and install what serving needs

serve: $(VENV)/.server  ## serve the demo model on 127.0.0.1:8000
	@PATH="$(abspath $(BIN)):$$PATH" minisgl serve $(ARGS)

test: $(VENV)/.dev  ## run all tests that need no GPU, those on a real tritonserver included
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

nightly: $(VENV)/.dev  ## the property tests with many more examples
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/properties $(ARGS)

fuzz: $(VENV)/.dev  ## fuzz the wire, chats, detokenizer and gateway for MINUTES=10
	@end=$$(( $$(date +%s) + 60 * $(MINUTES) )); \
	while [ $$(date +%s) -lt $$end ]; do \
	  HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -x $(FUZZ) $(ARGS) || exit 1; \
	done

lint: $(VENV)/.dev  ## ruff and the import rules
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@PYTHONPATH=client:workbench $(BIN)/lint-imports

types: $(VENV)/.dev  ## mypy, strict
	@$(BIN)/mypy

check: lint types  ## lint and types

format: $(VENV)/.dev  ## rewrite the code as ruff wants it
	@$(BIN)/ruff check --fix --quiet $(CODE) || true
	@$(BIN)/ruff format $(CODE)

docs: $(VENV)/.dev  ## write docs/reference.md from the tables in the code
	@$(BIN)/python -m tools.reference

clean:  ## remove what make and the tools made
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
