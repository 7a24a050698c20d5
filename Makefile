# Everything runs in .venv, which is made at the first call and remade when pyproject.toml or constraints.txt change.
#   make run PYTHON=python3.12 ARGS="steps=20 seed=1"
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

.DEFAULT_GOAL := help
.PHONY: help run test check lint types demo-model clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP) ## Run the bundled demo; ARGS="key=value ..." changes it
	$(BIN)/trtl-rl run $(ARGS)

test: $(STAMP) ## Run the quick tests, a file a process on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: lint types ## Lint, check types, run the slow tests, a file a process on two cores
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Check types
	$(BIN)/mypy

demo-model: $(STAMP) ## Remake the bundled model
	$(BIN)/python -m trtl_rl.demo.make

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: it is by far the largest, and what follows then finds the pinned version in place.
$(STAMP): pyproject.toml constraints.txt
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch, which takes the longest"
	@$(PIP) install --constraint constraints.txt torch
	@echo "Installing trtl-rl and what it needs"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@
