"""Lowers grouped matmul for an H200 on a machine without one; prints how many kernels it calls."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from ejkernel.modules import grouped_matmul

DEVICE = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=DEVICE)


def kernels(function):
    rows = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    with jax.sharding.use_abstract_mesh(MESH):
        lowered = jax.jit(function).trace(rows, weights, ids).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @triton_kernel_call")


def multiply(rows, weights, ids):
    return grouped_matmul(rows, weights, ids, platform="triton")


def total(*arrays):
    return multiply(*arrays).astype(jnp.float32).sum()


if __name__ == "__main__":
    print(kernels(multiply), kernels(jax.grad(total, (0, 1))))
