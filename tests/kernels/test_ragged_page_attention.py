"""What ragged attention over pages, with and without writing them, promises of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import examples

from ejkernel.modules import (
    RaggedPageAttentionv2,
    RaggedPageAttentionv2Config,
    RaggedPageAttentionv3,
    RaggedPageAttentionv3Config,
    RaggedPageAttentionv3Update,
    flash_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
)

PAGES, SIZE, PER_SEQUENCE, KV_HEADS, HEADS, DIM, TOKENS = 14, 4, 3, 2, 4, 8, 16


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(TOKENS, HEADS, DIM)
KEYS, VALUES = draw(PAGES, SIZE, KV_HEADS, DIM, seed=1), draw(PAGES, SIZE, KV_HEADS, DIM, seed=2)
NEW_KEYS, NEW_VALUES = draw(TOKENS, KV_HEADS, DIM, seed=3), draw(TOKENS, KV_HEADS, DIM, seed=4)
CU_Q, CU_K = np.array([0, 1, 6, 6, 13]), np.array([0, 9, 14, 14, 25])
TABLE = np.array([[3, 7, 1], [5, 0, 13], [2, 9, 4], [10, 6, 12]])
COMBINED = jnp.stack([KEYS, VALUES], axis=3).reshape(PAGES, SIZE, 2 * KV_HEADS, DIM)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def places(cu_q=CU_Q, cu_k=CU_K, table=TABLE):
    """(token, page, slot) of every new token."""
    for s, (q, k) in enumerate(zip(np.diff(cu_q), np.diff(cu_k), strict=True)):
        for i in range(q):
            position = k - q + i
            yield cu_q[s] + i, table[s, position // SIZE], position % SIZE


def by_hand(query, keys, values, cu_q, cu_k, table, window=None):
    """One query at a time, in float64."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    out = np.zeros_like(query)
    for s in range(len(cu_q) - 1):
        q, length = cu_q[s + 1] - cu_q[s], cu_k[s + 1] - cu_k[s]
        for i in range(q):
            own = length - q + i
            oldest = 0 if window is None else max(own - window + 1, 0)
            seen = [p for p in range(oldest, own + 1) if table[s, p // SIZE] >= 0]
            if not seen:
                continue
            key, value = (
                np.repeat(np.stack([x[table[s, p // SIZE], p % SIZE] for p in seen]), 2, axis=1)
                for x in (keys, values)
            )
            logits = np.einsum("nh,pnh->np", query[cu_q[s] + i], key) * DIM**-0.5
            weights = np.exp(logits - logits.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[cu_q[s] + i] = np.einsum("np,pnh->nh", weights, value)
    return out


@st.composite
def ragged_calls(draw):
    """Four sequences in sixteen rows, some empty, with holes in their tables."""
    lengths = [draw(st.integers(0, PER_SEQUENCE * SIZE)) for _ in range(4)]
    queries = [draw(st.integers(0, min(length, 4))) for length in lengths]
    longest = draw(st.integers(0, 3))
    queries[longest] = min(lengths[longest], TOKENS - sum(queries) + queries[longest])
    table = np.array(draw(st.permutations(range(PAGES))))[:12].reshape(4, 3)
    present = draw(st.lists(st.booleans(), min_size=12, max_size=12) | st.just([True] * 12))
    table = np.where(np.array(present).reshape(4, 3), table, -1)
    return np.cumsum([0, *queries]), np.cumsum([0, *lengths]), table


@examples(40, derandomize=True)
@given(ragged_calls(), st.sampled_from([None, 3]))
def test_any_ragged_call_is_the_sum_of_its_queries(call, window):
    out = ragged_page_attention_v3(QUERY, KEYS, VALUES, *call, sliding_window=window)
    np.testing.assert_allclose(
        out, by_hand(QUERY, KEYS, VALUES, *call, window), rtol=2e-5, atol=5e-6
    )


# Version 2: keys and values side by side


def test_combined_pages_are_even_and_odd_heads():
    expected = ragged_page_attention_v3(QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE)
    for layout, order in (("NHD", (0, 1, 2, 3)), ("HNPD", (2, 0, 1, 3))):
        out = ragged_page_attention_v2(
            QUERY, COMBINED.transpose(order), np.diff(CU_K), TABLE, CU_Q, 4, kv_layout=layout
        )
        close(out, expected)


@pytest.mark.parametrize("number", [0, 2, jnp.array([2])])
def test_only_the_sequences_that_count_are_looked_at(number):
    """Behind them stands whatever the last batch has left, also lengths beyond the table."""
    starts = np.array([0, 1, 6, -5, 999])
    lengths = np.array([9, 5, 10**6, -3])
    table = np.where(np.arange(4)[:, None] < 2, TABLE, 10**6)
    out, lse = ragged_page_attention_v2(
        QUERY, COMBINED, lengths, table, starts, number, return_lse=True
    )
    count = int(jnp.asarray(number).reshape(()))
    expected = ragged_page_attention_v3(
        QUERY, KEYS, VALUES, CU_Q[: count + 1], CU_K[: count + 1], TABLE[:count]
    )
    close(out, expected)
    assert not out[starts[count] :].any()
    assert lse.shape == (TOKENS, HEADS)
    assert (lse[starts[count] :] == -jnp.inf).all()
    jitted = jax.jit(ragged_page_attention_v2)(QUERY, COMBINED, lengths, table, starts, number)
    np.testing.assert_array_equal(jitted, out)


def test_combined_pages_are_not_copied():
    shape = jax.ShapeDtypeStruct
    cache = shape((2048, 16, 4, 64), jnp.float32)
    run = jax.jit(ragged_page_attention_v2)
    ints = [shape(x, jnp.int32) for x in ((4,), (4, 32), (5,), ())]
    used = run.lower(shape((8, 4, 64), jnp.float32), cache, *ints).compile().memory_analysis()
    assert used.temp_size_in_bytes < 2e6 < 2048 * 16 * 4 * 64


# Version 3


def test_a_flat_table_is_the_same_table():
    out = ragged_page_attention_v3(QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE.reshape(-1))
    np.testing.assert_array_equal(
        out, ragged_page_attention_v3(QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE)
    )


def test_rows_of_no_sequence_give_zero_whatever_they_hold():
    query = QUERY.at[13:].set(jnp.nan)

    out, lse = ragged_page_attention_v3(
        query, KEYS, VALUES, CU_Q, CU_K, TABLE, softmax_aux=jnp.ones(2), return_lse=True
    )
    assert not out[13:].any()
    assert (lse[13:] == -jnp.inf).all()
    assert np.isfinite(out).all()


def test_blocks_change_nothing():
    plain = ragged_page_attention_v3(QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE)
    for pages, queries in ((1, 2), (100, 100)):
        cfg = RaggedPageAttentionv3Config(pages, queries)
        close(ragged_page_attention_v3(QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE, cfg=cfg), plain)


def test_modules_and_their_configurations():
    arguments = (QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE)
    plain = ragged_page_attention_v3(*arguments)
    np.testing.assert_array_equal(RaggedPageAttentionv3()(*arguments), plain)
    cfg = RaggedPageAttentionv2Config(num_kv_pages_per_block=2)
    combined = (QUERY, COMBINED, np.diff(CU_K), TABLE, CU_Q, 4)
    close(RaggedPageAttentionv2()(*combined, cfg=cfg), plain)


def test_a_mesh_splits_heads_and_nothing_else():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    arguments = (QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE)
    specs = (P(None, "tp", None), P(), P())
    split = ragged_page_attention_v3(
        *arguments, return_lse=True, mesh=mesh, in_specs=specs, out_specs=(specs[0], P(None, "tp"))
    )
    for a, b in zip(split, ragged_page_attention_v3(*arguments, return_lse=True), strict=True):
        close(a, b)
    with pytest.raises(ValueError, match="query cannot be split along 't' over mesh axis tp; the"):
        ragged_page_attention_v3(*arguments, mesh=mesh, in_specs=(P("tp"), P(), P()))
    with pytest.raises(ValueError, match=r"out_specs .* does not follow from in_specs"):
        ragged_page_attention_v3(*arguments, mesh=mesh, in_specs=specs, out_specs=P())


# Writing the cache


def update(*, key_pages=KEYS, value_pages=VALUES, table=TABLE, **options):
    return ragged_page_attention_v3_update(
        QUERY, NEW_KEYS, NEW_VALUES, key_pages, value_pages, CU_Q, CU_K, table, **options
    )


@pytest.mark.parametrize(
    ("layout", "order"), [("NHD", (0, 1, 2, 3)), ("HND", (0, 2, 1, 3)), ("HNPD", (2, 0, 1, 3))]
)
def test_new_tokens_are_written_bit_for_bit_and_nothing_else(layout, order):
    keys, values = (np.array(x) for x in (KEYS, VALUES))
    keys[8], values[11] = np.nan, np.inf  # pages of nobody keep even these
    out, key_pages, value_pages = update(
        key_pages=keys.transpose(order), value_pages=values.transpose(order), kv_layout=layout
    )
    for token, page, slot in places():
        keys[page, slot], values[page, slot] = NEW_KEYS[token], NEW_VALUES[token]
    np.testing.assert_array_equal(key_pages, keys.transpose(order))
    np.testing.assert_array_equal(value_pages, values.transpose(order))
    close(out, by_hand(QUERY, keys, values, CU_Q, CU_K, TABLE))


def test_the_log_sum_exp_comes_second():
    out, lse, key_pages, _ = update(return_lse=True)
    expected = ragged_page_attention_v3(
        QUERY, key_pages, update()[2], CU_Q, CU_K, TABLE, return_lse=True
    )
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    arguments = (QUERY, NEW_KEYS, NEW_VALUES, KEYS, VALUES, CU_Q, CU_K, TABLE)
    np.testing.assert_array_equal(RaggedPageAttentionv3Update()(*arguments)[0], out)


def test_tokens_without_a_page_are_not_written():
    table = TABLE.copy()
    table[1, 0] = -1
    _, key_pages, _ = update(table=table)
    expected = np.array(KEYS)
    for token, page, slot in places(table=table):
        if page >= 0:
            expected[page, slot] = NEW_KEYS[token]
    np.testing.assert_array_equal(key_pages, expected)


def test_prefill_in_parts_and_decoding_give_the_whole():
    """Two sequences, one prefilled in two parts, then both decoded: as causal attention at once."""
    lengths = (11, 7)
    query, key, value = (
        [draw(1, n, heads, DIM, seed=10 * i + n) for n in lengths]
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    whole = [flash_attention(*x, causal=True)[0] for x in zip(query, key, value, strict=True)]
    cache = (jnp.full_like(KEYS, jnp.nan), jnp.full_like(VALUES, jnp.nan))
    table = np.array([[4, 0, 9], [7, 2, 5]])
    step = jax.jit(ragged_page_attention_v3_update)
    done = [0, 0]
    for taken in ((6, 0), (3, 5), (1, 1), (1, 1)):
        tokens = [
            jnp.concatenate(
                [x[s][0, done[s] : done[s] + n] for s, n in enumerate(taken)]
                + [jnp.full((8 - sum(taken), *x[0].shape[2:]), jnp.nan)]
            )
            for x in (query, key, value)
        ]
        total = [d + n for d, n in zip(done, taken, strict=True)]
        cu_q, cu_k = (jnp.cumsum(jnp.array([0, *x])) for x in (taken, total))
        out, *cache = step(*tokens, *cache, cu_q, cu_k, table)
        for s in range(2):
            close(out[cu_q[s] : cu_q[s + 1]], whole[s][done[s] : total[s]])
        done = total


def test_integers_are_rounded_and_saturate():
    zeros = jnp.zeros((PAGES, SIZE, KV_HEADS, DIM), jnp.int8)
    scale = jnp.array([0.5, 0.01])
    _, key_pages, value_pages = update(
        key_pages=zeros, value_pages=zeros, k_scale=scale, v_scale=0.5
    )
    for token, page, slot in places():
        expected = np.clip(np.round(np.asarray(NEW_KEYS[token]) / scale[:, None]), -128, 127)
        np.testing.assert_array_equal(key_pages[page, slot], expected)
    assert {-128, 127} <= set(np.unique(key_pages[:, :, 1]).tolist())
    assert abs(value_pages).max() < 10


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_floats_of_eight_bits_are_cast_and_saturate(dtype):
    zeros = jnp.zeros((PAGES, SIZE, KV_HEADS, DIM), dtype)
    _, key_pages, value_pages = update(
        key_pages=zeros, value_pages=zeros, k_scale=0.25, v_scale=1e-9
    )
    largest = float(jnp.finfo(dtype).max)
    for token, page, slot in places():
        np.testing.assert_array_equal(key_pages[page, slot], (NEW_KEYS[token] * 4).astype(dtype))
        values = np.asarray(value_pages[page, slot], np.float32)
        np.testing.assert_array_equal(values, np.sign(NEW_VALUES[token]) * largest)


def test_nothing_is_differentiated_through_integers():
    cache = (20 * KEYS).astype(jnp.int8), (20 * VALUES).astype(jnp.int8)

    def loss(query, key):
        out, *_ = ragged_page_attention_v3_update(
            query, key, NEW_VALUES, *cache, CU_Q, CU_K, TABLE, k_scale=0.05, v_scale=0.05
        )
        return jnp.sum(out**2)

    d_query, d_key = jax.jit(jax.grad(loss, argnums=(0, 1)))(QUERY, NEW_KEYS)
    assert np.isfinite(d_query).all()
    assert d_query[:13].any()
    assert not d_key.any()


@pytest.mark.parametrize("layout", ["NHD", "HNPD"])
def test_a_mesh_with_more_shards_than_key_heads_returns_the_cache_as_it_was(layout):
    order = {"NHD": (0, 1, 2, 3), "HNPD": (2, 0, 1, 3)}[layout]
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    arguments = {
        "key_pages": KEYS.transpose(order),
        "value_pages": VALUES.transpose(order),
        "kv_layout": layout,
    }
    heads = P(None, "tp", None)
    split = update(**arguments, mesh=mesh, in_specs=(heads, P(), P()), out_specs=heads)
    for a, b in zip(split, update(**arguments), strict=True):
        close(a, b)


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": QUERY[None]}, r"query must have shape \[tokens, heads, head_dim\]"),
        ({"key": NEW_KEYS[:5]}, r"key must be \[16, 2, 8\], as query and cache"),
        ({"value": NEW_VALUES.astype(jnp.int32)}, "value must be floating point"),
        ({"cu_seqlens_q": CU_Q[:, None]}, r"cu_seqlens_q must be integers \[sequences \+ 1\]"),
        ({"cu_seqlens_q": CU_Q - 1}, "cu_seqlens_q must begin with 0 and never decrease"),
        ({"cu_seqlens_q": CU_Q[::-1] * 0 + [0, 5, 4, 6, 7]}, "cu_seqlens_q must begin with 0"),
        ({"cu_seqlens_q": CU_Q * 2}, "cu_seqlens_q ends at 26, beyond the 16 rows of query"),
        ({"cu_seqlens_k": CU_K[:3]}, "cu_seqlens_k must have 5 entries, got 3"),
        ({"cu_seqlens_k": np.array([0, 9, 8, 8, 15])}, "cu_seqlens_k must begin with 0 and never"),
        ({"cu_seqlens_k": np.array([0, 13, 18, 18, 25])}, "at most 12, 3 pages of 4, got 13"),
        ({"cu_seqlens_k": np.array([0, 9, 13, 13, 24])}, "sequence 1 has 5 new ones of 4"),
        ({"page_indices": TABLE[:2]}, r"page_indices must be integers \[4, pages_per_sequence\]"),
        ({"page_indices": TABLE.reshape(-1)[:7]}, r"page_indices must be integers \[4, pages"),
        ({"page_indices": TABLE + 9}, "page_indices must hold page ids below 14"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(changes, message):
    call = {
        "query": QUERY,
        "key": NEW_KEYS,
        "value": NEW_VALUES,
        "key_pages": KEYS,
        "value_pages": VALUES,
        "cu_seqlens_q": CU_Q,
        "cu_seqlens_k": CU_K,
        "page_indices": TABLE,
    }
    with pytest.raises(ValueError, match=message) as caught:
        ragged_page_attention_v3_update(**call | changes)
    assert str(caught.value).startswith("ragged_page_attention_v3_update: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_pages": COMBINED[:, :, :3]}, "must have an even number of heads, got 3"),
        ({"kv_pages": COMBINED[0]}, r"\[pages, page_size, 2 \* kv_heads, head_dim\]"),
        ({"query_start_loc": CU_Q[:4]}, "query_start_loc must have 5 entries, got 4"),
        ({"query_start_loc": CU_Q[::-1].copy()}, "query_start_loc must begin with 0"),
        ({"block_tables": TABLE[:3]}, r"block_tables must be integers \[4, pages_per_sequence\]"),
        ({"num_seqs": 5}, "num_seqs must be between 0 and 4, got 5"),
        ({"num_seqs": -1}, "num_seqs must be between 0 and 4, got -1"),
        ({"context_lens": np.array([9, 5, 0, -2])}, "context_lens must not be negative, got -2"),
        ({"block_tables": TABLE + 9}, "block_tables must hold page ids below 14, or -1"),
        ({"num_seqs": jnp.array([1, 2])}, "num_seqs must be one number"),
        ({"context_lens": np.array([9, 5, 0, 13])}, "context_lens must be at most 12"),
    ],
)
def test_mistakes_with_combined_pages_are_refused(changes, message):
    call = {
        "query": QUERY,
        "kv_pages": COMBINED,
        "context_lens": np.diff(CU_K),
        "block_tables": TABLE,
        "query_start_loc": CU_Q,
        "num_seqs": 4,
    }
    with pytest.raises(ValueError, match=message) as caught:
        ragged_page_attention_v2(**call | changes)
    assert str(caught.value).startswith("ragged_page_attention_v2: ")


def test_no_tokens_leave_the_cache_as_it_is():
    out, key_pages, _ = ragged_page_attention_v3_update(
        QUERY[:0], NEW_KEYS[:0], NEW_VALUES[:0], KEYS, VALUES, CU_Q * 0, CU_K, TABLE
    )
    assert out.shape == (0, HEADS, DIM)
    np.testing.assert_array_equal(key_pages, KEYS)
