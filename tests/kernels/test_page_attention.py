"""What attention over pages promises beyond the numbers that the conformance suite checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.modules import PageAttention, PageAttentionConfig, page_attention
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor

PAGES, SIZE, KV_HEADS, HEADS, DIM = 12, 4, 2, 4, 8
TABLE = np.array([[3, 7, 1], [5, 0, 11], [2, 9, 4]], np.int32)
LENGTHS = np.array([1, 5, 12], np.int32)


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(3, 1, HEADS, DIM)
KEYS, VALUES = draw(PAGES, SIZE, KV_HEADS, DIM, seed=1), draw(PAGES, SIZE, KV_HEADS, DIM, seed=2)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def values_that_say_where():
    """Values that hold the position which `TABLE` gives to their slot."""
    values = np.zeros((PAGES, SIZE, KV_HEADS, DIM), np.float32)
    for row in TABLE:
        values[row] = np.arange(12, dtype=np.float32).reshape(3, SIZE, 1, 1)
    return values


def poisoned(pages, lengths=LENGTHS, first=(0, 0, 0)):
    """The pages with NaN in every slot that these sequences do not use."""
    clean = np.full(pages.shape, np.nan, np.float32)
    for row, length, begin in zip(TABLE, lengths, first, strict=True):
        for position in range(begin, length):
            page, slot = row[position // SIZE], position % SIZE
            clean[page, slot] = pages[page, slot]
    return clean


# Cases whose answer is known


def test_a_sequence_of_one_token_gives_its_value():
    out = page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE)
    np.testing.assert_array_equal(out[0, 0], np.repeat(VALUES[3, 0], 2, axis=0))


@pytest.mark.parametrize("window", [None, 3])
def test_equal_keys_give_the_mean_of_the_values_in_the_window(window):
    """The original ignored the window here."""
    keys, values = jnp.zeros_like(KEYS), values_that_say_where()
    out = page_attention(QUERY, keys, values, LENGTHS, TABLE, sliding_window=window)
    for got, length in zip(out, LENGTHS, strict=True):
        begin = 0 if window is None else max(length - window, 0)
        close(got, np.full_like(got, np.mean(np.arange(begin, length))))


def test_a_sink_of_the_weight_of_all_keys_takes_half():
    keys, values = jnp.zeros_like(KEYS), values_that_say_where()
    sinks = jnp.log(jnp.array([4.0, 8.0]))  # together as much as twelve keys of weight 1
    out = page_attention(QUERY, keys, values, LENGTHS, TABLE, softmax_aux=sinks)
    close(out[2], np.full_like(out[2], np.arange(12).mean() / 2))


def test_a_sequence_without_tokens_gives_zero():
    """The original gave the mean of whatever lay in the pages."""
    lengths = np.array([0, 5, 12], np.int32)
    out, lse = page_attention(QUERY, KEYS, VALUES, lengths, TABLE, return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -jnp.inf).all()
    assert np.isfinite(lse[1:]).all()


def test_the_log_sum_exp_counts_the_visible_keys():
    keys, values = jnp.zeros_like(KEYS), VALUES
    _, lse = page_attention(
        QUERY, keys, values, LENGTHS, TABLE, softmax_aux=jnp.ones(1), return_lse=True
    )
    assert lse.shape == (3, HEADS, 1)
    close(lse, np.broadcast_to(np.log(LENGTHS)[:, None, None], lse.shape))


def test_positions_on_no_page_are_not_seen():
    table = TABLE.copy()
    table[2, 1] = -1
    keys, values = jnp.zeros_like(KEYS), values_that_say_where()
    out = page_attention(QUERY, keys, values, LENGTHS, table)
    close(out[2], np.full_like(out[2], np.mean([0, 1, 2, 3, 8, 9, 10, 11])))


# One meaning, several forms


def test_a_query_may_come_without_its_axis():
    out, lse = page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE, return_lse=True)
    alone, alone_lse = page_attention(QUERY[:, 0], KEYS, VALUES, LENGTHS, TABLE, return_lse=True)
    np.testing.assert_array_equal(alone, out[:, 0])
    np.testing.assert_array_equal(alone_lse, lse[..., 0])


def test_several_queries_are_the_last_tokens():
    query = draw(3, 4, HEADS, DIM, seed=5)
    out = page_attention(query, KEYS, VALUES, LENGTHS, TABLE)
    for i in range(4):
        alone = page_attention(
            query[:, i : i + 1], KEYS, VALUES, np.maximum(LENGTHS - 3 + i, 0), TABLE
        )
        close(out[:, i : i + 1], alone)


@pytest.mark.parametrize(
    ("layout", "order"), [("NHD", (0, 1, 2, 3)), ("HND", (0, 2, 1, 3)), ("HNPD", (2, 0, 1, 3))]
)
def test_the_layout_changes_nothing(layout, order):
    out = page_attention(
        QUERY, KEYS.transpose(order), VALUES.transpose(order), LENGTHS, TABLE, kv_layout=layout
    )
    np.testing.assert_array_equal(out, page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE))


def test_numpy_and_other_integers_are_accepted():
    arrays = [np.asarray(x) for x in (QUERY, KEYS, VALUES)]
    out = page_attention(*arrays, LENGTHS.astype(np.uint8), TABLE.astype(np.int64))
    np.testing.assert_array_equal(out, page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE))


def test_the_module_runs_under_an_executor():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    cfg = PageAttentionConfig(pages_per_compute_block=1)
    out = executor(PageAttention(), QUERY, KEYS, VALUES, LENGTHS, TABLE, cfg=cfg)
    close(out, page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE))


def test_parts_of_a_context_can_be_merged():
    """By their log-sum-exp, with the sinks added once at the end."""
    sinks = draw(HEADS, 2, seed=3)
    whole = page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE, softmax_aux=sinks)
    parts = []
    for begin in (0, 1):
        table = np.where(np.arange(3) % 2 == begin, TABLE, -1)
        parts.append(page_attention(QUERY, KEYS, VALUES, LENGTHS, table, return_lse=True))
    outs, lses = (np.stack(x) for x in zip(*parts, strict=True))
    masses = np.exp(lses[..., 0])[:, :, None, :, None]  # [2, b, 1, n, 1]
    total = masses.sum(0) + np.exp(sinks).sum(-1)[:, None]
    close((outs * masses).sum(0) / total, whole)


# Caches of few bits


def test_a_scale_may_be_an_integer():
    whole = page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE, v_scale=2)
    np.testing.assert_array_equal(
        whole, page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE, v_scale=2.0)
    )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_cache_of_few_bits_is_read_as_what_it_stands_for(dtype):
    keys, values = (jnp.clip(40 * x, -100, 100).astype(dtype) for x in (KEYS, VALUES))
    k_scale, v_scale = jnp.array([0.02, 0.03]), jnp.float32(0.025)
    run = jax.jit(
        lambda k_scale, v_scale: page_attention(
            QUERY, keys, values, LENGTHS, TABLE, k_scale=k_scale, v_scale=v_scale
        )
    )
    wide = [x.astype(jnp.float32) for x in (keys, values)]
    expected = page_attention(QUERY, wide[0] * k_scale[:, None], wide[1] * v_scale, LENGTHS, TABLE)
    close(run(k_scale, v_scale), expected)


def test_a_wider_query_reads_a_narrow_cache():
    keys, values = KEYS.astype(jnp.bfloat16), VALUES.astype(jnp.bfloat16)
    out = page_attention(QUERY, keys, values, LENGTHS, TABLE)
    wide = [x.astype(jnp.float32) for x in (keys, values)]
    close(out, page_attention(QUERY, *wide, LENGTHS, TABLE))


# What is not in use


def test_pages_that_left_the_window_never_leak():
    first = np.maximum(LENGTHS - 3, 0)
    table = np.where(np.arange(3) < (first // SIZE)[:, None], 1000, TABLE)  # freed: any id
    clean = page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE, sliding_window=3)
    dirty = page_attention(
        QUERY,
        poisoned(KEYS, first=first),
        poisoned(VALUES, first=first),
        LENGTHS,
        table,
        sliding_window=3,
    )
    np.testing.assert_array_equal(dirty, clean)


def test_traced_ids_out_of_range_are_no_pages():
    table = TABLE.copy()
    table[2, 1] = -1
    wild = np.where(table < 0, PAGES + 7, table)
    run = jax.jit(page_attention)
    np.testing.assert_array_equal(
        run(QUERY, KEYS, VALUES, LENGTHS, wild), run(QUERY, KEYS, VALUES, LENGTHS, table)
    )


def test_a_page_that_two_sequences_share_gets_both_gradients():
    table = np.array([[3, 7, 1]] * 3, np.int32)

    def d_values(query, lengths, table):
        run = lambda values: page_attention(query, KEYS, values, lengths, table).sum()
        return jax.jit(jax.grad(run))(VALUES)

    shared = d_values(QUERY, LENGTHS, table)
    others = d_values(QUERY[:2], LENGTHS[:2], table[:2])
    last = d_values(QUERY[2:], LENGTHS[2:], table[2:])
    close(shared, others + last)


@pytest.mark.parametrize(("layout", "dtype"), [("NHD", jnp.float32), ("HNPD", jnp.int8)])
def test_memory_does_not_grow_with_the_cache(layout, dtype):
    def temporary(pages):
        sizes = (pages, 16, 2, 64) if layout == "NHD" else (2, pages, 16, 64)
        cache = jax.ShapeDtypeStruct(sizes, dtype)
        shapes = (
            jax.ShapeDtypeStruct((4, 1, 8, 64), jnp.float32),
            cache,
            cache,
            jax.ShapeDtypeStruct((4,), jnp.int32),
            jax.ShapeDtypeStruct((4, 64), jnp.int32),
        )
        run = jax.jit(lambda *x: page_attention(*x, kv_layout=layout, k_scale=0.1))
        return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    small = temporary(256)
    assert temporary(4096) == small
    assert small < 1e6


def test_memory_of_the_gradient_of_queries_does_not_grow_with_the_cache():
    """Gradients of the cache, as large as it is, are not made where nobody asks for them."""

    def temporary(pages):
        shape = jax.ShapeDtypeStruct
        cache = shape((pages, 16, 2, 64), jnp.float32)
        ints = (shape((4,), jnp.int32), shape((4, 64), jnp.int32))
        run = jax.jit(jax.grad(lambda *x: page_attention(*x).sum()))
        program = run.lower(shape((4, 1, 8, 64), jnp.float32), cache, cache, *ints).compile()
        return program.memory_analysis().temp_size_in_bytes

    small = temporary(256)
    assert temporary(4096) == small
    assert small < 1e6


# Transformations


def test_a_mesh_splits_batch_and_heads():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    query = draw(4, HEADS, DIM, seed=7)
    lengths, table = np.array([1, 5, 12, 0]), np.concatenate([TABLE, [[0, 0, 0]]])
    plain = page_attention(query, KEYS, VALUES, lengths, table, return_lse=True)
    cache = P(None, None, None, None)
    split = page_attention(
        query,
        KEYS,
        VALUES,
        lengths,
        table,
        return_lse=True,
        mesh=mesh,
        in_specs=(P("dp", "tp"), cache, cache, P("dp"), P("dp", None)),
        out_specs=P("dp", "tp", None),
    )
    for a, b in zip(split, plain, strict=True):
        close(a, b)


def test_vmap_shares_the_cache():
    queries = draw(2, 3, 1, HEADS, DIM, seed=8)
    run = lambda query: page_attention(query, KEYS, VALUES, LENGTHS, TABLE)
    close(jax.vmap(run)(queries), jnp.stack([run(query) for query in queries]))


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": QUERY[0, 0]}, r"query must have shape \[batch, queries, heads, head_dim\] or"),
        ({"query": np.ones((3, 1, 4, 8), np.int32)}, "query must be floating point, float32, bf"),
        ({"query": QUERY[:, :, :3]}, "multiple of key heads, got 3 and 2"),
        ({"query": QUERY[..., :4]}, "one head dim, got 4 and 8"),
        ({"key_cache": KEYS[0]}, r"key_cache must have shape \[pages, page_size, kv_heads, head_d"),
        ({"key_cache": KEYS.astype(jnp.int32)}, "key_cache must be one of float32, .*got int32"),
        ({"value_cache": VALUES[:5]}, "key_cache and value_cache must agree in all but the head"),
        ({"value_cache": VALUES.astype(jnp.bfloat16)}, "must agree"),
        ({"kv_layout": "NDH"}, "kv_layout must be one of NHD, HND, HNPD, got 'NDH'"),
        ({"context_lens": LENGTHS[:2]}, "context_lens must have one row for each of the 3"),
        ({"context_lens": LENGTHS.astype(np.float32)}, r"context_lens must be integers \[3\]"),
        ({"context_lens": np.array([1, -5, 12])}, "context_lens must not be negative, got -5"),
        ({"context_lens": np.array([1, 5, 13])}, "at most 12, 3 pages of 4, got 13"),
        ({"block_tables": TABLE[0]}, r"block_tables must be integers \[3, max_blocks\]"),
        ({"block_tables": TABLE + 3}, "page ids below 12, or -1 for no page, got 12"),
        ({"block_tables": TABLE - 4}, "or -1 for no page, got -4"),
        ({"block_tables": jnp.asarray(TABLE + 3)}, "page ids below 12, or -1 for no page, got 12"),
        ({"context_lens": jnp.array([1, 5, 13])}, "at most 12, 3 pages of 4, got 13"),
        (
            {"softmax_aux": jnp.ones((3, 1))},
            r"softmax_aux must be \[sinks\] or \[4,",
        ),
        ({"sliding_window": 0}, "sliding_window must be positive, got 0"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be positive"),
        ({"k_scale": 10**400}, "k_scale must be a number that a float can hold"),
        ({"k_scale": jnp.ones(3)}, r"k_scale must be one number or \[2\], got \[3\]"),
        ({"v_scale": np.array([2, 2])}, r"v_scale must be floating point"),
        ({"v_scale": True}, r"v_scale must be floating point"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(changes, message):
    call = {
        "query": QUERY,
        "key_cache": KEYS,
        "value_cache": VALUES,
        "context_lens": LENGTHS,
        "block_tables": TABLE,
    }
    with pytest.raises(ValueError, match=message) as caught:
        page_attention(**call | changes)
    assert str(caught.value).startswith("page_attention: ")
    assert "\n" not in str(caught.value)


def test_a_number_that_no_float_holds(as_a_user_calls):
    with pytest.raises(ValueError, match="page_attention: softmax_scale must be a number that a"):
        page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE, softmax_scale=10**400)


def test_only_entries_in_use_are_checked():
    table = np.where(np.arange(3) < -(-LENGTHS // SIZE)[:, None], TABLE, 1000)
    np.testing.assert_array_equal(
        page_attention(QUERY, KEYS, VALUES, LENGTHS, table),
        page_attention(QUERY, KEYS, VALUES, LENGTHS, TABLE),
    )


def test_an_empty_batch_gives_an_empty_result():
    out = page_attention(QUERY[:0], KEYS, VALUES, LENGTHS[:0], TABLE[:0])
    assert out.shape == (0, 1, HEADS, DIM)


@pytest.mark.parametrize("field", ["pages_per_compute_block", "num_warps", "num_splits"])
def test_an_illegal_configuration_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be"):
        PageAttentionConfig(**{field: -1})
