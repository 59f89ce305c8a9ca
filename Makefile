# make demo: train a small model through attnloom, with pictures (about three minutes)
# make test: every check and test that CI runs (also fetches Triton 3.6, beside which Gluon kernels are tested)
# make docs: build the documentation into site/
#
# All make .venv on first use and install into it what pyproject.toml lists. Variables:
#   PYTHON  interpreter, 3.10 or newer       make test PYTHON=python3.12
#   TORCH   pip arguments that bring torch   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
#   ARGS    passed on to the demo            make demo ARGS="--seconds 30 --seed 1"

SHELL   := /bin/bash
PYTHON  ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.10,$(shell \
             $(p) -c 'import sys; sys.version_info >= (3, 10) and print("$(p)")' 2>/dev/null)))
TORCH   ?= torch==2.13.0
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: demo test check bench docs clean

demo: $(VENV)/.demo
	@$(BIN)/attnloom demo $(ARGS)

test: $(VENV)/.dev
	@./check --all

check: $(VENV)/.dev
	@./check

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.run --suite cpu --json benchmarks/results/cpu.json

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open site/index.html"

$(VENV)/.torch:
	@if [ -z "$(PYTHON)" ]; then \
	    echo "attnloom needs Python 3.10 or newer and found none; install one or pass PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { \
	    echo "python could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	    exit 1; \
	}
	@echo "==> installing $(TORCH) (the largest download)"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "==> installing attnloom and what the demo needs"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "==> installing attnloom and the development tools"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	@echo "==> installing attnloom and what builds the documentation"
	@$(PIP) --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .triton-3.6 build dist site demo_output *.egg-info .ruff_cache .pytest_cache .import_linter_cache
