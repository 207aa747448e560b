"""Grouped matmul in Triton: interpreted it computes what is defined, compiled it fits the chip."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ejkernel import settings
from ejkernel.cli.oracle import with_gradients
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common import triton_bridge
from ejkernel.kernels.grouped_matmul import OP, triton_gpu
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec
from ejkernel.kernels.grouped_matmul.triton_gpu_plan import layout, most_tiles, tile_list
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS
from ejkernel.modules import grouped_matmul
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Backend, Device, Platform

H200 = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent")
SOURCE = next(source for source in OP.sources if source.platform is Platform.TRITON)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture
def interpreter():
    """Kernels run in Triton's interpreter, on NumPy arrays."""
    with settings.override(interpret=True):
        if reason := triton_bridge.why_not(H200, jnp.float32):
            pytest.skip(f"triton {reason}")
        yield


# Tiles small enough that a group has several, and a band of them is not all there is.
SMALL = GroupedMatmulConfig(platform="triton", block_m=16, block_n=16, block_k=16)


def workloads(*quick):
    return [
        pytest.param(workload, id=workload.name, marks=[] if chosen else [pytest.mark.slow])
        for workload in WORKLOADS
        if "test" in workload.tags
        for chosen in [workload.name in quick]
    ]


def check(workload, dtype, cfg):
    case = Case(OP, SOURCE, workload)
    call = case.call(dtype)
    run = lambda inputs: executor.run(OP, inputs, call.spec, Request(cfg=cfg))
    outputs, gradients = with_gradients(run)(call.inputs)
    assert outputs.out.dtype == call.spec.output_dtype(call.inputs)
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


@needs_triton
@pytest.mark.parametrize(
    "workload", workloads("ids", "rows_past_the_sum", "transposed", "existing_sizes")
)
def test_interpreted_it_computes_what_is_defined(interpreter, workload):
    """Values and gradients; what a kernel leaves unwritten would be NaN."""
    check(workload, jnp.float32, SMALL)


@needs_triton
@pytest.mark.parametrize("workload", workloads("offset_array"))
def test_half_precision_is_as_good_as_rounding(interpreter, workload):
    check(workload, jnp.float16, SMALL)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ids", "sizes", "one_row"])
def test_tiles_of_the_usual_size(interpreter, name):
    workload = next(w for w in WORKLOADS if w.name == name)
    check(workload, jnp.float32, GroupedMatmulConfig(platform="triton"))
