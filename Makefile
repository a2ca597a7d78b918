# Each target makes what it needs: a virtual environment, packages, servers.  All it takes is Python 3.11+, make and git.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
PIP := $(VENV)/.pip-ready
# Four on two cores: many tests wait for a server, or for a lease to lapse.  A worker without tests takes some of another's.
WORKERS ?= 4
PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal
MATRIX := $(CURDIR)/.matrix
# Tests in this process, on memory and SQLite: no server, no socket to another process.
QUICK := tests/unit tests/stores/test_memory.py tests/stores/sqlite/test_store.py tests/stores/sqlite/test_loop.py \
	tests/docs/test_skeleton.py tests/docs/test_reference.py tests/docs/test_error_pages.py tests/docs/test_client_docs.py \
	$(addprefix tests/doors/test_,asgi_leaving.py asgi_messages.py asgi_options.py asgi_setup.py door.py fingerprints.py \
	lambda_batch.py openapi.py profiles.py wsgi_shapes.py)
UNMEASURED := $(addprefix tests/,chaos client docs doors examples support tools webhooks)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-matchmaking test check bench docs clean lint types layers quick-tests measured-tests other-tests

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(DEMO_READY)  ## play the everyday accidents against the payments example; ONCE=1 ends it after them
	@ONCE=$(ONCE) $(BIN)/python examples/demo.py $(STORY)

demo-matchmaking: $(DEMO_READY)  ## play the accidents of a dating app against the matchmaking example; ONCE=1 ends it after them
	@ONCE=$(ONCE) $(BIN)/python examples/demo_matchmaking.py $(STORY)

check: $(READY)  ## lint, types, import directions and the tests without servers, in under a minute
	@$(MAKE) --no-print-directory --output-sync=target -j2 quick-tests lint layers types

test: $(READY)  ## everything, on real servers; FULL=1 tests each pair of server and framework whole
	@$(MAKE) --no-print-directory --keep-going lint layers types docs measured-tests other-tests

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

# Selected by path: in order to leave tests out by their marks, pytest would import every server, driver and framework.
quick-tests: $(READY)
	$(BIN)/python -m pytest -q -n 2 $(QUICK)

# Coverage is measured where it is asserted, because it makes tests slower.  Nothing is run again if it fails.
measured-tests: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) tests $(UNMEASURED:%=--ignore=%)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include="src/oncemore/_runtime/*,src/oncemore/_ledger/*,src/oncemore/_contract/*,src/oncemore/_fingerprint/*" --fail-under=100

other-tests: $(READY)
	rm -rf $(MATRIX) && mkdir $(MATRIX)
	ONCEMORE_FULL=$(FULL) ONCEMORE_MATRIX=$(MATRIX) $(BIN)/python $(PYTEST) $(UNMEASURED)
	$(BIN)/python docs/_generate/crashes.py --check $(MATRIX)

# Reinstalled only when pyproject.toml changes.  A pip older than 25.1 does not know dependency groups.
$(PIP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	@touch $@

# Whoever wants to see the demo first need not wait for the rest.
$(DEMO_READY): $(PIP)
	$(BIN)/python -m pip install --quiet --editable ".[fastapi,httpx,aiosqlite,postgres,cli,jobs,webhooks,prometheus]" --group examples
	@touch $@

$(READY): $(PIP)
	$(BIN)/python -m pip install --quiet --editable ".[all]" --group dev
	@touch $@ $(DEMO_READY)
