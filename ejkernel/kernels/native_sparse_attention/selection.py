"""The blocks of a token when the caller gives none: its own, and those with the highest scores."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.native_sparse_attention import geometry
from ejkernel.kernels.native_sparse_attention.inputs import Spec

# Logits at once, over all batch rows and heads.
_LARGEST_TILE = 1 << 21


@functools.partial(jax.jit, static_argnames=("spec", "count"))
def select_blocks(
    query: jax.Array, key: jax.Array, cu_seqlens: jax.Array | None, spec: Spec, count: int
) -> jax.Array:
    """The blocks of each token, [b, t, k, count]: its own first, then by falling score.

    The score of a block that is complete by the token is the softmax weight of the block's mean
    key among those of all such blocks, summed over the query heads of the key head. Of equal scores
    the lower index wins. Entries for which there is no block are -1. No gradient flows.
    """
    b, t, n, h = query.shape
    k = key.shape[2]
    at = geometry.tokens(t, cu_seqlens)
    query, key = lax.stop_gradient((query, key))
    own = jnp.where(at.exists, at.position // spec.block_size, -1)
    own = jnp.broadcast_to(own[None, :, None, None], (b, t, k, 1))
    others = min(count - 1, t // spec.block_size)
    if count == 0 or others == 0:
        return _padded(own[..., :count], count)
    pools = geometry.pools(t, cu_seqlens, spec.block_size, at)
    # A token's own block may be complete as well: it is in the list already.
    ahead = pools.first + jnp.minimum(pools.seen, at.position // spec.block_size)
    means = jnp.moveaxis(geometry.pooled(key, pools, spec), 1, 2)  # [b, k, blocks, h]
    blocks = jnp.arange(means.shape[2], dtype=jnp.int32)

    batch = b if isinstance(b, int) else 1  # of an exported program, not known
    rows = max(1, min(t, _LARGEST_TILE // (batch * n * means.shape[2])))
    tiles = -(-t // rows)
    cut = lambda x, axis: _cut(x, axis, tiles, rows)

    def choose(tile: tuple[jax.Array, ...]) -> jax.Array:
        query, first, seen, ahead = tile
        query = query.reshape(b, rows, k, n // k, h)
        logits = _matmul("btkgh,bkjh->bktgj", query, means) * spec.softmax_scale
        after = blocks >= first[:, None]
        weights = _softmax(logits, (after & (blocks < (first + seen)[:, None]))[:, None])
        allowed = after & (blocks < ahead[:, None])  # [rows, blocks]
        scores = jnp.where(allowed, weights.sum(3), -1.0)
        best, index = lax.top_k(scores, others)
        index = jnp.where(best < 0, -1, index - first[:, None])
        return jnp.moveaxis(index, 1, 2).astype(jnp.int32)  # [b, rows, k, others]

    tokens = (cut(query, 1), *(cut(x, 0) for x in (pools.first, pools.seen, ahead)))
    chosen = lax.map(choose, tokens)
    chosen = jnp.moveaxis(chosen, 0, 1).reshape(b, tiles * rows, k, others)[:, :t]
    return _padded(jnp.concatenate([own, chosen], axis=-1), count)


def _cut(x: jax.Array, axis: int, tiles: int, rows: int) -> jax.Array:
    """An axis of tokens cut into tiles, which come first."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, tiles * rows - x.shape[axis])
    x = jnp.pad(x, missing)
    x = x.reshape(*x.shape[:axis], tiles, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _padded(indices: jax.Array, count: int) -> jax.Array:
    missing = count - indices.shape[-1]
    return jnp.pad(indices, ((0, 0),) * 3 + ((0, missing),), constant_values=-1)


def _softmax(logits: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax over the visible entries, zeros where there are none."""
    logits = jnp.where(visible, logits, -jnp.inf)
    row_max = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(logits.dtype).min)
    weights = jnp.exp(logits - row_max)
    row_sum = weights.sum(-1, keepdims=True)
    return weights / jnp.where(row_sum > 0, row_sum, 1.0)


def _matmul(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum(
        equation, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )
