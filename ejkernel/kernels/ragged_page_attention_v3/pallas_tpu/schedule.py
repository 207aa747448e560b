"""The work list of a TPU kernel over pages, computed in XLA from traced lengths.

A work item is a tile of queries of one sequence. It visits blocks of that sequence's pages. The
page table stays in HBM; the kernel copies it in chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.mosaic_tpu.vectors import ArrayOrRef
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs

TABLE_CHUNK = 128  # entries of the page table that are copied at once, or a multiple of them
NO_PAGE = 1 << 30  # a bit of a table entry; the other bits are then 0, which is a valid page


class WorkList(NamedTuple):
    """The tiles of one kernel, in order; [tiles] each except the last.

    Attributes:
        sequence: the sequence of the queries.
        row: the first query among all queries of the call.
        rows: how many queries the tile has.
        position: the position of the first query within its sequence.
        begin: the first block of pages that one of them sees.
        end: one past the last such block.
        core_bounds: the first tile of each core, and one past the last tile, [cores + 1].
    """

    sequence: ArrayOrRef
    row: ArrayOrRef
    rows: ArrayOrRef
    position: ArrayOrRef
    begin: ArrayOrRef
    end: ArrayOrRef
    core_bounds: ArrayOrRef


def max_tiles(inputs: Inputs, tile_queries: int) -> int:
    """The most tiles that a call can have, whatever its lengths."""
    b, t = inputs.query.shape[:2]
    sequences = inputs.kv_lens.size
    if tile_queries == 1:
        return sequences
    return min(sequences * -(-t // tile_queries), b * t // tile_queries + sequences)


def work_list(
    inputs: Inputs,
    tile_queries: int,
    *,
    all_sequences: bool,
    block_positions: int,
    page_size: int,
    window: int | None,
    cores: int,
) -> WorkList:
    """The tiles of the sequences with several queries; with one query a tile, of the others.

    `all_sequences`: of all sequences.
    """
    b, t = inputs.query.shape[:2]
    starts = jnp.asarray(inputs.query_starts) + t * jnp.arange(b, dtype=jnp.int32)[:, None]
    lengths = jnp.clip(inputs.query_lens, 0, t)
    kv_lengths = jnp.minimum(inputs.kv_lens, inputs.page_indices.shape[-1] * page_size)
    starts, lengths, kv_lengths = (x.reshape(-1) for x in (starts, lengths, kv_lengths))
    # Queries before the first position see nothing and are left out.
    visible = jnp.minimum(lengths, jnp.maximum(kv_lengths, 0))
    starts = starts + lengths - visible

    listed = visible > 0
    if not all_sequences:
        listed &= (visible == 1) if tile_queries == 1 else (visible > 1)
    counts = jnp.where(listed, -(-visible // tile_queries), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(max_tiles(inputs, tile_queries), dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, ends.shape[0] - 1)
    skipped = (index - (ends - counts)[sequence]) * tile_queries
    rows = jnp.clip(visible[sequence] - skipped, 0, tile_queries)
    position = (kv_lengths - visible)[sequence] + skipped
    if window is None:
        begin = 0 * position
    else:
        begin = jnp.maximum(position - window + 1, 0) // block_positions
    end = jnp.maximum(position + rows - 1, 0) // block_positions + 1
    bounds = _core_bounds(jnp.where(index < ends[-1], end - begin, 0), ends[-1], cores)
    return WorkList(sequence, starts[sequence] + skipped, rows, position, begin, end, bounds)


def _core_bounds(blocks: jax.Array, count: jax.Array, cores: int) -> jax.Array:
    """Tiles for each core, with about as many blocks."""
    if cores == 1:
        return jnp.stack([jnp.zeros_like(count), count])
    done = jnp.cumsum(blocks, dtype=jnp.int32)
    shares = done[-1] * jnp.arange(1, cores, dtype=jnp.int32) // cores
    inner = jnp.searchsorted(done, shares, side="left").astype(jnp.int32)
    inner = jnp.minimum(inner, done.shape[0] - 1)
    # A tile across the border goes to the core that has the greater part of it.
    inner += (2 * done[inner] - blocks[inner] <= 2 * shares).astype(jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.minimum(inner, count), count[None]])


def flat_page_table(inputs: Inputs, block_pages: int, cache_pages: int) -> tuple[jax.Array, int]:
    """The page table of all sequences as one row, and how many entries each has."""
    table = jnp.asarray(inputs.page_indices)
    table = table.reshape(-1, table.shape[-1])
    table = jnp.where((table >= 0) & (table < cache_pages), table, NO_PAGE)
    missing = -table.shape[1] % max(TABLE_CHUNK, block_pages)
    table = jnp.pad(table, ((0, 0), (0, missing)), constant_values=NO_PAGE)
    return table.reshape(-1), table.shape[1]


def tiles_to_tokens(work: WorkList, tiles: jax.Array, tokens: int, fill: float) -> jax.Array:
    """The rows of all tiles, [tiles, size, n], as [tokens, n]; `fill` for tokens of no tile."""
    first_row, count = jnp.asarray(work.row), work.core_bounds[-1]
    index = jnp.arange(first_row.shape[0], dtype=jnp.int32)
    place = jnp.where(index < count, first_row, tokens)
    first = jnp.full(tokens, -1, jnp.int32).at[place].max(index, mode="drop")
    tile = jax.lax.cummax(first)
    offset = jnp.arange(tokens, dtype=jnp.int32) - first_row[tile]
    valid = (tile >= 0) & (offset < work.rows[tile])
    values = tiles[tile, jnp.where(valid, offset, 0)]
    return jnp.where(valid[:, None], values, fill)
