"""The figures of block-sparse attention: what an eighth of the blocks costs against all of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli import measure
from ejkernel.cli.figures import Figure
from ejkernel.modules import blocksparse_attention, flash_attention

_LENGTH, _HEADS, _HEAD_DIM = 8192, 4, 64
_BLOCK_SIZE, _ONE_IN = 64, 8
_BLOCKS = _LENGTH // _BLOCK_SIZE


def _arrays() -> tuple[jax.Array, ...]:
    """Query, key, value and a direction in which to pull gradients back."""
    return tuple(jax.random.normal(jax.random.key(0), (4, 1, _LENGTH, _HEADS, _HEAD_DIM)))


def _block_mask() -> jax.Array:
    """One block in eight, drawn at random for every row of blocks."""
    order = np.random.default_rng(0).random((_BLOCKS, _BLOCKS))
    return jnp.asarray(order.argsort(axis=1) < _BLOCKS // _ONE_IN)


def _sparse(query: jax.Array, key: jax.Array, value: jax.Array, block_mask: jax.Array) -> jax.Array:
    return blocksparse_attention(query, key, value, block_mask=block_mask, block_size=_BLOCK_SIZE)


def _dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return flash_attention(query, key, value)


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Result and gradients for query, key and value; a mask comes last."""

    def run(
        query: jax.Array, key: jax.Array, value: jax.Array, along: jax.Array, *mask: jax.Array
    ) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(lambda *arrays: function(*arrays, *mask), query, key, value)
        return out, *pull_back(along)

    return jax.jit(run)


def _check(
    arrays: tuple[jax.Array, ...],
    block_mask: jax.Array,
    out: jax.Array,
    gradients: tuple[jax.Array, ...] = (),
) -> None:
    """Compare one head with attention written out in float64, some rows of blocks at a time."""
    query, key, value, along = (np.asarray(x[0, :, 0], np.float64) for x in arrays)
    scale = _HEAD_DIM**-0.5
    expected = np.empty_like(value)
    d_query, d_key, d_value = np.empty_like(query), np.zeros_like(key), np.zeros_like(value)
    for begin in range(0, _BLOCKS, 8):
        rows = slice(begin * _BLOCK_SIZE, (begin + 8) * _BLOCK_SIZE)
        seen = np.asarray(block_mask[begin : begin + 8]).repeat(_BLOCK_SIZE, 0)
        logits = np.where(seen.repeat(_BLOCK_SIZE, 1), query[rows] @ key.T * scale, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected[rows] = weights @ value
        delta = (along[rows] * expected[rows]).sum(axis=-1, keepdims=True)
        d_logits = weights * (along[rows] @ value.T - delta)
        d_query[rows] = d_logits @ key * scale
        d_key += d_logits.T @ query[rows] * scale
        d_value += weights.T @ along[rows]
    measure.check_close(out[0, :, 0], expected, ulps=32)
    for got, right in zip(gradients, (d_query, d_key, d_value), strict=False):
        measure.check_close(got[0, :, 0], right, ulps=128)


def forward_time() -> float:
    """Time against that of flash attention without a mask."""
    (*arrays, along), block_mask = _arrays(), _block_mask()
    sparse, dense = jax.jit(_sparse), jax.jit(_dense)
    _check((*arrays, along), block_mask, sparse(*arrays, block_mask))
    mine, whole = measure.interleaved(
        lambda: sparse(*arrays, block_mask), lambda: dense(*arrays), rounds=5
    )
    return mine / whole


def gradient_time() -> float:
    """The same for result and gradients."""
    arrays, block_mask = _arrays(), _block_mask()
    sparse, dense = _with_gradients(_sparse), _with_gradients(_dense)
    out, *gradients = sparse(*arrays, block_mask)
    _check(arrays, block_mask, out, tuple(gradients))
    mine, whole = measure.interleaved(
        lambda: sparse(*arrays, block_mask), lambda: dense(*arrays), rounds=5
    )
    return mine / whole


_SHAPE = (
    "one block of 64 in eight (traced mask), time relative to `flash_attention` without a mask; "
    "length 8192, 4 heads of 64, float32"
)
FIGURES = (
    Figure(
        "blocksparse",
        f"`blocksparse_attention` forward, {_SHAPE}",
        "x",
        "lower",
        0.35,
        forward_time,
        operation="blocksparse_attention",
        mask=("block mask",),
    ),
    Figure(
        "blocksparse_gradient",
        f"`blocksparse_attention` forward + backward, {_SHAPE}",
        "x",
        "lower",
        0.4,
        gradient_time,
        operation="blocksparse_attention",
        mask=("block mask",),
    ),
)
