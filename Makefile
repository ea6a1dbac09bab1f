# The README's two commands are `make run` and `make test`; each sets up what it needs in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICK ?=

.PHONY: run test setup dev check docs bench bench-cpu bench-peers test-cuda bench-cuda harness clean

run: setup
	@$(BIN)/python -m harness.demo --engine $(BIN)/glm53

test: dev check
	$(BIN)/python -m pytest tests -m 'not long'

setup: $(VENV)/.installed

dev: $(VENV)/.dev

check: dev
	$(BIN)/ruff check .
	$(BIN)/mypy glm53serve

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else f"glm53serve needs Python 3.11 to 3.13, {sys.executable} is {sys.version.split()[0]} (set PYTHON=...)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@echo "compiling the CPU kernels once (about a minute) ..."
	$(BIN)/python -m glm53serve.cpu.warm
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# Rewrites docs/ENVIRONMENT.md from the settings table.
docs: setup
	$(BIN)/python -c 'from pathlib import Path; from glm53serve.settings import render_markdown; Path("docs/ENVIRONMENT.md").write_text(render_markdown())'

# Every serve case against the shipped model.
harness: setup
	$(BIN)/python -m harness.glm53_serve_harness --engine $(BIN)/glm53 --model glm53serve/data/glm53-nano

bench: bench-cpu

# QUICK=1 for a first look in under a minute.
bench-cpu: dev
	$(BIN)/python -m bench.cpu $(if $(QUICK),--quick)

# Side by side with other engines; builds or installs nothing by itself, and says what is missing.
bench-peers: dev
	$(BIN)/python -m bench.peers

# On a machine with an NVIDIA GPU; installs nothing: PYTHON must have the packages of the cuda and dev extras. The kernels against the reference, goldens,
# tasks of the shipped model, 1,000 schedules (GLM53_TEST_SCHEDULES), experts in host memory, the serve harness, compute-sanitizer where it is installed.
test-cuda:
	$(PYTHON) -m pytest tests/cuda -rs

bench-cuda:
	$(PYTHON) -m bench.cuda
	$(PYTHON) -m bench.cuda_serve

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
