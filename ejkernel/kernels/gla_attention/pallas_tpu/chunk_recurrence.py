"""One chunk of a gated linear recurrence inside a TPU kernel: `chunk_recurrence` for one key head.

Pairs of tokens are grouped as there, by the block of 2, 4, 8, ... tokens whose middle separates
them, and nothing is divided by a decay. Sums of decays are matmuls with tables of ones and zeros.

    rows     [g * c, d]   g query heads of the key head, one below the other, c tokens
    columns  [c, d]
    weights  [g * c, c]
    decays   [c, d]; where the columns share one, it lies along the lanes: [1, c]
    state    [v, h]; the decays of its rows, which are the usual ones, lie along the lanes
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ejkernel.kernels.common.mosaic_tpu.vectors import LANES
from ejkernel.kernels.common.precision import tile_product
from ejkernel.kernels.common.refs import Ref
from ejkernel.kernels.gla_attention.chunk_recurrence import DecayGradients

# In place of -inf: 0 times -inf would be NaN.
_LEAST = -1e30
# Gradients of rows, of columns, and of the decays inside the chunk, for `decay_gradients`.
TileGradients = tuple[jax.Array, jax.Array, list[jax.Array]]


class SumTables(NamedTuple):
    """The decays of each sum, as rows of ones and zeros, and the same transposed.

    `sums` is [(n + 2) * c, c]: for every token those up to and with it, those after it, and for
    blocks of 2, 4, ..., c tokens those between it and the middle.
    """

    sums: Ref
    transposed: Ref | None  # in the backward kernel


def sum_table(tokens: int) -> np.ndarray:
    """The array of `SumTables.sums`."""
    token, other = np.arange(tokens)[:, None], np.arange(tokens)
    parts = [other <= token, other > token]
    for size in (1 << level for level in range(levels_of(tokens))):
        upper = token // size % 2 == 1
        near = token // size == other // size
        parts.append(near & np.where(upper, other <= token, other > token))
    return np.concatenate(parts).astype(jnp.bfloat16)


def levels_of(tokens: int) -> int:
    """How many sizes of blocks there are, `tokens` being a power of two."""
    return tokens.bit_length() - 1


def dot(left: jax.Array, right: jax.Array, axes: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """A matmul of operands in `dtype`, accumulated in float32."""
    return tile_product(left.astype(dtype), right.astype(dtype), axes)


def split_bfloat16(x: jax.Array, exact: bool) -> list[jax.Array]:
    """Three bfloat16 numbers that add up to a float32 one: each is one matmul.

    Not `exact`: only the first, the rounded number.
    """
    if x.dtype == jnp.bfloat16 or not exact:
        return [x.astype(jnp.bfloat16)]
    parts = []
    for _ in range(2):
        # By bits: compilers may remove a conversion to bfloat16 and back.
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part)
        x = x - part
    return [part.astype(jnp.bfloat16) for part in (*parts, x)]


def sum_matmul(left: jax.Array, right: jax.Array, exact: bool = True) -> jax.Array:
    """`left @ right`, where one is ones and zeros in bfloat16 and the other is split."""
    parts = (
        [(left, part) for part in split_bfloat16(right, exact)]
        if left.dtype == jnp.bfloat16
        else [(part, right) for part in split_bfloat16(left, exact)]
    )
    return functools.reduce(jnp.add, [dot(a, b, (1, 0), jnp.bfloat16) for a, b in parts])


class NoDecayTile:
    """No decay; `dtype` is that of the operands of matmuls."""

    tokens: int
    group: int
    dtype: DTypeLike

    def __init__(self, tokens: int, group: int, dtype: DTypeLike):
        self.tokens, self.group, self.dtype = tokens, group, dtype

    @functools.cached_property
    def token_xor(self) -> jax.Array:
        """[g * c, c]: row token xor column token; -1 above the diagonal."""
        shape = (self.group * self.tokens, self.tokens)
        row = lax.broadcasted_iota(jnp.int32, shape, 0) & (self.tokens - 1)
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        return jnp.where(row >= column, row ^ column, -1)

    def products(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return dot(rows, columns, (1, 1), self.dtype)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """The products of rows and columns, 0 above the diagonal."""
        return jnp.where(self.token_xor >= 0, self.products(rows, columns), 0.0)

    def weighted_sum(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        """The sum over s of weights * decay * columns, for each row."""
        return dot(weights, columns, (1, 0), self.dtype)

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> TileGradients:
        """Gradients of the sum of weights * scores: of rows, columns, and inside the chunk."""
        d_rows = dot(weights, columns, (1, 0), self.dtype)
        return d_rows, dot(weights, rows, (0, 0), self.dtype), []

    def from_start(self, x: jax.Array) -> jax.Array:
        """`x`, rows or columns, decayed over the tokens from the start through its own."""
        return x

    def to_end(self, x: jax.Array) -> jax.Array:
        """`x`, decayed over the tokens after its own to the end of the chunk."""
        return x

    def over_chunk(self, state: jax.Array, axis: int) -> jax.Array:
        """A state, one of whose axes decays over the whole chunk."""
        return state

    def decay_gradients(
        self,
        inside: list[jax.Array],
        outside: Callable[[], DecayGradients],
    ) -> jax.Array | None:
        """The gradient of the decays, in their layout."""
        return None

    def scaled(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        """`x * factor`, for each of the query heads in `x`."""
        if x.shape[0] == factor.shape[0]:
            return x * factor
        return (x.reshape(self.group, *factor.shape[:1], -1) * factor).reshape(x.shape)

    def summed(self, x: jax.Array) -> jax.Array:
        """[g * c, d] -> [c, d]: the sum over the query heads."""
        return x if self.group == 1 else x.reshape(self.group, self.tokens, -1).sum(0)


class ScalarDecayTile(NoDecayTile):
    """One decay for all columns, [1, c]: it multiplies the scores of a pair of tokens."""

    def __init__(self, decays: jax.Array, tokens: int, group: int, dtype: DTypeLike):
        super().__init__(tokens, group, dtype)
        self.exact: bool = decays.dtype == jnp.float32
        self.decays: jax.Array = jnp.maximum(decays.astype(jnp.float32), _LEAST)

    @functools.cached_property
    def past(self) -> jax.Array:
        """[c, c]: whether the token of the column is that of the row, or before it."""
        shape = (self.tokens, self.tokens)
        return lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(
            jnp.int32, shape, 1
        )

    @functools.cached_property
    def before(self) -> jax.Array:
        return jnp.where(self.past, self.decays, 0.0)

    @functools.cached_property
    def start(self) -> jax.Array:
        return jnp.exp(self.before.sum(1, keepdims=True))

    @functools.cached_property
    def end(self) -> jax.Array:
        return jnp.exp(jnp.where(self.past, 0.0, self.decays).sum(1, keepdims=True))

    @functools.cached_property
    def pairs(self) -> jax.Array:
        """[c, c]: the decays between all pairs, 0 above the diagonal."""
        shape = (self.tokens, self.tokens)
        later = lax.broadcasted_iota(jnp.int32, shape, 0) > lax.broadcasted_iota(
            jnp.int32, shape, 1
        )
        exponents = sum_matmul(self.before, _ones(later), self.exact)
        return jnp.where(self.past, jnp.exp(exponents), 0.0)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return self.scaled(self.products(rows, columns), self.pairs)

    def weighted_sum(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        return super().weighted_sum(self.scaled(weights, self.pairs), columns)

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> TileGradients:
        decayed = self.scaled(weights, self.pairs)
        inside = self.summed(decayed * self.products(rows, columns))
        d_rows, d_columns, _ = super().gradients(decayed, rows, columns)
        return d_rows, d_columns, [inside]

    def from_start(self, x: jax.Array) -> jax.Array:
        return self.scaled(x, self.start)

    def to_end(self, x: jax.Array) -> jax.Array:
        return x * self.end

    def over_chunk(self, state: jax.Array, axis: int) -> jax.Array:
        return state * jnp.exp(self.decays.sum(1, keepdims=True))

    def decay_gradients(
        self,
        inside: list[jax.Array],
        outside: Callable[[], DecayGradients],
    ) -> jax.Array | None:
        """[1, c]: a decay counts for the pairs on its two sides."""
        shape = (self.tokens, self.tokens)
        earlier = lax.broadcasted_iota(jnp.int32, shape, 0) < lax.broadcasted_iota(
            jnp.int32, shape, 1
        )
        # Over s before the decay.
        pairs = sum_matmul(inside[0], _ones(earlier), self.dtype == jnp.float32)
        start, end, total = (x.sum(1, keepdims=True) for x in outside())
        of_tokens = jnp.where(earlier, end, pairs + start)
        return of_tokens.sum(0, keepdims=True) + total


class ColumnDecayTile(NoDecayTile):
    """A decay for every column: one matmul for each size of block."""

    def __init__(
        self, decays: jax.Array, tables: SumTables, tokens: int, group: int, dtype: DTypeLike
    ):
        super().__init__(tokens, group, dtype)
        self.exact: bool = decays.dtype == jnp.float32
        self.decays: jax.Array = jnp.maximum(decays.astype(jnp.float32), _LEAST)
        self.tables = tables

    def _factor(self, place: int) -> jax.Array:
        table = self.tables.sums[place * self.tokens : (place + 1) * self.tokens]
        return jnp.exp(sum_matmul(table, self.decays, self.exact))

    @functools.cached_property
    def start(self) -> jax.Array:
        return self._factor(0)

    @functools.cached_property
    def end(self) -> jax.Array:
        return self._factor(1)

    @functools.cached_property
    def levels(self) -> list[jax.Array]:
        """In the upper half of a block from its middle, in the lower half to it."""
        return [self._factor(2 + level) for level in range(levels_of(self.tokens))]

    def separated(self, level: int) -> jax.Array:
        """The pairs across the middles of blocks of this size."""
        return (self.token_xor >> level) == 1

    def own(self, weights: jax.Array) -> jax.Array:
        """[g * c, 1]: the weight of each token for itself."""
        return jnp.where(self.token_xor == 0, weights, 0.0).sum(1, keepdims=True)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        own = self.scaled(rows, columns).sum(1, keepdims=True)
        scores = jnp.where(self.token_xor == 0, own, 0.0)
        for level, factor in enumerate(self.levels):
            products = self.products(self.scaled(rows, factor), columns * factor)
            scores = jnp.where(self.separated(level), products, scores)
        return scores

    def weighted_sum(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        result = self._times(self.own(weights), columns)
        for level, factor in enumerate(self.levels):
            part = jnp.where(self.separated(level), weights, 0.0)
            result += self.scaled(super().weighted_sum(part, columns * factor), factor)
        return result

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> TileGradients:
        own = self.own(weights)
        d_rows, d_columns = self._times(own, columns), self.summed(own * rows)
        inside = []
        for level, factor in enumerate(self.levels):
            part = jnp.where(self.separated(level), weights, 0.0)
            decayed_rows, decayed_columns = self.scaled(rows, factor), columns * factor
            of_rows, of_columns, _ = super().gradients(part, decayed_rows, decayed_columns)
            d_rows += self.scaled(of_rows, factor)
            d_columns += of_columns * factor
            inside.append(self.summed(decayed_rows * of_rows) + decayed_columns * of_columns)
        return d_rows, d_columns, inside

    def from_start(self, x: jax.Array) -> jax.Array:
        return self.scaled(x, self.start)

    def to_end(self, x: jax.Array) -> jax.Array:
        return x * self.end

    def over_chunk(self, state: jax.Array, axis: int) -> jax.Array:
        if axis == 1:
            return state * self.start[self.tokens - 1 :]
        # A number for each row of the state: a matmul transposes the sums, the same in all lanes.
        ones = jnp.ones((self.tokens, LANES), jnp.bfloat16)
        parts = split_bfloat16(self.decays, self.exact)
        sums = [dot(part, ones, (0, 0), jnp.bfloat16) for part in parts]
        return state * jnp.exp(functools.reduce(jnp.add, sums))[:, :1]

    def decay_gradients(
        self,
        inside: list[jax.Array],
        outside: Callable[[], DecayGradients],
    ) -> jax.Array | None:
        start, end, total = outside()
        terms = jnp.concatenate([start, end, *inside])
        exact = self.dtype == jnp.float32
        if self.tables.transposed is None:
            raise ValueError("gla_attention: the gradient of decays needs the transposed table.")
        return sum_matmul(self.tables.transposed[...], terms, exact) + total

    def _times(self, own: jax.Array, columns: jax.Array) -> jax.Array:
        """[g * c, 1] times [c, d], for each of the query heads."""
        if self.group == 1:
            return own * columns
        wide = own.reshape(self.group, self.tokens, 1) * columns
        return wide.reshape(own.shape[0], -1)


def _ones(mask: jax.Array) -> jax.Array:
    """A mask as ones and zeros for a matmul."""
    return jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)


class ChunkTile(NamedTuple):
    """The tokens of a chunk in float32, or their gradients; c tokens, g query heads.

    Attributes:
        query: [g * c, h], scaled.
        key: [c, h].
        value: [c, v].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array


