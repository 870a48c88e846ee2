# `make serve` and `make test` are all that a newcomer needs; both first make the environment in .venv.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := torch==2.13.0
LOCKS  := requirements.lock requirements.dev.lock
# Tests on all cores: each process begins with a part of its own, so that a server or model that a module shares is
# made once. With threads for all cores in each process, their products wait for each other, and take twice as long.
PYTEST_ALL_CORES := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal
# Whose loops numba keeps, compiled, beside their sources. Processes that begin together would each compile all of them.
COMPILED := worker.drafts.suffix_automaton kernels.attention.cpu.decode_kernel
# Modules with such tests: to import all of them takes a third of a minute.
SERVING = $(shell grep -rlE --include='test_*.py' 'mark\.(ray|gpu)\b' tests)
# Rooms with tests that are run in part otherwise.
NIGHTLY := tests/kernels tests/worker tests/server/test_call_grammars.py tests/shoal/test_engine.py
# Of recipes that run beside each other: each line says which one it is of.
SAYS = 2>&1 | sed --unbuffered 's/^/$@  /'
# Where it is set, each of the many processes that tests start would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test quick test-kernels test-bench nightly fuzz soak rehearse mutants env lint types check-docs
.PHONY: model compiled computing serving helm-test lock wheelhouse clean

serve: env  ## a chat server on this machine: model, Ray, router, two replicas
	@exec $(BIN)/shoal serve $(ARGS)

# Tests with Ray mostly wait, so the others run beside them.
test: env lint check-docs model  ## everything that CI runs
	@$(MAKE) --no-print-directory --jobs 3 types computing serving
	@$(BIN)/python -m tests.passed kernels || $(MAKE) --no-print-directory test-kernels
	@$(BIN)/python -m tests.passed benchmarks || $(MAKE) --no-print-directory test-bench
	@$(BIN)/python -m tests.passed rehearsals || $(MAKE) --no-print-directory rehearse

quick: env  ## the tests that are quick, for the inner loop: no Ray, real processes, models and kernels
	$(PYTEST_ALL_CORES) -m "not ray and not slow and not bench and not gpu" --ignore tests/kernels

test-kernels: env  ## the kernels, in Triton's interpreter; `make test` runs them when they have changed
	$(PYTEST_ALL_CORES) -m "not gpu" tests/kernels
	$(BIN)/python -m tests.passed kernels --write

test-bench: env model  ## the benchmarks from end to end; `make test` runs them when they have changed
	$(BIN)/pytest -m bench
	$(BIN)/python -m tests.passed benchmarks --write

nightly: env model  ## what CI runs a part of: all families in stages and on ranks, all modes with the real model
	SHOAL_NIGHTLY=1 $(PYTEST_ALL_CORES) -m "not ray and not bench and not gpu" $(NIGHTLY)
	$(BIN)/pytest -m "bench or rehearsal"

fuzz: env  ## 1,000 damaged requests at each endpoint of a whole server, 100,000 generated answers, and more
	SHOAL_FUZZ=1000 SHOAL_FUZZ_ANSWERS=100000 $(BIN)/pytest tests/server/test_fuzz.py tests/router/formats/test_lexer.py

soak: env  ## an hour of requests of every kind at a server, which then holds no more than after ten minutes: ARGS
	$(BIN)/python -m tests.server.soak $(ARGS)

rehearse: env  ## ray up and the chart, on hosts that are namespaces; `make test` runs it when they have changed
	$(BIN)/pytest -m rehearsal
	$(BIN)/python -m tests.passed rehearsals --write

mutants: env  ## how many of fifty seeded faults the tests find: --tree measures another checkout, as ARGS
	$(BIN)/python -m tests.mutants $(ARGS)

env: $(STAMP)

# torch first and by itself: every later step finds it there and leaves it alone. What installers print is noise as long
# as they succeed, and would hide what the server says after it.
$(STAMP): pyproject.toml requirements.lock requirements.dev.lock
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"Shoal needs Python 3.11 or 3.12, and this is " + sys.version.split()[0] + ": make PYTHON=python3.12, for example")'
	@echo "Making the environment in $(VENV): once, and it takes some minutes"
	@mkdir -p $(VENV)
	@{ { test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } \
	&& $(BIN)/python -m pip install --upgrade "pip>=24" \
	&& $(BIN)/python -m pip install $(TORCH) \
	&& $(BIN)/python -m pip install --require-hashes --no-deps $(LOCKS:%=--requirement %) \
	&& $(BIN)/python -m pip install --no-deps --no-build-isolation --editable .; \
	} > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log >&2; exit 1; }
	@touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

check-docs: env  ## the pages that are made from the code are as the code says
	$(BIN)/python -m shoal.reference --check
	$(BIN)/python -m bench.results --check

compiled: env
	$(BIN)/python -c "$(COMPILED:%=import %;)"

computing: compiled
	$(PYTEST_ALL_CORES) -m "not ray and not bench and not gpu and not rehearsal" --ignore tests/kernels $(SAYS)

serving: compiled
	$(BIN)/pytest -m "(ray or gpu) and not bench and not rehearsal" $(SERVING) $(SAYS)

model: env
	$(BIN)/shoal pull SmolLM2-135M-Instruct
	$(BIN)/shoal pull --dequantize SmolLM2-135M-Instruct

helm-test: env  ## lint, render and validate the chart
	$(BIN)/python helm/check.py

lock: env  ## after a change of dependencies: their versions and checksums; ARGS=--upgrade takes the newest
	$(BIN)/python .ci/lock.py $(ARGS)

wheelhouse: env  ## the folder wheelhouse, from which PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheelhouse make env installs
	$(BIN)/python -m pip download --dest wheelhouse "pip>=24" $(TORCH)
	$(BIN)/python -m pip download --dest wheelhouse --require-hashes --no-deps $(LOCKS:%=--requirement %)

clean:
	rm -rf $(VENV) .helm-bin .pytest_cache .mypy_cache .ruff_cache .hypothesis
