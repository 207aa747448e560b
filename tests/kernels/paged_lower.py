"""Lowers attention over pages for an H200 on a machine without one; prints its kernels and aliases.

One line for each operation: how many Triton kernels it calls, and how many of the arrays that are
donated to it become results.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from ejkernel.modules import (
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
)

DEVICE = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=DEVICE)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def numbers(*sizes):
    return shape(*sizes, dtype=jnp.int32)


def lowered(function, arguments, donate=()):
    donated = [i for i, name in enumerate(arguments) if name in donate]
    run = lambda *given: function(**dict(zip(arguments, given, strict=True)), platform="triton")
    with jax.sharding.use_abstract_mesh(MESH):
        traced = jax.jit(run, donate_argnums=donated).trace(*arguments.values())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    print(text.count("custom_call @triton_kernel_call"), text.count("tf.aliasing_output"))


CACHE, TOKENS, QUERY = shape(64, 16, 2, 64), shape(40, 2, 64), shape(40, 8, 64)
SEQUENCES = {
    "cu_seqlens_q": numbers(5),
    "cu_seqlens_k": numbers(5),
    "page_indices": numbers(4, 16),
}

if __name__ == "__main__":
    lowered(
        page_attention,
        {
            "query": shape(4, 8, 64),
            "key_cache": CACHE,
            "value_cache": CACHE,
            "context_lens": numbers(4),
            "block_tables": numbers(4, 16),
        },
    )
    lowered(
        ragged_page_attention_v2,
        {
            "query": QUERY,
            "kv_pages": shape(64, 16, 4, 64),
            "context_lens": numbers(4),
            "block_tables": numbers(4, 16),
            "query_start_loc": numbers(5),
            "num_seqs": numbers(),
        },
    )
    reading = {"query": QUERY, "key_pages": CACHE, "value_pages": CACHE, **SEQUENCES}
    lowered(ragged_page_attention_v3, reading)
    new = {"query": QUERY, "key": TOKENS, "value": TOKENS}
    cache = ("key_pages", "value_pages")
    lowered(ragged_page_attention_v3_update, new | reading, donate=cache)
