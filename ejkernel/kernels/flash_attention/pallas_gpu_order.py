"""In which order the units of the joint backward pass add to the gradients of queries.

A unit is a block of keys of one batch row and key head; it visits tiles of queries, and so do
others. Sums must come out the same every time, so that those who visit a tile add to it in the
order of their key blocks: upward or downward, the same for all units of a head. All units stand in
one order, in which every worker takes the next, and a unit waits only for units before it; so the
first that is not done never waits.

With a causal mask a key block is seen from its own place to the end. Where the units of a head
begin together, from the last block to the first, and each walks upward from its place, none meets
another: in every tile two blocks of keys follow each other by the time of two tiles. Those that end
first are those of the last blocks; they begin with the first blocks of the next head, which walk
downward, and again none meets another, and all end together.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention.pallas_gpu_walk import _sorting
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL, block_map
from ejkernel.types.rules import Rule

_TILE_BITS = 15
MOST_TILES = MOST_LINES = 2**_TILE_BITS


class Turns(NamedTuple):
    """The tiles of every key block, and whose turn it is in each.

    Attributes:
        count: how many tiles each line, a block of keys, visits; at least one.
        tiles: these tiles, upward; see `unpack`.
        visits: how many lines visit each tile.
    """

    count: jax.Array  # [b', n', lines]
    tiles: jax.Array  # [b', n', lines, blocks]
    visits: jax.Array  # [b', n', blocks]


def unpack(tile):
    """The place of a tile among the blocks of queries, whether it is partial, and the line's turn.

    The turn counts the lines before this one that visit the tile.
    """
    block, partial = tile & (2**_TILE_BITS - 1), (tile >> _TILE_BITS) & 1
    return block, partial, tile >> (_TILE_BITS + 1)


def turns(rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int) -> Turns:
    """The tiles of every key block."""
    if not jax.tree.leaves(rule):  # known before anything runs
        with jax.ensure_compile_time_eval():
            return _turns(rule, q_len, kv_len, block_q, block_k)
    return _turns(rule, q_len, kv_len, block_q, block_k)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _turns(rule, q_len, kv_len, block_q, block_k) -> Turns:
    state = jnp.swapaxes(block_map(rule, q_len, kv_len, block_q, block_k).state, 2, 3)
    lines, blocks = state.shape[2:]
    if kv_len % block_k:  # what lies past the last key must be masked
        last = (jnp.arange(lines) == lines - 1)[:, None]
        state = jnp.where(last & (state == FULL), jnp.int8(PARTIAL), state)
    # A line without tiles still writes its result: it visits one, in which it sees nothing.
    blind = (state == EMPTY).all(-1, keepdims=True) & (jnp.arange(blocks) == 0)
    state = jnp.where(blind, jnp.int8(PARTIAL), state)
    visited = (state != EMPTY).astype(jnp.int32)
    turn = jnp.cumsum(visited, axis=2) - visited
    partial = (state == PARTIAL).astype(jnp.int32)
    numbers = (turn << 1 | partial) << _TILE_BITS | jnp.arange(blocks, dtype=jnp.int32)
    tiles = jnp.take_along_axis(numbers, _sorting(1 - visited), axis=-1)
    return Turns(visited.sum(-1, dtype=jnp.int32), tiles, visited.sum(2, dtype=jnp.int32))


class Order(NamedTuple):
    """Who does what: the same for every mask.

    Attributes:
        units: the unit of each worker in each lap, or -1; unit = pair * lines + line.
        heads: how many pairs of batch row and key head, in their order, go the same way.
        sections: how many such groups there are; every other one goes downward, the last one too.
    """

    units: np.ndarray  # [laps, workers]
    heads: int
    sections: int

    def downward(self, pair):
        """Whether the units of a pair begin with the first line, and walk downward."""
        return (self.sections - 1 - pair // self.heads) % 2 == 0


def order(pairs: int, lines: int, workers: int) -> Order:
    """All units, as many pairs at a time as keep all workers busy."""
    heads = max(1, workers // lines)
    sections = -(-pairs // heads)
    found = Order(np.zeros((0, workers), np.int32), heads, sections)
    units = []
    for section in range(sections):
        pair = np.arange(section * heads, min(pairs, (section + 1) * heads))
        line = np.arange(lines)
        line = line if found.downward(pair[0]) else line[::-1]
        units.append((pair * lines + line[:, None]).reshape(-1))
    units = np.concatenate(units)
    units = np.pad(units, (0, -units.size % workers), constant_values=-1)
    return found._replace(units=units.reshape(-1, workers).astype(np.int32))
