# The one door for people. `make help` lists what it opens; everything happens in .venv, nothing outside is touched.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
DEMO ?=
TESTS ?= tests
# libp2p and hivemind cannot be loaded by one process, so the observer's tests have one of their own.
APART := tests/control/test_observer.py
VIRTUAL := tests/sim
BENCH ?=
# The site's tools have an environment of their own: no test needs them.
DOCS := .venv-docs
# So have the tools of a release.
RELEASING := .venv-release
RELEASE ?=
# Tests start some hundred processes of the same program: what one has compiled is there for the next.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test apart swarm virtual check format protos hashes reference docs bench release release-tools clean

help:  ## show this list
	@awk -F':.*## *' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install everything (fast when nothing changed)

# Everything but torch comes from hashes.txt: the versions of constraints.txt, without the resolver (the reason stands
# there), and only files whose SHA-256 is listed. setuptools goes first, because it builds the packages that have no
# wheel and this one; pip would fetch another one for that, unchecked. torch comes alone and unchecked: its build depends
# on the machine (CPU, or the index's CUDA build, which brings more packages along), and one that is provided locally is
# on no index. Its other dependencies are there by then. pip compiles nothing: most of these packages' files are never
# read. What a daemon and a join read is compiled by reading it once.
$(STAMP): pyproject.toml hashes.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one with  make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	sed -n '/^setuptools==/,/[^\\]$$/p' hashes.txt > $(VENV)/setuptools.txt
	$(INSTALL) --no-deps --require-hashes -r $(VENV)/setuptools.txt
	$(INSTALL) --no-deps --require-hashes --no-build-isolation -r hashes.txt
	$(INSTALL) "torch==2.13.0"
	$(INSTALL) --no-deps --no-build-isolation -e .
	$(BIN)/python -c "import cli, node.app.daemon"
	$(BIN)/python -c "import node.control.observer"
	@touch $@

demo: setup  ## a whole swarm on this machine (options: make demo DEMO="--kill")
	$(BIN)/tutti demo $(DEMO)

# Checks need one core, and so do the observer's tests, after which all other test files are read once and so compiled
# for the four that read them then. Tests with whole daemons come last, two files at a time. They wait more than they
# compute: tests in virtual time, which do not care how long anything takes, get what they leave of the cores, and so
# have more time than others before they count as hanging.
test: setup  ## everything a change must pass: check, then the tests (fewer: make test TESTS=tests/core)
ifeq ($(TESTS),tests)
	@$(MAKE) --no-print-directory -j 2 -O check apart
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not swarm" -n 4 --dist worksteal --ignore=$(APART) --ignore=$(VIRTUAL)
	@$(MAKE) --no-print-directory -j 2 -O swarm virtual
else
	@$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest $(TESTS)
endif

swarm: setup
	$(BIN)/python -m pytest -m swarm -n 2 --dist loadfile --no-loadscope-reorder --timeout 400 --durations 25 tests/swarm

virtual: setup
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -n 2 --dist worksteal --timeout 900 $(VIRTUAL)

apart: setup
	$(BIN)/python -m pytest $(APART)
	$(BIN)/python -m pytest --collect-only --ignore=$(APART) | tail -1

check: setup  ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: setup  ## repair style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup  ## generate Python from protos/*.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --pyi_out=. protos/*.proto

reference: setup  ## write docs/reference/ from the code
	$(BIN)/python -m tools.reference

# With --quiet, mkdocs would not count warnings either. The theme's banner about its successor is no
# warning about these pages.
docs: $(DOCS)/.ready  ## build the site of docs/ into build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

$(DOCS)/.ready: docs/requirements.txt
	@test -x $(DOCS)/bin/python || "$(PYTHON)" -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r docs/requirements.txt
	@touch $@

# uv asks the index for the files of each release; pip can write down only the one that it would take here.
hashes: setup  ## write hashes.txt anew after a change of constraints.txt
	$(INSTALL) --upgrade --target $(VENV)/uv "uv==0.13.9"
	{ sed -n '/^#/p' hashes.txt; $(VENV)/uv/bin/uv pip compile --quiet --no-deps --universal --generate-hashes \
		--no-header --no-annotate --no-emit-package torch constraints.txt; } > $(VENV)/hashes.txt
	mv $(VENV)/hashes.txt hashes.txt

# A benchmark of which a row does not hold, or could not be judged, ends with an error: the others run
# all the same, and the page says it. One that somebody broke off (130) is the last.
bench: setup  ## run the benchmarks and write docs/benchmarks.md (one: BENCH=pipeline; a part of one: BENCH=real PART=3)
	@found=$$($(BIN)/python -m benchmarks $(BENCH)); code=0; \
	for name in $$found; do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(if $(PART),--only $(PART)) $(WITH) \
			--json docs/benchmarks/results/$$name$(if $(PART),.$(PART)).json || code=$$?; \
		test $$code -ne 130 || break; \
	done; \
	$(BIN)/python -m tools.measurements; \
	exit $$code

release: release-tools  ## build the files of a release into dist/; publishes nothing (RELEASE=--without-image)
	$(RELEASING)/bin/python -m tools.release $(RELEASE)

release-tools: $(RELEASING)/.ready

$(RELEASING)/.ready: tools/requirements-release.txt
	@test -x $(RELEASING)/bin/python || "$(PYTHON)" -m venv $(RELEASING)
	$(RELEASING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tools/requirements-release.txt
	@touch $@

clean:  ## remove .venv and everything generated that git does not keep
	rm -rf $(VENV) $(DOCS) $(RELEASING) build dist ./*.egg-info .demo .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
