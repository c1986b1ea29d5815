# Everything runs in .venv, which is made on first use. `make` alone lists the verbs.

PYTHON ?= python3
NPROC ?= 4
ARGS ?=
# Another torch than the pinned one, such as 2.11.0, gets an environment of its own.
TORCH ?=

VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
# What `make demo` needs, and all that the other targets need.
RUNTIME := $(VENV)/runtime.stamp
INSTALLED := $(VENV)/installed.stamp
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# Modules are compiled when they are first imported; most of torch's never are.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile -c $(CONSTRAINTS)
# pip shows what it fetches. Its warnings, about its sources, are shown only if it fails.
ERRORS := 2>$(VENV)/pip.log || { cat $(VENV)/pip.log >&2; exit 1; }

.PHONY: help demo test lint bench docs dist soak
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small GPT on $(NPROC) processes with dmuon and with AdamW; results in out/"
	@echo "make test    run the test suite; ARGS='tests/unit/test_plan.py -k batch' runs a part of it"
	@echo "make lint    check style, format and types"
	@echo "make bench   measure; results in out/"
	@echo "make soak    train random models with random options in all layouts, beside one process"
	@echo "make docs    build the documentation site; out/site/index.html"
	@echo "make dist    build wheel and sdist of the last commit, and try them; results in dist/"
	@echo ""
	@echo "PYTHON=... picks the interpreter for .venv; NPROC=... and ARGS='--steps 100' reach the demo."
	@echo "TORCH=2.11.0 runs any of them with that torch, in .venv-2.11.0."

# The package is built with the pinned setuptools: build isolation would fetch another one.
$(RUNTIME): pyproject.toml constraints.txt
	@echo "Installing torch, a solver and matplotlib into $(VENV); once, a minute and the download."
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),{ grep -v -E '^(torch|triton|setuptools|numpy)==' constraints.txt; echo torch==$(TORCH); \
		echo 'numpy<2.4'; } > $(CONSTRAINTS)) # interpreters of older Tritons cannot read newer arrays
	@$(PIP) 'setuptools>=77.0.3' $(ERRORS)
	@$(PIP) --no-build-isolation --editable '.[plot]' $(ERRORS)
	@touch $@

$(INSTALLED): $(RUNTIME)
	@echo "Installing what tests, checks and documentation need into $(VENV); once, a few minutes."
	@$(PIP) --no-build-isolation --editable '.[dev,docs,frameworks,release]' $(ERRORS)
	@$(PIP) --no-deps litgpt $(ERRORS) # which asks for an older huggingface_hub, and runs with this one
	@touch $@

# One thread a process: the processes share the cores.
demo: $(RUNTIME)
	@echo "Starting $(NPROC) processes"
	@OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 \
		$(BIN)/torchrun --standalone --nproc-per-node=$(NPROC) examples/train_gpt.py $(ARGS)

# A file's tests run in one worker, in their order: they share processes and what fixtures made.
# A worker that dies ends the run, which names its test: pytest-xdist 3.8 may hang with a new one.
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	@mkdir -p out
	$(BIN)/python -m benchmarks.steps --ask replicated --json out/bench_steps.json
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scheduler --json out/bench_scheduler.json

soak: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.distributed.test_matrix --rounds 10 $(ARGS)

dist: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.release

# Links, anchors, the navigation and docstrings are checked: every warning is an error. Not with
# --quiet, which does not count warnings.
docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "out/site/index.html"
