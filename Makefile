# Every target starts from .venv, which `make venv` makes from nothing.
PYTHON ?= python3
VENV ?= .venv
# For pip, e.g. an --extra-index-url that has CPU builds of torch.
PIP_ARGS ?=

BIN := $(VENV)/bin
RESULTS := benchmarks/results
# A benchmark, with its figures and a plot of them.
measure = $(BIN)/python -m benchmarks.$(1) --json $(RESULTS)/$(1).json --plot $(RESULTS)/$(1).png

.PHONY: help venv demo test test-full lint prs compat compat-serve bench clean

help:
	@echo "make venv       .venv with vLLM (CPU) and this package"
	@echo "make demo       serve a tiny Qwen3.5 + MTP model, stock and patched, side by side"
	@echo "make test       all tests that CI runs"
	@echo "make test-full  those and the long ones"
	@echo "make lint       ruff, ruff format and mypy"
	@echo "make prs        every pull request as a branch, checked as vLLM would; into prs/"
	@echo "make bench      measure the figures that README.md and the texts show, into $(RESULTS)"
	@echo "make compat     what becomes of every pull request on releases of vLLM"
	@echo "make compat-serve  the same, and served on 0.30 and 0.31; into $(RESULTS)"

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

compat: venv
	$(BIN)/python -m benchmarks.compat

compat-serve: venv
	$(BIN)/python -m benchmarks.compat --serve 0.30.0 0.31.0 \
		--pip-args="$(PIP_ARGS)" --json $(RESULTS)/compat.json

bench: venv
	$(call measure,start_cost)
	$(call measure,head_construction)
	$(call measure,load_peak)
	$(call measure,draft_load_time)
	$(call measure,serve_parity)
	$(call measure,demo)
	$(BIN)/vllm-lean-vocab estimate benchmarks/shapes/qwen3_8_27b --json > $(RESULTS)/estimate.new
	mv $(RESULTS)/estimate.new $(RESULTS)/estimate.json
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) .releases prs build dist *.egg-info demo.png
