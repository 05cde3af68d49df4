# make demo | test | check | gpu | memcheck | readme | wheel | env | clean
# PYTHON is the interpreter that creates .venv (any of 3.10 to 3.13); everything else runs in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TABLES := README.md docs/attention.md docs/performance.md $(wildcard heads/*/README.md)
# two processes of one thread each: most tests are many tiny tensors, which more threads only slow down
TESTS  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
# most of the time goes into compiling kernels, which several processes do at once
GPU_JOBS ?= 8
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check gpu memcheck readme wheel env clean

demo: $(READY)
	@$(BIN)/specdeft demo

test: $(READY)
	$(TESTS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m specdeft.evaluate.report --check $(TABLES)
	$(TESTS)

# On a CUDA machine, with the interpreter and packages that are there: no environment is made.
gpu:
	$(PYTHON) -m pytest -n $(GPU_JOBS) -m gpu tests/gpu

memcheck:
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -m memcheck tests/gpu

readme: $(READY)
	$(BIN)/python -m specdeft.evaluate.report --write $(TABLES)

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation

env: $(READY)

# torch goes first and alone: resolved together with the rest, pip may settle on a newer, much larger build.
# medusa-llm is only compared with (its tree buffers and its acceptance rule); its own pins would undo ours.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch==2.13.0
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	$(PIP) install --quiet --no-deps medusa-llm==0.1
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
