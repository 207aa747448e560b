"""Experts split over chips: rows travel by one ragged exchange each way, and nothing else does."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.modules import grouped_matmul
from ejkernel.parallel import combine, dispatch
from tpu.ahead_of_time import compiled_over, kernels_in, mesh_of, needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.tpu]

EXPERTS, WIDTH = 64, 256
EXCHANGE = re.compile(r"= (\S+?)\{.* (ragged-all-to-all|all-to-all|all-gather|all-reduce)\(")


def program(topology, chips, capacity=None):
    """Dispatch, grouped matmul and combine, with gradients of tokens and weights."""
    mesh = mesh_of(topology, ep=chips)

    def local(tokens, ids, weights):
        rows, sizes, plan = dispatch(
            tokens, ids, axis_name="ep", experts=EXPERTS, capacity=capacity
        )
        return combine(grouped_matmul(rows, weights, group_sizes=sizes), plan)

    layer = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    loss = lambda x, ids, w: layer(x, ids, w).astype(jnp.float32).sum()
    arguments = (
        jax.ShapeDtypeStruct((256 * chips, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((256 * chips,), jnp.int32),
        jax.ShapeDtypeStruct((EXPERTS, WIDTH, WIDTH), jnp.bfloat16),
    )
    run = lambda x: jax.value_and_grad(loss, (0, 2))(*x)
    return compiled_over(mesh, P("ep"), run, arguments)


def elements(shape):
    sizes = re.fullmatch(r"\w+\[([\d,]*)\]", shape)[1]
    return [int(size) for size in sizes.split(",") if size]


@pytest.mark.parametrize(
    ("topology", "chips"), [("v5e:2x2", 4), ("v5e:4x4", 16), ("v5p:2x2x1", 4), ("v6e:2x2", 4)]
)
def test_rows_travel_by_ragged_all_to_all(topology, chips):
    """To the experts and back, as do their gradients; nothing else but sizes and the loss does."""
    compiled = program(topology, chips)
    found = EXCHANGE.findall(compiled.as_text())
    by_name = lambda name: [elements(shape) for shape, used in found if used == name]
    assert sorted(shape[0] for shape in by_name("ragged-all-to-all")) == [
        *[256] * 2,
        *[256 * chips] * 2,
    ]
    assert by_name("all-to-all") == []
    gathered = sum(sum(shape[:1]) for shape in by_name("all-gather") + by_name("all-reduce"))
    assert gathered <= chips * EXPERTS + 1
    assert kernels_in(compiled) >= 3


def test_a_capacity_bounds_the_buffer():
    small, whole = program("v5e:4x4", 16, capacity=32), program("v5e:4x4", 16)
    shapes = [
        elements(shape) for shape, used in EXCHANGE.findall(small.as_text()) if "ragged" in used
    ]
    assert sorted(shape[0] for shape in shapes) == [256, 256, 16 * 32, 16 * 32]
    memory = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    assert memory(small) < memory(whole)
