# Each target makes its own virtual environment, once; nothing is installed the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test test-all parity pages check clean

help:
	@echo "make demo      train, evaluate and run a tiny model under five residual plans (5 minutes)"
	@echo "make test      run the tests (8 minutes on two cores)"
	@echo "make test-all  also the slow tests and make parity"
	@echo "make parity    every layout of ranks trains every plan like one process (5 minutes)"
	@echo "make pages     draw docs/figures, and pages of the recorded results in runs/pages"
	@echo "make check     lint, format check, types"
	@echo "make install   only the virtual environment, in $(VENV)"
	@echo "make clean     remove the virtual environment and caches"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; run make PYTHON=/path/to/a/newer/one"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/ladder demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: test
	$(BIN)/python -m pytest -m 'slow or parity' -n auto --dist worksteal

parity: $(INSTALLED)
	$(BIN)/python -m pytest -m parity -n auto --dist worksteal

pages: $(INSTALLED)
	$(BIN)/python benchmarks/pages.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
