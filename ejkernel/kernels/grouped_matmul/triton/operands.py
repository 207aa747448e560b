"""What the Triton kernels are given: compile-time constants, group offsets, the list of row tiles.

Offsets and tiles are computed on the device from traced sizes or ids; only bounds are static.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.kernels.grouped_matmul.inputs import Inputs, local_ids


@dataclasses.dataclass(frozen=True)
class GroupedMatmulStatic(StaticArguments):
    """The constants of a launch: a matmul of tiles [block_m, block_k] and [block_k, block_n].

    For `tgmm`, `m` and `n` are the two axes of a weight and `k` are rows.
    """

    m: int
    n: int
    k: int
    weights: int
    block_m: int
    block_n: int
    block_k: int
    max_tiles: int  # of rows
    raster_band: int  # row tiles whose programs are adjacent, so that they share weights in L2
    gathers: bool  # rows are read and written through `order`
    transposed: bool  # the weights are [n, k]
    has_existing: bool  # rows without a weight are copied from `existing`, else 0
    precision: str

    @property
    def n_blocks(self) -> int:
        return -(-self.n // self.block_n)

    @property
    def m_blocks(self) -> int:
        return -(-self.m // self.block_m)

    @property
    def uneven_m(self) -> bool:
        return self.m % self.block_m > 0

    @property
    def uneven_n(self) -> bool:
        return self.n % self.block_n > 0

    @property
    def uneven_k(self) -> bool:
        return self.k % self.block_k > 0


class GroupOffsets(NamedTuple):
    """Where the rows of each weight are, in the order of the weights.

    Attributes:
        offsets: where ranges of rows begin, and the end of the last: of the rows before the first
            weight, of each weight, of the rows after the last.
        order: the row at each sorted position; None: the rows are sorted already.
    """

    offsets: Int[Array, "ranges"]
    order: Int[Array, "m"] | None


def group_offsets(inputs: Inputs, batch: tuple[int, ...]) -> GroupOffsets:
    """The offsets of all groups, over all calls of a batch."""
    rows, weights = inputs.inputs.shape[-2], inputs.weights.shape[0]
    if not batch and inputs.group_sizes is not None:
        return GroupOffsets(_offsets_of_sizes(inputs, rows), None)
    local = jnp.broadcast_to(local_ids(inputs), (*batch, rows)).reshape(-1)
    total = local.shape[0]
    ids, order = lax.sort((local, lax.iota(jnp.int32, total)), num_keys=1)
    # `compare_all` is one kernel; a binary search would be a loop of them.
    firsts = jnp.searchsorted(ids, lax.iota(jnp.int32, weights + 1), method="compare_all")
    return GroupOffsets(_with_ends(0, firsts.astype(jnp.int32), total), order)


def _offsets_of_sizes(inputs: Inputs, rows: int) -> Int[Array, "ranges"]:
    sizes = jnp.asarray(inputs.group_sizes).astype(jnp.int32)
    first = 0 if inputs.groups is None else jnp.asarray(inputs.groups)[0].astype(jnp.int32)
    groups = first + lax.iota(jnp.int32, inputs.weights.shape[0] + 1)
    return _with_ends(0, jnp.minimum(_exclusive_sum(sizes, groups), rows), rows)


def _with_ends(first: int, middle: jax.Array, last: int) -> jax.Array:
    return jnp.pad(jnp.pad(middle, (1, 0), constant_values=first), (0, 1), constant_values=last)


def _exclusive_sum(x: Int[Array, "g"], index: Int[Array, "i"]) -> Int[Array, "i"]:
    """The sum of `x[:i]` for each of these, as one kernel."""
    earlier = lax.iota(jnp.int32, x.shape[0]) < index[:, None]
    return jnp.where(earlier, x, 0).sum(1, dtype=jnp.int32)


def max_tiles(rows: int, weights: int, block: int) -> int:
    """A bound on the tiles of `block` rows: each range of rows may have one that is not full."""
    ranges = min(weights + 2, rows)
    return (rows + ranges * (block - 1)) // block


def tile_list(offsets: Int[Array, "ranges"], block: int, count: int) -> Int[Array, "3 tiles"]:
    """For each tile the index of its weight (-1: none), its first row and the end of its rows.

    Tiles of one weight are adjacent. Entries after the last tile have no rows.
    """
    starts, ends = offsets[:-1], offsets[1:]
    ranges = starts.shape[0]
    counts = (ends - starts + block - 1) // block
    firsts = _exclusive_sum(counts, lax.iota(jnp.int32, ranges + 1))  # the last: of all tiles
    tile = lax.iota(jnp.int32, count)
    owner = (firsts[1:] <= tile[:, None]).sum(1, dtype=jnp.int32)
    exists = owner < ranges
    owner = jnp.minimum(owner, ranges - 1)
    start = starts[owner] + (tile - firsts[owner]) * block
    end = jnp.minimum(start + block, ends[owner])
    weight = jnp.where(owner == ranges - 1, -1, owner - 1)
    return jnp.stack([weight, jnp.where(exists, start, 0), jnp.where(exists, end, 0)])
