"""Lowers flash attention for an H200 on a machine without one; prints how many kernels it calls."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from ejkernel.modules import flash_attention

DEVICE = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=DEVICE)


def kernels(function):
    shape = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(MESH):
        lowered = jax.jit(function).trace(shape, shape, shape).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @triton_kernel_call")


def attend(query, key, value):
    return flash_attention(query, key, value, causal=True, platform="triton")


def total(*arrays):
    return attend(*arrays).astype(jnp.float32).sum()


if __name__ == "__main__":
    print(kernels(attend), kernels(jax.grad(total, (0, 1, 2))))
