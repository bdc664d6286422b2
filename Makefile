# make demo | test | lint | clean.  Each sets up .venv by itself; see `make help`.

PYTHON ?= python3
PY := .venv/bin/python

# What mypy checks: blendrag, and of each integration the package that is marked as typed.
PACKAGES := blendrag $(patsubst %/py.typed,%,$(wildcard integrations/*/*/py.typed integrations/*/*/*/*/py.typed \
    integrations/*/*/*/*/*/py.typed))
empty :=
MYPYPATH := .$(subst $(empty) ,,$(addprefix :,$(wildcard integrations/*)))

# Through the environment, so that any path survives the shell.
export DOCS

.PHONY: help demo test test-hard lint setup clean
.DEFAULT_GOAL := help

help:
	@echo "make demo             answer questions from this project's documentation, plain and blended"
	@echo "make demo DOCS=path   the same for a folder of .md, .txt, .html and .pdf files"
	@echo "make test             the whole test suite (ARGS='-k store' for a part of it)"
	@echo "make test-hard        thousands of damaged and special files, and 200 killed writers (under 20 minutes)"
	@echo "make lint             ruff and mypy --strict"
	@echo "make clean            remove .venv and caches; models and stored chunks in ~/.cache/blendrag stay"
	@echo
	@echo "The first of them sets up .venv (a few minutes).  PYTHON=python3.12 names the Python to use (>= 3.11)."

setup:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "There is no $(PYTHON): install Python 3.11 or newer, or name it: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$$("$(PYTHON)" --version) is too old: blendrag needs 3.11 or newer; name it: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@"$(PYTHON)" scripts/bootstrap.py

demo: setup
	@$(PY) -m blendrag demo $${DOCS:+"$$DOCS"} $(ARGS)

test: setup
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-hard: setup
	$(PY) -m pytest -n 2 --dist load tests/test_store_hostile.py tests/test_store_fuzz.py tests/test_store_kills.py \
	    --mutated-entries 5000 --mutated-manifests 500 --kills 100 $(ARGS)

lint: setup
	$(PY) -m ruff check .
	MYPYPATH=$(MYPYPATH) $(PY) -m mypy --strict --explicit-package-bases $(PACKAGES)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
