"""Shared by the tests of all Triton kernels: marks, subprocesses, resource limits of a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ejkernel.ops.platform import Device

H200 = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent", 132, 232_448)
# Bytes of shared memory that a program may use, by compute capability.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def marked(workloads, *quick):
    """Parameters of a test: the workloads tagged for tests, marked slow except the quick ones."""
    return [
        pytest.param(workload, id=workload.name, marks=[] if chosen else [pytest.mark.slow])
        for workload in workloads
        if "test" in workload.tags
        for chosen in [workload.name in quick]
    ]


def other_process(script, *arguments):
    """The lines that a script of this folder prints; a process either interprets or compiles."""
    paths = [str(Path(__file__).parents[2]), *sys.path]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    for name in ("TRITON_INTERPRET", "EJKERNEL_INTERPRET"):
        environment.pop(name, None)
    command = [sys.executable, Path(__file__).with_name(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def compiled(script, capability, *calls, guess=False):
    """The compiled kernels of all candidates of these calls, or of the heuristic's choice.

    Asserts that none spills registers or needs more memory than the GPU has.
    """
    arguments = ["--guess"] * guess + [str(capability), *calls]
    kernels = [json.loads(line) for line in other_process(script, *arguments)]
    assert {kernel["call"] for kernel in kernels} == set(calls)
    for kernel in kernels:
        assert kernel["local"] == 0, kernel
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["tensor"] <= 512, kernel
    return kernels


def lowered(script):
    """What a script prints that lowers for an H200; needs the CUDA plugin."""
    for package in ("jax_triton", "jax_cuda13_plugin"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return other_process(script)
