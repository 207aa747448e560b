"""Cuts sequences into chunks: padded or packed, forward or reversed in time, some lanes at once.

    tokens   [b, s, k, ...]       as they are given
    places   [b, c * tokens per chunk, k, ...]   every chunk holds tokens of one sequence only
    states   [b, m, k, h, v]      one for each sequence of a row
    lanes    [l, ...]             the batch rows times the key heads of a unit

The lanes of a unit are computed at once, its chunks one after the other in time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.integers import largest_divisor
from ejkernel.kernels.common.refs import Index

_Carry = TypeVar("_Carry")
_Start = tuple[Index, ...]


class Packing(NamedTuple):
    """The places of packed sequences, each of which begins a new chunk."""

    sequence: jax.Array  # [b, c]: the sequence of each chunk
    token: jax.Array  # [b, p]: the token at each place
    used: jax.Array  # [b, p]: whether there is one
    place: jax.Array  # [b, s]: the place of each token
    within: jax.Array  # [b, s]: whether it is part of a sequence


class ChunkGrid:
    """The chunks of a call."""

    batch: int
    tokens: int
    chunk: int
    reverse: bool

    def __init__(
        self,
        shape: tuple[int, int, int],
        chunk: int,
        lanes: int,
        reverse: bool,
        cu_seqlens: jax.Array | None,
    ):
        self.batch, self.tokens, heads = shape
        self.chunk, self.reverse = chunk, reverse
        self.heads: int = largest_divisor(heads, lanes)
        self.rows: int = 1
        self.packing: Packing | None = None
        if cu_seqlens is None:
            self.chunks: int = -(-self.tokens // chunk)
            if self.heads == heads:
                self.rows = largest_divisor(self.batch, lanes // heads)
        else:
            filled = min(cu_seqlens.shape[1] - 1, self.tokens)  # sequences that are not empty
            self.chunks = (self.tokens + filled * (chunk - 1)) // chunk
            pack = lambda ends: _packing(ends, self.tokens, chunk, self.chunks)
            self.packing = jax.vmap(pack)(cu_seqlens)
        self.head_units: int = heads // self.heads
        self.units: int = self.batch // self.rows * self.head_units

    def to_places(self, x: jax.Array) -> jax.Array:
        """Tokens to places; 0 where there is none."""
        if self.packing is not None:
            taken = jax.vmap(lambda x, token: x[token])(x, self.packing.token)
            return jnp.where(_along(self.packing.used, x.ndim), taken, 0)
        if missing := self.chunks * self.chunk - self.tokens:
            return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
        return x

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """Places to tokens; 0 where a token is part of no sequence."""
        if self.packing is not None:
            taken = jax.vmap(lambda x, place: x[place])(x, self.packing.place)
            return jnp.where(_along(self.packing.within, x.ndim), taken, 0)
        return x[:, : self.tokens]

    def read(self, x: jax.Array, unit: Index, time: Index, group: int | None = None) -> jax.Array:
        """The lanes [l, chunk, ...] of a unit in the chunk that is visited at this time.

        Of `group` query heads on each key head: [l, chunk, group, ...].
        """
        row, head = self._corner(unit)
        each = group or 1
        start = (row, self._index(time) * self.chunk, head * each)
        part = _cut(x, start, (self.rows, self.chunk, self.heads * each))
        part = jnp.flip(part, 1) if self.reverse else part
        if group is not None:
            part = part.reshape(*part.shape[:2], self.heads, group, *part.shape[3:])
        part = jnp.swapaxes(part, 1, 2)
        return part.reshape(-1, *part.shape[2:])

    def write(self, x: jax.Array, part: jax.Array, unit: Index, time: Index) -> jax.Array:
        """`x` with these lanes where `read` would read them."""
        row, head = self._corner(unit)
        part = part.reshape(self.rows, self.heads, *part.shape[1:])
        part = jnp.swapaxes(part, 1, 2)
        part = jnp.flip(part, 1) if self.reverse else part
        each = 1
        if part.ndim > x.ndim:
            each = part.shape[3]
            part = part.reshape(*part.shape[:2], -1, *part.shape[4:])
        return _paste(x, part, (row, self._index(time) * self.chunk, head * each))

    def used(self, unit: Index, time: Index) -> jax.Array | None:
        """Which of the chunk's tokens there are, [1, chunk, 1]; None: all of them."""
        index = self._index(time)
        if self.packing is not None:
            used = _cut(
                self.packing.used, (self._corner(unit)[0], index * self.chunk), (1, self.chunk)
            )
        elif self.tokens % self.chunk:
            place = index * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32)
            used = (place < self.tokens)[None]
        else:
            return None
        return (jnp.flip(used, 1) if self.reverse else used)[..., None]

    def read_heads(self, x: jax.Array, unit: Index) -> jax.Array:
        """[b, k] -> the lanes [l] of a unit."""
        return _cut(x, self._corner(unit), (self.rows, self.heads)).reshape(-1)

    def write_heads(self, x: jax.Array, part: jax.Array, unit: Index) -> jax.Array:
        """`x` with these lanes where `read_heads` would read them."""
        return _paste(x, part.reshape(self.rows, self.heads), self._corner(unit))

    def load_state(
        self, states: jax.Array, state: jax.Array, unit: Index, time: Index, before: Index
    ) -> jax.Array:
        """`state`, or that of the sequence at this time if it is not the one visited `before`."""
        if isinstance(before, int) and not 0 <= before < self.chunks:
            return self._state(states, unit, time)
        if self.packing is None:
            new = jnp.asarray((before < 0) | (before >= self.chunks))
        else:
            outside = (before < 0) | (before >= self.chunks)
            last = self._sequence(unit, jnp.clip(before, 0, self.chunks - 1))
            new = outside | (last != self._sequence(unit, time))
        return jnp.where(new, self._state(states, unit, time), state)

    def store_state(
        self, states: jax.Array, state: jax.Array, unit: Index, time: Index
    ) -> jax.Array:
        """`states` with that of the sequence visited at this time; the last visit is kept."""
        row, head = self._corner(unit)
        part = state.reshape(self.rows, 1, self.heads, *state.shape[1:])
        return _paste(states, part, (row, self._sequence(unit, time), head))

    def _state(self, states: jax.Array, unit: Index, time: Index) -> jax.Array:
        row, head = self._corner(unit)
        part = _cut(states, (row, self._sequence(unit, time), head), (self.rows, 1, self.heads))
        return part.reshape(-1, *part.shape[3:])

    def _sequence(self, unit: Index, time: Index) -> Index:
        if self.packing is None:
            return 0
        return self.packing.sequence[self._corner(unit)[0], self._index(time)]

    def _index(self, time: Index) -> Index:
        """Which chunk is visited at this time."""
        return self.chunks - 1 - time if self.reverse else time

    def _corner(self, unit: Index) -> tuple[Index, Index]:
        """The first row and the first key head of a unit."""
        row, head = divmod(unit, self.head_units)
        return row * self.rows, head * self.heads


