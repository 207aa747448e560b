"""The Triton kernel of `examples/own_kernel.py`: interpreted it is right, compiled it fits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.triton_testing import SHARED, needs_triton, other_process

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_kernel.py"


@needs_triton
def test_interpreted_every_candidate_computes_what_is_defined():
    paths = os.pathsep.join([str(EXAMPLE.parents[1]), *sys.path])
    environment = {**os.environ, "EJKERNEL_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("ok: triton")]) == 4
    assert "TuningWarning" not in done.stderr  # no candidate was dropped


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_it_spills_no_registers_and_fits(capability):
    lines = other_process("example_kernel_compile.py", str(capability))
    assert len(lines) == 4
    for local_memory, shared_memory in (map(int, line.split()) for line in lines):
        assert local_memory == 0
        assert shared_memory <= SHARED[capability]
