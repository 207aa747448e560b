"""Lowers paged attention for an H200 on a machine without one; prints its kernels and aliases.

One line for each operation: the number of Triton kernels, and of donated arrays that are updated in
place.
"""

import jax
import jax.numpy as jnp
from kernels.triton_programs import kernels, lowered

from ejkernel.modules import (
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def numbers(*sizes):
    return shape(*sizes, dtype=jnp.int32)


def say(function, arguments, donate=()):
    donated = [i for i, name in enumerate(arguments) if name in donate]
    run = lambda *given: function(**dict(zip(arguments, given, strict=True)), platform="triton")
    text = lowered(run, *arguments.values(), donate=donated)
    print(kernels(text), text.count("tf.aliasing_output"))


CACHE, TOKENS, QUERY = shape(64, 16, 2, 64), shape(40, 2, 64), shape(40, 8, 64)
SEQUENCES = {
    "cu_seqlens_q": numbers(5),
    "cu_seqlens_k": numbers(5),
    "page_indices": numbers(4, 16),
}

if __name__ == "__main__":
    say(
        page_attention,
        {
            "query": shape(4, 8, 64),
            "key_cache": CACHE,
            "value_cache": CACHE,
            "context_lens": numbers(4),
            "block_tables": numbers(4, 16),
        },
    )
    say(
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
    say(ragged_page_attention_v3, reading)
    new = {"query": QUERY, "key": TOKENS, "value": TOKENS}
    cache = ("key_pages", "value_pages")
    say(ragged_page_attention_v3_update, new | reading, donate=cache)
