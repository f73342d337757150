# The verbs of this repository, for people, pre-commit and CI alike.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# The stack is gpu or cpu. Why it is cpu in spite of a driver, the other words of CHOSEN say.
DRIVER := /proc/driver/nvidia/version
CHOSEN := $(if $(wildcard $(DRIVER)),$(shell $(PYTHON) tools/stack.py $(DRIVER)),cpu)
STACK := $(firstword $(CHOSEN))
WHY := $(wordlist 2,99,$(CHOSEN))
CONSTRAINTS := constraints/$(STACK).txt
EXTRAS := $(if $(filter gpu,$(STACK)),server$(comma)gpu,server)
TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' $(CONSTRAINTS))
CODE := minisgl_backend client workbench docker tests tools model_repository

RESOLVE = $(BIN)/uv pip compile --universal --python-version 3.10 --no-annotate \
  --custom-compile-command 'make constraints' --quiet $(ARGS)
RESOLVE_DEV = $(RESOLVE) pyproject.toml --extra dev

FUZZ := $(addprefix tests/properties/test_,wire_fuzz.py gateway_fuzz.py detokenizer_chunking.py)
MINUTES := 10
# Only two of them start servers (tests/conftest.py), which often wait, and the others leave the processors to those;
# ARGS='-n 0' runs the tests in one process, as a debugger needs it.
WORKERS := 4

.PHONY: help install serve test coverage fuzz lint types format check nightly constraints docs clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 20

# PyTorch's CPU build comes from pip's own sources if they have one, else from the index that uv knows.
# The stack for GPUs has pip's default build, which brings CUDA.
$(VENV)/.torch: $(CONSTRAINTS)
	@$(if $(WHY),echo "$(WHY)")
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch $(TORCH) ($(STACK))"
	@if [ $(STACK) = gpu ]; then \
	  $(PIP) -c $(CONSTRAINTS) torch==$(TORCH); \
	else \
	  $(PIP) torch==$(TORCH)+cpu 2>/dev/null || \
	    { $(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu torch==$(TORCH); }; \
	fi
	@touch $@

$(VENV)/.server: $(VENV)/.torch pyproject.toml
	@echo "installing minisgl and tritonserver ($(STACK))"
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

# The report comes also if tests fail.
coverage: $(VENV)/.dev  ## the tests of make test with branch coverage, and what they do not cover
	@rm -f .coverage .coverage.*
	@$(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS); \
	code=$$?; $(BIN)/coverage combine --quiet && $(BIN)/coverage report && exit $$code

nightly: $(VENV)/.dev  ## the tests that take too long for make test, and properties with many more examples
	@$(BIN)/python -m pytest --timeout 0 -m nightly $(ARGS)
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --timeout 0 tests/properties $(ARGS)

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

# ARGS=--upgrade takes the newest versions; without it those in the files are kept if they fit.
constraints: $(VENV)/.dev  ## write constraints/cpu.txt, gpu.txt and clients.txt, every package of each
	@$(RESOLVE_DEV) -c constraints/cpu.in -o constraints/cpu.txt
	@sed -i -E '/^(nvidia-[cn]|cuda-toolkit=|triton=)/d' constraints/cpu.txt  # of torch's CUDA build
	@$(RESOLVE_DEV) --extra gpu -c constraints/gpu.in -o constraints/gpu.txt
	@$(RESOLVE) constraints/clients.in -o constraints/clients.txt

docs: $(VENV)/.dev  ## write docs/reference.md from the tables in the code
	@$(BIN)/python -m tools.reference

clean:  ## remove what make and the tools made
	rm -rf $(VENV) .coverage .coverage.* build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
