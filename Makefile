# run: train the example on 2 processes   compare: FSDP2 beside it   test: style, types, tests
# bench: peers side by side
# fuzz: random cases against one process   size: lines, and the limit of the story   features: the table of docs/features.md
# spec: which statements of the specification have a test
# Needs python3.11 or later with venv, a C++ compiler and make; all else goes into .venv, once.

PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
TIERS := $(foreach tier,gloo fake unit gpu,$(wildcard tests/$(tier)))
FIRST := $(wildcard tests/gloo/[a-e]*/)
SECOND := $(filter-out $(FIRST),$(wildcard tests/gloo/*/ tests/gloo/test_*.py))
COMPARED := --batch 4 --seq 128 --steps 12 --systems eager,compiled,fsdp2,fsdp2-compiled
export OMP_NUM_THREADS ?= 1
# What pip does not compile, Python compiles at the first import and keeps.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run compare test types fuzz bench size spec features format clean compiler

run: compiler .venv/run
	@echo "starting 2 processes"
	@$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_gpt.py $(ARGS)
ifndef ARGS
	@echo "Next: make compare puts FSDP2 beside it, and measures speed, memory and losses; it takes several minutes."
endif

compare: compiler .venv/run
	@$(PY) -m fsdp_compile compare examples/gpt.py:make $(COMPARED) $(ARGS)

test: compiler .venv/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PYTHON) tools/size.py --check
ifdef ARGS
	$(PY) -m mypy
	$(PY) -m pytest $(TIERS) $(ARGS)
else # three at a time on two cores: ranks of gloo, which come in two halves, wait for each other and for the C++ compiler
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target first.half second.half $(patsubst %,%.tier,$(filter-out tests/gloo,$(TIERS))) types
endif

types: .venv/test
	$(PY) -m mypy

first.half second.half:
	$(PY) -m pytest $(if $(filter first%,$@),$(FIRST),$(SECOND))

tests/unit.tier: types # whose cache a test of users' types reads

%.tier:
	$(PY) -m pytest $*

fuzz: compiler .venv/test
	PYTHONPATH=tests $(PY) -m fuzz $(ARGS)

bench: compiler .venv/bench
	$(PY) -m bench $(ARGS)

size:
	@$(PYTHON) tools/size.py

spec:
	@$(PYTHON) tools/spec_coverage.py

features:
	@$(PYTHON) tools/feature_table.py

format: .venv/test
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# .venv stays: remove it by hand to start anew.
clean:
	rm -rf build *.egg-info *.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fsdp_compile tests bench examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Three environments in one folder, each with what the one before has: for running the example, testing, benchmarks.
# torch comes first and alone: a range would let pip take the newest build, with gigabytes of CUDA packages.
.venv/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "error: needs Python 3.11 or later, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) tools/narrate.py "creating .venv" $(PYTHON) -m venv .venv
	@$(PYTHON) tools/narrate.py "installing $$(grep ^torch== constraints.txt)" $(PIP) torch
	@touch $@

.venv/run: .venv/torch pyproject.toml
	@$(PYTHON) tools/narrate.py "installing fsdp_compile and matplotlib" $(PIP) -e '.[examples]'
	@touch $@

# Most files of the tests' tools are never imported; Python compiles those that are.
.venv/test: .venv/torch pyproject.toml
	@$(PYTHON) tools/narrate.py "installing what the tests need" $(PIP) --no-compile -e '.[test,examples]'
	@touch .venv/run $@

# torchtitan for SimpleFSDP, whose files need torch alone: its trainer's dependencies stay out.
.venv/bench: .venv/test
	@$(PYTHON) tools/narrate.py "installing torchtitan" $(PIP) --no-deps torchtitan
	@touch $@

compiler:
	@command -v $(CXX) >/dev/null \
	|| { echo "error: torch.compile needs a C++ compiler, $(CXX) is not on the path; install g++ or set CXX" >&2; exit 1; }
