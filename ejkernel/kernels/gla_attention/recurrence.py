"""How a state fades from token to token within a chunk, with no decay ever divided by another.

Between tokens `s < t` a column of the state fades by `exp(a[s + 1] + ... + a[t])`. A chunk needs
this for all pairs of its tokens, between the rows and the columns of a matmul:

    scores[t, s] = sum over d of rows[t, d] * fade(s, t)[d] * columns[s, d]        (s <= t)

Splitting the fade into `exp(b[t]) * exp(-b[s])` with `b` the running sum overflows under strong
decays. Here pairs are sorted by the place that parts them: `s` and `t` lie in the two halves of one
aligned block of 2, 4, 8, ... tokens, and `fade = exp(from the middle to t) * exp(from s to the
middle)`. Both exponents are sums of neighbouring decays: none is positive where no decay is, and
none is a difference in which digits could be lost. The same holds for the gradients.

    rows     [l, c, g, d]   l lanes (batch rows times key heads), c tokens,
    columns  [l, c, d]      g query heads on a key head
    weights  [l, c, g, c]
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common.precision import matmul

# Stands for -inf, with which a sum of products with zeros would not be a number.
_LEAST = -1e30


class Slopes(NamedTuple):
    """Gradients of the logarithms of a chunk's fades: to the start, to the end, over all of it."""

    start: jax.Array
    end: jax.Array
    total: jax.Array


