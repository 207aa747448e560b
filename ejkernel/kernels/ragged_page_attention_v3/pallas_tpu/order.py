"""The order of rows in a block of pages: which head stands where, and how heads are told apart."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.cache import Cache
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.vectors import (
    divided,
    shuffled,
    swapped_halves,
    taken_apart,
)


def place_of(cache: Cache, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Position and head of a column of a packed block, by its number when in order."""
    page, row = divided(column, cache.slots * cache.heads)
    if cache.heads_first:
        head, slot = divided(row, cache.slots)
    else:
        slot, head = divided(row, cache.heads)
    return page * cache.slots + slot, head


def head_of_rows(cache: Cache, rows: int, heads: int) -> jax.Array:
    """The key head of each row of a packed tile, [rows, 1]; a query has so many rows as heads."""
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return divided(divided(row, heads)[1], heads // cache.heads)[0]


def own_values(
    cache: Cache, values: jax.Array, start: Any, head: Any, out_of_order: bool
) -> jax.Array:
    """The values of a key head, and 0 for those of others; they are the columns from `start` on."""
    column = jax.lax.broadcasted_iota(jnp.int32, (values.shape[0], 1), 0) + start
    _, of_column = place_of(cache, shuffled(column) if out_of_order else column)
    return jnp.where(of_column == head, values.astype(jnp.float32), 0.0).astype(values.dtype)


def halves(cache: Cache, rows: jax.Array, out_of_order: bool) -> tuple[jax.Array, jax.Array]:
    """Keys and values apart, from rows of both in turn."""
    if out_of_order:
        return taken_apart(rows)
    slots = cache.slots if cache.heads_first else 1
    both = rows.reshape(-1, 2, slots, rows.shape[1])
    keys, values = (both[:, i].reshape(-1, rows.shape[1]) for i in range(2))
    return keys, values


def by_head(cache: Cache, x: jax.Array) -> jax.Array:
    """A block [pages, *page, d] -> [heads, positions, d]"""
    heads, pages, width = cache.heads * cache.parts, x.shape[0], x.shape[-1]
    if cache.heads_first:
        x = x.reshape(pages, heads, cache.slots, width).swapaxes(0, 1)
        return x.reshape(heads, pages * cache.slots, width)
    return x.reshape(pages * cache.slots, heads, width).swapaxes(0, 1)


def order_words(cache: Cache, blocks: Any, ordered: Any, slot: Any) -> None:
    """The same for two heads at once, read as words; positions in the order of `shuffled`."""
    words, slots, pages = blocks.bitcast(jnp.uint32), cache.slots, blocks.shape[1]
    pairs = cache.heads * cache.parts // 2

    @pl.loop(0, pages, unroll=min(4, pages))
    def _(page):
        place = pl.ds(pl.multiple_of(page * slots, slots), slots)
        for pair in range(pairs):
            found = words[slot, page, pl.ds(pair, slots, stride=pairs)]
            found = found.reshape(-1, 2, 8, found.shape[-1])
            for i, half in enumerate(swapped_halves(found[:, 0], found[:, 1])):
                half = half.reshape(slots // 2, half.shape[-1])
                ordered[2 * pair + i, place] = pltpu.bitcast(half, ordered.dtype)
