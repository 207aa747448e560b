"""The figure of native sparse attention: what few blocks cost against all of them."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli import measure
from ejkernel.cli.figures import Figure
from ejkernel.modules import flash_attention, native_sparse_attention

_LENGTH, _HEADS, _HEAD_DIM = 16384, 8, 64
_BLOCKS, _BLOCK_SIZE = 16, 64


def _arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    draw = lambda seed, heads: jax.random.normal(
        jax.random.key(seed), (1, _LENGTH, heads, _HEAD_DIM)
    )
    return draw(0, _HEADS), draw(1, 1), draw(2, 1)


def _random_blocks() -> jax.Array:
    """For every token blocks drawn from all that have begun, none of them twice."""
    begun = np.arange(_LENGTH) // _BLOCK_SIZE + 1
    order = np.random.default_rng(0).random((_LENGTH, _LENGTH // _BLOCK_SIZE), np.float32)
    order[np.arange(order.shape[1]) >= begun[:, None]] = 2.0
    chosen = np.argsort(order, axis=1)[:, :_BLOCKS]
    chosen[np.arange(_BLOCKS) >= begun[:, None]] = -1
    return jnp.asarray(chosen[None, :, None], jnp.int32)


def _check(out: jax.Array, arrays: tuple[jax.Array, ...], blocks: jax.Array) -> None:
    """Compare some tokens with attention written out in float64."""
    query, key, value = (np.asarray(x[0], np.float64) for x in arrays)
    for token in np.linspace(0, _LENGTH - 1, 33).astype(int):
        index = np.arange(token + 1)
        seen = index[np.isin(index // _BLOCK_SIZE, blocks[0, token, 0])]
        logits = query[token] @ key[seen, 0].T * _HEAD_DIM**-0.5
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ value[seen, 0]
        measure.check_close(out[0, token], expected, ulps=32)


def selected_time() -> float:
    """Time of the selected branch against that of causal flash attention."""
    arrays, blocks = _arrays(), _random_blocks()
    sparse = jax.jit(lambda q, k, v, i: native_sparse_attention(q, k, v, block_indices=i))
    dense = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True))
    _check(sparse(*arrays, blocks), arrays, blocks)
    mine, whole = measure.interleaved(
        lambda: sparse(*arrays, blocks), lambda: dense(*arrays), rounds=3
    )
    return mine / whole


FIGURES = (
    Figure(
        "native_sparse",
        "`native_sparse_attention` forward, 16 random blocks of 64 for each token, time relative "
        "to causal `flash_attention`; length 16384, 8 query heads and 1 KV head of 64, float32",
        "x",
        "lower",
        0.5,
        selected_time,
        operation="native_sparse_attention",
        mask=("causal", "selected blocks"),
    ),
)