class Still:
    """No decay at all."""

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """The products of rows and columns, 0 ahead of the diagonal."""
        products = matmul("ltgd,lsd->ltgs", rows, columns)
        return jnp.where(_causal(products.shape[-1]), products, 0.0)

    def spread(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        """What the scores give for rows when weighted: sum over s of weights * fade * columns."""
        return matmul("ltgs,lsd->ltgd", weights, columns)

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple:
        """Gradients of the sum of weights * scores: for rows, columns, and what `slopes` takes."""
        return self.spread(weights, columns), matmul("ltgs,ltgd->lsd", weights, rows), None

    def from_start(self, x: jax.Array) -> jax.Array:
        """`x`, faded over the tokens from the start of the chunk through its own."""
        return x

    def to_end(self, x: jax.Array) -> jax.Array:
        """`x`, faded over the tokens after its own to the end of the chunk."""
        return x

    def over_all(self, state: jax.Array, axis: int) -> jax.Array:
        """A state, one of whose axes fades over the whole chunk."""
        return state

    def slopes(self, inside: Any, outside: Slopes) -> jax.Array | None:
        """The gradient of the decays."""
        return None


class Fading(Still):
    """Log decays `[l, c, d]`, d either the columns' or 1."""

    def __init__(self, decays: jax.Array):
        self.decays = jnp.maximum(decays, _LEAST)
        self.tokens = decays.shape[1]

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

    def over_all(self, state: jax.Array, axis: int) -> jax.Array:
        return state * jnp.expand_dims(self.start[:, -1], 3 - axis)

    def slopes(self, inside: Any, outside: Slopes) -> jax.Array | None:
        tables, width = _tables(self.tokens), self.decays.shape[-1]
        start, end, total = (_narrowed(x, width) for x in outside)
        return (
            self._inside(inside)
            + _sums(tables.start.T, start)
            + _sums(tables.end.T, end)
            + total[:, None]
        )

    def _inside(self, inside: Any) -> jax.Array:
        raise NotImplementedError


class Uniform(Fading):
    """One decay for all columns: pairs of tokens have one fade, and it multiplies the scores."""

    @functools.cached_property
    def pairs(self) -> jax.Array:
        """[l, c, 1, c]"""
        later = _tables(self.tokens).end.T  # [r, s]: r after s
        exponents = _sums(_tables(self.tokens).start, self.decays * later)
        return jnp.where(_causal(self.tokens), jnp.exp(exponents)[:, :, None], 0.0)

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return matmul("ltgd,lsd->ltgs", rows, columns) * self.pairs

    def spread(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        return matmul("ltgs,lsd->ltgd", weights * self.pairs, columns)

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple:
        faded = weights * self.pairs
        inside = (faded * matmul("ltgd,lsd->ltgs", rows, columns)).sum(2)
        d_rows = matmul("ltgs,lsd->ltgd", faded, columns)
        return d_rows, matmul("ltgs,ltgd->lsd", faded, rows), inside

    def _inside(self, inside: Any) -> jax.Array:
        """[l, t, s] -> [l, r, 1]: a decay counts for the pairs on its two sides."""
        tables = _tables(self.tokens)
        below = _sums(tables.start.T, inside)  # [l, r, s]: the sum over t >= r
        return jnp.where(tables.end.T > 0, below, 0.0).sum(-1, keepdims=True)


class Columnwise(Fading):
    """A decay of its own for every column: one matmul for each size of block."""

    @functools.cached_property
    def levels(self) -> jax.Array:
        """[l, n, c, d]: in the upper half of a block from its middle, in the lower half to it."""
        tables = _tables(self.tokens)
        fades = jnp.exp(_sums(tables.levels.reshape(-1, self.tokens), self.decays))
        return fades.reshape(fades.shape[0], -1, self.tokens, fades.shape[-1])

    def scores(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        own = (rows * columns[:, :, None]).sum(-1, keepdims=True)
        scores = jnp.where(_diagonal(self.tokens), own, 0.0)
        if self.tokens == 1:
            return scores
        faded_rows, faded_columns = self._faded(rows, columns)
        products = matmul("lntgd,lnsd->lntgs", faded_rows, faded_columns)
        masks = _tables(self.tokens).masks
        return scores + _added(jnp.where(masks, products, 0.0), 1)

    def spread(self, weights: jax.Array, columns: jax.Array) -> jax.Array:
        result = _own(weights)[..., None] * columns[:, :, None]
        if self.tokens == 1:
            return result
        weights = jnp.where(_tables(self.tokens).masks, weights[:, None], 0.0)
        parts = matmul("lntgs,lnsd->lntgd", weights, columns[:, None] * self.levels)
        return result + _added(parts * self.levels[:, :, :, None], 1)

    def gradients(self, weights: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple:
        own = _own(weights)[..., None]
        d_rows, d_columns = own * columns[:, :, None], _added(own * rows, 2)
        if self.tokens == 1:
            return d_rows, d_columns, None
        levels = self.levels
        weights = jnp.where(_tables(self.tokens).masks, weights[:, None], 0.0)
        faded_rows, faded_columns = self._faded(rows, columns)
        row_parts = matmul("lntgs,lnsd->lntgd", weights, faded_columns)
        column_parts = matmul("lntgs,lntgd->lnsd", weights, faded_rows)
        d_rows += _added(row_parts * levels[:, :, :, None], 1)
        d_columns += _added(column_parts * levels, 1)
        inside = _added(faded_rows * row_parts, 3) + faded_columns * column_parts
        return d_rows, d_columns, inside

    def _faded(self, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows[:, None] * self.levels[:, :, :, None], columns[:, None] * self.levels

    def _inside(self, inside: Any) -> jax.Array:
        if inside is None:
            return jnp.zeros_like(self.decays)
        table = _tables(self.tokens).levels.reshape(-1, self.tokens)
        return _sums(table.T, inside.reshape(inside.shape[0], -1, inside.shape[-1]))


def fading(decays: jax.Array | None) -> Still:
    """How a chunk fades whose log decays are these, `[l, c, d]` or `[l, c, 1]`."""
    if decays is None:
        return Still()
    return Uniform(decays) if decays.shape[-1] == 1 else Columnwise(decays)


class _Tables(NamedTuple):
    """Which tokens' decays are in which sum, as rows of ones and zeros, [.., c]."""

    start: np.ndarray  # [c, c]: for each token those up to and with it
    end: np.ndarray  # [c, c]: for each token those after it
    levels: np.ndarray  # [n, c, c]: for blocks of 2, 4, ..., c tokens, between token and middle
    masks: np.ndarray  # [n, c, 1, c]: the pairs that the middles of those blocks part


@functools.cache
def _tables(tokens: int) -> _Tables:
    token, other = np.arange(tokens)[:, None], np.arange(tokens)
    levels, masks = [], []
    for size in (1 << level for level in range(tokens.bit_length() - 1)):
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
    """`table @ x`, as a matmul for each lane: its result lies the way the next one reads it."""
    tables = jnp.broadcast_to(jnp.asarray(table, x.dtype), (x.shape[0], *table.shape))
    return matmul("lrt,ltd->lrd", tables, x)


def _added(x: jax.Array, axis: int) -> jax.Array:
    """The sum over a short axis, term by term: XLA makes that part of whatever it stands in."""
    terms = [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
    return functools.reduce(jnp.add, terms)


def _narrowed(x: jax.Array, width: int) -> jax.Array:
    """The sum over the columns where they share one decay."""
    return x if x.shape[-1] == width else x.sum(-1, keepdims=True)
