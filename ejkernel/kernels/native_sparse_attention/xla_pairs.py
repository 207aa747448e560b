"""The lists of blocks of all tokens inverted: for every block of keys the tokens that chose it.

A row is cut into chunks of tokens. The pairs (token, block) of a chunk are sorted by block, and the
pairs of each block are cut into tiles: `block_q` tokens against one block of keys, which is large
enough for an efficient matmul. The results of the tiles are written to a buffer in the order of the
sorted pairs, and each token then gathers the results of its own pairs.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.native_sparse_attention import geometry
from ejkernel.kernels.native_sparse_attention.inputs import Inputs, Spec

# Numbers in the buffer of a chunk: more cost memory and leave the cache of a CPU.
_LARGEST_BUFFER = 1 << 23
_UNROLLED = 8

Carry = TypeVar("Carry")


class Pairs(NamedTuple):
    """The pairs of one chunk, sorted by block; arrays over them are padded by a tile."""

    token: Int[Array, "pairs"]  # counted from the start of the chunk
    begin: Int[Array, "pairs"]  # the first key of the pair's block
    block: Int[Array, "pairs"]  # a number for each block, beyond all others for a pair of no use
    useful: Bool[Array, "pairs"]
    tiles: Int[Array, "tiles"]  # the first pair of each tile
    tile_count: Int[Array, ""]
    place: Int[Array, "slots tokens"]  # where the pairs of each token are
    used: Bool[Array, "slots tokens"]


class PairTile(NamedTuple):
    """Some tokens and their block of keys; entries that are not `useful` are padding."""

    first: Int[Array, ""]
    begin: Int[Array, ""]
    token: Int[Array, "rows"]
    useful: Bool[Array, "rows"]


@dataclasses.dataclass(frozen=True)
class PairSizes:
    """The static sizes of a call; a unit is one key head of one batch row."""

    batch: int
    length: int  # tokens that choose
    keys: int  # tokens in all
    heads: int  # key heads
    group: int  # query heads of each
    slots: int  # blocks in the list of a token
    block_size: int
    rows: int  # tokens in a tile
    chunk: int  # tokens in a chunk
    blocks: int  # no block has a number as high as this

    @property
    def units(self) -> int:
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def pairs(self) -> int:
        return self.chunk * self.slots

    def split_tokens(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """[b, t, heads of both kinds, ...] -> [units, chunks, chunk, everything of a key head]."""
        b, t = x.shape[:2]
        x = x.reshape(b, t, self.heads, -1)
        if missing := self.chunks * self.chunk - t:
            x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=fill)
        x = jnp.moveaxis(x, 2, 1)
        return x.reshape(self.units, self.chunks, self.chunk, -1)

    def join_tokens(self, x: jax.Array) -> jax.Array:
        """[units * chunks, chunk, group * d] -> [b, t, n, d]."""
        x = x.reshape(self.batch, self.heads, self.chunks * self.chunk, self.group, -1)
        x = jnp.moveaxis(x, 1, 2)[:, : self.length]
        return x.reshape(self.batch, self.length, self.heads * self.group, -1)

    def split_keys(self, x: jax.Array) -> jax.Array:
        """[b, keys, k, d] -> [units, keys and a block of padding, d]."""
        x = jnp.moveaxis(jnp.pad(x, ((0, 0), (0, self.block_size), (0, 0), (0, 0))), 2, 1)
        return x.reshape(self.units, *x.shape[2:])

    def join_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of `split_keys`."""
        x = x[:, : self.keys].reshape(self.batch, self.heads, self.keys, -1)
        return jnp.moveaxis(x, 1, 2)


