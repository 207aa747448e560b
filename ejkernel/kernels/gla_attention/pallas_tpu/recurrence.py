"""How a state fades within a chunk, inside a TPU kernel: `recurrence` for the arrays of one head.

Pairs of tokens are sorted as there, by the block of 2, 4, 8, ... tokens whose middle parts them,
and no decay is ever divided by another. Sums of decays are matmuls with tables of ones and zeros.

    rows     [g * c, d]   g query heads on the key head, one below the other, c tokens
    columns  [c, d]
    weights  [g * c, c]
    decays   [c, d]; where the columns share one, it lies along the lanes: [1, c]
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common.precision import tile_product

# Stands for -inf, with which a sum of products with zeros would not be a number.
_LEAST = -1e30
_LANES = 128


class Slopes(NamedTuple):
    """Gradients of the logarithms of a chunk's fades: to the start [c, d], to the end, over all."""

    start: jax.Array
    end: jax.Array
    total: jax.Array  # [1, d]


class Tables(NamedTuple):
    """Which decays are in which sum, as a kernel reads it, and the same transposed.

    `sums` is [(n + 2) * c, c]: for every token those up to and with it, those after it, and for
    blocks of 2, 4, ..., c tokens those between it and the middle.
    """

    sums: Any
    transposed: Any


def tables(tokens: int) -> np.ndarray:
    """The numbers of `Tables.sums`."""
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


def dot(left: jax.Array, right: jax.Array, axes: tuple[int, int], dtype: Any) -> jax.Array:
    """A matmul that takes its operands in `dtype` and adds up in float32."""
    return tile_product(left.astype(dtype), right.astype(dtype), axes)


def split(x: jax.Array, exact: bool) -> list[jax.Array]:
    """Numbers of bfloat16 that add up to float32 ones: a matmul of each is a pass of the unit.

    Not `exact`: only the first, the numbers rounded.
    """
    if x.dtype == jnp.bfloat16 or not exact:
        return [x.astype(jnp.bfloat16)]
    parts = []
    for _ in range(2):
        # By bits: compilers may take a conversion there and back for nothing.
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part)
        x = x - part
    return [part.astype(jnp.bfloat16) for part in (*parts, x)]


def added(left: jax.Array, right: jax.Array, exact: bool = True) -> jax.Array:
    """`left @ right` with one of them ones and zeros in bfloat16, the other split."""
    parts = (
        [(left, part) for part in split(right, exact)]
        if left.dtype == jnp.bfloat16
        else [(part, right) for part in split(left, exact)]
    )
    return functools.reduce(jnp.add, [dot(a, b, (1, 0), jnp.bfloat16) for a, b in parts])


