"""The kernels over pages on real models: default blocks fit, and the cache stays where it is."""

import math
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import ragged_page_attention_v2, ragged_page_attention_v3_update
from tpu.ahead_of_time import GENERATIONS, compiled, kernels_in, needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.tpu]
SEQUENCES, PER_SEQUENCE, TOKENS, PAGES = 64, 512, 2048, 4096


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def integers(*sizes):
    return shape(*sizes, dtype=jnp.int32)


def update_arguments(heads, kv_heads, head_dim, value_dim, dtype, page_size):
    """Queries, keys, values; keys and values of the cache; lengths and table."""
    wide = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    tokens = [
        shape(TOKENS, n, d, dtype=wide)
        for n, d in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    ]
    pages = [shape(PAGES, page_size, kv_heads, d, dtype=dtype) for d in (head_dim, value_dim)]
    lengths = [integers(SEQUENCES + 1)] * 2
    return tokens, pages, [*lengths, integers(SEQUENCES, PER_SEQUENCE)]


def update(arguments):
    tokens, pages, rest = arguments
    return ragged_page_attention_v3_update(*tokens, *pages, *rest)


def moved(program, size):
    """Instructions that make an array of this many elements anew."""
    kinds = "copy|transpose|reshape|fusion|copy-start"
    made = re.findall(rf"= \w+\[([\d,]+)\]\S* ({kinds})\(", program.as_text())
    return [how for sizes, how in made if math.prod(map(int, sizes.split(","))) >= size]


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim", "dtype", "page_size"),
    [
        (32, 8, 128, 128, jnp.bfloat16, 16),
        pytest.param(8, 8, 64, 64, jnp.bfloat16, 64, marks=pytest.mark.slow),
        pytest.param(8, 1, 256, 256, jnp.bfloat16, 32, marks=pytest.mark.slow),
        pytest.param(16, 16, 192, 128, jnp.bfloat16, 16, marks=pytest.mark.slow),
        pytest.param(4, 4, 96, 96, jnp.float8_e4m3fn, 16, marks=pytest.mark.slow),
        pytest.param(64, 8, 128, 128, jnp.int8, 32, marks=pytest.mark.slow),
        pytest.param(32, 8, 128, 128, jnp.float32, 16, marks=pytest.mark.slow),
        pytest.param(28, 4, 128, 128, jnp.bfloat16, 128, marks=pytest.mark.slow),
    ],
)
def test_default_blocks_of_real_models_fit(
    generation, heads, kv_heads, head_dim, value_dim, dtype, page_size
):
    """On its own, without a platform being asked for, a call for a TPU is one for our kernels."""
    arguments = update_arguments(heads, kv_heads, head_dim, value_dim, dtype, page_size)
    assert kernels_in(compiled(generation, update, arguments)) == 4


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_donated_cache_is_written_where_it_lies(kv_heads):
    arguments = update_arguments(8, kv_heads, 128, 128, jnp.bfloat16, 16)
    _, pages, _ = arguments
    with warnings.catch_warnings():  # only the cache comes back: what else is given cannot be used
        warnings.simplefilter("ignore")
        program = compiled("v5e", update, arguments, donate_argnums=0)
    cache = math.prod(pages[0].shape)
    assert program.memory_analysis().alias_size_in_bytes >= 2 * 2 * cache
    assert not moved(program, cache)


def test_combined_pages_are_read_where_they_lie():
    query, pages = shape(TOKENS, 32, 128), shape(PAGES, 16, 16, 128)
    arguments = (
        *(query, pages, integers(SEQUENCES), integers(SEQUENCES, PER_SEQUENCE)),
        *(integers(SEQUENCES + 1), integers()),
    )
    program = compiled("v5e", lambda x: ragged_page_attention_v2(*x), arguments)
    assert kernels_in(program) == 2
    assert not moved(program, math.prod(pages.shape))
