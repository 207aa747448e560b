"""The tiles that a kernel visits, one after the other: the block map as a work list.

A kernel that accumulates results block by block visits the list in order. The tiles of one result
block stand together, so that its accumulator is initialised at the first of them and written after
the last. Every result block has at least one tile, even if that is empty: a row that sees nothing
is written too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.refs import Ref
from ejkernel.kernels.flash_attention.static_arrays import static_arrays
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.rules import Rule

# An entry of the list that a kernel reads is the other block, then these flags, then the state of
# the tile in two bits. A row is all result blocks of one batch row and block of heads.
_FIRST, _LAST, _FIRST_OF_ROW, _LAST_OF_ROW, _FLAG_BITS = 4, 8, 16, 32, 6


class TilePosition(NamedTuple):
    """The tile of a step: batch row, block of heads, block of queries, block of keys."""

    batch: jax.Array
    heads: jax.Array
    queries: jax.Array
    keys: jax.Array


class Step(NamedTuple):
    """A step: its tile, the state of that, and whether it is the first or last of its result block
    and of its row.
    """

    tile: TilePosition
    state: jax.Array
    first: jax.Array
    last: jax.Array
    first_of_row: jax.Array
    last_of_row: jax.Array


class TileSchedule(NamedTuple):
    """A list of tiles, of which the first `count` are visited.

    Attributes:
        result: the result block of each tile, counted over [batch, heads, blocks].
        packed: 4 times the other block of each tile, plus the state of the tile.
        count: how many tiles there are; an int where the mask is static.
        batch: batch rows that the list holds; 1 where all have the same tiles.
        heads: heads likewise.
        blocks: result blocks of a row.
        by_keys: whether results are blocks of keys.
    """

    result: jax.Array | np.ndarray
    packed: jax.Array | np.ndarray
    count: int | jax.Array
    batch: int
    heads: int
    blocks: int
    by_keys: bool

    @property
    def shared(self) -> bool:
        """Whether all batch rows and heads have the same tiles."""
        return self.batch == 1 and self.heads == 1

    def scalars(self) -> list[jax.Array]:
        """The list in scalar memory: result blocks, and entries with flags."""
        return [jnp.asarray(self._results()), jnp.asarray(self._entries())]

    def _results(self) -> jax.Array | np.ndarray:
        """The result blocks in a form in which shifts give batch row, head and block: scalar units
        divide slowly, and every step asks several times.
        """
        if self.shared:
            return self.result
        owner, mine = jnp.divmod(self.result, self.blocks)
        row, head = jnp.divmod(owner, self.heads)
        owner = head + (row << _bits(self.heads))
        return mine + (owner << _bits(self.blocks))

    def _entries(self) -> jax.Array | np.ndarray:
        """The other block and state of each tile, and its flags."""
        result, count = self.result, self.count
        rows = result // self.blocks
        state, other = self.packed & 3, self.packed >> 2
        is_last = jnp.arange(result.shape[0]) == count - 1
        for one, first, last in ((result, _FIRST, _LAST), (rows, _FIRST_OF_ROW, _LAST_OF_ROW)):
            changes = one[1:] != one[:-1]
            begins = jnp.pad(changes, (1, 0), constant_values=True)
            ends = jnp.pad(changes, (0, 1)) | is_last
            state += jnp.where(begins, first, 0) + jnp.where(ends, last, 0)
        return (other << _FLAG_BITS) + state

    def tile(
        self, row: jax.Array, heads: jax.Array, step: jax.Array, results: Ref, entries: Ref
    ) -> TilePosition:
        """The tile of a step of the grid (batch rows, blocks of heads, tiles)."""
        mine = results[step]
        if not self.shared:
            owner, mine = _split(mine, self.blocks)
            if self.heads > 1:
                owner, heads = _split(owner, self.heads)
            if self.batch > 1:
                row = owner
        other = jax.lax.shift_right_logical(entries[step], np.int32(_FLAG_BITS))
        return TilePosition(row, heads, *((other, mine) if self.by_keys else (mine, other)))

    def step(
        self, row: jax.Array, heads: jax.Array, step: jax.Array, results: Ref, entries: Ref
    ) -> Step:
        """A step of the grid, read from the list in scalar memory."""
        flag = lambda which: entries[step] & which != 0
        return Step(
            tile=self.tile(row, heads, step, results, entries),
            state=entries[step] & 3,
            first=flag(_FIRST),
            last=flag(_LAST),
            first_of_row=flag(_FIRST_OF_ROW),
            last_of_row=flag(_LAST_OF_ROW),
        )


def _bits(count: int) -> int:
    """How many bits numbers below `count` take."""
    return (count - 1).bit_length()


def _split(number: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The bits above those of a number below `count`, and that number."""
    bits = _bits(count)
    return jax.lax.shift_right_logical(number, np.int32(bits)), number & ((1 << bits) - 1)


def tile_schedule(
    rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int, *, by_keys: bool = False
) -> TileSchedule:
    """The tiles of a mask; results are blocks of queries or, `by_keys`, blocks of keys.

    The last blocks count as partial where they reach past the end.
    """
    sizes = (q_len, kv_len, block_q, block_k)
    if not jax.tree.leaves(rule):  # the mask is static: so are the list and its length
        state, wanted = static_arrays(_tile_states, rule, *sizes, by_keys)
        place = np.flatnonzero(wanted)
        count = place.size
    else:
        state, wanted = _tile_states(rule, *sizes, by_keys)
        (place,) = jnp.nonzero(wanted, size=wanted.size, fill_value=wanted.size - 1)
        count = wanted.sum(dtype=jnp.int32)
    batch, heads, blocks, steps = state.shape
    place = place.astype(jnp.int32)
    return TileSchedule(
        result=place // steps,
        packed=place % steps * 4 + state.reshape(-1)[place],
        count=count,
        batch=batch,
        heads=heads,
        blocks=blocks,
        by_keys=by_keys,
    )


def _tile_states(
    rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int, by_keys: bool
) -> tuple[jax.Array, jax.Array]:
    """The state of each tile, and which ones, flattened, are in the list.

    A result without tiles has one in which nothing is visible: it must be written.
    """
    some, every = rule.blocks(q_len, kv_len, block_q, block_k)
    some, every = (x[None] if x.ndim == 3 else x for x in (some, every))
    if q_len % block_q:
        every &= jnp.arange(every.shape[-2])[:, None] < every.shape[-2] - 1
    if kv_len % block_k:
        every &= jnp.arange(every.shape[-1]) < every.shape[-1] - 1
    state = jnp.where(some, jnp.where(every, FULL, PARTIAL), EMPTY).astype(jnp.int32)
    if by_keys:
        state = jnp.swapaxes(state, -1, -2)
    placeholder = (state == EMPTY).all(-1, keepdims=True) & (jnp.arange(state.shape[-1]) == 0)
    return state, ((state != EMPTY) | placeholder).reshape(-1)
