"""The blocks of a token when the caller gives none: its own, and those with the highest scores.

The score of a block that is complete by the token is the softmax weight of the block's mean key
among those of all such blocks, summed over the query heads of the key head. Of equal scores the
lower index wins. Entries for which there is no block are -1.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.native_sparse_attention import geometry
from ejkernel.kernels.native_sparse_attention.inputs import Selection, SelectionInputs, Spec
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass

# Logits at once, over all batch rows and heads.
_LARGEST_TILE = 1 << 21


class Candidates(NamedTuple):
    """The mean keys of all complete blocks, and which of them each token may choose."""

    means: Float[Array, "b c k h"]
    # The first one of the token's sequence, the end of those complete by the token, and the end of
    # those that it may choose: its own block may be complete too, and is in the list already.
    limits: Int[Array, "3 t"]


def candidates(inputs: SelectionInputs, spec: Spec) -> Candidates:
    """What the tokens of a call choose from."""
    length = inputs.key.shape[1]
    at = geometry.tokens(length, inputs.cu_seqlens)
    pools = geometry.pools(length, inputs.cu_seqlens, spec.block_size, at)
    ahead = jnp.minimum(pools.seen, at.position // spec.block_size)
    limits = jnp.stack([pools.first, pools.first + pools.seen, pools.first + ahead])
    limits = geometry.of_queries(limits, inputs)
    return Candidates(geometry.pooled(inputs.key, pools, spec), limits)


def with_own(
    inputs: SelectionInputs, spec: Spec, chosen: Int[Array, "b t k o"] | None
) -> Int[Array, "b t k c"]:
    """The lists of all tokens: the block of a token, then those chosen, then -1."""
    batch, length, kv_heads = inputs.query.shape[:3]
    at = geometry.tokens_of_queries(inputs)
    own = jnp.where(at.exists, at.position // spec.block_size, -1)
    own = jnp.broadcast_to(own[None, :, None, None], (batch, length, kv_heads, 1))
    if chosen is None:
        lists = own
    else:  # the sum has the sharding of `chosen` in its type, as the concatenation demands
        lists = jnp.concatenate([own + jnp.zeros_like(chosen[..., :1]), chosen], axis=-1)
    count = inputs.places.shape[0]
    missing = max(0, count - lists.shape[-1])
    return jnp.pad(lists, ((0, 0),) * 3 + ((0, missing),), constant_values=-1)[..., :count]


def run(inputs: SelectionInputs, spec: Spec, params: None) -> tuple[Selection, tuple[()]]:
    """The blocks of each token: its own first, then by falling score."""
    b, t, k, g, _ = inputs.query.shape
    means, limits = candidates(inputs, spec)
    others = min(inputs.places.shape[0] - 1, means.shape[1])
    if others <= 0:
        return Selection(with_own(inputs, spec, None)), ()
    means = jnp.moveaxis(means, 1, 2)  # [b, k, blocks, h]
    blocks = jnp.arange(means.shape[2], dtype=jnp.int32)

    batch = b if isinstance(b, int) else 1  # of an exported program, not known
    rows = max(1, min(t, _LARGEST_TILE // (batch * k * g * means.shape[2])))
    tiles = -(-t // rows)
    cut = lambda x, axis: _cut(x, axis, tiles, rows)

    def choose(tile: tuple[jax.Array, ...]) -> jax.Array:
        query, first, seen, ahead = tile
        logits = _matmul("btkgh,bkjh->bktgj", query, means) * spec.softmax_scale
        after = blocks >= first[:, None]
        weights = _softmax(logits, (after & (blocks < seen[:, None]))[:, None])
        allowed = after & (blocks < ahead[:, None])  # [rows, blocks]
        scores = jnp.where(allowed, weights.sum(3), -1.0)
        best, index = lax.top_k(scores, others)
        index = jnp.where(best < 0, -1, index - first[:, None])
        return jnp.moveaxis(index, 1, 2).astype(jnp.int32)  # [b, rows, k, others]

    chosen = lax.map(choose, (cut(inputs.query, 1), *(cut(x, 0) for x in limits)))
    chosen = jnp.moveaxis(chosen, 0, 1).reshape(b, tiles * rows, k, others)[:, :t]
    return Selection(with_own(inputs, spec, chosen)), ()


def _cut(x: jax.Array, axis: int, tiles: int, rows: int) -> jax.Array:
    """An axis of tokens cut into tiles, which come first."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, tiles * rows - x.shape[axis])
    x = jnp.pad(x, missing)
    x = x.reshape(*x.shape[:axis], tiles, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


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


@functools.partial(jax.jit, static_argnames="spec")
def select_blocks(inputs: SelectionInputs, spec: Spec) -> Int[Array, "b t k c"]:
    """The blocks of each token, by XLA: JAX splits the program as it splits the arrays."""
    return run(inputs, spec, None)[0].blocks


IMPLEMENTATION = Implementation(forward=Pass(run=run, features=ALL_FEATURES))
