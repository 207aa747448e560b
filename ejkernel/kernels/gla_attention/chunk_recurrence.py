"""One chunk of a gated linear recurrence, forward and backward, without dividing by a decay.

    h[t] = decay(t) * h[t - 1] + key[t] value[t]^T          o[t] = query[t]^T h[t]

All tokens of the chunk are computed at once: the products between them, what they read from the
state before the chunk, and the state after it (https://arxiv.org/abs/2312.06635).

Between tokens `s < t` a column of the state decays by `exp(a[s + 1] + ... + a[t])`. A chunk needs
this for all pairs of its tokens, between the rows and the columns of a matmul:

    scores[t, s] = sum over d of rows[t, d] * decay(s, t)[d] * columns[s, d]        (s <= t)

Splitting the decay into `exp(b[t]) * exp(-b[s])` with `b` the running sum overflows under strong
decays. Instead pairs are grouped by the smallest aligned block of 2, 4, 8, ... tokens that holds
both: `s` and `t` lie in its two halves, and `decay = exp(from the middle to t) * exp(from s to the
middle)`. Both exponents are sums of neighbouring decays: none is positive where no decay is, and
none is a difference that could lose digits. The same holds for the gradients.

    rows     [l, c, g, d]   l lanes (batch rows times key heads), c tokens,
    columns  [l, c, d]      g query heads of a key head
    weights  [l, c, g, c]
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common.precision import matmul

# In place of -inf: 0 times -inf would be NaN.
_LEAST = -1e30
_SHORT = 16  # tokens of a chunk on a CPU; the longer ones of a GPU sum logarithms by a matmul


class DecayGradients(NamedTuple):
    """Gradients of the log decays of a chunk: from its start, to its end, over all of it."""

    start: jax.Array
    end: jax.Array
    total: jax.Array


class NoDecay:
    """No decay."""

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """The products of rows and columns, 0 ahead of the diagonal."""
        products = matmul("ltgd,lsd->ltgs", rows, columns)
        return jnp.where(_causal(products.shape[-1]), products, 0.0)

    def weighted_sum(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        """The sum over s of weights * decay * columns, for each row."""
        return matmul("ltgs,lsd->ltgd", weights, columns)

    def gradients(
        self, weights: jax.Array, rows: jax.Array, columns: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Gradients of the sum of weights * scores: of rows, columns, and inside the chunk."""
        return self.weighted_sum(weights, columns), matmul("ltgs,ltgd->lsd", weights, rows), None

    def from_start(self, x: jax.Array) -> jax.Array:
        """`x`, decayed over the tokens from the start of the chunk through its own."""
        return x

    def to_end(self, x: jax.Array) -> jax.Array:
        """`x`, decayed over the tokens after its own to the end of the chunk."""
        return x

    def over_chunk(self, state: jax.Array, axis: int) -> jax.Array:
        """A state, one of whose axes decays over the whole chunk."""
        return state

    def decay_gradients(
        self, inside: jax.Array | None, outside: DecayGradients
    ) -> jax.Array | None:
        """The gradient of the decays."""
        return None


class _Decay(NoDecay):
    """Log decays `[l, c, d]`, d either the columns' or 1."""

    def __init__(self, decays: jax.Array):
        self.decays: jax.Array = jnp.maximum(decays, _LEAST)
        self.tokens: int = decays.shape[1]

    @functools.cached_property
    def start(self) -> jax.Array:
        return jnp.exp(_sums(_tables(self.tokens).start, self.decays))

    @functools.cached_property
    def end(self) -> jax.Array:
        return jnp.exp(_sums(_tables(self.tokens).end, self.decays))

    def from_start(self, x: jax.Array) -> jax.Array:
        return x * (self.start[:, :, None] if x.ndim == 4 else self.start)

    def to_end(self, x: jax.Array) -> jax.Array:
        return x * self.end

    def over_chunk(self, state: jax.Array, axis: int) -> jax.Array:
        return state * jnp.expand_dims(self.start[:, -1], 3 - axis)

    def decay_gradients(
        self, inside: jax.Array | None, outside: DecayGradients
    ) -> jax.Array | None:
        tables, width = _tables(self.tokens), self.decays.shape[-1]
        start, end, total = (_narrowed(x, width) for x in outside)
        return (
            self._inside(inside)
            + _sums(tables.start.T, start)
            + _sums(tables.end.T, end)
            + total[:, None]
        )

    def _inside(self, inside: jax.Array | None) -> jax.Array:
        raise NotImplementedError


class ScalarDecay(_Decay):
    """One decay for all columns: it multiplies the scores of a pair of tokens."""

    @functools.cached_property
    def pairs(self) -> jax.Array:
        """[l, c, 1, c]"""
        later = _tables(self.tokens).end.T  # [r, s]: r after s
        exponents = _sums(_tables(self.tokens).start, self.decays * later)
        return jnp.where(_causal(self.tokens), jnp.exp(exponents)[:, :, None], 0.0)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return matmul("ltgd,lsd->ltgs", rows, columns) * self.pairs

    def weighted_sum(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        return matmul("ltgs,lsd->ltgd", weights * self.pairs, columns)

    def gradients(
        self, weights: jax.Array, rows: jax.Array, columns: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        decayed = weights * self.pairs
        inside = (decayed * matmul("ltgd,lsd->ltgs", rows, columns)).sum(2)
        d_rows = matmul("ltgs,lsd->ltgd", decayed, columns)
        return d_rows, matmul("ltgs,ltgd->lsd", decayed, rows), inside

    def _inside(self, inside: jax.Array | None) -> jax.Array:
        """[l, t, s] -> [l, r, 1]: a decay counts for the pairs on its two sides."""
        if inside is None:
            return jnp.zeros_like(self.decays)
        tables = _tables(self.tokens)
        below = _sums(tables.start.T, inside)  # [l, r, s]: the sum over t >= r
        return jnp.where(tables.end.T > 0, below, 0.0).sum(-1, keepdims=True)


class ColumnDecay(_Decay):
    """A decay for every column: one matmul for each size of block.

    The factors of short chunks are products: one exponential for each decay, and no matmul.
    """

    @functools.cached_property
    def start(self) -> jax.Array:
        return self._products[-1][0] if self.tokens <= _SHORT else super().start

    @functools.cached_property
    def end(self) -> jax.Array:
        return self._products[-1][1] if self.tokens <= _SHORT else super().end

    @functools.cached_property
    def _products(self) -> list[tuple[jax.Array, jax.Array]]:
        """In blocks of 1, 2, 4, ... tokens: from the start to a token, after it to the end."""
        lanes, tokens, width = self.decays.shape
        from_start, to_end = jnp.exp(self.decays), jnp.ones_like(self.decays)
        found = [(from_start, to_end)]
        is_upper = np.array([False, True])[:, None, None]
        for size in _sizes(tokens):
            halves = (lanes, -1, 2, size, width)
            first, last = from_start.reshape(halves), to_end.reshape(halves)
            whole = first[:, :, :, -1:]
            first *= jnp.where(is_upper, whole[:, :, :1], 1.0)
            last *= jnp.where(is_upper, 1.0, whole[:, :, 1:])
            from_start, to_end = (x.reshape(lanes, tokens, width) for x in (first, last))
            found.append((from_start, to_end))
        return found

    @functools.cached_property
    def levels(self) -> jax.Array:
        """[l, n, c, d]: in the upper half of a block from its middle, in the lower half to it."""
        tables = _tables(self.tokens)
        if self.tokens <= _SHORT:
            upper = [np.arange(self.tokens) // size % 2 == 1 for size in _sizes(self.tokens)]
            halves = zip(upper, self._products, strict=False)
            return jnp.stack([jnp.where(u[:, None], *factors) for u, factors in halves], 1)
        factors = jnp.exp(_sums(tables.levels.reshape(-1, self.tokens), self.decays))
        return factors.reshape(factors.shape[0], -1, self.tokens, factors.shape[-1])

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        own = (rows * columns[:, :, None]).sum(-1, keepdims=True)
        scores = jnp.where(_diagonal(self.tokens), own, 0.0)
        if self.tokens == 1:
            return scores
        decayed_rows, decayed_columns = self._decayed(rows, columns)
        products = matmul("lntgd,lnsd->lntgs", decayed_rows, decayed_columns)
        masks = _tables(self.tokens).masks
        return scores + _added(jnp.where(masks, products, 0.0), 1)

    def weighted_sum(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        result = _own(weights)[..., None] * columns[:, :, None]
        if self.tokens == 1:
            return result
        weights = jnp.where(_tables(self.tokens).masks, weights[:, None], 0.0)
        parts = matmul("lntgs,lnsd->lntgd", weights, columns[:, None] * self.levels)
        return result + _added(parts * self.levels[:, :, :, None], 1)

    def gradients(
        self, weights: jax.Array, rows: jax.Array, columns: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        own = _own(weights)[..., None]
        d_rows, d_columns = own * columns[:, :, None], _added(own * rows, 2)
        if self.tokens == 1:
            return d_rows, d_columns, None
        levels = self.levels
        weights = jnp.where(_tables(self.tokens).masks, weights[:, None], 0.0)
        decayed_rows, decayed_columns = self._decayed(rows, columns)
        row_parts = matmul("lntgs,lnsd->lntgd", weights, decayed_columns)
        column_parts = matmul("lntgs,lntgd->lnsd", weights, decayed_rows)
        d_rows += _added(row_parts * levels[:, :, :, None], 1)
        d_columns += _added(column_parts * levels, 1)
        inside = _added(decayed_rows * row_parts, 3) + decayed_columns * column_parts
        return d_rows, d_columns, inside

    def _decayed(self, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows[:, None] * self.levels[:, :, :, None], columns[:, None] * self.levels

    def _inside(self, inside: jax.Array | None) -> jax.Array:
        if inside is None:
            return jnp.zeros_like(self.decays)
        table = _tables(self.tokens).levels.reshape(-1, self.tokens)
        return _sums(table.T, inside.reshape(inside.shape[0], -1, inside.shape[-1]))


def decay_of(decays: jax.Array | None) -> NoDecay:
    """The decay of a chunk with these log decays, `[l, c, d]` or `[l, c, 1]`."""
    if decays is None:
        return NoDecay()
    return ScalarDecay(decays) if decays.shape[-1] == 1 else ColumnDecay(decays)


class _Tables(NamedTuple):
    """The tokens whose decays are in each sum, as rows of ones and zeros, [.., c]."""

    start: np.ndarray  # [c, c]: for each token those up to and with it
    end: np.ndarray  # [c, c]: for each token those after it
    levels: np.ndarray  # [n, c, c]: for blocks of 2, 4, ..., c tokens, between token and middle
    masks: np.ndarray  # [n, c, 1, c]: the pairs across the middles of those blocks


def _sizes(tokens: int) -> list[int]:
    """The halves of the blocks of 2, 4, 8, ... tokens."""
    return [1 << level for level in range(tokens.bit_length() - 1)]


@functools.cache
def _tables(tokens: int) -> _Tables:
    token, other = np.arange(tokens)[:, None], np.arange(tokens)
    levels, masks = [], []
    for size in _sizes(tokens):
        upper = token // size % 2 == 1
        near = token // size == other // size
        levels.append(near & np.where(upper, other <= token, other > token))
        masks.append(upper & (token // size == other // size + 1))
    shape = (len(levels), tokens, tokens)
    return _Tables(
        (other <= token).astype(np.float32),
        (other > token).astype(np.float32),
        np.array(levels, np.float32).reshape(shape),
        np.array(masks, bool).reshape(shape)[:, :, None],
    )


def _causal(tokens: int) -> np.ndarray:
    return np.tri(tokens, dtype=bool)[:, None]


def _diagonal(tokens: int) -> np.ndarray:
    return np.eye(tokens, dtype=bool)[:, None]


def _own(weights: jax.Array) -> jax.Array:
    """[l, c, g, c] -> [l, c, g]: the weight of each token for itself."""
    return jnp.where(_diagonal(weights.shape[-1]), weights, 0.0).sum(-1)


def _sums(table: np.ndarray, x: jax.Array) -> jax.Array:
    """`table @ x`, as a matmul for each lane: the next matmul reads that order."""
    tables = jnp.broadcast_to(jnp.asarray(table, x.dtype), (x.shape[0], *table.shape))
    return matmul("lrt,ltd->lrd", tables, x)


def _added(x: jax.Array, axis: int) -> jax.Array:
    """The sum over a short axis, term by term: XLA fuses that with its neighbours."""
    terms = [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
    return functools.reduce(jnp.add, terms)


def _narrowed(x: jax.Array, width: int) -> jax.Array:
    """The sum over the columns where they share one decay."""
    return x if x.shape[-1] == width else x.sum(-1, keepdims=True)


class Chunk(NamedTuple):
    """The tokens of a chunk, or their gradients; l lanes, c tokens, g query heads of a key head.

    Attributes:
        query: [l, c, g, h], scaled.
        key: [l, c, h].
        value: [l, c, v].
        decays: [l, c, h or 1], logarithms; None: the rows of the state do not decay.
        value_decays: [l, c, v], likewise of its columns.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decays: jax.Array | None
    value_decays: jax.Array | None


def forward(chunk: Chunk, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output [l, c, g, v] of a chunk and the state [l, h, v] after it."""
    rows, columns = decay_of(chunk.decays), decay_of(chunk.value_decays)
    inside = columns.weighted_sum(rows.scores(chunk.query, chunk.key), chunk.value)
    before = columns.from_start(_read(rows.from_start(chunk.query), state))
    return inside + before, _advance(chunk, rows, columns, state)


def advance(chunk: Chunk, state: jax.Array) -> jax.Array:
    """The state after a chunk."""
    return _advance(chunk, decay_of(chunk.decays), decay_of(chunk.value_decays), state)


def backward(
    chunk: Chunk, state: jax.Array, d_out: jax.Array, d_after: jax.Array
) -> tuple[Chunk, jax.Array]:
    """The gradients of a chunk and of the state before it."""
    rows, columns = decay_of(chunk.decays), decay_of(chunk.value_decays)
    query, key, value = chunk.query, chunk.key, chunk.value

    weights, d_weights = rows.scores(query, key), columns.scores(d_out, value)
    d_query, d_key, rows_inside = rows.gradients(d_weights, query, key)
    _, d_value, columns_inside = columns.gradients(weights, d_out, value)

    decayed_query, decayed_d_out = rows.from_start(query), columns.from_start(d_out)
    d_decayed_query = matmul("ltgv,lhv->ltgh", decayed_d_out, state)
    d_query += rows.from_start(d_decayed_query)

    last_key, last_value = rows.to_end(key), columns.to_end(value)
    d_last_key = matmul("lsv,lhv->lsh", last_value, d_after)
    d_last_value = matmul("lsh,lhv->lsv", last_key, d_after)
    d_key += rows.to_end(d_last_key)
    d_value += columns.to_end(d_last_value)

    d_decayed = _decayed(d_after, rows, columns)
    d_state = d_decayed + matmul("ltgh,ltgv->lhv", decayed_query, decayed_d_out)
    kept = state * d_decayed
    d_decays = rows.decay_gradients(
        rows_inside,
        DecayGradients(
            (decayed_query * d_decayed_query).sum(2), last_key * d_last_key, kept.sum(2)
        ),
    )
    read = _read(decayed_query, state) if chunk.value_decays is not None else decayed_d_out
    d_value_decays = columns.decay_gradients(
        columns_inside,
        DecayGradients((read * decayed_d_out).sum(2), last_value * d_last_value, kept.sum(1)),
    )
    return Chunk(d_query, d_key, d_value, d_decays, d_value_decays), d_state


def _read(query: jax.Array, state: jax.Array) -> jax.Array:
    return matmul("ltgh,lhv->ltgv", query, state)


def _decayed(state: jax.Array, rows: NoDecay, columns: NoDecay) -> jax.Array:
    """A state [l, h, v] decayed over the whole chunk."""
    return columns.over_chunk(rows.over_chunk(state, 1), 2)


def _advance(chunk: Chunk, rows: NoDecay, columns: NoDecay, state: jax.Array) -> jax.Array:
    added = matmul("lsh,lsv->lhv", rows.to_end(chunk.key), columns.to_end(chunk.value))
    return _decayed(state, rows, columns) + added
