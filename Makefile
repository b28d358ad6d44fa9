# Every target starts from .venv, which `make venv` makes from nothing.
PYTHON ?= python3
VENV ?= .venv
# For pip, e.g. an --extra-index-url that has CPU builds of torch.
PIP_ARGS ?=

BIN := $(VENV)/bin
RESULTS := benchmarks/results

.PHONY: help venv demo test test-full lint prs results clean

help:
	@echo "make venv       .venv with vLLM (CPU) and this package"
	@echo "make demo       serve a tiny Qwen3.5 + MTP model, stock and patched, side by side"
	@echo "make test       all tests that CI runs"
	@echo "make test-full  those and the long ones"
	@echo "make lint       ruff, ruff format and mypy"
	@echo "make prs        every pull request as a branch, checked as vLLM would; into prs/"
	@echo "make results    demo, loading peaks, GLM head and start cost, into $(RESULTS)"

venv: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml setup.py $(wildcard tools/*.py)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[cpu,dev]'
	$(BIN)/python tools/fit_environment.py
	@touch $@

demo: venv
	$(BIN)/python -m benchmarks.demo --plot demo.png

test: venv
	$(BIN)/python -m pytest -m "not full"

test-full: venv
	$(BIN)/python -m pytest

lint: venv
	PATH="$(abspath $(BIN)):$$PATH" pre-commit run --all-files --show-diff-on-failure

prs: venv
	$(BIN)/python -m benchmarks.pull_requests

results: venv
	$(BIN)/python -m benchmarks.start_cost --json $(RESULTS)/start_cost.json
	$(BIN)/python -m benchmarks.head_construction --json $(RESULTS)/head_construction.json
	$(BIN)/python -m benchmarks.load_peak --json $(RESULTS)/load_peak.json
	$(BIN)/python -m benchmarks.demo --json $(RESULTS)/demo.json --plot $(RESULTS)/demo.png
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) .releases prs build dist *.egg-info demo.png
