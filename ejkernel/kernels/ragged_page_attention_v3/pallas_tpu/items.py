"""The work of a TPU kernel over pages, listed in XLA from traced lengths: tiles of queries.

A tile is some queries of one sequence that see something; it visits blocks of that sequence's
pages. The table of pages stays in HBM, in pieces that a kernel copies as it goes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs

PIECE = 128  # entries of the table that are copied at once, or a multiple of them
NO_PAGE = 1 << 30  # a bit of a table's entry; the others are then 0, a page that is there


class Items(NamedTuple):
    """The tiles of one kernel, in order; [tiles] each but for the last.

    Attributes:
        sequence: whose queries these are.
        row: where they begin among all queries.
        rows: how many they are.
        first: the position of the first within its sequence.
        begin: the first block of pages that one of them sees.
        end: the block behind the last.
        bounds: which tiles each core works on, [cores + 1].
    """

    sequence: jax.Array
    row: jax.Array
    rows: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array
    bounds: jax.Array


def most_items(inputs: Inputs, size: int) -> int:
    """How many tiles of this size a call can have."""
    b, t = inputs.query.shape[:2]
    sequences = inputs.kv_lens.size
    return sequences if size == 1 else min(sequences * -(-t // size), b * t // size + sequences)


def items(
    inputs: Inputs,
    size: int,
    *,
    alone: bool,
    block: int,
    slots: int,
    window: int | None,
    cores: int,
) -> Items:
    """The tiles of `size` queries of all sequences with several queries; size 1: of the others.

    `alone`: of all sequences. A block has `block` positions, a page `slots`.
    """
    b, t = inputs.query.shape[:2]
    starts = jnp.asarray(inputs.query_starts) + t * jnp.arange(b, dtype=jnp.int32)[:, None]
    lengths = jnp.clip(inputs.query_lens, 0, t)
    kv_lengths = jnp.minimum(inputs.kv_lens, inputs.page_indices.shape[-1] * slots)
    starts, lengths, kv_lengths = (x.reshape(-1) for x in (starts, lengths, kv_lengths))
    # Queries before the first position see nothing and are left out.
    left = jnp.minimum(lengths, jnp.maximum(kv_lengths, 0))
    starts = starts + lengths - left

    fits = left > 0
    if not alone:
        fits &= (left == 1) if size == 1 else (left > 1)
    counts = jnp.where(fits, -(-left // size), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(most_items(inputs, size), dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, ends.shape[0] - 1)
    skipped = (index - (ends - counts)[sequence]) * size
    rows = jnp.clip(left[sequence] - skipped, 0, size)
    first = (kv_lengths - left)[sequence] + skipped
    begin = 0 * first if window is None else jnp.maximum(first - window + 1, 0) // block
    end = jnp.maximum(first + rows - 1, 0) // block + 1
    bounds = _bounds(jnp.where(index < ends[-1], end - begin, 0), ends[-1], cores)
    return Items(sequence, starts[sequence] + skipped, rows, first, begin, end, bounds)


def _bounds(blocks: jax.Array, count: jax.Array, cores: int) -> jax.Array:
    """Shares of about as many blocks for each core."""
    if cores == 1:
        return jnp.stack([jnp.zeros_like(count), count])
    done = jnp.cumsum(blocks, dtype=jnp.int32)
    shares = done[-1] * jnp.arange(1, cores, dtype=jnp.int32) // cores
    inner = jnp.searchsorted(done, shares, side="left").astype(jnp.int32)
    inner = jnp.minimum(inner, done.shape[0] - 1)
    # The tile that lies on the border goes where the greater part of it would.
    inner += (2 * done[inner] - blocks[inner] <= 2 * shares).astype(jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.minimum(inner, count), count[None]])


def flat_table(inputs: Inputs, pages: int, cache_pages: int) -> tuple[jax.Array, int]:
    """The table in one row, and how many entries of it a sequence has.

    `pages` are those of a block, `cache_pages` those of the cache.
    """
    table = jnp.asarray(inputs.page_indices)
    table = table.reshape(-1, table.shape[-1])
    table = jnp.where((table >= 0) & (table < cache_pages), table, NO_PAGE)
    missing = -table.shape[1] % max(PIECE, pages)
    table = jnp.pad(table, ((0, 0), (0, missing)), constant_values=NO_PAGE)
    return table.reshape(-1), table.shape[1]


def of_tokens(items: Items, by_item: jax.Array, tokens: int, fill: float) -> jax.Array:
    """What the tiles hold for their rows, [tiles, size, n], as [tokens, n]; `fill` for the rest."""
    count = items.bounds[-1]
    index = jnp.arange(items.row.shape[0], dtype=jnp.int32)
    place = jnp.where(index < count, items.row, tokens)
    begun = jnp.full(tokens, -1, jnp.int32).at[place].max(index, mode="drop")
    item = jax.lax.cummax(begun)
    offset = jnp.arange(tokens, dtype=jnp.int32) - items.row[item]
    there = (item >= 0) & (offset < items.rows[item])
    values = by_item[item, jnp.where(there, offset, 0)]
    return jnp.where(there[:, None], values, fill)
