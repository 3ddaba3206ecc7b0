# Two commands set up a fresh machine with Python >= 3.11: `make demo` and `make test`.
# Every dependency is a wheel. `make test` installs exactly the files of the lock, by their hashes; .ci/run lists the
# system packages that some tests use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS_VENV := .venv-models
OLDEST_VENV := .venv-oldest
TOOLS_VENV := .venv-tools

# Processes that run the tests. Two keep two cores busy, and both begin with the folders that start Ray.
WORKERS ?= 2

.PHONY: demo prepare test test-fast test-thorough test-models test-oldest bench lint hooks lock sbom image clean

demo: $(VENV)/.demo
	$(BIN)/hawkvision demo

# Compiles the tools of FPGAs and builds the models first, because several tests use them; this takes seconds if it was
# done before. The run fails if a test is skipped for a reason that is not in the list. A test that fails beside others
# runs once more, alone: on a shared machine Ray and emulated links may get too little of the processors.
TEST = $(BIN)/pytest -p tests.skips --allowed-skips .ci/allowed_skips.toml
CLUSTERS := tests/system/cluster
test: prepare
	@echo "make test: running the tests; on two slow cores the whole takes half an hour"
	$(TEST) --numprocesses $(WORKERS) --dist load --ignore $(CLUSTERS) || \
		{ echo "make test: what failed beside other tests runs once more, alone"; \
		$(TEST) --last-failed --last-failed-no-failures none; }
	@echo "make test: clusters, which need the machine for themselves; two more minutes"
	$(TEST) $(CLUSTERS)

prepare: $(VENV)/.test
	@echo "make prepare: compiling yosys and nextpnr, and building models (kept in ~/.cache/YoWASP and ~/.cache/hawkvision)"
	started=$$(date +%s); \
		$(BIN)/python -m fpga.compiler.toolchain && \
		$(BIN)/hawkvision models build && \
		$(BIN)/hawkvision models build --task cifar10 && \
		$(BIN)/hawkvision models build --task fashion_mnist && \
		echo "make prepare: done in $$(($$(date +%s) - started)) s"

# Nightly: many more examples of each property test.
test-thorough: export HAWKVISION_EXAMPLES := nightly
test-thorough: test

test-fast: $(VENV)/.test
	$(BIN)/pytest -m "not slow and not models"

# Parity against torch and torchvision: a second environment, because torch takes 5 GB.
test-models: $(MODELS_VENV)/.models
	$(MODELS_VENV)/bin/pytest -m models tests/hawkvision/model_zoo

# A quick part of the tests with the oldest versions that pyproject.toml allows, in an environment of its own. Ray is
# not part of it: its versions have their own tests.
OLDEST_TESTS := tests/hawkvision/client/test_client.py tests/hawkvision/core/settings/test_config.py tests/hawkvision/models/test_manifest.py \
	tests/hawkvision/cascade/certification/test_profile.py tests/hawkvision/inference/test_backend_registry.py \
	tests/hawkvision/imaging/test_image_refusals.py tests/hawkvision/transport/protocol/test_identity.py \
	tests/hawkvision/model_zoo/building/test_quantize.py tests/edge/servers/test_http.py tests/edge/servers/test_bad_input.py tests/edge/servers/test_datagram.py
test-oldest: $(OLDEST_VENV)/.oldest
	$(OLDEST_VENV)/bin/python -m pytest -m "not slow" $(OLDEST_TESTS)

