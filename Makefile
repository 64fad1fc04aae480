# `make` lists the targets. Variables, all overridable on the command line:
#   PYTHON       the interpreter that makes .venv (python3.11, else python3; 3.11 is what the lock is made for)
#   PIP_ARGS     passed to every pip install, for example --index-url of a mirror
#   TORCH_INDEX  PyTorch's CPU wheel index, asked only when pip's own indexes lack torch's +cpu build
#   PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS
PYTHON ?=
PIP_ARGS ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

PY := .venv/bin/python
# Without it vLLM's CPU backend decodes several times slower.
ifndef OMP_NUM_THREADS
OMP_NUM_THREADS := $(shell scripts/physical-cores)
endif
VLLM_NO_USAGE_STATS := 1
DO_NOT_TRACK := 1
export PYTHON PIP_ARGS TORCH_INDEX OMP_NUM_THREADS VLLM_NO_USAGE_STATS DO_NOT_TRACK

# No target is a file: the scripts know themselves what is up to date.
.PHONY: help venv build-ext demo test unit integration check bench clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

venv: ## Make .venv from requirements/cpu.lock; does nothing when it is up to date
	@scripts/setup-venv

build-ext: venv ## Build the C++ extension in place where a compiler exists
	@scripts/build-ext

demo: build-ext ## Answer questions over a folder of documents, with and without reuse
	@$(PY) -m daric_rag.demo $(DEMO_ARGS)

test: build-ext ## All tests: unit first, then integration
	@scripts/system-packages redis-server
	@$(PY) -m pytest tests/unit tests/integration $(PYTEST_ARGS)

unit: venv ## Only the tests that need no engine and no server
	@$(PY) -m pytest tests/unit $(PYTEST_ARGS)

integration: build-ext ## Only the tests that need an engine, Redis or processes
	@scripts/system-packages redis-server
	@$(PY) -m pytest tests/integration $(PYTEST_ARGS)

check: venv ## Format, lint and types; compiles the CUDA kernels where nvcc is on the PATH
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy --strict daric_rag
	@scripts/check-cuda

bench: build-ext ## The benchmark table; also writes JSON under benchmarks/results
	@$(PY) -m benchmarks.run $(BENCH_ARGS)

clean: ## Remove what the targets made: .venv, builds, caches (not the user's cache directory)
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find daric_rag -name '*.so' -delete
	find daric_rag tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