def pair_sizes(inputs: Inputs, spec: Spec, block_q: int) -> PairSizes:
    """The sizes of a call in tiles of `block_q` tokens."""
    batch, length, heads = inputs.query.shape[:3]
    kv_heads, slots = inputs.block_indices.shape[2:]
    group, widest = heads // kv_heads, max(inputs.key.shape[3], inputs.value.shape[3])
    sequences = 1 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    keys = inputs.key.shape[1]
    blocks = -(-keys // spec.block_size) + sequences
    # Enough tokens to fill a tile of each block, if they choose evenly.
    chunk = block_q * max(8, -(-blocks // slots))
    most = min(_LARGEST_BUFFER // (group * widest), (2**31 - 1) // (blocks + 1)) // slots
    chunk = max(1, min(chunk, most, length))
    return PairSizes(
        batch=batch,
        length=length,
        keys=keys,
        heads=kv_heads,
        group=group,
        slots=slots,
        block_size=spec.block_size,
        rows=min(block_q, chunk * slots),
        chunk=chunk,
        blocks=blocks,
    )


def chosen_blocks(
    inputs: Inputs, at: geometry.Tokens, size: PairSizes
) -> tuple[jax.Array, jax.Array]:
    """The first key and the number of every block of every token, [units, chunks, chunk, slots]."""
    index = inputs.block_indices
    position, start, sequence = (
        x[None, :, None, None] for x in (at.position, at.start, at.sequence)
    )
    exists = at.exists[None, :, None, None]
    useful = exists & (index >= 0) & (index <= position // size.block_size)
    begin = jnp.where(useful, start + index * size.block_size, 0)
    # Blocks of different sequences may begin within one block size of each other: a step for each
    # sequence keeps their numbers apart.
    number = jnp.where(useful, begin // size.block_size + sequence, size.blocks)
    return size.split_tokens(begin), size.split_tokens(number, size.blocks)


def sort_pairs(begin: jax.Array, number: jax.Array, size: PairSizes) -> Pairs:
    """The pairs of a chunk by block, then token; begin and number are [chunk, slots]."""
    order = jnp.arange(size.pairs, dtype=jnp.int32)
    # One number holds block, token and slot: sorting it alone is far cheaper than sorting several.
    key = lax.sort(number.reshape(-1) * size.pairs + order)
    block, pair = lax.div(key, jnp.int32(size.pairs)), lax.rem(key, jnp.int32(size.pairs))
    run = order - lax.cummax(jnp.where(_changes(block), order, 0))
    heads = (lax.rem(run, jnp.int32(size.rows)) == 0) & (block < size.blocks)
    token = lax.div(pair, jnp.int32(size.slots))
    # A token that names a block again has both pairs side by side: the first counts.
    useful = (_changes(block) | _changes(token)) & (block < size.blocks)
    most = min(size.pairs, size.pairs // size.rows + size.blocks)
    place = jnp.zeros_like(order).at[pair].set(order, unique_indices=True)
    used = useful[place]
    padded = lambda x, fill: jnp.pad(x, (0, size.rows), constant_values=fill)
    by_slot = lambda x: x.reshape(size.chunk, size.slots).T
    return Pairs(
        token=padded(token, 0),
        begin=padded(begin.reshape(-1)[pair], 0),
        block=padded(block, size.blocks),
        useful=padded(useful, False),
        tiles=lax.sort(jnp.where(heads, order, size.pairs))[:most],
        tile_count=heads.sum(dtype=jnp.int32),
        place=by_slot(place),
        used=by_slot(used),
    )


def _changes(x: jax.Array) -> jax.Array:
    """Where an entry differs from the one before it."""
    return jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])


def over_tiles(
    pairs: Pairs, size: PairSizes, step: Callable[[PairTile, Carry], Carry], carry: Carry
) -> Carry:
    """`carry = step(tile, carry)` for every tile, in the order of the sorted pairs."""

    def one(i: Index, carry: Carry) -> Carry:
        first = pairs.tiles[i]
        token, block, useful = (
            lax.dynamic_slice_in_dim(x, first, size.rows)
            for x in (pairs.token, pairs.block, pairs.useful)
        )
        useful &= block == block[0]
        # The rest of the tile belongs to other blocks. It repeats a token of this block, so that
        # no other data is read.
        token = jnp.where(useful, token, token[0])
        return step(PairTile(first, pairs.begin[first], token, useful), carry)

    return lax.fori_loop(jnp.int32(0), pairs.tile_count, one, carry)


def gather_sum(
    buffer: jax.Array, pairs: Pairs, weights: jax.Array | None, start: jax.Array
) -> jax.Array:
    """`start` plus the sum of the buffer over the pairs of each token, [chunk, group * d].

    `weights` [slots, chunk, group] multiply it.
    """

    def add(slot: Index, total: jax.Array) -> jax.Array:
        part = buffer.at[pairs.place[slot]].get(mode="promise_in_bounds")
        if weights is not None:
            shape = weights.shape[1:]
            part = (part.reshape(*shape, -1) * weights[slot][..., None]).reshape(part.shape)
        return total + jnp.where(pairs.used[slot][:, None], part, 0.0)

    slots = pairs.place.shape[0]
    return lax.fori_loop(0, slots, add, start, unroll=min(slots, _UNROLLED))
