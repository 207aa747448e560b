"""How grouped matmul is cut on Hopper, and the list of its tiles, made on the device.

A tile has rows of one group alone. The last tile of a group is moved back to end where the group
ends, if the group has as many rows: what two tiles compute is the same, and whole tiles are stored
in one copy. Rows without a weight are groups too, of which there is nothing to add up: they come
out as 0.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.common import mosaic_gpu as gpu

# A warpgroup's matmul has 64 rows; a row of 128 bytes is the widest that shared memory interleaves.
ROWS = STEP = 64


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        block_m: rows of a tile: 64 for each warpgroup that computes, or fewer for a single one.
        block_n: columns of a tile, 128 or 256.
        stages: steps of 64 along k that are kept in flight.
        band: tiles of columns that are visited before the next rows, so that both stay in L2.
        buffers: pieces of the result, 128 bytes wide, that a warpgroup can have under way.
        pair: whether two blocks of threads compute tiles one below the other in step, each bringing
            half of the weights for both.
    """

    block_m: int
    block_n: int
    stages: int
    band: int = 8
    buffers: int = 2
    pair: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of threads that work on neighbouring tiles."""
        return 2 if self.pair else 1

    @property
    def rows(self) -> int:
        """Rows of the tiles that are computed together."""
        return self.block_m * self.blocks

    @property
    def consumers(self) -> int:
        return -(-self.block_m // ROWS)

    @property
    def shared_bytes(self) -> int:
        step = 2 * STEP * (self.consumers * ROWS + self.block_n)
        return self.stages * step + self.consumers * self.buffers * ROWS * 128


def fitting(
    block_m: int,
    block_n: int,
    stages: int = 8,
    band: int = 8,
    buffers: int = 2,
    pair: bool = False,
) -> Tiles:
    """Tiles of this size with as many stages as shared memory holds.

    >>> fitting(128, 256).stages, fitting(16, 256).stages
    (4, 5)
    """
    sizes = (Tiles(block_m, block_n, count, band, buffers, pair) for count in range(stages, 1, -1))
    fit = (tiles for tiles in sizes if tiles.shared_bytes <= gpu.SHARED_BYTES + 2048)
    return next(fit, Tiles(block_m, block_n, 2, band, buffers, pair))


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


def launch(most: int, tiles: Tiles) -> dict[str, Any]:
    """Blocks of threads that stay: one for each multiprocessor, unless there is less to do."""
    together: dict[str, Any] = {"cluster": (2,), "cluster_names": ("pair",)} if tiles.pair else {}
    return together | {
        "grid": (max(1, min(gpu.MULTIPROCESSORS // tiles.blocks, most)),),
        "grid_names": ("block",),
        "num_threads": tiles.consumers + 1,
        "thread_name": "warpgroup",
    }


def rank(tiles: Tiles) -> Any:
    """Which of a pair a block of threads is."""
    return lax.axis_index("pair") if tiles.pair else 0
