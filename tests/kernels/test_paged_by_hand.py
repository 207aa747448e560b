"""Calls over pages whose answer is known without computing it, and caches written in place."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    PageAttentionConfig,
    RaggedPageAttentionv3Config,
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
)

PAGES, SIZE, KV_HEADS, HEADS, DIM = 8, 4, 2, 4, 8
# Five tokens prefilled, and the last of eleven decoded.
CU_Q, CU_K, TABLE = np.array([0, 5, 6]), np.array([0, 5, 16]), np.array([[3, 6, 0], [5, 1, 7]])
QUERY = jax.random.normal(jax.random.key(0), (6, HEADS, DIM))
EQUAL = np.zeros((PAGES, SIZE, KV_HEADS, DIM), np.float32)


def close(a, b):
    np.testing.assert_allclose(a, np.broadcast_to(b, a.shape), rtol=2e-5, atol=2e-6)


def positions():
    """Values that hold the position which `TABLE` gives to their slot."""
    values = EQUAL.copy()
    for row in TABLE:
        values[row] = np.arange(12, dtype=np.float32).reshape(3, SIZE, 1, 1)
    return values


def means(window):
    """Over positions 0 to 4 of the first sequence, one by one, then 0 to 10 of the second."""
    own = np.array([0, 1, 2, 3, 4, 10])
    oldest = np.maximum(own - window + 1, 0)
    return ((own + oldest) / 2)[:, None, None]


@pytest.mark.parametrize("window", [3, 100])
def test_equal_keys_give_the_means_of_the_positions_that_are_seen(window):
    options = {"sliding_window": window, "return_lse": True}
    values = positions()
    out, lse = ragged_page_attention_v3(QUERY, EQUAL, values, CU_Q, CU_K, TABLE, **options)
    close(out, means(window))
    seen = np.minimum(np.array([1, 2, 3, 4, 5, 11]), window)
    close(lse, np.log(seen)[:, None])
    combined = np.stack([EQUAL, values], 3).reshape(PAGES, SIZE, 2 * KV_HEADS, DIM)
    both = ragged_page_attention_v2(QUERY, combined, np.diff(CU_K), TABLE, CU_Q, 2, **options)
    close(both[0], means(window))
    np.testing.assert_array_equal(both[1], lse)


def test_new_tokens_are_seen_by_the_call_that_writes_them():
    values = positions()
    new = np.concatenate([np.arange(5.0), [10.0]]).astype(np.float32)[:, None, None]
    new = np.broadcast_to(new, (6, KV_HEADS, DIM))
    for token, (page, slot) in enumerate([(3, 0), (3, 1), (3, 2), (3, 3), (6, 0), (7, 2)]):
        assert (values[page, slot] == new[token]).all()
        values[page, slot] = np.nan
    out, _, value_pages = ragged_page_attention_v3_update(
        QUERY, np.zeros_like(new), new, EQUAL, values, CU_Q, CU_K, TABLE
    )
    close(out, means(100))
    np.testing.assert_array_equal(value_pages, positions())


def test_a_soft_cap_bounds_the_logits():
    """Two keys with logits 20 and 0, bounded by 2."""
    keys = EQUAL.copy()
    keys[3, 0, :, 0] = 20.0
    query = np.zeros((1, 1, HEADS, DIM), np.float32)
    query[..., 0] = 1.0
    run = lambda **options: page_attention(
        query, keys, positions(), np.array([2]), TABLE[:1], softmax_scale=1.0, **options
    )
    bounded = 2.0 * np.tanh(10.0)
    close(run(logits_soft_cap=2.0), 1.0 / (1.0 + np.exp(bounded)))
    close(run(), 1.0 / (1.0 + np.exp(20.0)))


def test_sinks_count_once_whatever_the_blocks():
    """The original counted them once for every block."""
    sinks = jnp.log(jnp.array([3.0, 8.0]))  # as much as the eleven keys of the last query
    for pages in (1, 3):
        cfg = RaggedPageAttentionv3Config(num_kv_pages_per_block=pages, num_queries_per_block=2)
        out = ragged_page_attention_v3(
            QUERY, EQUAL, positions(), CU_Q, CU_K, TABLE, softmax_aux=sinks, cfg=cfg
        )
        seen = np.array([1, 2, 3, 4, 5, 11])[:, None, None]
        close(out, means(100) * seen / (seen + 11))


def test_sinks_have_the_gradient_of_their_share():
    """The original gave them none. With n keys of weight 1, d out / d sink = -out s / (n + s)."""
    lengths, s = np.array([3, 11]), 4.0

    def total(sinks):
        cfg = PageAttentionConfig(pages_per_compute_block=1)
        out = page_attention(
            QUERY[:2], EQUAL, positions(), lengths, TABLE, softmax_aux=sinks, cfg=cfg
        )
        return out.sum()

    gradient = jax.jit(jax.grad(total))(jnp.log(jnp.full((HEADS, 1), s)))
    mean, n = (lengths - 1) / 2, lengths
    expected = -(DIM * mean * n * s / (n + s) ** 2).sum()
    close(gradient, expected)


def test_every_argument_has_a_name():
    """The original took most of them by position alone."""
    cache = {"key_cache": EQUAL, "value_cache": positions()}
    out = page_attention(
        query=QUERY[:2], **cache, context_lens=np.array([5, 11]), block_tables=TABLE
    )
    ragged = ragged_page_attention_v3(
        query=QUERY[:2],
        key_pages=EQUAL,
        value_pages=positions(),
        cu_seqlens_q=np.array([0, 1, 2]),
        cu_seqlens_k=CU_K,
        page_indices=TABLE,
    )
    close(out, ragged)
    close(out, np.array([2.0, 5.0])[:, None, None])


# In place


@pytest.mark.parametrize(
    ("layout", "dtype"), [("NHD", jnp.float32), ("HND", jnp.int8), ("HNPD", jnp.float32)]
)
def test_a_donated_cache_is_not_copied(layout, dtype):
    shape = jax.ShapeDtypeStruct
    sizes = {"NHD": (4096, 16, 2, 64), "HND": (4096, 2, 16, 64), "HNPD": (2, 4096, 16, 64)}[layout]
    cache = shape(sizes, dtype)
    step = jax.jit(
        ragged_page_attention_v3_update,
        donate_argnames=("key_pages", "value_pages"),
        static_argnames="kv_layout",
    )
    floats = [shape(x, jnp.float32) for x in ((8, 4, 64), (8, 2, 64), (8, 2, 64))]
    ints = [shape(x, jnp.int32) for x in ((5,), (5,), (4, 32))]
    program = step.lower(*floats, cache, cache, *ints, kv_layout=layout).compile()
    used, size = program.memory_analysis(), math.prod(sizes) * np.dtype(dtype).itemsize
    assert used.alias_size_in_bytes == 2 * size
    assert used.temp_size_in_bytes < size / 8
    kind = {"float32": "f32", "int8": "s8"}[np.dtype(dtype).name]
    whole = f"{kind}[{','.join(map(str, sizes))}]"
    copies = [x for x in program.as_text().splitlines() if re.search(r"= \S+ copy\(", x)]
    assert not [line for line in copies if whole in line]


def test_a_donated_cache_keeps_its_place():
    cache = [jnp.asarray(EQUAL), jnp.asarray(positions())]
    places = [x.unsafe_buffer_pointer() for x in cache]
    new = jnp.ones((6, KV_HEADS, DIM))
    step = jax.jit(ragged_page_attention_v3_update, donate_argnames=("key_pages", "value_pages"))
    _, *after = step(
        QUERY,
        new,
        new,
        key_pages=cache[0],
        value_pages=cache[1],
        cu_seqlens_q=CU_Q,
        cu_seqlens_k=CU_K,
        page_indices=TABLE,
    )
    assert all(x.is_deleted() for x in cache)
    assert [x.unsafe_buffer_pointer() for x in after] == places
