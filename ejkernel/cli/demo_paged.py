"""The calls of `ejkernel demo` over a paged KV cache, and the same in plain JAX.

Plain JAX gathers the pages of every sequence into a dense array, padded to the longest, and runs
dense attention with a mask of the lengths.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import modules
from ejkernel.cli.baseline import Baseline, attend, normal

_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 8, 2, 64, 16
# Lengths of the sequences as shares of the longest: a batch in which requests come and go.
_SHARES = np.array([1.0, 0.09, 0.31, 0.02, 0.17, 0.55, 0.05, 0.12])


def _lengths(tokens: int) -> np.ndarray:
    return np.maximum(1, _SHARES * tokens).astype(np.int32)


def _table(tokens: int) -> np.ndarray:
    """Pages in no order, a table entry for each page of the longest sequence."""
    per_sequence = -(-tokens // _PAGE_SIZE)
    pages = np.random.default_rng(0).permutation(len(_SHARES) * per_sequence)
    return pages.reshape(len(_SHARES), per_sequence).astype(np.int32)


def _pages(seed: int, tokens: int, kv_heads: int = _KV_HEADS) -> np.ndarray:
    return normal(_table(tokens).size, _PAGE_SIZE, kv_heads, _HEAD_DIM, seed=seed)


def _gathered(pages: jax.Array, table: jax.Array) -> jax.Array:
    """The cache of each sequence as a dense array, [sequences, positions, k, h]."""
    return pages[table].reshape(table.shape[0], -1, *pages.shape[2:])


def _decode_arrays(tokens: int) -> dict[str, np.ndarray]:
    """Every sequence decodes one token."""
    return {
        "query": normal(len(_SHARES), 1, _HEADS, _HEAD_DIM),
        "key_cache": _pages(1, tokens),
        "value_cache": _pages(2, tokens),
        "context_lens": _lengths(tokens),
        "block_tables": _table(tokens),
    }


def _decode(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
) -> jax.Array:
    """Decode in plain JAX."""
    key, value = (_gathered(x, block_tables) for x in (key_cache, value_cache))
    mask = jnp.arange(key.shape[1]) < context_lens[:, None]
    return attend(query, key, value, mask=mask[:, None, None])


def _query_lengths(tokens: int) -> np.ndarray:
    """The second sequence prefills a chunk of its prompt, the others decode one token each."""
    lengths = np.ones(len(_SHARES), np.int32)
    lengths[1] = tokens // 32
    return lengths


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.array([0, *np.cumsum(lengths)], np.int32)


def _mixed_arrays(tokens: int) -> dict[str, np.ndarray]:
    """One sequence prefills while the others decode."""
    queries = _query_lengths(tokens)
    return {
        "query": normal(int(queries.sum()), _HEADS, _HEAD_DIM),
        "key_pages": _pages(1, tokens),
        "value_pages": _pages(2, tokens),
        "cu_seqlens_q": _cumulative(queries),
        "cu_seqlens_k": _cumulative(_lengths(tokens)),
        "page_indices": _table(tokens),
    }


def _mixed(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    page_indices: jax.Array,
) -> jax.Array:
    """Prefill and decode in plain JAX: the queries padded to the longest, then dense attention."""
    key, value = (_gathered(x, page_indices) for x in (key_pages, value_pages))
    sequences = page_indices.shape[0]
    longest = query.shape[0] - sequences + 1  # every other sequence has one query at least
    starts, counts = cu_seqlens_q[:-1], jnp.diff(cu_seqlens_q)
    offset = jnp.arange(longest)
    padded = query[jnp.minimum(starts[:, None] + offset, query.shape[0] - 1)]
    position = (jnp.diff(cu_seqlens_k) - counts)[:, None] + offset
    mask = jnp.arange(key.shape[1]) <= position[..., None]
    out = attend(padded, key, value, mask=mask[:, None])
    row = jnp.arange(query.shape[0])
    sequence = jnp.searchsorted(cu_seqlens_q, row, side="right", method="compare_all") - 1
    return out[sequence, row - starts[sequence]]


def _combined_arrays(tokens: int) -> dict[str, np.ndarray]:
    """The same with keys and values in one cache, head by head."""
    queries = _query_lengths(tokens)
    return {
        "query": normal(int(queries.sum()), _HEADS, _HEAD_DIM),
        "kv_pages": _pages(1, tokens, 2 * _KV_HEADS),
        "context_lens": _lengths(tokens),
        "block_tables": _table(tokens),
        "query_start_loc": _cumulative(queries),
        "num_seqs": np.array(len(queries), np.int32),
    }


def _combined(
    query: jax.Array,
    kv_pages: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
) -> jax.Array:
    """As `_mixed`, after separating keys from values; every sequence counts."""
    del num_seqs
    cu_seqlens_k = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(context_lens)])
    pages = kv_pages[:, :, 0::2], kv_pages[:, :, 1::2]
    return _mixed(query, *pages, query_start_loc, cu_seqlens_k, block_tables)


def _update_arrays(tokens: int) -> dict[str, np.ndarray]:
    """The same with the keys and values of the new tokens."""
    arrays = _mixed_arrays(tokens)
    shape = (arrays["query"].shape[0], _KV_HEADS, _HEAD_DIM)
    return {"key": normal(*shape, seed=3), "value": normal(*shape, seed=4), **arrays}


def _update(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    page_indices: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the new tokens with an indexed update, then as `_mixed`."""
    row = jnp.arange(query.shape[0])
    sequence = jnp.searchsorted(cu_seqlens_q, row, side="right", method="compare_all") - 1
    position = jnp.diff(cu_seqlens_k)[sequence] + row - cu_seqlens_q[1:][sequence]
    page = page_indices[sequence, position // _PAGE_SIZE]
    key_pages = key_pages.at[page, position % _PAGE_SIZE].set(key)
    value_pages = value_pages.at[page, position % _PAGE_SIZE].set(value)
    out = _mixed(query, key_pages, value_pages, cu_seqlens_q, cu_seqlens_k, page_indices)
    return out, key_pages, value_pages


_TOKENS = 2048
_CACHE = "8 heads of 64 on 2 key heads, pages of 16"
_LENGTHS = "8 sequences of 40 to 2048 tokens"
_MIXED = f"{_LENGTHS}, one of which prefills 64 tokens while the others decode"
_DENSE = "a gather of the pages, then `jax.nn.dot_product_attention` with a mask of the lengths"
_PADDED = f"{_DENSE}, queries padded to the longest"

BASELINES = {
    "page_attention": Baseline(
        _TOKENS,
        f"{_LENGTHS} decode; {_CACHE}",
        _DENSE,
        _decode_arrays,
        modules.page_attention,
        _decode,
    ),
    "ragged_page_attention_v2": Baseline(
        _TOKENS,
        f"{_MIXED}; keys and values in one cache; {_CACHE}",
        _PADDED,
        _combined_arrays,
        modules.ragged_page_attention_v2,
        _combined,
    ),
    "ragged_page_attention_v3": Baseline(
        _TOKENS,
        f"{_MIXED}; {_CACHE}",
        _PADDED,
        _mixed_arrays,
        modules.ragged_page_attention_v3,
        _mixed,
    ),
    "ragged_page_attention_v3_update": Baseline(
        _TOKENS,
        f"{_MIXED}; new keys and values are written to the cache; {_CACHE}",
        f"an indexed update of the cache, {_PADDED}",
        _update_arrays,
        modules.ragged_page_attention_v3_update,
        _update,
    ),
}
