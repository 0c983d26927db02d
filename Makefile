# make demo: the main job. make test: all checks. Both set up .venv first if need be.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-reality interop results lint setup

demo: $(READY)
	@$(BIN)/blockdraft demo

# Two processes of one thread each: small tests use no second thread well.
test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The real target on 60 prompts of 128 tokens, all dtypes: about 15 minutes on two cores.
test-reality: $(READY)
	BLOCKDRAFT_REALITY=full $(BIN)/python -m pytest tests/reality -s

# EAGLE-3 and DFlash on equal terms: about two hours on two cores, and it goes on where it was.
results: $(READY)
	$(BIN)/python benchmarks/results.py --write docs/results.md

# Our drafter in other engines, each in an environment of its own (gigabytes, and llama.cpp built from source, the first time): about ten minutes on two cores after that.
interop: $(READY)
	$(BIN)/python benchmarks/interop.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (torch is large: this can take minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
	@touch $(READY)
