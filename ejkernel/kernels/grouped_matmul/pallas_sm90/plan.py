"""How grouped matmul is cut on Hopper, and the list of its tiles, made on the device.

A tile has rows of one group alone. The last tile of a group is moved back to end where the group
ends, if the group has as many rows: what two tiles compute is the same, and whole tiles are stored
in one copy. Rows without a weight are groups too, of which there is nothing to add up: they come
out as 0.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.ops.platform import Device

# A warpgroup's matmul has 64 rows; a row of 128 bytes is the widest that shared memory interleaves.
ROWS = STEP = 64
# Shared memory that is left for barriers.
_BARRIER_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        block_m: rows of a tile: 64 for each warpgroup that computes, or fewer for a single one.
        block_n: columns of a tile, 128 or 256.
        stages: steps of 64 along k that are kept in flight.
        band: tiles of columns that are visited before the next rows, so that both stay in L2.
        buffers: pieces of the result, 128 bytes wide, that a warpgroup can have under way.
    """

    block_m: int
    block_n: int
    stages: int
    band: int = 8
    buffers: int = 2

    @property
    def consumers(self) -> int:
        return -(-self.block_m // ROWS)

    @property
    def shared_bytes(self) -> int:
        step = 2 * STEP * (self.consumers * ROWS + self.block_n)
        return self.stages * step + self.consumers * self.buffers * ROWS * 128


def fitting(block_m: int, block_n: int, stages: int = 8, band: int = 8) -> Tiles:
    """Tiles of this size with as many stages, then as much room for results, as memory holds.

    >>> fitting(128, 256)
    Tiles(block_m=128, block_n=256, stages=4, band=8, buffers=2)
    >>> fitting(128, 256, stages=3).buffers
    4
    """
    room = gpu.SHARED_MEMORY - _BARRIER_BYTES
    pieces = block_n // ROWS
    for count in range(stages, 1, -1):
        sizes = (Tiles(block_m, block_n, count, band, buffers) for buffers in (pieces, 2))
        if fit := [tiles for tiles in sizes if tiles.shared_bytes <= room]:
            return fit[0]
    return Tiles(block_m, block_n, 2, band)


class Plan(NamedTuple):
    """The tiles of rows: for each its weight, where it is cut, its first own row, where it ends.

    Attributes:
        tiles: [most tiles, 4]; a weight past the last stands for none.
        passed: how many there are up to each group; the last says how many in all.
    """

    tiles: Int[Array, "m 4"]
    passed: Int[Array, "g"]


def plan(starts: Int[Array, "e"], ends: Int[Array, "e"], rows: int, block: int) -> Plan:
    """The tiles of all groups, and of the rows before and after them."""
    weights = starts.shape[0]
    busy = ends > starts
    first = jnp.min(jnp.where(busy, starts, rows))
    last = jnp.maximum(jnp.max(jnp.where(busy, ends, 0)), first)
    begin = jnp.concatenate([starts, jnp.stack([jnp.zeros_like(first), last])])
    end = jnp.concatenate([ends, jnp.stack([first, jnp.full_like(last, rows)])])
    size = jnp.maximum(end - begin, 0)
    tiles = (size + block - 1) // block
    # Sums over a comparison: XLA makes one small kernel of each, and no scan.
    upto = lax.iota(jnp.int32, weights + 2)
    passed = jnp.where(upto[:, None] <= upto, tiles[:, None], 0).sum(0)
    most = rows // block + min(weights + 2, rows)
    index = lax.iota(jnp.int32, most)
    group = jnp.minimum((index[:, None] >= passed).sum(1, dtype=jnp.int32), weights + 1)
    own = begin[group] + (index - (passed - tiles)[group]) * block
    stop = end[group]
    at = jnp.minimum(own, jnp.maximum(begin[group], stop - block))
    return Plan(jnp.stack([group, at, own, stop], axis=1), passed)


def place(index: Any, lines: Any, columns: int, band: int) -> tuple[Any, Any]:
    """Row and column of tile `index`: bands of columns, in each of which row follows row."""
    if columns <= band:
        return lax.div(index, columns), lax.rem(index, columns)
    size = lines * band
    before = lax.div(index, size)
    rest = index - before * size
    width = jnp.minimum(band, columns - before * band)
    line = lax.div(rest, width)
    return line, before * band + rest - line * width


def thread_blocks(most: int, device: Device) -> int:
    """Thread blocks of the persistent kernel: one for each multiprocessor, at most `most`."""
    return max(1, min(gpu.multiprocessors(device), most))


def each_tile(
    total: Any, grid: int, find: Callable[[Any], tuple], program: Callable[..., Any]
) -> None:
    """`step = program(step, *find(index))` for the tiles of this block of threads.

    Each lap begins with another block: the last tile of a line, if it is smaller, is not always
    the same one's. What `find` reads is read a lap ahead, so that no tile begins with waiting.
    """
    block = lax.axis_index("block")
    before = lambda lap: lap * grid + lax.rem(block + lap, grid)
    known = lambda lap: find(jnp.minimum(before(lap), total - 1))

    def one(lap, carry):
        step, tile = carry
        following = known(lap + 1)
        return program(step, *tile), following

    whole = lax.div(total, grid)
    laps = whole + jnp.where(before(whole) < total, 1, 0)
    lax.fori_loop(0, laps, one, (jnp.int32(0), known(jnp.int32(0))))
