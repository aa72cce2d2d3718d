# make run [exp=lm] [args="train.steps=50"]   make test [PYTHON=python3.11]   and the rest below.

# One interpreter of each version that CI tests, newest first: those on the PATH, and pyenv's own, since what pyenv puts
# on the PATH runs only where its version was selected. Where there is none, 3.13 may do.
PYTHONS = $(shell for p in python3.12 python3.11 python3 python $$(pyenv root 2>/dev/null)/versions/*/bin/python; \
  do $$p -c 'import ensurepip, sys; v = sys.version_info; (3, 11) <= v < (3, 13) and print(v.minor, sys.executable)' \
  2>/dev/null; done | sort -run -k1,1 | cut -d" " -f2)
NEWEST = $(shell for p in python3.13 $$(pyenv root 2>/dev/null)/versions/3.13*/bin/python; do \
  $$p -c 'import ensurepip, sys; print(sys.executable)' 2>/dev/null && break; done)
PYTHON ?= $(firstword $(PYTHONS) $(shell command -v python3.13))
# Each interpreter that is asked for by name has an environment of its own.
VENV ?= .venv$(if $(filter-out file,$(origin PYTHON)),-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))
exp ?= lm
args ?=
PY = $(VENV)/bin/python

# The JAX that fits this machine's hardware.
ACCELERATOR := $(shell if [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ]; then echo cuda; \
  elif [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then echo tpu; fi)
comma := ,
EXTRAS = experiments$(if $(ACCELERATOR),$(comma)$(ACCELERATOR))

# What a version of Python or of JAX breaks first, in three minutes: see CONTRIBUTING.md.
PART = tests/rl/test_ppo.py tests/contracts/test_planners.py tests/scan/test_affine.py tests/scan/test_sharded.py \
  tests/solve/test_parallel_scan.py tests/lm/test_model.py tests/lm/test_config.py tests/io/test_digest.py \
  tests/experiments/test_runner.py tests/test_mesh.py tests/test_packaging.py tests/test_startup.py

# Files of tests are never split among workers, which share what they compile; the longest begin first.
PYTEST = $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: run test test-all test-cold test-gpu test-slow test-part install oldest lint docs bench notebooks release newcomer clean

run: $(VENV)/.run
	$(PY) -m experiments.$(exp) $(args)

# What a merge runs: everything but the tests of single papers whose imports are what they were.
test: $(VENV)/.test
	$(PYTEST) --papers changed $(args)

test-all: $(VENV)/.test
	$(PYTEST) $(args)

# Once a week: everything on every interpreter that is promised, without a program of an earlier run.
test-cold:
	for python in $(PYTHONS) $(NEWEST); do \
	  JAXPAR_TEST_CACHE=off $(MAKE) test-all PYTHON=$$python || exit 1; done

# On a machine with NVIDIA cards: every test that needs one, by name, in one process.
test-gpu: $(VENV)/.test
	JAX_PLATFORMS=cuda $(PY) -m pytest -m gpu -v $(args)

test-part: $(VENV)/.test
	$(PYTEST) $(PART) $(args)

install: $(VENV)/.test

oldest:
	@set -- $(PYTHONS); [ $$# -lt 2 ] || { shift $$(($$# - 1)); echo $$1; }

test-slow: $(VENV)/.test
	$(PY) -m pip install -q -e '.[peers]'
	$(PY) -m pytest -m slow $(args)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)

docs: $(VENV)/.docs
	$(VENV)/bin/sphinx-build -W --keep-going -j 2 -b html docs docs/_build/html

bench: $(VENV)/.run
	$(PY) bench/lm_throughput.py $(args)

# Also on the version that CI does not test.
release: $(VENV)/.test
	$(PY) tests/release.py $(PYTHONS) $(NEWEST) $(args)

# What README, how-to pages and notebooks show, typed: prints what was slow, silent or red.
newcomer: $(VENV)/.test
	$(PY) tests/newcomer.py $(args)

# Executes those whose code has changed, a minute each; args="05_neat" for one, args="--all" for all.
notebooks: $(VENV)/.test
	$(PY) tests/write_notebooks.py $(args)

clean:
	rm -rf $(VENV) .venv-* .pytest_cache docs/_build build dist

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "jaxpar needs Python 3.11, 3.12 or 3.13, on the PATH or in pyenv."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip

# One stamp a set of extras: a second `make run` costs nothing.
$(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[$(if $(filter run,$*),$(EXTRAS),$*$(if $(ACCELERATOR),$(comma)$(ACCELERATOR)))]"
	@touch $@