def scan(
    step: Callable[[_Carry, tuple], tuple[_Carry, Any]],
    carry: _Carry,
    count: int,
    xs: jax.Array | None = None,
    reverse: bool = False,
) -> tuple[_Carry, Any]:
    """`lax.scan` of `step(carry, (index, xs[index]))`: no loop where there is only one."""
    if count == 1:
        carry, result = step(carry, (0, jax.tree.map(lambda x: x[0], xs)))
        return carry, jax.tree.map(lambda x: x[None], result)
    index = jnp.arange(count, dtype=jnp.int32)
    return lax.scan(step, carry, (index, xs), reverse=reverse)


def _packing(ends: jax.Array, tokens: int, chunk: int, chunks: int) -> Packing:
    """The packing of one row; unused chunks are empty and of the last sequence."""
    ends = ends.astype(jnp.int32)
    count = ends.shape[0] - 1
    needed = (jnp.diff(ends) + chunk - 1) // chunk
    first = jnp.pad(jnp.cumsum(needed, dtype=jnp.int32), (1, 0))  # the first chunk of each sequence
    index = jnp.arange(chunks, dtype=jnp.int32)
    sequence = jnp.searchsorted(first, index, side="right").astype(jnp.int32) - 1
    sequence = jnp.clip(sequence, 0, count - 1)
    start = ends[sequence] + (index - first[sequence]) * chunk
    token = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)
    used = token < ends[sequence + 1][:, None]
    token = jnp.where(used, token, 0).reshape(-1)

    each = jnp.arange(tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, each, side="right").astype(jnp.int32) - 1
    within = (owner >= 0) & (owner < count)
    owner = jnp.clip(owner, 0, count - 1)
    place = jnp.where(within, first[owner] * chunk + each - ends[owner], 0)
    return Packing(sequence, token, used.reshape(-1), place, within)


def _along(mask: jax.Array, rank: int) -> jax.Array:
    return mask.reshape(*mask.shape, *(1,) * (rank - 2))


def _start(start: _Start, rank: int) -> list[jax.Array]:
    return [jnp.int32(i) for i in start] + [jnp.int32(0)] * (rank - len(start))


def _cut(x: jax.Array, start: _Start, sizes: tuple[int, ...]) -> jax.Array:
    """The part of `x` of these sizes in its first axes; whole where it is all of it."""
    if x.shape[: len(sizes)] == sizes:
        return x
    return lax.dynamic_slice(x, _start(start, x.ndim), (*sizes, *x.shape[len(sizes) :]))


def _paste(x: jax.Array, part: jax.Array, start: _Start) -> jax.Array:
    part = part.astype(x.dtype)
    return (
        part if part.shape == x.shape else lax.dynamic_update_slice(x, part, _start(start, x.ndim))
    )
