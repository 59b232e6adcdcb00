# The two commands a newcomer needs: `make demo` and `make test`. Each makes .venv and installs what is missing.
# constraints.txt binds these targets and CI only; the package itself allows ranges.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check docs exact wheel clean

demo: $(READY)
	$(BIN)/moespeq demo

test: $(READY)
	$(BIN)/python -m pytest -n auto

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The whole exactness matrix; about an hour on two cores. Its last output is recorded in docs/exactness.md.
exact: $(READY)
	$(BIN)/python -m pytest -m "not gpu" -n auto --dist worksteal -rA tests/golden

# The site, in build/site; a warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

wheel: $(READY)
	$(BIN)/python -m build --wheel --outdir dist

clean:
	rm -rf $(VENV) build dist src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("moespeq needs Python 3.11 or newer; set PYTHON=python3.x") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
