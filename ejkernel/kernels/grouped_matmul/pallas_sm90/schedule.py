"""The tile scheduler of the Hopper kernels: the list of row tiles, and the loop over tiles.

A row tile holds rows of one group only. The last tile of a group is moved back so that it ends with
the group, if the group has that many rows: the rows that two tiles compute get the same values, and
whole tiles are stored in one copy. Rows without a weight form groups too; their tiles have an empty
sum and give 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.refs import Index
from ejkernel.ops.platform import Device

TILE_FIELDS = 4


class TileSchedule(NamedTuple):
    """The row tiles of a call.

    Attributes:
        tiles: for each tile its weight (past the last: none), its first row, the first row that no
            tile before it computes, and the end of its group.
        tile_ends: the number of tiles up to and including each group; the last entry is their
            number.
    """

    tiles: Int[Array, "m 4"]
    tile_ends: Int[Array, "g"]


def schedule_tiles(
    starts: Int[Array, "e"], ends: Int[Array, "e"], rows: int, block: int
) -> TileSchedule:
    """The tiles of all groups, and of the rows before and after them."""
    weights = starts.shape[0]
    used = ends > starts
    first = jnp.min(jnp.where(used, starts, rows))
    last = jnp.maximum(jnp.max(jnp.where(used, ends, 0)), first)
    begin = jnp.concatenate([starts, jnp.stack([jnp.zeros_like(first), last])])
    end = jnp.concatenate([ends, jnp.stack([first, jnp.full_like(last, rows)])])
    size = jnp.maximum(end - begin, 0)
    tiles = (size + block - 1) // block
    # Sums over comparisons: XLA makes one small kernel of each, without a scan.
    index = lax.iota(jnp.int32, weights + 2)
    tile_ends = jnp.where(index[:, None] <= index, tiles[:, None], 0).sum(0)
    max_tiles = rows // block + min(weights + 2, rows)
    tile = lax.iota(jnp.int32, max_tiles)
    group = jnp.minimum((tile[:, None] >= tile_ends).sum(1, dtype=jnp.int32), weights + 1)
    own_start = begin[group] + (tile - (tile_ends - tiles)[group]) * block
    group_end = end[group]
    start = jnp.minimum(own_start, jnp.maximum(begin[group], group_end - block))
    return TileSchedule(jnp.stack([group, start, own_start, group_end], axis=1), tile_ends)


def tile_coordinates(
    index: Index, row_tiles: Index, column_tiles: int, band: int
) -> tuple[jax.Array, jax.Array]:
    """Row and column of tile `index`: bands of columns, in each of which row follows row."""
    if column_tiles <= band:
        return lax.div(index, column_tiles), lax.rem(index, column_tiles)
    size = row_tiles * band
    before = lax.div(index, size)
    rest = index - before * size
    width = jnp.minimum(band, column_tiles - before * band)
    row = lax.div(rest, width)
    return row, before * band + rest - row * width


def thread_blocks(max_tiles: int, device: Device) -> int:
    """Thread blocks of the persistent kernel: one for each multiprocessor, at most `max_tiles`."""
    return max(1, min(gpu.multiprocessors(device), max_tiles))


def specialise_over_tiles(
    consumers: int,
    for_each: Callable[[Callable[..., jax.Array]], None],
    load_tile: Callable[..., jax.Array],
    compute_tile: Callable[..., jax.Array],
) -> None:
    """The producer warpgroup runs `load_tile(step, *tile)` for every tile of `for_each`.

    The consumers run `compute_tile(warpgroup, step, *tile)`.
    """
    gpu.specialise_warpgroups(
        consumers,
        lambda: for_each(load_tile),
        lambda warpgroup: for_each(lambda *tile: compute_tile(warpgroup, *tile)),
    )


def for_each_tile(
    total: Index,
    blocks: int,
    read: Callable[[jax.Array], tuple[jax.Array, ...]],
    process: Callable[..., jax.Array],
) -> None:
    """`step = process(step, *read(tile))` for the tiles of this thread block.

    Each wave begins with another thread block: the last tile of a row, if it is smaller, does not
    always go to the same one. `read` runs a wave ahead, so that no tile begins with a wait.
    """
    block = lax.axis_index("block")
    tile_of = lambda wave: wave * blocks + lax.rem(block + wave, blocks)
    read_wave = lambda wave: read(jnp.minimum(tile_of(wave), total - 1))

    def one_wave(
        wave: jax.Array, carry: tuple[jax.Array, tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        step, tile = carry
        following = read_wave(wave + 1)
        return process(step, *tile), following

    full_waves = lax.div(total, blocks)
    waves = full_waves + jnp.where(tile_of(full_waves) < total, 1, 0)
    lax.fori_loop(0, waves, one_wave, (jnp.int32(0), read_wave(jnp.int32(0))))
