# `make conformance` judges the built-in implementations, `make test` runs every test; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: conformance test lint clean

conformance: $(READY)
	$(BIN)/pytest conformance -q -n auto $(OPTIONS)

test: $(READY) lint
	$(BIN)/pytest -q -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types/mha && for part in spec implementations conformance; do ln -sfn ../../../$$part build/types/mha/$$part; done
	MYPYPATH=build/types $(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
