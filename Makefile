# `make help` tells what there is. Every target makes what it needs first, and only once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
# A test that hangs is a failure, not a wait.
PYTEST := $(PY) -m pytest --timeout 300
INSTALLED := $(VENV)/.installed
SMOLLM2 := models/smollm2/config.json
TINY := models/tiny/config.json
SOURCES := clients engine kernels service scripts tests $(wildcard bench)

# The interpreter that makes .venv, and the one that test-gpu and bench-gpu run.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
endif

.PHONY: help demo test test-all test-gpu bench-gpu check protos verify-protos breaking lint types fix venv models wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) $(SMOLLM2) ## start a server with the default model and ask it a question
	@$(PY) -m scripts.demo

test: $(INSTALLED) $(SMOLLM2) $(TINY) ## the CPU test suite
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED) $(SMOLLM2) $(TINY) ## the CPU test suite with the long tests
	$(PYTEST)

test-gpu: ## engine and kernel tests on a GPU, with PYTHON=python3 as it is: installs nothing
	$(PYTHON) -m pytest --device cuda -p no:cacheprovider tests/kernels tests/engine

bench-gpu: ## the benchmarks the docs quote, with PYTHON as it is: OUT=dir MODEL=dir ONLY="decode serve"
	$(PYTHON) -m scripts.bench_gpu $(if $(OUT),--out $(OUT)) $(if $(MODEL),--model $(MODEL)) $(if $(ONLY),--only $(ONLY))

check: verify-protos breaking lint types test-all ## everything that must hold before a change is merged

protos: $(INSTALLED) ## generate the Python of protos/
	$(PY) -m scripts.generate_protos

verify-protos: $(INSTALLED) ## generated code up to date, buf lint
	$(PY) -m scripts.generate_protos --check
	$(VENV)/bin/buf lint

breaking: $(INSTALLED) ## no breaking change of the protos since the last tag
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null || true); \
	if [ -z "$$tag" ]; then echo "buf breaking: there is no tag yet, nothing to compare with"; \
	else echo "buf breaking against $$tag"; $(VENV)/bin/buf breaking --against ".git#tag=$$tag"; fi

lint: $(INSTALLED) ## ruff
	$(VENV)/bin/ruff check $(SOURCES)

types: $(INSTALLED) ## mypy
	$(VENV)/bin/mypy

fix: $(INSTALLED) ## repair what ruff can repair
	$(VENV)/bin/ruff check --fix $(SOURCES)

venv: $(INSTALLED) ## .venv with the pinned versions

models: $(SMOLLM2) $(TINY) ## the default model and the tiny test model

wheel: $(INSTALLED) ## dist/*.whl
	rm -rf build dist
	$(PY) -m pip wheel --no-deps --wheel-dir dist .

clean: ## remove what was made, except models/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml requirements/constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "picovllm needs Python 3.11 or newer; none was found as python3. Name one: make PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "picovllm needs Python 3.11 or newer; $(PYTHON) is not that" >&2; exit 1; }
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo 'installing the pinned packages into .venv: minutes the first time'
	$(PY) -m pip install --disable-pip-version-check --constraint requirements/constraints.txt --editable '.[dev]'
	@touch $@

$(SMOLLM2): | $(INSTALLED)
	$(PY) -m scripts.fetch_model

$(TINY): scripts/make_tiny_model.py | $(INSTALLED) $(SMOLLM2)
	$(PY) -m scripts.make_tiny_model
	@touch $@
