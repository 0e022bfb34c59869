# Sets up its own environment outside the checkout: one for each set of dependencies, so a change
# of code needs no new install. Needs Python >= 3.11, make and git.
PYTHON ?= python3
CACHE ?= $(if $(DOMINO_KIT_CACHE),$(DOMINO_KIT_CACHE),$(HOME)/.cache/domino-kit)
KEY := $(shell $(PYTHON) tests/venv_key.py)
$(if $(KEY),,$(error set PYTHON to a Python 3.11 or later, for example: make demo PYTHON=python3.11))
VENV ?= $(CACHE)/venv-$(KEY)
BIN := $(VENV)/bin

.PHONY: demo bench test lint venv print-venv

venv: $(VENV)/complete
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .

$(VENV)/complete: pyproject.toml
	@test -f $@ || (rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) \
	  && $(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" \
	  && $(BIN)/python -m pip install --quiet ".[serve,dev]" \
	  && $(BIN)/python -m pip uninstall --quiet --yes domino-kit)
	@touch $@

print-venv:
	@echo $(VENV)

demo: venv
	$(BIN)/domino demo

bench: venv
	$(BIN)/python benchmarks/performance.py

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The demo alone, with both cores; then everything else in two processes.
test: lint
	$(BIN)/python -m pytest -m "not gpu" tests/test_demo.py
	$(BIN)/python -m pytest -m "not gpu" --ignore tests/test_demo.py \
	  -n 2 --dist loadfile --no-loadscope-reorder
