# `make help` lists the targets. Each makes what it needs; only python3 with venv is assumed.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable
SYSTEM_PACKAGES := libegl1 libgl1-mesa-dri libosmesa6 libgl1 libglib2.0-0 libxext6 ffmpeg libvulkan1
TEST_EXTRAS := train,maniskill,sb3,dev
SHORT_EXTRAS := train,dev

# Torch's idle threads would otherwise spin on the cores that MuJoCo's pool needs.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

# $(call usable,CANDIDATES,VERSIONS): the first candidate that runs, is of a version and can make environments.
usable = $(shell for python in $(1); do "$$python" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] not in "$(2)".split())' 2>/dev/null && command -v "$$python" && break; done)
candidates = python$(1) $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python) python3
found = $(call usable,$(call candidates,$(1)),$(1))
chosen = $(or $(if $(PYTHON),$(call usable,$(PYTHON),3.12 3.11),$(or $(call found,3.12),$(call found,3.11))),\
    $(error $(if $(PYTHON),PYTHON=$(PYTHON) is not a usable Python 3.11 or 3.12,No Python 3.12 or 3.11 found). \
    One with venv and ensurepip is needed: install it or give it with PYTHON=/path/to/python3.12))

.PHONY: help demo test check bench test-py311 test-py312 has-py311 has-py312

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.demo  ## train PPO to lift a cube from zero, evaluate, save a video: five minutes on two cores
	$(BIN)/python launch/train_sim.py configs/train/demo.yaml

test: $(VENV)/.test  ## all tests (20 minutes at most)
	$(BIN)/python -m pytest

check: $(VENV)/.test  ## ruff, pyright, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.test  ## speed against Gymnasium and Stable-Baselines3, measured here
	$(BIN)/python launch/bench.py sim ppo --quick

test-py311: .venv-py311/.short  ## the short run (unit and property tests) on Python 3.11
	.venv-py311/bin/python -m pytest tests/unit tests/property -m "not slow"

test-py312: .venv-py312/.short  ## the same on Python 3.12
	.venv-py312/bin/python -m pytest tests/unit tests/property -m "not slow"

has-py311 has-py312: has-py3%:
	@[ -n "$(call found,3.$*)" ]

# --- environments: a stamp file for each state, so that a second run installs nothing ------------------------

$(VENV)/.created:
	@$(if $(wildcard $(VENV)/bin/python),,echo "Making $(VENV) with $(chosen)" && "$(chosen)" -m venv $(VENV))
	@touch $@

$(VENV)/.system: $(VENV)/.created
	@missing=$$(for p in $(SYSTEM_PACKAGES); do dpkg-query -W -f='$${Status}' "$$p" 2>/dev/null | grep -q 'ok installed' || echo "$$p"; done); \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing system packages:" $$missing; \
		apt-get update -qq || echo "apt-get update failed; going on with the lists there are"; \
		for p in $$missing; do DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$p" >/dev/null \
			|| echo "Could not install $$p; rendering may need it"; done; \
	else echo "Rendering needs these system packages (Debian's names), not found here:" $$missing; fi
	@touch $@

$(VENV)/.demo: $(VENV)/.system pyproject.toml constraints.txt
	@echo "Installing robo-rl[train] into $(VENV) (minutes the first time)"
	@$(BIN)/python $(INSTALL) '.[train]'
	@touch $@

$(VENV)/.test: $(VENV)/.system pyproject.toml constraints.txt
	@echo "Installing robo-rl[$(TEST_EXTRAS)] into $(VENV) (minutes the first time)"
	@$(BIN)/python $(INSTALL) '.[$(TEST_EXTRAS)]'
	@touch $@ $(VENV)/.demo

.venv-py311/.short .venv-py312/.short: .venv-py3%/.short: pyproject.toml constraints.txt
	@$(if $(call found,3.$*),,$(error No Python 3.$* found))
	@echo "Making .venv-py3$* with $(call found,3.$*) and installing robo-rl[$(SHORT_EXTRAS)]"
	@"$(call found,3.$*)" -m venv .venv-py3$*
	@.venv-py3$*/bin/python $(INSTALL) '.[$(SHORT_EXTRAS)]'
	@touch $@
