"""The work list of the TPU kernels: one grid step for every pair of a row tile and a group in it.

Groups need not begin where tiles do. A tile that several groups share is visited once for each of
them, in consecutive steps, so that its output block stays in VMEM until the last of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.grouped_matmul.layout import GroupLayout
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL

# The low bits of an entry of `packed`; the weight is stored above them.
_STATE, _IS_FIRST, _IS_LAST, _FLAG_BITS = 3, 4, 8, 4


class RowSchedule(NamedTuple):
    """A list of steps, of which the first `count` are to be made.

    Attributes:
        tile: the row tile of a step.
        packed: the weight, the state and the flags of a step; read it with `weight_of`, `state_of`,
            `is_first`, `is_continued` and `is_last`.
        source: the row tile that a step fetches; tile 0 where it needs none.
        starts: the first row of each weight.
        ends: one past the last row of each weight.
        count: how many steps there are.
    """

    tile: Int[Array, "i"]
    packed: Int[Array, "i"]
    source: Int[Array, "i"]
    starts: Int[Array, "e"]
    ends: Int[Array, "e"]
    count: Int[Array, ""]

    def scalars(self) -> tuple[jax.Array, ...]:
        """What is prefetched into scalar memory."""
        return self.tile, self.packed, self.source, self.starts, self.ends


def weight_of(packed: Ref, step: Index) -> jax.Array:
    """The weight of a step."""
    return lax.shift_right_logical(packed[step], _FLAG_BITS)


def state_of(packed: Ref, step: Index) -> jax.Array:
    """FULL if all rows of the tile belong to the weight, PARTIAL if some do, EMPTY if none does.

    A tile without a group, and a weight without rows, has one EMPTY step.
    """
    return packed[step] & _STATE


def is_first(packed: Ref, step: Index) -> jax.Array:
    """Whether a step is the first one of its tile, or of its weight in a list by weight."""
    return packed[step] & _IS_FIRST > 0


def is_continued(packed: Ref, step: Index) -> jax.Array:
    """Whether a step is not the first one of its tile or weight."""
    return packed[step] & _IS_FIRST == 0


def is_last(packed: Ref, step: Index) -> jax.Array:
    """Whether a step is the last one of its tile, or of its weight in a list by weight."""
    return packed[step] & _IS_LAST > 0


def max_steps(rows: int, weights: int, block: int) -> int:
    """A bound on the steps: every group but the first may begin within a tile."""
    return -(-rows // block) + weights - 1


def schedule_rows(
    layout: GroupLayout, rows: int, block: int, *, by_weight: bool = False
) -> RowSchedule:
    """Steps in the order of the tiles or, `by_weight`, of the weights; each has at least one."""
    starts, ends = _consistent_ranges(layout, rows)
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
    step = lax.iota(jnp.int32, max_steps(rows, weights, block))
    # Of several ranges that begin at the same step, all but the last are empty.
    of_step = jnp.searchsorted(begins, step, side="right").astype(jnp.int32) - 1
    tile = jnp.clip(first[of_step] + step - begins[of_step], 0, tiles - 1)
    weight = owner[of_step]
    low, high = tile * block, (tile + 1) * block
    some = used[weight] & (starts[weight] < high) & (low < ends[weight])
    every = (starts[weight] <= low) & (high <= ends[weight])
    state = jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY))
    count, key = steps.sum(dtype=jnp.int32), weight if by_weight else tile
    changes = key[1:] != key[:-1]
    first, last = jnp.pad(changes, (1, 0), constant_values=True), jnp.pad(changes, (0, 1))
    last |= step == count - 1
    packed = (weight << _FLAG_BITS) + jnp.where(last, _IS_LAST, 0)
    packed = packed + jnp.where(first, _IS_FIRST, 0) + state
    return RowSchedule(tile, packed, jnp.where(state == EMPTY, 0, tile), starts, ends, count)


def _consistent_ranges(layout: GroupLayout, rows: int) -> tuple[Int[Array, "e"], Int[Array, "e"]]:
    """Ranges that follow each other and stay inside, whatever sizes a traced call was given."""
    ends = lax.cummax(jnp.clip(layout.ends, 0, rows))
    previous = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return jnp.clip(layout.starts, previous, ends), ends
