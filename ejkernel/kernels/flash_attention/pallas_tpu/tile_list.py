"""The tiles that a kernel visits, one after the other: the block map laid out as a list.

A kernel that adds up results block by block walks the list in order. Tiles of one result stand
together, so that its accumulator is begun at the first of them and written after the last. Every
result has at least one tile, be it empty: what sees nothing is written too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.rules import Rule


class TileList(NamedTuple):
    """A list of tiles, of which the first `count` are to be visited.

    Attributes:
        result: the block that a tile adds to, counted over [batch, heads, blocks].
        packed: 4 times the block that it takes from, plus the state of the tile.
        count: how many tiles there are; an int where the mask is static.
        batch: batch rows that the list holds; 1 where all have the same.
        heads: heads likewise.
        blocks: result blocks of a row.
    """

    result: jax.Array
    packed: jax.Array
    count: Any
    batch: int
    heads: int
    blocks: int


def tile_list(
    rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int, *, by_keys: bool = False
) -> TileList:
    """The tiles of a mask, a result being a block of queries or, `by_keys`, a block of keys.

    The last blocks, where they stick out over the end, count as partial.
    """
    if not jax.tree.leaves(rule):
        with jax.ensure_compile_time_eval():  # the mask is static: so are the list and its length
            tiles = _listed(rule, q_len, kv_len, block_q, block_k, by_keys)
            count = int(tiles.count)
        return tiles._replace(result=tiles.result[:count], packed=tiles.packed[:count], count=count)
    return _listed(rule, q_len, kv_len, block_q, block_k, by_keys)


def _listed(
    rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int, by_keys: bool
) -> TileList:
    some, every = rule.blocks(q_len, kv_len, block_q, block_k)
    some, every = (x[None] if x.ndim == 3 else x for x in (some, every))
    if q_len % block_q:
        every = every.at[..., -1, :].set(False)
    if kv_len % block_k:
        every = every.at[..., -1].set(False)
    state = jnp.where(some, jnp.where(every, FULL, PARTIAL), EMPTY).astype(jnp.int32)
    if by_keys:
        state = jnp.swapaxes(state, -1, -2)
    batch, heads, blocks, steps = state.shape
    alone = (state == EMPTY).all(-1, keepdims=True) & (jnp.arange(steps) == 0)
    wanted = ((state != EMPTY) | alone).reshape(-1)
    (place,) = jnp.nonzero(wanted, size=wanted.size, fill_value=wanted.size - 1)
    place = place.astype(jnp.int32)
    return TileList(
        result=place // steps,
        packed=place % steps * 4 + state.reshape(-1)[place],
        count=wanted.sum(dtype=jnp.int32),
        batch=batch,
        heads=heads,
        blocks=blocks,
    )