# Locks for the tests and the container, with the hash of every file; run this after a change of dependencies.
LOCK := edge/deploy/requirements
TEST_LOCK := .ci/requirements.test.txt
MODELS_LOCK := .ci/requirements.models.txt
COMPILE := $(TOOLS_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header
lock: $(TOOLS_VENV)/.tools
	$(COMPILE) --extra test --output-file $(TEST_LOCK) pyproject.toml
	printf '%s\n' html5lib hypothesis pytest pytest-timeout | \
		$(COMPILE) --extra models --output-file $(MODELS_LOCK) pyproject.toml -
	$(COMPILE) --extra build --output-file $(LOCK).build.txt pyproject.toml
	$(COMPILE) --extra build --extra datacenter --output-file $(LOCK).build,datacenter.txt pyproject.toml
	echo 'hatchling>=1.25' | $(COMPILE) --output-file $(LOCK).wheel.txt -

# Bills of materials of both images, CycloneDX 1.6, from the locks.
sbom: $(TOOLS_VENV)/.tools
	mkdir -p dist
	$(TOOLS_VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-format JSON \
		--output-file dist/hawkvision-edge.cdx.json $(LOCK).build.txt
	$(TOOLS_VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-format JSON \
		--output-file dist/hawkvision-datacenter.cdx.json $(LOCK).build,datacenter.txt

# Container images of a release. BASE names the base image by its digest, which comes from a registry.
image:
	@case "$(BASE)" in *@sha256:*) ;; *) echo "expected BASE=python:3.11-slim-bookworm@sha256:DIGEST;" \
		"docker buildx imagetools inspect python:3.11-slim-bookworm says the digest" >&2; exit 1;; esac
	docker build -f edge/deploy/Dockerfile --build-arg BASE=$(BASE) -t hawkvision-edge .
	docker build -f edge/deploy/Dockerfile --build-arg BASE=$(BASE) --build-arg EXTRAS=build,datacenter \
		-t hawkvision-datacenter .

bench: $(VENV)/.test
	$(BIN)/hawkvision models build
	$(BIN)/python -m tests.bench.servers.overhead.node
	$(BIN)/python -m tests.bench.transport.escalation_http

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Runs `make lint`'s checks at each commit, without a network: .pre-commit-config.yaml.
hooks: $(VENV)/.test
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) $(MODELS_VENV) $(OLDEST_VENV) $(TOOLS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "HawkVision needs Python >= 3.11, found " + sys.version.split()[0]'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	@echo "installing HawkVision and what the demonstration needs into $(VENV) (some 350 MB, once) ..."
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[demo]'
	touch $@

# Installs a lock and this checkout into the environment that the first argument names.
INSTALL = $(TOOLS_VENV)/bin/uv pip install --python $(1)/bin/python --require-hashes --requirements $(2) && \
	$(TOOLS_VENV)/bin/uv pip install --python $(1)/bin/python --no-deps --build-constraints $(LOCK).wheel.txt --editable .

$(VENV)/.test: $(VENV)/bin/python $(TOOLS_VENV)/.tools $(TEST_LOCK) pyproject.toml
	@echo "make: installing what $(TEST_LOCK) names into $(VENV) (2 GB the first time)"
	$(call INSTALL,$(VENV),$(TEST_LOCK))
	touch $(VENV)/.demo $@

$(MODELS_VENV)/.models: $(TOOLS_VENV)/.tools $(MODELS_LOCK) pyproject.toml
	@echo "make: installing what $(MODELS_LOCK) names into $(MODELS_VENV) (6 GB the first time)"
	$(TOOLS_VENV)/bin/uv venv --quiet --clear --seed --python $(PYTHON) $(MODELS_VENV)
	$(call INSTALL,$(MODELS_VENV),$(MODELS_LOCK))
	touch $@

$(TOOLS_VENV)/.tools: Makefile
	$(PYTHON) -m venv $(TOOLS_VENV)
	$(TOOLS_VENV)/bin/python -m pip install --quiet 'uv>=0.9,<1' 'cyclonedx-bom>=7,<8'
	touch $@

$(OLDEST_VENV)/.oldest: $(TOOLS_VENV)/.tools pyproject.toml
	$(TOOLS_VENV)/bin/uv venv --quiet --clear --python $(PYTHON) $(OLDEST_VENV)
	$(TOOLS_VENV)/bin/uv pip install --quiet --python $(OLDEST_VENV)/bin/python --resolution lowest-direct \
		--editable '.[build,int8,formats]' 'hypothesis>=6.120' 'pillow>=11.3' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@
