"""Lowers mean pooling for an H200 on a machine without one; prints how many kernels it calls."""

import jax
import jax.numpy as jnp
from kernels.triton_programs import kernels, lowered

from ejkernel.modules import mean_pooling


def padded(x, mask):
    return mean_pooling(x, mask, platform="triton")


def packed(x, ends):
    return mean_pooling(x, cu_seqlens=ends, platform="triton")


def gradient(pool):
    return jax.grad(lambda x, other: (pool(x, other).astype(jnp.float32) ** 2).sum())


if __name__ == "__main__":
    shape = jax.ShapeDtypeStruct
    x, mask = shape((64, 512, 768), jnp.bfloat16), shape((64, 512), jnp.bool_)
    for function in (padded, gradient(padded)):
        print(kernels(lowered(function, x, mask)))
    x, ends = shape((4096, 768), jnp.bfloat16), shape((9,), jnp.int32)
    for function in (packed, gradient(packed)):
        print(kernels(lowered(function, x, ends)))
