"""The rows of a block of pages in registers: which token and head each holds, heads told apart."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.common.mosaic_tpu.vectors import LANES, VmemRef
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.configs import CacheLayout

INTERLEAVED = 16  # rows of two bytes in a register


def divmod_small(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of small integers; kernels have no integer division of vectors."""
    if divisor & (divisor - 1) == 0:
        quotient = jax.lax.shift_right_logical(x, divisor.bit_length() - 1)
    else:
        quotient = jnp.floor((x.astype(jnp.float32) + 0.5) * (1.0 / divisor)).astype(jnp.int32)
    return quotient, x - quotient * divisor


def shift_divide(x: Index, divisor: int) -> jax.Array:
    """`x // divisor` of what is not negative, by a power of two."""
    return jax.lax.shift_right_logical(x, divisor.bit_length() - 1)


def divide(x: Index, divisor: int) -> jax.Array:
    """`x // divisor` of what is not negative."""
    is_power = divisor & (divisor - 1) == 0
    return shift_divide(x, divisor) if is_power else jax.lax.div(x, divisor)


def broadcast_lanes(x: jax.Array, width: int) -> jax.Array:
    """[rows, LANES], the same in all lanes -> [rows, width]"""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def lane_sums(x: jax.Array) -> jax.Array:
    """Partial sums along the rows, one for each lane: [rows, columns] -> [rows, LANES]"""
    missing = -x.shape[1] % LANES
    if missing:
        x = jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], axis=1)
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    return functools.reduce(jnp.add, parts)


def column_to_lanes(x: jax.Array) -> jax.Array:
    """A column along the lanes: [rows, 1] -> [rows / LANES rounded up, LANES]"""
    shape = (LANES, LANES)
    diagonal = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(
        jnp.int32, shape, 1
    )
    rows = []
    for start in range(0, x.shape[0], LANES):
        part = x[start : start + LANES]
        count = part.shape[0]
        wide = jnp.where(diagonal[:count], jnp.broadcast_to(part, (count, LANES)), 0.0)
        rows.append(wide.sum(axis=0, keepdims=True))
    return jnp.concatenate(rows, axis=0)


def swap_halves(upper: jax.Array, lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lower 16 bits of two arrays of words, and the upper ones, as words again."""
    change = ((upper >> 16) ^ lower) & 0xFFFF
    return upper ^ (change << 16), lower ^ change


def interleaved(number: jax.Array) -> jax.Array:
    """The row that `swap_halves` puts in place `number`, for two registers of 8 words."""
    group, inside = divmod_small(number, INTERLEAVED)
    word, half = divmod_small(inside, 2)
    return group * INTERLEAVED + half * 8 + word


def _even_and_odd_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even and odd rows, of two bytes each, both in the order of `interleaved`."""
    width = rows.shape[1]
    words = pltpu.bitcast(rows, jnp.uint32).reshape(-1, 2, 8, width)
    even, odd = (
        pltpu.bitcast(x.reshape(-1, width), rows.dtype)
        for x in swap_halves(words[:, 0], words[:, 1])
    )
    return even, odd


def position_and_head(layout: CacheLayout, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Position and key head of a column of a packed block, by its number in stored order."""
    page, row = divmod_small(column, layout.page_size * layout.kv_heads)
    if layout.heads_first:
        head, slot = divmod_small(row, layout.page_size)
    else:
        slot, head = divmod_small(row, layout.kv_heads)
    return page * layout.page_size + slot, head


def slot_of_rows(layout: CacheLayout) -> jax.Array:
    """The slot of each row of a page, [*page_shape, 1]"""
    page, slots = layout.page_shape, layout.page_size
    if len(page) == 1:
        row = jax.lax.broadcasted_iota(jnp.int32, (*page, 1), 0)
        if layout.heads_first:
            return divmod_small(row, slots)[1]
        return divmod_small(row, layout.page_rows // slots)[0]
    return jax.lax.broadcasted_iota(jnp.int32, (*page, 1), 1 if layout.heads_first else 0)


def key_head_of_rows(layout: CacheLayout, rows: int, heads: int) -> jax.Array:
    """The key head of each row of a packed tile, [rows, 1]; a query has one row for each head."""
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return divmod_small(divmod_small(row, heads)[1], heads // layout.kv_heads)[0]


def values_of_head(
    layout: CacheLayout, values: jax.Array, start: Index, head: Index, is_interleaved: bool
) -> jax.Array:
    """The values of the columns from `start` on, 0 where they belong to another key head."""
    column = jax.lax.broadcasted_iota(jnp.int32, (values.shape[0], 1), 0) + start
    _, of_column = position_and_head(layout, interleaved(column) if is_interleaved else column)
    return jnp.where(of_column == head, values.astype(jnp.float32), 0.0).astype(values.dtype)


def split_combined(
    layout: CacheLayout, rows: jax.Array, interleave: bool
) -> tuple[jax.Array, jax.Array]:
    """Keys and values, from rows in which they alternate."""
    if interleave:
        return _even_and_odd_rows(rows)
    slots = layout.page_size if layout.heads_first else 1
    both = rows.reshape(-1, 2, slots, rows.shape[1])
    keys, values = (both[:, i].reshape(-1, rows.shape[1]) for i in range(2))
    return keys, values


def sort_by_head(layout: CacheLayout, x: jax.Array) -> jax.Array:
    """A block [pages, *page_shape, d] -> [heads, positions, d]"""
    heads, pages, width = layout.kv_heads * layout.rows_per_head, x.shape[0], x.shape[-1]
    if layout.heads_first:
        x = x.reshape(pages, heads, layout.page_size, width).swapaxes(0, 1)
        return x.reshape(heads, pages * layout.page_size, width)
    return x.reshape(pages * layout.page_size, heads, width).swapaxes(0, 1)


def sort_by_head_in_words(layout: CacheLayout, blocks: VmemRef, by_head: Ref, stage: Index) -> None:
    """The same for two heads at once, read as words; positions in the order of `interleaved`."""
    words, slots, pages = blocks.bitcast(jnp.uint32), layout.page_size, blocks.shape[1]
    pairs = layout.kv_heads * layout.rows_per_head // 2

    @pl.loop(0, pages, unroll=min(4, pages))
    def _(page: jax.Array):
        place = pl.ds(pl.multiple_of(page * slots, slots), slots)
        for pair in range(pairs):
            found = words[stage, page, pl.ds(pair, slots, stride=pairs)]
            found = found.reshape(-1, 2, 8, found.shape[-1])
            for i, half in enumerate(swap_halves(found[:, 0], found[:, 1])):
                half = half.reshape(slots // 2, half.shape[-1])
                by_head[2 * pair + i, place] = pltpu.bitcast(half, by_head.dtype)


def rows_by_part(x: jax.Array, parts: int) -> jax.Array:
    """[queries, n, d] -> [parts, rows, d]"""
    size, heads, width = x.shape
    if parts > 1:
        x = x.reshape(size, parts, heads // parts, width).swapaxes(0, 1)
    return x.reshape(parts, size * heads // parts, width)


def rows_by_query(x: jax.Array, queries: int) -> jax.Array:
    """[parts, rows, d] -> [queries, n, d]"""
    parts, rows, width = x.shape
    if parts > 1:
        x = x.reshape(parts, queries, rows // queries, width).swapaxes(0, 1)
    return x.reshape(queries, parts * rows // queries, width)
