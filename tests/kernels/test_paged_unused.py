"""What no query sees never reaches a result or a gradient, whatever it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
)

PAGES, SIZE, KV_HEADS, HEADS, DIM, TOKENS = 14, 4, 2, 4, 8, 16
# Decoding, prefilling, empty, prefilling the last part; then three rows of no sequence.
CU_Q, CU_K = np.array([0, 1, 6, 6, 13]), np.array([0, 9, 14, 14, 25])
TABLE = np.array([[3, 7, 1], [5, 0, 13], [2, 9, 4], [10, -1, 12]])


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(TOKENS, HEADS, DIM)
KEYS, VALUES = draw(PAGES, SIZE, KV_HEADS, DIM, seed=1), draw(PAGES, SIZE, KV_HEADS, DIM, seed=2)
NEW_KEYS, NEW_VALUES = draw(TOKENS, KV_HEADS, DIM, seed=3), draw(TOKENS, KV_HEADS, DIM, seed=4)
OPTIONS = {
    "sliding_window": 3,
    "softmax_aux": jnp.array([0.5, -1.0]),
    "logits_soft_cap": 3.0,
    "k_scale": jnp.array([0.5, 1.5]),
    "v_scale": jnp.float32(0.7),
}


def used_slots(window=None, new=True):
    """Which slots hold a token that some query sees; without `new`, one from an earlier call."""
    used = np.zeros((PAGES, SIZE), bool)
    for row, q, length in zip(TABLE, np.diff(CU_Q), np.diff(CU_K), strict=True):
        oldest = 0 if window is None else max(length - q - window + 1, 0)
        for position in range(oldest, length if new else length - q) if q else ():
            if row[position // SIZE] >= 0:
                used[row[position // SIZE], position % SIZE] = True
    return used


def poisoned(pages, used):
    return jnp.where(used[:, :, None, None], pages, jnp.nan)


def poisoned_rows(x):
    return x.at[CU_Q[-1] :].set(jnp.nan)


def with_gradients(run):
    """Results of `run`, and the gradients of all that it is given, as one list."""

    @jax.jit
    def both(floats):
        outputs, pull_back = jax.vjp(run, floats)
        along = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), outputs)
        return jax.tree.leaves((outputs, pull_back(along)))

    return both


def assert_clean(clean, dirty):
    assert len(clean) == len(dirty) > 2
    for a, b in zip(clean, dirty, strict=True):
        assert not np.isnan(b).any()
        np.testing.assert_array_equal(a, b)


def floats_and_rest(options):
    floats = {k: x for k, x in options.items() if isinstance(x, jax.Array)}
    return floats, {k: x for k, x in options.items() if k not in floats}


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_unused_slots_and_rows_of_ragged_calls_never_leak(options):
    floats, rest = floats_and_rest(options)

    @with_gradients
    def both(x):
        query, keys, values, floats = x
        return ragged_page_attention_v3(
            query, keys, values, CU_Q, CU_K, TABLE, return_lse=True, **floats, **rest
        )

    used = used_slots(options.get("sliding_window"))
    clean = both((QUERY, KEYS, VALUES, floats))
    dirty = (poisoned_rows(QUERY), poisoned(KEYS, used), poisoned(VALUES, used), floats)
    dirty = both(dirty)
    assert_clean(clean, dirty)
    for gradient in dirty[3:5]:  # of keys and values
        assert not gradient[~used].any()


def test_unused_slots_of_combined_pages_never_leak():
    floats, rest = floats_and_rest(OPTIONS)
    combined = jnp.stack([KEYS, VALUES], axis=3).reshape(PAGES, SIZE, 2 * KV_HEADS, DIM)

    @with_gradients
    def both(x):
        query, pages, floats = x
        return ragged_page_attention_v2(
            query, pages, np.diff(CU_K), TABLE, CU_Q, 4, return_lse=True, **floats, **rest
        )

    used = used_slots(OPTIONS["sliding_window"])
    clean = both((QUERY, combined, floats))
    dirty = both((poisoned_rows(QUERY), poisoned(combined, used), floats))
    assert_clean(clean, dirty)


def test_unused_slots_of_decoding_sequences_never_leak():
    floats, rest = floats_and_rest(OPTIONS)
    lengths, table = np.array([9, 0, 0, 11]), TABLE
    used = np.zeros((PAGES, SIZE), bool)
    window = OPTIONS["sliding_window"]
    for row, length in zip(table, lengths, strict=True):
        for position in range(max(length - window, 0), length):
            if row[position // SIZE] >= 0:
                used[row[position // SIZE], position % SIZE] = True

    @with_gradients
    def both(x):
        query, keys, values, floats = x
        return page_attention(
            query, keys, values, lengths, table, return_lse=True, **floats, **rest
        )

    clean = both((QUERY[:4], KEYS, VALUES, floats))
    dirty = (QUERY[:4], poisoned(KEYS, used), poisoned(VALUES, used), floats)
    dirty = both(dirty)
    assert_clean(clean, dirty)
    assert not dirty[2][1:3].any()  # the queries of the sequences without tokens
    for gradient in dirty[3:5]:
        assert not gradient[~used].any()


def test_what_a_call_that_writes_does_not_use_never_leaks():
    """Unused slots, slots that are written, and new tokens that go nowhere."""
    floats, rest = floats_and_rest(OPTIONS)

    @with_gradients
    def both(x):
        query, key, value, keys, values, floats = x
        out, lse, *pages = ragged_page_attention_v3_update(
            query, key, value, keys, values, CU_Q, CU_K, TABLE, return_lse=True, **floats, **rest
        )
        seen = used_slots(OPTIONS["sliding_window"])[:, :, None, None]
        return out, lse, *(jnp.where(seen, x, 0.0) for x in pages)

    old = used_slots(OPTIONS["sliding_window"], new=False)
    tokens = (QUERY, NEW_KEYS, NEW_VALUES)
    clean = both((*tokens, KEYS, VALUES, floats))
    dirty = (*map(poisoned_rows, tokens), poisoned(KEYS, old), poisoned(VALUES, old), floats)
    dirty = both(dirty)
    assert_clean(clean, dirty)


def test_a_sequence_that_is_not_a_number_keeps_to_itself():
    """Tiles of queries reach into the next sequence; neither its numbers nor theirs come along."""
    cu, table, own = np.array([0, 3, 7]), np.array([[3, 7], [5, 0]]), np.arange(7)[:, None] < 3

    @jax.jit
    def gradients(query, other):
        run = lambda *x: ragged_page_attention_v3(*x, cu, cu, table, return_lse=True)
        (out, lse), pull_back = jax.vjp(run, query, KEYS, VALUES)
        along = (jnp.where(own[..., None], jnp.ones_like(out), other), jnp.where(own, lse, other))
        return out, *pull_back(along)

    clean = gradients(QUERY[:7], 0.5)
    dirty = gradients(QUERY[:7].at[3:].set(jnp.nan), jnp.nan)
    for a, b in zip(clean[:2], dirty[:2], strict=True):  # the output, the gradient of the query
        np.testing.assert_array_equal(a[:3], b[:3])
    for a, b in zip(clean[2:], dirty[2:], strict=True):
        np.testing.assert_array_equal(a[table[0]], b[table[0]])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_unused_slots_of_eight_bits_never_leak(dtype):
    used, scale = used_slots(), jnp.array([0.5, 2.0])
    pages = [x.astype(dtype) for x in (KEYS, VALUES)]
    dirty = [poisoned(x.astype(jnp.float32), used).astype(dtype) for x in pages]

    @jax.jit
    def run(query, pages, k_scale, v_scale):
        call = lambda query, k_scale, v_scale: ragged_page_attention_v3(
            query, *pages, CU_Q, CU_K, TABLE, k_scale=k_scale, v_scale=v_scale
        )
        out, pull_back = jax.vjp(call, query, k_scale, v_scale)
        return out, *pull_back(jnp.ones_like(out))

    clean = run(QUERY, pages, scale, scale[0])
    assert_clean(clean, run(QUERY, dirty, scale, scale[0]))
