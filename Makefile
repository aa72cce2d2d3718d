# make run [exp=lm] [args="train.steps=50"]   make test   and the rest below.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3 python; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
exp ?= lm
args ?=
VENV ?= .venv
PY = $(VENV)/bin/python

# The JAX that fits this machine's hardware.
ACCELERATOR := $(shell if [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ]; then echo cuda; \
  elif [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then echo tpu; fi)
comma := ,
EXTRAS = experiments$(if $(ACCELERATOR),$(comma)$(ACCELERATOR))

.PHONY: run test test-slow lint docs bench notebooks clean

run: $(VENV)/.run
	$(PY) -m experiments.$(exp) $(args)

test: $(VENV)/.test
	$(PY) -m pytest -n 2 --dist loadfile --max-worker-restart 0 $(args)

test-slow: $(VENV)/.test
	$(PY) -m pytest -m slow $(args)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)

docs: $(VENV)/.docs
	$(VENV)/bin/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.run
	$(PY) bench/lm_throughput.py $(args)

notebooks: $(VENV)/.test
	$(VENV)/bin/jupytext --to ipynb notebooks/*.py

clean:
	rm -rf $(VENV) docs/_build build dist

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "jaxpar needs Python 3.11 or newer on the PATH."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip

# One stamp a set of extras: a second `make run` costs nothing.
$(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[$(if $(filter run,$*),$(EXTRAS),$*$(if $(ACCELERATOR),$(comma)$(ACCELERATOR)))]"
	@touch $@