class Still:
    """No decay at all; `dtype` is what matmuls take."""

    def __init__(self, tokens: int, group: int, dtype: Any):
        self.tokens, self.group, self.dtype = tokens, group, dtype

    # Pairs of tokens

    @functools.cached_property
    def apart(self) -> jax.Array:
        """[g * c, c]: token xor token, in whose first bit they part; -1 ahead of the diagonal."""
        shape = (self.group * self.tokens, self.tokens)
        row = lax.broadcasted_iota(jnp.int32, shape, 0) & (self.tokens - 1)
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        return jnp.where(row >= column, row ^ column, -1)

    def products(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return dot(rows, columns, (1, 1), self.dtype)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """The products of rows and columns, 0 ahead of the diagonal."""
        return jnp.where(self.apart >= 0, self.products(rows, columns), 0.0)

    def spread(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        """What the scores give for rows when weighted: sum over s of weights * fade * columns."""
        return dot(weights, columns, (1, 0), self.dtype)

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple:
        """Gradients of the sum of weights * scores: for rows, columns, and what `slopes` takes."""
        d_rows = dot(weights, columns, (1, 0), self.dtype)
        return d_rows, dot(weights, rows, (0, 0), self.dtype), None

    # Tokens and the ends of the chunk

    def from_start(self, x: jax.Array) -> jax.Array:
        """`x`, rows or columns, faded over the tokens from the start through its own."""
        return x

    def to_end(self, x: jax.Array) -> jax.Array:
        """`x`, faded over the tokens after its own to the end of the chunk."""
        return x

    def over_all(self, state: jax.Array, axis: int) -> jax.Array:
        """A state, one of whose axes fades over the whole chunk."""
        return state

    def slopes(self, inside: Any, outside: Callable[[], Slopes]) -> jax.Array | None:
        """The gradient of the decays, which lies as they do."""
        return None

    def each(self, x: jax.Array, fade: jax.Array) -> jax.Array:
        """`x * fade`, for each of the query heads in `x`."""
        if x.shape[0] == fade.shape[0]:
            return x * fade
        return (x.reshape(self.group, *fade.shape[:1], -1) * fade).reshape(x.shape)

    def summed(self, x: jax.Array) -> jax.Array:
        """[g * c, d] -> [c, d]: the sum over the query heads."""
        return x if self.group == 1 else x.reshape(self.group, self.tokens, -1).sum(0)


class Uniform(Still):
    """One decay for all columns, [1, c]: pairs of tokens have one fade, it multiplies scores."""

    def __init__(self, decays: jax.Array, *shared: Any):
        super().__init__(*shared)
        self.exact = decays.dtype == jnp.float32
        self.decays = jnp.maximum(decays.astype(jnp.float32), _LEAST)

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
        """[c, c]: the fades between all pairs, 0 ahead of the diagonal."""
        shape = (self.tokens, self.tokens)
        later = lax.broadcasted_iota(jnp.int32, shape, 0) > lax.broadcasted_iota(
            jnp.int32, shape, 1
        )
        exponents = added(self.before, _ones(later), self.exact)
        return jnp.where(self.past, jnp.exp(exponents), 0.0)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return self.each(self.products(rows, columns), self.pairs)

    def spread(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        return super().spread(self.each(weights, self.pairs), columns)

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple:
        faded = self.each(weights, self.pairs)
        inside = self.summed(faded * self.products(rows, columns))
        return (*super().gradients(faded, rows, columns)[:2], inside)

    def from_start(self, x: jax.Array) -> jax.Array:
        return self.each(x, self.start)

    def to_end(self, x: jax.Array) -> jax.Array:
        return x * self.end

    def over_all(self, state: jax.Array, axis: int) -> jax.Array:
        return state * jnp.exp(self.decays.sum(1, keepdims=True))

    def slopes(self, inside: Any, outside: Callable[[], Slopes]) -> jax.Array | None:
        """[1, c]: a decay counts for the pairs on its two sides."""
        shape = (self.tokens, self.tokens)
        earlier = lax.broadcasted_iota(jnp.int32, shape, 0) < lax.broadcasted_iota(
            jnp.int32, shape, 1
        )
        pairs = added(inside, _ones(earlier), self.dtype == jnp.float32)  # over s before the decay
        start, end, total = (x.sum(1, keepdims=True) for x in outside())
        of_tokens = jnp.where(earlier, end, pairs + start)
        return of_tokens.sum(0, keepdims=True) + total


class Columnwise(Still):
    """A decay of its own for every column: one matmul for each size of block."""

    def __init__(self, decays: jax.Array, tables: Tables, *shared: Any):
        super().__init__(*shared)
        self.exact = decays.dtype == jnp.float32
        self.decays = jnp.maximum(decays.astype(jnp.float32), _LEAST)
        self.tables = tables

    def _fade(self, place: int) -> jax.Array:
        table = self.tables.sums[place * self.tokens : (place + 1) * self.tokens]
        return jnp.exp(added(table, self.decays, self.exact))

    @functools.cached_property
    def start(self) -> jax.Array:
        return self._fade(0)

    @functools.cached_property
    def end(self) -> jax.Array:
        return self._fade(1)

    @functools.cached_property
    def levels(self) -> list[jax.Array]:
        """In the upper half of a block from its middle, in the lower half to it."""
        return [self._fade(2 + level) for level in range(levels_of(self.tokens))]

    def parted(self, level: int) -> jax.Array:
        """The pairs that the middles of blocks of this size part."""
        return (self.apart >> level) == 1

    def own(self, weights: jax.Array) -> jax.Array:
        """[g * c, 1]: the weight of each token for itself."""
        return jnp.where(self.apart == 0, weights, 0.0).sum(1, keepdims=True)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        own = self.each(rows, columns).sum(1, keepdims=True)
        scores = jnp.where(self.apart == 0, own, 0.0)
        for level, fade in enumerate(self.levels):
            products = self.products(self.each(rows, fade), columns * fade)
            scores = jnp.where(self.parted(level), products, scores)
        return scores

    def spread(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        result = self._times(self.own(weights), columns)
        for level, fade in enumerate(self.levels):
            part = jnp.where(self.parted(level), weights, 0.0)
            result += self.each(super().spread(part, columns * fade), fade)
        return result

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple:
        own = self.own(weights)
        d_rows, d_columns = self._times(own, columns), self.summed(own * rows)
        inside = []
        for level, fade in enumerate(self.levels):
            part = jnp.where(self.parted(level), weights, 0.0)
            faded_rows, faded_columns = self.each(rows, fade), columns * fade
            of_rows, of_columns, _ = super().gradients(part, faded_rows, faded_columns)
            d_rows += self.each(of_rows, fade)
            d_columns += of_columns * fade
            inside.append(self.summed(faded_rows * of_rows) + faded_columns * of_columns)
        return d_rows, d_columns, inside

    def from_start(self, x: jax.Array) -> jax.Array:
        return self.each(x, self.start)

    def to_end(self, x: jax.Array) -> jax.Array:
        return x * self.end

    def over_all(self, state: jax.Array, axis: int) -> jax.Array:
        if axis == 1:
            return state * self.start[self.tokens - 1 :]
        # A number for each row of the state: a matmul turns the sums, alike in all lanes.
        ones = jnp.ones((self.tokens, _LANES), jnp.bfloat16)
        parts = split(self.decays, self.exact)
        sums = [dot(part, ones, (0, 0), jnp.bfloat16) for part in parts]
        return state * jnp.exp(functools.reduce(jnp.add, sums))[:, :1]

    def slopes(self, inside: Any, outside: Callable[[], Slopes]) -> jax.Array | None:
        start, end, total = outside()
        terms = jnp.concatenate([start, end, *inside])
        exact = self.dtype == jnp.float32
        return added(self.tables.transposed[...], terms, exact) + total

    def _times(self, own: jax.Array, columns: jax.Array) -> jax.Array:
        """[g * c, 1] times [c, d], for each of the query heads."""
        if self.group == 1:
            return own * columns
        wide = own.reshape(self.group, self.tokens, 1) * columns
        return wide.reshape(own.shape[0], -1)


def _ones(mask: jax.Array) -> jax.Array:
    """A mask as ones and zeros for a matmul."""
    return jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
