# Everything runs in a virtual environment that make builds on first use.
# `make demo` and `make test` need only python3 (3.11 or newer), make and a package index.

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests ejkernel
WORKERS ?= auto
# Which tests: the quick selection by default.
MARKS ?= not gpu and not tpu and not slow
EVIDENCE := benchmarks/results/evidence
# The versions of Flax and Equinox, a group of pyproject.toml: integrations or integrations-oldest.
INTEGRATIONS ?= integrations
# The tests that `make test-gpu` runs, with the packages that they need.
GPU_TESTS := tests/kernels/test_*_triton.py tests/kernels/test_*_pallas_gpu.py tests/kernels/test_*_cuda.py

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
stamp := $(VENV)/.installed
# The tests of a group share what they compile and run in one process.
pytest := $(bin)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup -q
on_cpu := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1

.PHONY: help demo test test-all test-rest test-random test-tpu test-gpu test-integrations test-examples test-docs test-nightly test-package docs docs-serve sbom lint format bench tables clean
help:
	@echo "make demo          run every operation on this machine: checked, timed, compared with plain JAX"
	@echo "make test          the quick test suite, minutes"
	@echo "make test-all      the whole CPU suite: all workloads, dtypes and candidate configurations"
	@echo "make test-random   random calls of all operations, compared with the reference; minutes"
	@echo "make test-tpu      TPU kernels, interpreted and compiled by libtpu; needs no TPU"
	@echo "make test-gpu      NVIDIA kernels, interpreted and compiled; needs no GPU"
	@echo "make test-integrations  the drop-ins against Flax and Equinox, in an environment of their own"
	@echo "make test-examples the scripts and notebooks in examples/, in an environment of their own"
	@echo "make test-nightly  transformations of all workloads, slow tests of TPU and NVIDIA kernels; hours"
	@echo "make test-package  build a wheel from the sdist, install it alone, run its demo"
	@echo "make docs          build the documentation site into build/site (make docs-serve shows it while you write)"
	@echo "make test-docs     build it, and load every page in a headless Chromium, if there is one"
	@echo "make sbom          list what the package consists of (CycloneDX), ask PyPI for advisories"
	@echo "make lint          ruff, pyright, types of the public interface (make format applies ruff's fixes)"
	@echo "make bench         measure the CPU benchmarks (make tables only rewrites the generated tables)"
	@echo "make clean         remove environments and caches"

demo: $(stamp)-package
	$(bin)/ejkernel demo

test: $(stamp)-test
	$(pytest) $(TESTS) -m "$(MARKS)" $(GPU_TESTS:%=--ignore-glob="%") $(ARGS)

test-all: MARKS = not gpu and not tpu and not nightly
test-all: export EXAMPLES = all
test-all: test

# What `make test` leaves to `make test-all`: slow tests, and all examples of property tests.
test-rest: MARKS = (slow or hypothesis) and not gpu and not tpu and not nightly
test-rest: export EXAMPLES = all
test-rest: test

# With those of `make test-rest` and `make test-tpu`, 300 calls on XLA and 60 of interpreted TPU kernels.
test-random: $(stamp)-test
	$(on_cpu) $(pytest) tests/conformance/test_random_calls.py -m nightly $(ARGS)

test-tpu: $(stamp)-tpu
	PYTHONPATH=$(VENV)/tpu $(on_cpu) $(pytest) tests -m "tpu and not slow" $(ARGS)

test-gpu: $(stamp)-gpu
	PYTHONPATH=$(VENV)/cuda $(on_cpu) $(pytest) $(GPU_TESTS) -m "$(MARKS)" $(ARGS)

# In an environment beside this one, with its JAX.
test-integrations: peers = $(VENV)-$(INTEGRATIONS)
test-integrations: $(stamp)-package
	$(MAKE) --no-print-directory VENV=$(peers) $(peers)/.installed-test
	$(peers)/bin/python -m pip --disable-pip-version-check install --quiet --group $(INTEGRATIONS) \
		jax==$$($(bin)/python -c "import jax; print(jax.__version__)")
	$(peers)/bin/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup -q -rs \
		tests/integrations ejkernel/integrations $(ARGS)

# Two scripts at a time: each is a process of its own that uses several cores.
test-examples:
	$(MAKE) --no-print-directory VENV=$(VENV)-examples $(VENV)-examples/.installed-test
	$(VENV)-examples/bin/python -m pip --disable-pip-version-check install --quiet --group examples
	$(VENV)-examples/bin/python -m pytest -n 2 --dist loadgroup -q -rs tests/examples $(ARGS)

