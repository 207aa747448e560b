# Everything runs in a virtual environment that make builds on first use.
# `make demo` and `make test` need only python3 (3.11 or newer), make and a package index.

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests ejkernel
MARKS ?= not gpu and not tpu and not slow
WORKERS ?= auto
# What `make test-gpu` runs with all it needs, and `make test` therefore leaves to it.
GPU_TESTS := tests/kernels/test_*_triton.py tests/kernels/test_*_pallas_gpu.py tests/kernels/test_*_cuda.py
APART := $(GPU_TESTS:%=--ignore-glob="%")

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
stamp := $(VENV)/.installed

.PHONY: help demo test test-tpu test-gpu lint format bench tables clean
help:
	@echo "make demo    every operation on this machine, checked and timed"
	@echo "make test    the test suite; with MARKS='not gpu and not tpu' the slow part of it as well"
	@echo "make test-tpu  the kernels for TPUs, interpreted and compiled; no TPU is needed"
	@echo "make test-gpu  the kernels for NVIDIA GPUs, interpreted and compiled; no GPU is needed"
	@echo "make lint    ruff and pyright (make format mends what ruff can)"
	@echo "make bench   the figures that README quotes (make tables only writes its tables)"
	@echo "make clean   remove the environments and caches"

demo: $(stamp)-package
	$(bin)/ejkernel demo

test: $(stamp)-test
	$(bin)/python -m pytest $(TESTS) -m "$(MARKS)" -n $(WORKERS) --maxprocesses 8 -q $(APART)

# Kernels for TPUs, interpreted for their numbers and compiled by libtpu for every generation.
test-tpu: $(stamp)-tpu
	PYTHONPATH=$(VENV)/tpu JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 \
		$(bin)/python -m pytest tests -m "tpu and not slow" -n $(WORKERS) --maxprocesses 8 -q

# Kernels for NVIDIA GPUs: Triton's interpreted and compiled for three generations, Pallas' assembled
# for an H200. On a GPU, `pytest -m gpu` runs the rest.
test-gpu: $(stamp)-gpu
	PYTHONPATH=$(VENV)/cuda JAX_PLATFORMS=cpu \
		$(bin)/python -m pytest $(GPU_TESTS) -m "$(MARKS)" -n $(WORKERS) --maxprocesses 8 -q

lint: $(stamp)-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --pythonpath $(bin)/python

format: $(stamp)-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

bench: $(stamp)-package
	$(bin)/ejkernel bench --json benchmarks/results
	$(bin)/python benchmarks/tables.py

tables: $(stamp)-package
	$(bin)/python benchmarks/tables.py

clean:
	rm -rf .venv .venv-oldest .venv-newest .pytest_cache .ruff_cache .hypothesis build dist
	find ejkernel tests benchmarks -name __pycache__ -type d -exec rm -rf {} +

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

# XLA's CUDA plugin of JAX's own version, an assembler, and Triton, likewise apart.
$(stamp)-gpu: pyproject.toml $(stamp)-test
	version=$$($(bin)/python -c "import jax; print(jax.__version__)") && \
	$(pip) install --quiet --no-deps --upgrade --target $(VENV)/cuda jax-cuda13-pjrt==$$version \
		jax-cuda13-plugin==$$version nvidia-cuda-nvcc absl-py triton==3.6.0 "jax-triton>=0.3.1,<0.4"
	@touch $@

$(stamp)-dev: pyproject.toml $(stamp)-test
	$(pip) install --quiet --group dev
	@touch $@
