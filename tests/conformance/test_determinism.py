"""The same call gives the same bits, fifty times over, during other work, in another process."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from conformance.random_cases import SEED

import ejkernel
from ejkernel.cli import oracle
from ejkernel.cli.random_calls.run import choices_of, comparison
from ejkernel.kernels import OPS
from ejkernel.ops import executor
from ejkernel.ops.executor import Request

RUNS = 50
NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
QUICK = OPS.index("mean_pooling")
CALLS = [
    pytest.param(i, id=name, marks=[] if i == QUICK else NIGHTLY) for i, name in enumerate(OPS)
]


def digests(index, runs):
    """Hashes of values and gradients of a random call on XLA, one for each run."""
    call = comparison(choices_of(SEED, index)).call
    run = lambda inputs: executor.run(call.op, inputs, call.spec, Request(platform="xla"))
    program = jax.jit(oracle.with_gradients(run))
    for _ in range(runs):
        found = hashlib.sha256()
        for x in jax.tree.leaves(program(call.inputs)):
            found.update(np.asarray(x).tobytes())
        yield found.hexdigest()


@pytest.mark.parametrize("index", CALLS)
def test_fifty_runs_give_the_same_bits_during_other_work(index):
    stopped = threading.Event()

    def work():
        x = np.ones((256, 256), np.float32)
        while not stopped.is_set():
            jax.block_until_ready(jax.numpy.dot(x, x))

    other = threading.Thread(target=work)
    other.start()
    try:
        assert len(set(digests(index, RUNS))) == 1
    finally:
        stopped.set()
        other.join()


@pytest.mark.slow
def test_another_process_gives_the_same_bits():
    here = [next(digests(index, 1)) for index in range(len(OPS))]
    paths = [str(Path(ejkernel.__file__).parents[1]), str(Path(__file__).parents[1])]
    script = (
        "import jax; jax.config.update('jax_num_cpu_devices', 8); "
        "from conformance.test_determinism import *; "
        "print(*[next(digests(i, 1)) for i in range(len(OPS))])"
    )
    there = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert there.returncode == 0, there.stderr
    assert there.stdout.split() == here
