# `make demo` and `make test` need only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXAMPLES := $(VENV)/.examples

# Pin all versions, including those of the build.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo toy test try-torch check types docs dist bench clean

help:
	@echo "make demo    tune an ensemble on scikit-learn's digits, with a page that shows how good it is"
	@echo "make toy     run the paper's toy example, and draw it to toy.png"
	@echo "make test    ruff, mypy, and all tests and doctests"
	@echo "make try-torch TORCH=2.10.0   the tests of the loss, with another PyTorch"
	@echo "make check   only ruff and mypy"
	@echo "make types   pyright on the Python code in the documents"
	@echo "make docs    build the site to site/; fails on a broken link"
	@echo "make dist    build wheel and sdist, and try the wheel in a clean environment"
	@echo "make bench   run the benchmarks on the CPU; results go to benchmarks/results"
	@echo "make clean   remove the virtual environment and all caches"

demo: $(INSTALLED)
	$(BIN)/pseudograd tune digits --out runs/demo

toy: $(INSTALLED)
	$(BIN)/python -m paper toy --picture toy.png

# One process per core; more than four would only wait for the longest file. With a passive wait
# policy, idle threads leave the cores to other processes.
test: check $(EXAMPLES)
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n logical --maxprocesses 4

# The oldest PyTorch that pyproject.toml allows; the newest: `make try-torch TORCH=2.15.0 NUMPY=`.
# Triton's interpreter, as of PyTorch before 2.13, needs NumPy before 2.4.
TORCH := 2.10.0
NUMPY := <2.4
try-torch:
	PYTHON=$(PYTHON) NUMPY="$(NUMPY)" tools/try_torch.sh $(TORCH)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The code is written to build/documents, one file for each document.
types: $(INSTALLED)
	$(BIN)/pip install --quiet --group types
	$(BIN)/python -m tools.document_code build/documents
	$(BIN)/basedpyright --project build/documents

# Material announces its successor at every start, unless told not to.
docs: $(INSTALLED)
	$(BIN)/pip install --quiet --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(INSTALLED)
	$(BIN)/pip install --quiet --group release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	PYTHON=$(PYTHON) tools/try_wheel.sh dist/*.whl

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.import_time
	$(BIN)/python -m benchmarks.loss
	$(BIN)/python -m benchmarks.fleet --out benchmarks/results/fleet_cpu.csv
	$(BIN)/python -m benchmarks.tune

# Rebuilt only when a version or the CPU kernels change.
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(wildcard src/pseudograd/loss/cpp/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet pip
	$(BIN)/pip install --quiet --editable '.[all]' --group dev --group paper
	touch $@

# Libraries that the documents have examples for, and those that make a site of the documents.
$(EXAMPLES): $(INSTALLED)
	for group in examples docs; do $(BIN)/pip install --quiet --group $$group \
		|| echo "$$group could not be installed: tests that need these libraries are skipped"; done
	touch $@

clean:
	rm -rf $(VENV) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src paper beyond tests benchmarks tools -name __pycache__ -prune -exec rm -rf {} +