# Each part runs whatever became of the one before, and records what it proved.
test-nightly: $(stamp)-tpu $(stamp)-gpu
	failed=0; \
	$(pytest) tests -m "nightly and not gpu and not tpu" \
		--evidence $(EVIDENCE)/nightly_cpu.json $(ARGS) || failed=1; \
	PYTHONPATH=$(VENV)/tpu $(on_cpu) $(pytest) tests -m "tpu and slow" \
		--evidence $(EVIDENCE)/nightly_tpu.json $(ARGS) || failed=1; \
	PYTHONPATH=$(VENV)/cuda $(on_cpu) $(pytest) $(GPU_TESTS) -m "slow and not gpu and not tpu" \
		--evidence $(EVIDENCE)/nightly_gpu.json $(ARGS) || failed=1; \
	exit $$failed

# What a user installs: from the sdist a wheel, from the wheel an environment of its own.
test-package: | $(bin)/python
	rm -rf build/package
	$(bin)/python -m venv build/package/builder
	build/package/builder/bin/pip --disable-pip-version-check install --quiet --require-hashes \
		-r tools/build_requirements.txt
	build/package/builder/bin/python -m build --no-isolation --outdir build/package .
	$(bin)/python -m venv build/package/clean
	build/package/clean/bin/pip --disable-pip-version-check install --quiet \
		"$$(ls $(CURDIR)/build/package/*.whl)[cli]"
	cd build/package && clean/bin/ejkernel --version && clean/bin/ejkernel demo && \
		clean/bin/ejkernel bench --html report.html --results "$(CURDIR)/benchmarks/results"

# Fails on an example that does not run, a broken link, and a public name without a page.
docs: $(VENV)-docs/.installed build/.examples
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build

docs-serve: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs serve

test-docs: docs
	SITE=build/site $(pytest) -rs tests/docs/test_site.py $(ARGS)

sources := $(shell find ejkernel -name "*.py")
build/.examples: $(wildcard docs/*.md) README.md CONTRIBUTING.md $(sources) $(stamp)-test
	$(pytest) tests/docs/test_documents.py -k our_documents
	@mkdir -p build && touch $@

# What the package consists of, as CycloneDX, and the known advisories of these versions.
sbom: $(stamp)-test
	@mkdir -p build
	$(bin)/python tools/sbom.py --extra cli > build/ejkernel.cdx.json
	$(bin)/python tools/sbom.py --extra cli --advisories

lint: $(stamp)-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/python tools/typed.py --least 95

format: $(stamp)-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

bench: $(stamp)-package
	$(bin)/ejkernel bench --json benchmarks/results
	$(bin)/python -m benchmarks.report

tables: $(stamp)-package
	$(bin)/python -m benchmarks.report

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist
	find ejkernel tests benchmarks examples -name __pycache__ -type d -exec rm -rf {} +

# The stamps depend on pyproject.toml: a changed dependency installs again, nothing else does.
$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ejkernel needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(stamp)-package: pyproject.toml | $(bin)/python
	$(pip) install --quiet --upgrade pip
	$(pip) install --quiet --editable ".[cli]"
	@touch $@

$(stamp)-test: pyproject.toml $(stamp)-package
	$(pip) install --quiet --group test
	@touch $@

# The libtpu that belongs to the JAX of the environment, in a folder of its own: with it on the path
# JAX looks for a TPU.
$(stamp)-tpu: pyproject.toml $(stamp)-test
	$(pip) install --quiet --no-deps --upgrade --target $(VENV)/tpu "$$($(bin)/python -c \
		"import importlib.metadata as m; print(next(r.split(';')[0] for r in m.requires('jax') if r.startswith('libtpu')))")"
	@touch $@

# XLA's CUDA plugin of JAX's own version, an assembler, and Triton, also in a folder of their own.
$(stamp)-gpu: pyproject.toml $(stamp)-test
	version=$$($(bin)/python -c "import jax; print(jax.__version__)") && \
	$(pip) install --quiet --no-deps --upgrade --target $(VENV)/cuda jax-cuda13-pjrt==$$version \
		jax-cuda13-plugin==$$version nvidia-cuda-nvcc absl-py triton==3.6.0 "jax-triton>=0.3.1,<0.4"
	@touch $@

# In an environment of its own: the site is made from the sources, without importing them.
$(VENV)-docs/.installed: pyproject.toml | $(bin)/python
	$(bin)/python -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet --upgrade pip
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet --group docs
	@touch $@

$(stamp)-dev: pyproject.toml $(stamp)-test
	$(pip) install --quiet --group dev
	@touch $@
