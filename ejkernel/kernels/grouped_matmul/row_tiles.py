"""The tiles of rows that a kernel visits: one step for every pair of a tile and a group in it.

Groups need not begin where tiles do. A tile in which several groups meet is visited once for each
of them, one after the other, so that what it writes stays where it is until the last of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.grouped_matmul.layout import Layout
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL

STATE, FIRST, LAST, FLAGS = 3, 4, 8, 4


class RowTiles(NamedTuple):
    """A list of steps, of which the first `count` are to be made.

    Attributes:
        tile: the tile of rows of a step.
        packed: the weight of a step, above `FLAGS` bits. Two are its state: all rows of the tile
            belong to the weight, some, or none. The last stands for a tile, or a weight, that has
            nothing else. `FIRST` and `LAST` tell the first and last step of a tile or weight.
        source: the tile that a step needs; where it needs none, always the same.
        starts: the first row of each weight.
        ends: the row after its last.
        count: how many steps there are.
    """

    tile: Int[Array, "i"]
    packed: Int[Array, "i"]
    source: Int[Array, "i"]
    starts: Int[Array, "e"]
    ends: Int[Array, "e"]
    count: Any

    def scalars(self) -> tuple[jax.Array, ...]:
        """What goes into scalar memory."""
        return self.tile, self.packed, self.source, self.starts, self.ends


def most_steps(rows: int, weights: int, block: int) -> int:
    """Every group but the first may begin within a tile."""
    return -(-rows // block) + weights - 1


def row_tiles(layout: Layout, rows: int, block: int, *, by_weight: bool = False) -> RowTiles:
    """Steps in the order of the tiles, each of which has one or, `by_weight`, of the weights."""
    starts, ends = _in_order(layout, rows)
    weights, tiles = starts.shape[0], -(-rows // block)
    used = ends > starts
    first = jnp.minimum(starts // block, tiles - 1)
    steps = jnp.where(used, (ends - 1) // block - first + 1, 0)
    owner = lax.iota(jnp.int32, weights)
    if by_weight:
        steps = jnp.maximum(steps, 1)
    else:
        before = jnp.min(jnp.where(used, first, tiles), keepdims=True)
        after = jnp.max(jnp.where(used, first + steps, before), keepdims=True)
        nothing = jnp.zeros_like(before)
        first = jnp.concatenate([nothing, first, after])
        steps = jnp.concatenate([before, steps, tiles - after])
        owner = jnp.concatenate([owner[:1], owner, owner[-1:]])
    begins = jnp.cumsum(steps, dtype=jnp.int32) - steps
    step = lax.iota(jnp.int32, most_steps(rows, weights, block))
    of_step = jnp.searchsorted(begins, step, side="right").astype(jnp.int32) - 1
    # Of those that begin at the same step all but the last have none.
    tile = jnp.clip(first[of_step] + step - begins[of_step], 0, tiles - 1)
    weight = owner[of_step]
    low, high = tile * block, (tile + 1) * block
    some = used[weight] & (starts[weight] < high) & (low < ends[weight])
    every = (starts[weight] <= low) & (high <= ends[weight])
    state = jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY))
    count, mine = steps.sum(dtype=jnp.int32), weight if by_weight else tile
    changes = mine[1:] != mine[:-1]
    first, last = jnp.pad(changes, (1, 0), constant_values=True), jnp.pad(changes, (0, 1))
    last |= step == count - 1
    packed = (weight << FLAGS) + jnp.where(last, LAST, 0) + jnp.where(first, FIRST, 0) + state
    return RowTiles(tile, packed, jnp.where(state == EMPTY, 0, tile), starts, ends, count)


def _in_order(layout: Layout, rows: int) -> tuple[jax.Array, jax.Array]:
    """Ranges that follow each other, whatever sizes a traced call was given."""
    ends = lax.cummax(jnp.clip(layout.ends, 0, rows))
    behind = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return jnp.clip(layout.starts, behind, ends), ends
