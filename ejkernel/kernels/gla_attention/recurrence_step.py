"""One chunk of a gated linear recurrence, forward and backward.

    h[t] = fade(t) * h[t - 1] + key[t] value[t]^T          o[t] = query[t]^T h[t]

over the tokens of the chunk at once: what they take from each other, from the state before them,
and what they leave behind (https://arxiv.org/abs/2312.06635).
"""

from typing import NamedTuple

import jax

from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.gla_attention.recurrence import Slopes, Still, fading


class Chunk(NamedTuple):
    """The tokens of a chunk, or their gradients; l lanes, c tokens, g query heads on a key head.

    Attributes:
        query: [l, c, g, h], scaled.
        key: [l, c, h].
        value: [l, c, v].
        decays: [l, c, h or 1], logarithms; None: the rows of the state do not fade.
        value_decays: [l, c, v], likewise of its columns.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decays: jax.Array | None
    value_decays: jax.Array | None


def forward(chunk: Chunk, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output [l, c, g, v] of a chunk and the state [l, h, v] behind it."""
    rows, columns = fading(chunk.decays), fading(chunk.value_decays)
    inside = columns.spread(rows.scores(chunk.query, chunk.key), chunk.value)
    before = columns.from_start(_read(rows.from_start(chunk.query), state))
    return inside + before, _advance(chunk, rows, columns, state)


def advance(chunk: Chunk, state: jax.Array) -> jax.Array:
    """The state behind a chunk."""
    return _advance(chunk, fading(chunk.decays), fading(chunk.value_decays), state)


def backward(
    chunk: Chunk, state: jax.Array, d_out: jax.Array, d_after: jax.Array
) -> tuple[Chunk, jax.Array]:
    """The gradients of a chunk and of the state before it, from those of what came out."""
    rows, columns = fading(chunk.decays), fading(chunk.value_decays)
    query, key, value = chunk.query, chunk.key, chunk.value

    weights, d_weights = rows.scores(query, key), columns.scores(d_out, value)
    d_query, d_key, rows_inside = rows.gradients(d_weights, query, key)
    _, d_value, columns_inside = columns.gradients(weights, d_out, value)

    faded_query, faded_d_out = rows.from_start(query), columns.from_start(d_out)
    d_faded_query = matmul("ltgv,lhv->ltgh", faded_d_out, state)
    d_query += rows.from_start(d_faded_query)

    last_key, last_value = rows.to_end(key), columns.to_end(value)
    d_last_key = matmul("lsv,lhv->lsh", last_value, d_after)
    d_last_value = matmul("lsh,lhv->lsv", last_key, d_after)
    d_key += rows.to_end(d_last_key)
    d_value += columns.to_end(d_last_value)

    d_faded = _faded(d_after, rows, columns)
    d_state = d_faded + matmul("ltgh,ltgv->lhv", faded_query, faded_d_out)
    kept = state * d_faded
    d_decays = rows.slopes(
        rows_inside,
        Slopes((faded_query * d_faded_query).sum(2), last_key * d_last_key, kept.sum(2)),
    )
    read = _read(faded_query, state) if chunk.value_decays is not None else faded_d_out
    d_value_decays = columns.slopes(
        columns_inside,
        Slopes((read * faded_d_out).sum(2), last_value * d_last_value, kept.sum(1)),
    )
    return Chunk(d_query, d_key, d_value, d_decays, d_value_decays), d_state


def _read(query: jax.Array, state: jax.Array) -> jax.Array:
    return matmul("ltgh,lhv->ltgv", query, state)


def _faded(state: jax.Array, rows: Still, columns: Still) -> jax.Array:
    """A state [l, h, v] as the whole chunk leaves it."""
    return columns.over_all(rows.over_all(state, 1), 2)


def _advance(chunk: Chunk, rows: Still, columns: Still, state: jax.Array) -> jax.Array:
    added = matmul("lsh,lsv->lhv", rows.to_end(chunk.key), columns.to_end(chunk.value))
    return _faded(state, rows, columns) + added
