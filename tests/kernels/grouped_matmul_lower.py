"""Lowers grouped matmul for an H200 on a machine without one; prints how many kernels it calls."""

import jax
import jax.numpy as jnp
from kernels.triton_programs import kernels, lowered

from ejkernel.modules import grouped_matmul


def multiply(rows, weights, ids):
    return grouped_matmul(rows, weights, ids, platform="triton")


def total(*arrays):
    return multiply(*arrays).astype(jnp.float32).sum()


if __name__ == "__main__":
    shapes = (
        jax.ShapeDtypeStruct((512, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((512,), jnp.int32),
    )
    for function in (multiply, jax.grad(total, (0, 1))):
        print(kernels(lowered(function, *shapes)))
