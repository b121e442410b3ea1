# Two commands on a fresh machine: `make loop` (environment + main job) and `make test` (environment + tests).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The stamp is written last: an interrupted set-up starts again instead of being taken for done.
STAMP  := $(VENV)/.installed

.PHONY: help loop test setup lint lock clean
help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / \t/' | expand -t 8

loop: setup  ## environment and main job: handwritten digits to a proven int8 MNN model
	$(BIN)/edgeloop build

test: setup  ## environment and tests
	$(BIN)/python -m pytest

setup: $(STAMP)  ## the environment alone

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else f"edgeloop needs Python 3.11, $(PYTHON) is {sys.version.split()[0]}: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@echo "installing what requirements.lock pins into $(VENV): some minutes, without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lint: setup  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

lock:  ## pin what a fresh install of pyproject.toml resolves to
	$(PYTHON) infra/lock.py

clean:  ## remove the environment and caches, keep models and data
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
