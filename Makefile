# Each target makes what it needs: a virtual environment, packages, servers.  All it takes is Python 3.11+, make and git.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
PIP := $(VENV)/.pip-ready
# Three on two cores: many tests wait for a server, or for a lease to lapse.
WORKERS ?= 3
PYTEST := -m pytest -q -n $(WORKERS)
MATRIX := $(CURDIR)/.matrix

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs clean lint types layers quick-tests all-tests

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(DEMO_READY)  ## play the everyday accidents against the payments example; ONCE=1 ends it after them
	@ONCE=$(ONCE) $(BIN)/python examples/demo.py $(STORY)

check: lint types layers quick-tests  ## all that needs no server, in under two minutes

test: lint types layers docs all-tests  ## everything, on real servers, with the coverage of the core

bench: $(READY)  ## our figures beside the raw stores', measured in the same run
	$(BIN)/python -m bench

docs: $(READY)  ## build the documentation into site/; a broken link is an error
	$(BIN)/mkdocs build --strict --quiet

clean:  ## remove all that make made
	rm -rf $(VENV) site .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .matrix

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

quick-tests: $(READY)
	$(BIN)/python $(PYTEST) -m "not server and not chaos and not longer"

# A busy machine can fail a test that has a clock in it.  What fails is run once more, alone, and said to have been.
all-tests: $(READY)
	$(BIN)/coverage erase
	rm -rf $(MATRIX) && mkdir $(MATRIX)
	ONCEMORE_MATRIX=$(MATRIX) $(BIN)/coverage run $(PYTEST) || { \
		echo "FAILED ABOVE: once more, alone"; \
		ONCEMORE_MATRIX=$(MATRIX) $(BIN)/coverage run -m pytest -q --last-failed --last-failed-no-failures none; }
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include="src/oncemore/_runtime/*,src/oncemore/_ledger/*,src/oncemore/_contract/*,src/oncemore/_fingerprint/*" --fail-under=100
	$(BIN)/python docs/_generate/crashes.py --check $(MATRIX)

# Reinstalled only when pyproject.toml changes.  A pip older than 25.1 does not know dependency groups.
$(PIP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	@touch $@

# Whoever wants to see the demo first need not wait for the rest.
$(DEMO_READY): $(PIP)
	$(BIN)/python -m pip install --quiet --editable ".[fastapi,httpx,aiosqlite,postgres,cli]" --group examples
	@touch $@

$(READY): $(PIP)
	$(BIN)/python -m pip install --quiet --editable ".[all]" --group dev
	@touch $@ $(DEMO_READY)
