"""One chunk of a gated linear recurrence inside a TPU kernel: `recurrence_step` for one key head.

The state lies [v, h], so that decays of its rows, the most usual ones, lie along the lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.gla_attention.pallas_tpu.recurrence import Slopes, Still, dot


class Chunk(NamedTuple):
    """The tokens of a chunk in float32, or their gradients; c tokens, g query heads.

    Attributes:
        query: [g * c, h], scaled.
        key: [c, h].
        value: [c, v].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array


class Gradients(NamedTuple):
    """Those of a chunk, of its decays as they lie, and of the state before it."""

    chunk: Chunk
    decays: jax.Array | None
    value_decays: jax.Array | None
    state: jax.Array


def forward(
    chunk: Chunk, rows: Still, columns: Still, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output [g * c, v] of a chunk and the state [v, h] behind it."""
    inside = columns.spread(rows.scores(chunk.query, chunk.key), chunk.value)
    before = dot(rows.from_start(chunk.query), state, (1, 1), rows.dtype)
    return inside + columns.from_start(before), advance(chunk, rows, columns, state)


def advance(chunk: Chunk, rows: Still, columns: Still, state: jax.Array) -> jax.Array:
    """The state behind a chunk."""
    added = dot(columns.to_end(chunk.value), rows.to_end(chunk.key), (0, 0), rows.dtype)
    return _faded(state, rows, columns) + added


def backward(
    chunk: Chunk,
    rows: Still,
    columns: Still,
    state: jax.Array,
    d_out: jax.Array,
    d_after: jax.Array,
) -> Gradients:
    """The gradients of a chunk, from those of its output and of the state behind it."""
    query, key, value = chunk
    product = lambda left, right, *axes: dot(left, right, axes, rows.dtype)

    weights, d_weights = rows.scores(query, key), columns.scores(d_out, value)
    d_query, d_key, rows_inside = rows.gradients(d_weights, query, key)
    _, d_value, columns_inside = columns.gradients(weights, d_out, value)

    faded_query, faded_d_out = rows.from_start(query), columns.from_start(d_out)
    d_faded_query = product(faded_d_out, state, 1, 0)
    d_query += rows.from_start(d_faded_query)

    last_key, last_value = rows.to_end(key), columns.to_end(value)
    d_last_key = product(last_value, d_after, 1, 0)
    d_last_value = product(last_key, d_after, 1, 1)
    d_key += rows.to_end(d_last_key)
    d_value += columns.to_end(d_last_value)

    d_faded = _faded(d_after, rows, columns)
    d_state = d_faded + product(faded_d_out, faded_query, 0, 0)
    kept = state * d_faded
    d_decays = rows.slopes(
        rows_inside,
        lambda: Slopes(
            rows.summed(faded_query * d_faded_query),
            last_key * d_last_key,
            kept.sum(0, keepdims=True),
        ),
    )
    d_value_decays = columns.slopes(
        columns_inside,
        lambda: Slopes(
            columns.summed(product(faded_query, state, 1, 1) * faded_d_out),
            last_value * d_last_value,
            _sums_of_rows(kept),
        ),
    )
    return Gradients(Chunk(d_query, d_key, d_value), d_decays, d_value_decays, d_state)


def _faded(state: jax.Array, rows: Still, columns: Still) -> jax.Array:
    """A state [v, h] as the whole chunk leaves it."""
    return columns.over_all(rows.over_all(state, 1), 0)


def _sums_of_rows(x: jax.Array) -> jax.Array:
    """[v, h] -> [1, v], by a matmul: it turns them."""
    return dot(jnp.ones((8, x.shape[1]), jnp.float32), x, (1, 1), jnp.dtype(jnp.float32))[:1]
