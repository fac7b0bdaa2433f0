# All targets use .venv, which is made on demand with the pinned packages of constraints.txt.
# Needs Python >= 3.11 with pip, and make. `make help` lists the targets.

PYTHON ?= python3
JOBS ?= 2
CONFIG ?= experiments/mnist5k.yaml experiments/autompg.yaml
TORCH ?= 2.13.0
PYTEST_ARGS ?=
FIGURE ?= fig4
PRESET ?= small

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Without --no-compile pip compiles every module of every package, although few are imported.
INSTALL := $(PIP) install --no-compile -c constraints.txt
SETTINGS := pyproject.toml constraints.txt
PATHS := $(wildcard src tests benchmarks examples experiments docs/*.py docs/tutorials)
# One thread per test process: several threads per core slow each other down.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Without bytecode on disk every process of the tests compiles PyTorch anew, 3 s instead of 1 s.
export PYTHONDONTWRITEBYTECODE :=
comma := ,
say = @echo "==> $(1)"

.DEFAULT_GOAL := help
.PHONY: help run reproduce test check-long docs format clean constraints

help: ## Show this list
	@echo "Usage: make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name words; do printf '%-16s%s\n' "$$name" "$$words"; done
	@echo "Settings: PYTHON=$(PYTHON) JOBS=$(JOBS) FIGURE=$(FIGURE) PRESET=$(PRESET) PYTEST_ARGS='$(PYTEST_ARGS)'"
	@echo "          CONFIG='$(CONFIG)'"

run: $(VENV)/.run ## Install, then learn the weight decay of networks on digits and on a small tabular data set
	@for file in $(CONFIG); do \
		echo "==> Training a network and learning its weight decay ($$file)"; \
		$(BIN)/evigrad train --config $$file || exit; \
	done

reproduce: $(VENV)/.experiments ## Install, then run a figure or table of the paper: FIGURE=fig4 PRESET=small
	$(call say,Reproducing $(FIGURE)$(comma) preset $(PRESET): finished runs are not repeated)
	@$(BIN)/python -m experiments $(FIGURE) --preset $(PRESET)

test: $(VENV)/.test ## Install, then run all checks: ruff, import-linter, basedpyright, pytest
	$(call say,ruff: common mistakes$(comma) imports$(comma) and docstrings that match the code)
	@$(BIN)/ruff check $(PATHS)
	$(call say,ruff: formatting)
	@$(BIN)/ruff format --check $(PATHS)
	$(call say,import-linter: subpackages import only from lower layers)
	@PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(call say,pytest: $(JOBS) processes with one thread each$(comma) warnings are errors)
	@mkdir -p build; \
	$(BIN)/basedpyright --pythonpath $(BIN)/python > build/types.txt 2>&1 & types=$$!; \
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS); tests=$$?; \
	echo "==> basedpyright: types, checked while the tests ran"; \
	wait $$types; types=$$?; cat build/types.txt; \
	exit $$((tests || types))

check-long: $(VENV)/.test ## Install, then run the checks that take too long for `make test`
	$(call say,pytest: tests that are marked long$(comma) and properties on more examples)
	@$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "long or hypothesis" \
		--hypothesis-profile long $(PYTEST_ARGS)

docs: $(VENV)/.docs ## Install, then build the documentation as a site: build/site/index.html
	$(call say,MkDocs: warnings are errors$(comma) links and anchors must resolve)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build
	@echo "Open build/site/index.html, or with search: $(PYTHON) -m http.server -d build/site"

format: $(VENV)/.test ## Format the code and fix what ruff can fix
	$(call say,ruff: fixing and formatting)
	@$(BIN)/ruff check --fix $(PATHS)
	@$(BIN)/ruff format $(PATHS)

clean: ## Remove the virtual environment, caches and builds (runs/ stays)
	$(call say,Removing $(VENV)$(comma) caches and builds)
	@rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	@find $(PATHS) -name __pycache__ -type d -prune -exec rm -rf {} +

constraints: ## Pin again: install the newest versions that fit, and write constraints.txt
	$(call say,Resolving every package in a fresh environment)
	@rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	@build/constraints/bin/python -m pip --quiet install --upgrade pip
	@build/constraints/bin/python -m pip --quiet install torch==$(TORCH) -e '.[all,hub,dev]'
	@{ sed -n '/^#/p' constraints.txt; \
		build/constraints/bin/python -m pip freeze --all --exclude-editable \
		| grep -vE '^(#|wheel==)' | sed 's/+[a-z0-9]*$$//' | LC_ALL=C sort -f; \
	} > build/constraints.txt
	@mv build/constraints.txt constraints.txt

$(VENV)/.run: $(SETTINGS) | $(VENV)/.made
	$(call say,Installing evigrad with the versions of constraints.txt (takes minutes the first time))
	@$(INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.experiments: $(SETTINGS) | $(VENV)/.made
	$(call say,Installing evigrad and the packages of its experiments with the versions of constraints.txt)
	@$(INSTALL) -e '.[experiments]'
	@touch $(VENV)/.run $@

$(VENV)/.docs: $(SETTINGS) | $(VENV)/.made
	$(call say,Installing evigrad and the packages of its site with the versions of constraints.txt)
	@$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.test: $(SETTINGS) constraints-laplace.txt | $(VENV)/.made
	$(call say,Installing evigrad and its checkers with the versions of constraints.txt (takes minutes the first time))
	@$(INSTALL) -e '.[all,dev]'
	@$(INSTALL) --no-deps -r constraints-laplace.txt
	@touch $(VENV)/.run $(VENV)/.experiments $(VENV)/.docs $@

$(VENV)/.made:
	@command -v $(PYTHON) > /dev/null || { \
		echo "evigrad needs Python 3.11 or newer; '$(PYTHON)' was not found. Set another one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "evigrad needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Set another one: make PYTHON=python3.12 ..."; exit 1; }
	$(call say,Making a virtual environment in $(VENV) with $$($(PYTHON) --version))
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --upgrade pip  # the pip of Python 3.11 takes twice as long to resolve
	@touch $@