class ChunkTileGradients(NamedTuple):
    """Gradients of a chunk, of its decays in their layout, and of the state before it."""

    chunk: ChunkTile
    decays: jax.Array | None
    value_decays: jax.Array | None
    state: jax.Array


def forward(
    chunk: ChunkTile, rows: NoDecayTile, columns: NoDecayTile, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output [g * c, v] of a chunk and the state [v, h] after it."""
    inside = columns.weighted_sum(rows.scores(chunk.query, chunk.key), chunk.value)
    before = dot(rows.from_start(chunk.query), state, (1, 1), rows.dtype)
    return inside + columns.from_start(before), advance(chunk, rows, columns, state)


def advance(
    chunk: ChunkTile, rows: NoDecayTile, columns: NoDecayTile, state: jax.Array
) -> jax.Array:
    """The state after a chunk."""
    added = dot(columns.to_end(chunk.value), rows.to_end(chunk.key), (0, 0), rows.dtype)
    return _decayed(state, rows, columns) + added


def backward(
    chunk: ChunkTile,
    rows: NoDecayTile,
    columns: NoDecayTile,
    state: jax.Array,
    d_out: jax.Array,
    d_after: jax.Array,
) -> ChunkTileGradients:
    """The gradients of a chunk, from those of its output and of the state after it."""
    query, key, value = chunk
    matmul = lambda left, right, *axes: dot(left, right, axes, rows.dtype)

    weights, d_weights = rows.scores(query, key), columns.scores(d_out, value)
    d_query, d_key, rows_inside = rows.gradients(d_weights, query, key)
    _, d_value, columns_inside = columns.gradients(weights, d_out, value)

    decayed_query, decayed_d_out = rows.from_start(query), columns.from_start(d_out)
    d_decayed_query = matmul(decayed_d_out, state, 1, 0)
    d_query += rows.from_start(d_decayed_query)

    last_key, last_value = rows.to_end(key), columns.to_end(value)
    d_last_key = matmul(last_value, d_after, 1, 0)
    d_last_value = matmul(last_key, d_after, 1, 1)
    d_key += rows.to_end(d_last_key)
    d_value += columns.to_end(d_last_value)

    d_decayed = _decayed(d_after, rows, columns)
    d_state = d_decayed + matmul(decayed_d_out, decayed_query, 0, 0)
    kept = state * d_decayed
    d_decays = rows.decay_gradients(
        rows_inside,
        lambda: DecayGradients(
            rows.summed(decayed_query * d_decayed_query),
            last_key * d_last_key,
            kept.sum(0, keepdims=True),
        ),
    )
    d_value_decays = columns.decay_gradients(
        columns_inside,
        lambda: DecayGradients(
            columns.summed(matmul(decayed_query, state, 1, 1) * decayed_d_out),
            last_value * d_last_value,
            _sums_of_rows(kept),
        ),
    )
    return ChunkTileGradients(ChunkTile(d_query, d_key, d_value), d_decays, d_value_decays, d_state)


def _decayed(state: jax.Array, rows: NoDecayTile, columns: NoDecayTile) -> jax.Array:
    """A state [v, h] decayed over the whole chunk."""
    return columns.over_chunk(rows.over_chunk(state, 1), 0)


def _sums_of_rows(x: jax.Array) -> jax.Array:
    """[v, h] -> [1, v], by a matmul, which transposes."""
    return dot(jnp.ones((8, x.shape[1]), jnp.float32), x, (1, 1), jnp.dtype(jnp.float32))[:1]
