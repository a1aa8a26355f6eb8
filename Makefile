# Everything runs in a virtual environment of its own. Set-up happens once, and again only when pyproject.toml changes:
# the second `make demo` or `make test` needs no network.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
SITE ?= .venv-site
DEMO ?=
JOBS ?= 2
CUDA_JOBS ?= 8

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# What must hold at every commit: names, laws, the oracle itself, a row for everything that is exported, every pair of
# slots, every layer, the theorems, and of each room the tests that compare its numbers with an independent computation.
CORE := tests/test_product.py tests/test_tables.py tests/test_structures.py tests/test_house.py tests/test_public_names.py \
    tests/test_oracle.py tests/theorems tests/families tests/rules tests/solve tests/kernels tests/mirror tests/step \
    tests/optim/test_adamw.py tests/optim/test_momentum.py tests/vi/test_laplace.py tests/fit/test_networks.py \
    tests/fit/test_least_squares.py tests/test_numbers.py \
    tests/functionspace/test_basin.py tests/functionspace/test_flatness.py tests/test_pde.py tests/test_proximal.py \
    tests/test_docs.py tests/test_docstrings.py

.DEFAULT_GOAL := help
.PHONY: help demo lint check test cuda docs site bench wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' DEMO='options of natgrad demo' JOBS=$(JOBS)"

demo: $(VENV)/.cli  ## compare optimizers on digits and on a differential equation, in a minute
	$(BIN)/natgrad demo $(DEMO)

# One thread for each job: small matrices are no faster with more, and jobs would wait for each other. Bytecode is kept
# even where the environment says not to: every job and every process that a test starts imports all of it.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.dev  ## ruff, the order of imports, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

check: lint  ## the gate before a commit: lint, the laws of the house, and every table of theorems
	$(PYTEST) $(CORE)

test: lint  ## the whole gate: lint, doctests and all tests, JOBS files at a time
	$(PYTEST)

# No virtual environment: PYTHON has a torch with CUDA and pytest, and nothing is installed. A process for every file,
# some at a time: one alone leaves the GPU idle. Without a GPU the tests would all be skipped, so that is an error.
cuda:  ## the tests that need a GPU, run by PYTHON
	@$(PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch of $(PYTHON) sees no GPU: make cuda PYTHON=...")'
	printf '%s\n' tests/cuda/test_*.py | OMP_NUM_THREADS=1 xargs -P $(CUDA_JOBS) -n 1 $(PYTHON) -m pytest -q

docs: $(VENV)/.dev  ## fill in the measurements that README and docs/ quote, from the result files
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.pages --figures

# Sphinx reads build/source and runs the gallery: in its own virtual environment, so that tests need none of it. ONLINE=1 links
# to the pages of torch.
site: $(SITE)/.docs  ## build the site into build/site: pages, API, gallery; open build/site/index.html
	$(SITE)/bin/python docs/site/stage.py build/source
	OMP_NUM_THREADS=1 $(SITE)/bin/python -m sphinx -q -W --keep-going -c docs/site -b html -d build/doctrees build/source build/site

bench: $(VENV)/.dev  ## run the benchmarks
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/kfac.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/gaussian.py

wheel: $(VENV)/.dev  ## build wheel and sdist into dist/, and try each of them in an empty folder
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	OMP_NUM_THREADS=1 $(BIN)/python .ci/smoke.py dist $(TAG)

clean:  ## remove the virtual environment, caches and results
	rm -rf $(VENV) $(SITE) build dist natgrad-demo .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and pinned: an open range may resolve to a build with gigabytes of libraries for a GPU. It is named
# again with the rest, so that no other package replaces it.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.cli: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[cli]' '$(TORCH)'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[dev]' '$(TORCH)'
	@touch $@ $(VENV)/.cli

$(SITE)/.docs: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' '$(TORCH)'
	@touch $@
