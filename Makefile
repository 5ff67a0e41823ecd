# `make demo` shows it, `make test` proves it; everything runs in .venv.

UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTS := test $(wildcard sgl-kernel-ext/test)
CODE := python test benchmark scripts $(wildcard sgl-kernel-ext)

.PHONY: setup models demo test test-fast lint nightly

setup: $(INSTALLED)

.venv/bin/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(INSTALLED): pyproject.toml | $(filter .venv/bin/uv,$(UV))
	test -x $(BIN)/python || $(UV) venv --no-python-downloads --python $(PYTHON) .venv
	$(UV) pip install --python $(BIN)/python -e '.[dev]'
	touch $@

models: setup
	$(BIN)/python scripts/make_tiny_models.py --output models

demo: setup
	$(BIN)/python scripts/make_tiny_models.py --output models --only demo
	$(BIN)/python scripts/demo.py --model models/demo --output out/demo

test: lint models
	$(BIN)/python -m pytest -m "not slow" $(TESTS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow and not server" $(TESTS)

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

nightly: models
	$(BIN)/python -m pytest -m slow $(TESTS)
