"""Numbers, slices and blocks: the small array work that rules share."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.types.rule_tree import is_array

# A number or position that is known when the mask is made, or only when the program runs.
Index = int | np.integer | jax.Array

# The first query or key of a rectangle: static, traced, or one per batch row `[b]`.
Start = int | jax.Array

# What stands beyond the end of an array.
Fill = bool | int | np.integer

# A bound beyond any length. The sum of two such bounds, or of one and an index, fits in int32.
LARGE = 2**30 - 1


@dataclasses.dataclass(frozen=True)
class Grid:
    """A mask cut into blocks: where each block begins and ends."""

    q_len: int
    kv_len: int
    block_q: int
    block_k: int

    def q_ends(self) -> tuple[jax.Array, jax.Array]:
        """First and last query of each block, `[nq, 1]`."""
        first, last = _ends(self.q_len, self.block_q)
        return first[:, None], last[:, None]

    def k_ends(self) -> tuple[jax.Array, jax.Array]:
        """First and last key of each block, `[1, nk]`."""
        first, last = _ends(self.kv_len, self.block_k)
        return first[None, :], last[None, :]


def per_row(number: Index) -> Index:
    """A number shaped against `[..., n, q, k]`; an array has one entry per batch row."""
    return number[..., None, None, None] if is_array(number) else number


def shift(number: Index | None, by: Index) -> Index | None:
    """`bounded(number) + by`, static where both are; None, an open bound, stays None."""
    return None if number is None else bounded(number) + by


def bounded(number: Index) -> Index:
    """`number` clipped to +-`LARGE`, so that adding an index cannot overflow int32."""
    if is_array(number):
        return jnp.clip(number, -LARGE, LARGE)
    return max(-LARGE, min(LARGE, number))


def take(
    values: jax.Array, start: Start, length: int, axis: int, fill: Fill, row_rank: int = 1
) -> jax.Array:
    """`values[start:start + length]` along a negative `axis`, `fill` beyond the end.

    Args:
        values: an array whose last `row_rank` axes belong to one batch row.
        start: where to begin; with one start per batch row, each row begins at its own.
        length: how many to take.
        axis: along which axis, counted from the end.
        fill: what lies beyond the end.
        row_rank: rank of `values` without a batch axis.

    Returns:
        The values, with a batch axis if either argument has one.
    """
    if not isinstance(start, int) and start.ndim == 1:
        row = values.shape[values.ndim - row_rank :]
        rows = jnp.broadcast_to(values, (start.shape[0], *row))
        return jax.vmap(lambda row, at: take(row, at, length, axis, fill))(rows, start)
    axis += values.ndim
    extent = values.shape[axis]
    if isinstance(start, int):
        begin, end = min(start, extent), min(start + length, extent)
        inside = lax.slice_in_dim(values, begin, end, axis=axis)
        return _extend(inside, length - (end - begin), axis, fill)
    if extent < length:
        values = _extend(values, length - extent, axis, fill)
        extent = length
    if extent % length == 0:
        return lax.dynamic_slice_in_dim(values, start, length, axis)
    # A tile that runs over the edge: take the last full one and move it into place.
    inside_start = jnp.minimum(start, extent - length)
    tile = lax.dynamic_slice_in_dim(values, inside_start, length, axis)
    tile = _extend(tile, length, axis, fill)
    return lax.dynamic_slice_in_dim(tile, start - inside_start, length, axis)


def cut(values: jax.Array, block: int) -> jax.Array:
    """The last axis cut into blocks, `[..., blocks, block]`, the last value repeated."""
    if values.shape[-1] == 0:
        return values.reshape(*values.shape[:-1], 0, block)
    missing = -values.shape[-1] % block
    padding = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    return jnp.pad(values, padding, mode="edge").reshape(*values.shape[:-1], -1, block)


def _extend(values: jax.Array, by: int, axis: int, fill: Fill) -> jax.Array:
    if by == 0:
        return values
    padding = [(0, 0)] * values.ndim
    padding[axis] = (0, by)
    return jnp.pad(values, padding, constant_values=fill)


def index_or_first(value: jax.Array, b: Index) -> jax.Array:
    """Row `b` of `value`; a single row is shared by every `b`."""
    if value.shape[0] == 1:
        return value[0]
    if isinstance(b, int):
        return value[b]
    return lax.dynamic_index_in_dim(value, b, axis=0, keepdims=False)


def head_of(mask: jax.Array, n: Index) -> jax.Array:
    """Head `n` of `[..., n, q, k]`; a single head is shared by every `n`."""
    if mask.shape[-3] == 1:
        return mask
    return lax.dynamic_slice_in_dim(mask, n, 1, mask.ndim - 3)


def as_start(start: Index) -> Start:
    """A start as a Python int if it is known, else as an int32 array."""
    return (
        operator.index(start)
        if isinstance(start, int | np.integer)
        else jnp.asarray(start, jnp.int32)
    )


def _ends(length: int, block: int) -> tuple[jax.Array, jax.Array]:
    first = jnp.arange(0, length, block, dtype=jnp.int32)
    return first, jnp.minimum(first + block, length) - 1
