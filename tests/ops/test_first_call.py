"""What the first call of a new shape compiles, and what a second process finds of it."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel.cli import subjects
from ejkernel.ops.workload import is_differentiable

ROOT = Path(__file__).parents[2]
CORE = [
    (subject, workload)
    for subject in subjects.every()
    for workload in subject.workloads
    if "core" in workload.tags
]
NAMES = [f"{subject.name}-{workload.name}" for subject, workload in CORE]
# Of each operation the last one, which uses most features, is quick.
LAST = {subject.name: workload for subject, workload in CORE}
QUICK_LAST = [
    pytest.param(*one, marks=() if one[1] is LAST[one[0].name] else pytest.mark.slow)
    for one in CORE
]
MOST = 2  # programs that a call may compile besides the caller's own


def function_and_floats(subject, workload):
    arguments = workload.build()
    floats = {name: x for name, x in arguments.items() if is_differentiable(x)}
    rest = {name: x for name, x in arguments.items() if name not in floats}
    return lambda floats: subject.function(**floats, **rest), floats


def total(tree):
    floats = (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))
    return sum(x.astype(jnp.float32).sum() for x in floats)


@pytest.mark.parametrize(("subject", "workload"), QUICK_LAST, ids=NAMES)
def test_tracing_a_call_compiles_nothing_of_its_own(subject, workload, compilations):
    function, floats = function_and_floats(subject, workload)
    compilations.clear()
    jax.jit(function).lower(floats)
    assert len(compilations) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "workload"), CORE, ids=NAMES)
def test_tracing_a_gradient_compiles_nothing_of_its_own(subject, workload, compilations):
    function, floats = function_and_floats(subject, workload)
    compilations.clear()
    jax.jit(jax.grad(lambda x: total(function(x)))).lower(floats)
    assert len(compilations) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "workload"), CORE, ids=NAMES)
def test_an_eager_call_compiles_little_besides_its_program(subject, workload, compilations):
    function, floats = function_and_floats(subject, workload)
    compilations.clear()
    jax.block_until_ready(function(floats))
    assert 1 <= len(compilations) <= 1 + MOST


PROGRAM = """
import jax, jax.numpy as jnp
import ejkernel
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
x = jnp.ones((1, 96, 4, 16))
loss = lambda q: ejkernel.flash_attention(q, x, x, causal=True).sum()
jax.block_until_ready(jax.jit(jax.grad(loss))(x))
count = lambda name: sum(event.endswith(name) for event in events)
print(count("compilation_cache/cache_hits"), count("compilation_cache/cache_misses"))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
    }
    run = lambda: subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    (_, first_misses), (hits, misses) = run(), run()
    assert int(first_misses) > 0
    assert (int(hits), int(misses)) == (int(first_misses), 0)
