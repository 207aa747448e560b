"""What the Triton kernels are told of a call: where the rows of each weight stand, in which tiles.

All of it is made on the device from traced sizes or ids; only bounds on it are static.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.kernels.grouped_matmul.inputs import Inputs, local_ids


@dataclasses.dataclass(frozen=True)
class Mode(StaticArguments):
    """All that is static of a launch: a product of tiles [block_m, block_k] and [block_k, block_n].

    Of a sum over rows, `m` and `n` are the two axes of a weight and `k` are rows.
    """

    m: int
    n: int
    k: int
    weights: int
    block_m: int
    block_n: int
    block_k: int
    tiles: int  # of rows; a bound
    band: int  # tiles whose programs stand together, so that they share weights in the L2 cache
    gathers: bool  # rows stand where `order` says
    transposed: bool  # the weights are [n, k]
    existing: bool  # rows without a weight are those of an array, not 0
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


class Layout(NamedTuple):
    """Rows in the order of their weights, those without one before and behind.

    Attributes:
        edges: where the ranges of rows begin, and the end of the last: of the rows before the first
            weight, of each weight, of the rows behind.
        order: the row at each place; None: they come in this order.
    """

    edges: Int[Array, "edges"]
    order: Int[Array, "m"] | None


def lead_of(inputs: Inputs, d_out: Any = None) -> tuple[int, ...]:
    """The batch axis of calls that were joined, () for one call."""
    matrices = [x.shape[:-2] for x in (inputs.inputs, inputs.existing_out, d_out) if x is not None]
    vectors = [x.shape[:-1] for x in (inputs.group_ids, inputs.group_sizes) if x is not None]
    return jnp.broadcast_shapes(*matrices, *vectors)


def flat(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """All rows of all joined calls, [m, columns]."""
    if not lead:
        return x
    return jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, x.shape[-1])


def layout(inputs: Inputs, lead: tuple[int, ...]) -> Layout:
    """Where the rows of each weight are, all joined calls taken together."""
    rows, weights = inputs.inputs.shape[-2], inputs.weights.shape[0]
    if not lead and inputs.group_sizes is not None:
        return Layout(_edges_of_sizes(inputs, rows), None)
    local = jnp.broadcast_to(local_ids(inputs), (*lead, rows)).reshape(-1)
    total = local.shape[0]
    ids, order = lax.sort((local, lax.iota(jnp.int32, total)), num_keys=1)
    # Comparing with all is one kernel; a search would be a loop of them.
    firsts = jnp.searchsorted(ids, lax.iota(jnp.int32, weights + 1), method="compare_all")
    return Layout(_between(0, firsts.astype(jnp.int32), total), order)


def _edges_of_sizes(inputs: Inputs, rows: int) -> Int[Array, "edges"]:
    sizes = jnp.asarray(inputs.group_sizes).astype(jnp.int32)
    first = 0 if inputs.groups is None else jnp.asarray(inputs.groups)[0].astype(jnp.int32)
    own = first + lax.iota(jnp.int32, inputs.weights.shape[0] + 1)
    return _between(0, jnp.minimum(_sum_before(sizes, own), rows), rows)


def _between(first: int, middle: jax.Array, last: int) -> jax.Array:
    return jnp.pad(jnp.pad(middle, (1, 0), constant_values=first), (0, 1), constant_values=last)


def _sum_before(x: Int[Array, "g"], index: Int[Array, "i"]) -> Int[Array, "i"]:
    """The sum of `x[:i]` for each of these, as one kernel."""
    earlier = lax.iota(jnp.int32, x.shape[0]) < index[:, None]
    return jnp.where(earlier, x, 0).sum(1, dtype=jnp.int32)


def most_tiles(rows: int, weights: int, block: int) -> int:
    """A bound on the tiles of `block` rows: each range of rows may have one that is not full."""
    ranges = min(weights + 2, rows)
    return (rows + ranges * (block - 1)) // block


def tile_list(edges: Int[Array, "edges"], block: int, most: int) -> Int[Array, "3 tiles"]:
    """For each tile the index of its weight (-1: none), its first row and the end of its rows.

    Tiles of one weight stand together. What the list has room for beyond them has no rows.
    """
    starts, ends = edges[:-1], edges[1:]
    ranges = starts.shape[0]
    counts = (ends - starts + block - 1) // block
    firsts = _sum_before(counts, lax.iota(jnp.int32, ranges + 1))  # the last: of all tiles
    tile = lax.iota(jnp.int32, most)
    own = (firsts[1:] <= tile[:, None]).sum(1, dtype=jnp.int32)
    real = own < ranges
    own = jnp.minimum(own, ranges - 1)
    start = starts[own] + (tile - firsts[own]) * block
    end = jnp.minimum(start + block, ends[own])
    weight = jnp.where(own == ranges - 1, -1, own - 1)
    return jnp.stack([weight, jnp.where(real, start, 0), jnp.where(real, end, 0)])
