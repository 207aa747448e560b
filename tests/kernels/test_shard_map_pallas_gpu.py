"""Kernels for Hopper inside a `shard_map` that checks over which axes arrays vary, the default."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.common.mosaic_gpu.versions import why_missing
from ejkernel.modules import flash_attention, grouped_matmul
from ejkernel.parallel import combine, dispatch

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((8,), ("x",), abstract_device=H200)
EXPERTS = 64

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))


def traced(function, *shapes):
    """The program of a function of shares and its gradients, traced for eight H200s."""
    split = NamedSharding(MESH, P("x"))
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in shapes]
    with jax.sharding.use_abstract_mesh(MESH):
        run = jax.shard_map(function, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
        loss = lambda *x: run(*x).astype(jnp.float32).sum()
        return str(jax.jit(jax.grad(loss, (0, len(shapes) - 1))).trace(*arguments).jaxpr)


def test_flash_attention():
    x = jax.ShapeDtypeStruct((8, 512, 4, 128), jnp.bfloat16)
    run = lambda query, other: flash_attention(query, other, other, causal=True, platform="pallas")
    assert "psum" not in traced(run, x, x)


def test_grouped_matmul_between_dispatch_and_combine():
    def layer(tokens, ids, weights):
        rows, sizes, plan = dispatch(tokens, ids, axis_name="x", experts=EXPERTS)
        results = grouped_matmul(rows, weights, group_sizes=sizes, platform="pallas")
        return combine(results, plan)

    program = traced(
        layer,
        jax.ShapeDtypeStruct((2048, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((2048,), jnp.int32),
        jax.ShapeDtypeStruct((EXPERTS, 256, 256), jnp.bfloat16),
    )
    assert program.count("= ragged_all_to_all[") == 4
