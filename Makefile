# Two commands do all the set-up on a fresh machine with Python >= 3.11: `make demo` and `make test`.
# Nothing outside the interpreter is needed: every dependency is a wheel.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS_VENV := .venv-models

.PHONY: demo test test-fast test-models bench lint clean

demo: $(VENV)/.demo
	$(BIN)/hawkvision demo

# Builds the ladder first, because system tests run real models; it takes seconds when already built.
# Two workers, because most tests wait for processes and sockets: they share two cores well.
test: $(VENV)/.test
	$(BIN)/hawkvision models build
	$(BIN)/pytest --numprocesses 2 --dist load

test-fast: $(VENV)/.test
	$(BIN)/pytest -m "not slow and not models"

# Parity against torch and torchvision: a second environment, because torch takes 5 GB that nobody else needs.
test-models: $(MODELS_VENV)/.models
	$(MODELS_VENV)/bin/pytest -m models tests/hawkvision/zoo

bench: $(VENV)/.test
	$(BIN)/hawkvision models build
	$(BIN)/python -m loadgen.bench.edge
	$(BIN)/python -m loadgen.bench.dc_hop

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(MODELS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "HawkVision needs Python >= 3.11, found " + sys.version.split()[0]'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.demo pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(MODELS_VENV)/.models: pyproject.toml
	$(PYTHON) -m venv $(MODELS_VENV)
	$(MODELS_VENV)/bin/python -m pip install --quiet --editable '.[models,report]' html5lib pytest pytest-timeout hypothesis
	touch $@
