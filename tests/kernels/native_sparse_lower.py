"""Lowers native sparse attention for an H200 on a machine without one; prints its kernel counts."""

import jax
import jax.numpy as jnp
from kernels.triton_programs import kernels, lowered

from ejkernel.modules import native_sparse_attention


def attend(query, key, value, blocks):
    return native_sparse_attention(query, key, value, block_indices=blocks, platform="triton")


def select_and_attend(query, key, value):
    return native_sparse_attention(query, key, value, block_counts=4, platform="triton")


def total(*arrays):
    return attend(*arrays).astype(jnp.float32).sum()


if __name__ == "__main__":
    shapes = (
        jax.ShapeDtypeStruct((1, 512, 16, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 512, 2, 4), jnp.int32),
    )
    for function in (attend, jax.grad(total, (0, 1, 2))):
        print(kernels(lowered(function, *shapes)))
    print(kernels(lowered(select_and_attend, *shapes[:3])))
