# Each target makes its own virtual environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two small cores are enough for everything here; more threads than cores only slow it down.
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false
# Large tensors come and go at every step; keep their pages instead of asking the system for them again and again.
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 4294967296

PACKAGES := checkpoint corpus convert uptrain eval recipes libraries
MODULES := $(wildcard *.py)

.PHONY: demo test check bundled-model clean

demo: $(VENV)/.installed  ## convert, uptrain and compare the bundled model; the report's path is the last line
	$(BIN)/headfold run demo -o demo

# Two processes of one thread each; a file stays in one process, so its fixtures are made once.
test: $(VENV)/.installed-dev  ## all tests, with coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered

check: $(VENV)/.installed-dev typing-tree  ## style, types, import arrows, dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p headfold
	cd build/typing && PYTHONPATH=. ../../$(BIN)/lint-imports ../../pyproject.toml --no-cache
	$(BIN)/deptry .

# mypy and import-linter want a folder called headfold that holds the package and nothing else of the checkout.
.PHONY: typing-tree
typing-tree:
	rm -rf build/typing && mkdir -p build/typing/headfold
	ln -s $(addprefix ../../../,$(MODULES) $(PACKAGES) py.typed) build/typing/headfold/

bundled-model: $(VENV)/.installed  ## pretrain the bundled model again from random weights (about an hour)
	$(BIN)/python -m headfold.recipes.pretrain

# torch first and by itself, so that no other package picks its version.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	# its source is read by a test; with its dependencies it would bring triton, of no use without a GPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps liger-kernel
	touch $@

clean:
	rm -rf $(VENV) build demo *.egg-info
