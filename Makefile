# `make demo` shows it, `make test` proves it; everything runs in .venv.

UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
PYTHON ?= python3
# SGLang's kernels are built for these.
SERVED = $(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("$(PYTHON) is \
	Python %d.%d, and SGLang needs 3.11 to 3.13: add PYTHON=python3.12" % sys.version_info[:2])'
BIN := .venv/bin
INSTALLED := .venv/.installed
# What was resolved, without where it came from.
LOCK := .venv/lock.txt
KERNEL_TESTS := $(wildcard sgl-kernel-ext/test)
# Two files at a time, in the order of test/conftest.py: an engine or a server of a test takes about
# one core and 2.5 GB.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
# A log that was cut to its end still names every failure: one line each comes last.
PYTEST := $(BIN)/python -m pytest --tb=short --durations=15 --force-short-summary
CODE := python test benchmark scripts $(wildcard sgl-kernel-ext)

# pip and uv take packages from one index, whichever of them was told its address.
INDEX := $(or $(UV_DEFAULT_INDEX),$(UV_INDEX_URL),$(PIP_INDEX_URL),$(shell \
	$(PYTHON) -m pip config get global.index-url 2>/dev/null))
ifneq ($(INDEX),)
export UV_DEFAULT_INDEX := $(INDEX)
export PIP_INDEX_URL := $(INDEX)
endif

# An engine imports a thousand modules; without their bytecode each start takes half a minute more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup models demo demo-forms test suite test-fast lint nightly canary audit router deploy-tools stores

setup: $(INSTALLED)

.venv/bin/uv:
	@$(SERVED)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(INSTALLED): pyproject.toml | $(filter .venv/bin/uv,$(UV))
	@test -x $(BIN)/python || $(SERVED)
	test -x $(BIN)/python || $(UV) venv --no-python-downloads --python $(PYTHON) .venv
	$(UV) pip install --python $(BIN)/python -e '.[dev,real-model]'
	$(UV) pip freeze --python $(BIN)/python --exclude-editable > $(LOCK)
	touch $@

models: setup
	$(BIN)/python scripts/make_tiny_models.py --output models
	$(BIN)/python scripts/get_real_model.py --output models

demo: setup
	$(BIN)/python scripts/get_real_model.py --output models
	$(BIN)/python -m benchmark.demo talk

demo-forms: setup
	$(BIN)/python scripts/make_tiny_models.py --output models --only demo
	$(BIN)/python -m benchmark.demo forms

test: lint models suite

# By day with half of the examples of each property, by night with twice as many.
suite:
	$(PYTEST) -m "not slow" $(KERNEL_TESTS)
	HC_EXAMPLES=0.5 $(PYTEST) -m "not slow and not server" $(TWO) test
	$(PYTEST) -m "server and not slow" $(TWO) test

# With a quarter of the examples of each property.
test-fast: setup
	HC_EXAMPLES=0.25 $(PYTEST) -m "not slow and not server" $(TWO) --ignore test/e2e --ignore test/fuzz test

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmark/make_tables.py --check
	$(BIN)/python -m benchmark.simulator.tables --check

nightly: export PATH := $(CURDIR)/.deploy-tools/bin:$(PATH)
nightly: models router deploy-tools
	$(PYTEST) -m slow $(KERNEL_TESTS)
	$(PYTEST) -m slow test
	HC_EXAMPLES=2 $(PYTEST) -m "not slow and not server" --ignore test/e2e test
	$(MAKE) stores
	$(MAKE) audit
	$(MAKE) canary

# A router that reads KV events, in an environment of its own: the tests of it ask it over HTTP.
router: .router/bin/python

.router/bin/python: | setup
	$(UV) venv --python $(BIN)/python .router
	$(UV) pip install --python .router/bin/python ai-dynamo-runtime==1.6.1 || { rm -r .router; false; }

# What reads the files of deploy/, in a folder of its own that is on the path of the nightly tests.
deploy-tools: .deploy-tools/.installed

.deploy-tools/.installed: scripts/get_deploy_tools.sh
	scripts/get_deploy_tools.sh .deploy-tools

# Mooncake, NIXL and OpenTelemetry, in a folder of their own that is on the path of their tests alone.
stores: .stores/.installed
	PYTHONPATH=$(CURDIR)/.stores LD_LIBRARY_PATH=$(CURDIR)/.stores/lib $(PYTEST) test/stores

.stores/.installed: scripts/get_stores.sh | setup
	UV=$(UV) PYTHON=$(BIN)/python scripts/get_stores.sh .stores

# The suite on the newest SGLang that the package index has, beside the one that is pinned.
canary: models
	$(UV) venv --allow-existing --python $(BIN)/python .canary
	echo sglang > .canary/newest.txt
	$(UV) pip install --upgrade --python .canary/bin/python --override .canary/newest.txt \
		-e '.[dev,real-model]'
	.canary/bin/python -c 'import sglang; print("SGLang", sglang.__version__)'
	SGLANG_HC_ANY_SGLANG=1 $(MAKE) suite BIN=.canary/bin

# Not part of `make test`: advisories appear without a change here.
audit: setup
	$(BIN)/python scripts/audit.py $(LOCK)
