# make setup | example | test | test-long | fuzz | bench | models | audit | lint       (PYTHON=python3.12 chooses the interpreter of a new .venv)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PY := .venv/bin/python
STAMP := .venv/.installed
PYTHON ?=
ARGS ?=

# The tensors of the tests and examples are small: more threads only wait for each other.
export OMP_NUM_THREADS ?= 1

# The tests start dozens of processes: without what Python keeps of a compiled module each takes a third longer to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup example test test-long fuzz test-machines test-versions bench models audit lint format clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s  %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv and install the project with everything below needs; nothing when nothing changed

$(STAMP): pyproject.toml constraints.txt
	@if ! $(PY) -m pip --version > /dev/null 2>&1; then \
	  python=$$(.ci/find-python $(PYTHON)); \
	  echo "creating .venv with $$python"; \
	  "$$python" -m venv .venv; \
	fi
	@echo "installing into .venv (torch is several GB the first time)"
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test,dev,plot]"
	@# pyright does not follow the editable install's mapping of transforms/
	@mkdir -p .venv/typings/thunder_norm && ln -sfn ../../../transforms .venv/typings/thunder_norm/transforms
	@touch $(STAMP)

example: setup ## the main example: norms of GPT-2, layer by layer (ARGS=... for its options)
	$(PY) examples/gpt2_norms.py $(ARGS)

test: setup ## the tests, and of many cases of a test a part (ARGS="-k linear -x" for pytest)
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

test-long: setup ## the tests with nothing left out to save time: an hour
	THUNDER_NORM_LONG=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

fuzz: setup ## random programs, long: derivatives, torch's operators, modules, wrappers, changes between calls, writes, writes into wrappers, bounds, networks, real mode, random numbers, checkpointed regions, norm maps and profiles, calls and what surrounds them (ARGS="derivatives --minutes 30")
	$(PY) -m tests.fuzz --jobs 2 $(ARGS)

test-machines: setup ## the tests ten times, as other processors run them and with other seeds: hours (ARGS="tests/rules/test_*.py")
	$(PY) -m tests.machines $(ARGS)

test-versions: setup ## the tests with other versions of Python, torch, Thunder and transformers: over an hour (ARGS="--only newest")
	$(PY) -m tests.versions $(ARGS)

bench: setup ## the benchmarks (ARGS=... for their options)
	$(PY) -m benchmarks $(ARGS)

models: setup ## models that others wrote, each in a process of its own: over half an hour (ARGS="--only Llama" for one row)
	$(PY) -m tests.models_zoo $(ARGS)

audit: setup ## search long for tensors that exceed what a norm rule claims; writes docs/rules.md (ARGS=... for its options)
	$(PY) -m thunder_norm.audit --all --long --jobs 2 --write docs tests/rules/test_*.py $(ARGS)

lint: setup ## formatting, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright --pythonpath $(PY)

format: setup ## apply the formatting and the safe lint fixes
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## remove .venv and caches
	rm -rf .venv build .pytest_cache .ruff_cache .hypothesis *.egg-info
	find benchmarks examples tests thunder_norm transforms -name __pycache__ -type d -prune -exec rm -rf {} +
