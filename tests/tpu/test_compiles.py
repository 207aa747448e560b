"""Every TPU kernel compiles for every generation, in every workload, and nothing falls back."""

import jax
import jax.numpy as jnp
import pytest
from conformance.cases import all_cases
from evidence import proves

from ejkernel.cli.oracle import with_gradients
from ejkernel.modules import flash_attention, grouped_matmul, lightning_attention
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from tpu.ahead_of_time import GENERATIONS, compiled, device, kernels_in, needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.tpu]


def of_tpus(cases):
    return [x for x in cases if x.values[0].source.backend == "tpu"]


# An op that runs the code of another is covered by the other's workloads: its own are slow.
CASES = of_tpus(all_cases(borrowed="none"))
CORE = [
    x
    for x in of_tpus(all_cases(tpu="fullest", borrowed="none"))
    if "core" in x.values[0].workload.tags
]


def compiles(generation, case, dtype):
    """Whether a workload is kernels, forward and, where the platform has it, backward."""
    call = case.call(dtype)
    run = lambda x: executor.run(call.op, x, call.spec, Request(platform="pallas"))
    backward = case.source.load().backward
    proves(case.op.name, case.source, "forward", compiled_for=generation)
    if backward is None or backward.refusal(call.inputs, call.spec, device(generation)):
        return kernels_in(compiled(generation, run, call.inputs)) >= 1
    proves(case.op.name, case.source, "backward", compiled_for=generation)
    return kernels_in(compiled(generation, with_gradients(run), call.inputs)) >= 2


one_quickly = pytest.mark.parametrize(
    "generation",
    [x if x == "v5e" else pytest.param(x, marks=pytest.mark.slow) for x in GENERATIONS],
)


@one_quickly
@pytest.mark.parametrize("case", CASES)
def test_every_workload_compiles(case, generation):
    assert compiles(generation, case, jnp.bfloat16)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("case", CORE)
def test_every_generation_compiles_the_core(case, generation):
    assert compiles(generation, case, jnp.bfloat16)


@one_quickly
@pytest.mark.parametrize("case", CORE)
def test_the_core_compiles_in_float32(case, generation):
    assert compiles(generation, case, jnp.float32)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [
        (32, 8, 128, 128),
        pytest.param(8, 8, 64, 64, marks=pytest.mark.slow),
        pytest.param(8, 1, 256, 256, marks=pytest.mark.slow),
        pytest.param(16, 16, 192, 128, marks=pytest.mark.slow),
        pytest.param(4, 4, 96, 96, marks=pytest.mark.slow),
    ],
)
def test_default_tiles_of_real_models_fit(generation, heads, kv_heads, head_dim, value_dim):
    """On its own, without a platform being asked for, a call for a TPU is one for our kernels."""
    shape = lambda n, d: jax.ShapeDtypeStruct((1, 8192, n, d), jnp.bfloat16)
    arrays = (shape(heads, head_dim), shape(kv_heads, head_dim), shape(kv_heads, value_dim))
    run = lambda x: flash_attention(*x, causal=True)
    loss = lambda x: run(x).astype(jnp.float32).sum()
    assert kernels_in(compiled(generation, run, arrays)) == 1
    assert kernels_in(compiled(generation, jax.grad(loss), arrays)) >= 2


@pytest.mark.parametrize("generation", ["v6e", "7x"])
@pytest.mark.parametrize("value_dim", [1, 3])
@pytest.mark.parametrize("operation", [flash_attention, lightning_attention])
def test_values_of_a_few_columns_compile(operation, value_dim, generation):
    """Mosaic has no such row of 16 bits: found by `benchmarks/tpu_random_calls.py`."""
    shape = lambda length, d: jax.ShapeDtypeStruct((1, length, 2, d), jnp.bfloat16)
    arrays = (shape(129, 64), shape(129, 64), shape(129, value_dim))
    loss = lambda x: operation(*x, platform="pallas").astype(jnp.float32).sum()
    assert kernels_in(compiled(generation, jax.grad(loss), arrays)) >= 2


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    ("rows", "k", "n", "groups"),
    [
        (8192, 4096, 14336, 8),
        pytest.param(8192, 14336, 4096, 8, marks=pytest.mark.slow),
        pytest.param(32768, 7168, 2048, 256, marks=pytest.mark.slow),
        pytest.param(1024, 2048, 7168, 256, marks=pytest.mark.slow),
    ],
)
def test_default_blocks_of_real_mixtures_fit(generation, rows, k, n, groups):
    shape = lambda *x, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(x, dtype)
    arrays = (shape(rows, k), shape(groups, k, n), shape(groups, dtype=jnp.int32))
    run = lambda x: grouped_matmul(x[0], x[1], group_sizes=x[2])
    gradients = lambda x: jax.grad(lambda y: run((*y, x[2])).astype(jnp.float32).sum())(x[:2])
    assert kernels_in(compiled(generation, run, arrays)) == 1
    assert kernels_in(compiled(generation, gradients, arrays)) >= 2
