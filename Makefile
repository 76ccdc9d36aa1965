# `make demo` and `make test` work on a fresh machine with Python 3.11+ and make alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXAMPLES := $(VENV)/.examples

# All versions are pinned, those of the build too.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo toy test check bench clean

help:
	@echo "make demo    find the best k for scikit-learn's digits, with a page that shows why"
	@echo "make toy     run the paper's toy example, and draw it to toy.png"
	@echo "make test    ruff, mypy, and all tests and doctests"
	@echo "make check   ruff and mypy alone"
	@echo "make bench   run the benchmarks on the CPU; results go to benchmarks/results"
	@echo "make clean   remove the virtual environment and all caches"

demo: $(INSTALLED)
	$(BIN)/pseudograd tune digits --hidden 400 --repetitions 10 --out runs/demo

toy: $(INSTALLED)
	$(BIN)/python -m paper toy --picture toy.png

# One process for each core; more than four would only wait for the longest file. Their threads sleep
# while they wait, and leave the cores to the others.
test: check $(EXAMPLES)
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n logical --maxprocesses 4

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.import_time
	$(BIN)/python -m benchmarks.loss
	$(BIN)/python -m benchmarks.fleet --out benchmarks/results/fleet_cpu.csv
	$(BIN)/python -m benchmarks.tune
	$(BIN)/python -m benchmarks.ties

# Made anew when a version changes, and otherwise left alone.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet pip
	$(BIN)/pip install --quiet --editable '.[cpu,parquet,ray]' --group dev --group paper
	touch $@

# Other people's libraries, which the documents have examples for.
$(EXAMPLES): $(INSTALLED)
	$(BIN)/pip install --quiet --group examples \
		|| echo "some libraries could not be installed: the tests of their examples are skipped"
	touch $@

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src paper tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
