# `make serve` and `make test` are all that a newcomer needs; both first make the environment in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: serve test env lint types check-docs unit helm-test lock clean

serve: env  ## a chat server on this machine: model, Ray, router, two replicas
	@exec $(BIN)/shoal serve $(ARGS)

test: env lint types check-docs unit  ## everything that CI runs

env: $(STAMP)

# torch first and by itself: every later step finds it there and leaves it alone.
$(STAMP): pyproject.toml requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable ".[dev]"
	@touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

check-docs: env  ## the pages that are made from the code are as the code says
	$(BIN)/python -m shoal.reference --check
	$(BIN)/python -m bench.results --check

unit: env
	$(BIN)/shoal pull SmolLM2-135M-Instruct
	$(BIN)/pytest

helm-test: env  ## lint, render and validate the chart
	$(BIN)/python helm/check.py

lock:  ## after a change of dependencies: pin all that is installed
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch > requirements.lock

clean:
	rm -rf $(VENV) .helm-bin .pytest_cache .mypy_cache .ruff_cache .hypothesis
