"""What the GPU kernels walk: the order of the work, the blocks to visit, what is visible in them.

All of it is computed by XLA before the kernel starts; of a mask without arrays, when it is traced.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.block_map import EMPTY, FULL, PARTIAL, block_map
from ejkernel.types.rules import (
    Band,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    QueryLength,
    Rule,
    Segments,
    TokenTypes,
)

# No index of a token is as far from zero as this, and sums of two do not overflow.
_FAR = 2**29
# What a query and a key carry that match nothing.
_NO_QUERY, _NO_KEY = -(2**31), -(2**31) + 1


class Walk(NamedTuple):
    """The tiles of one pass: a line is a block of queries (or of keys), a step a tile of it.

    Attributes:
        order: the units of work, the longest first; unit = (batch * heads + head) * lines + line.
        count: how many blocks each line visits, at least one.
        partial: how many of them, the first ones, need the mask.
        index: the blocks of each line, the partial ones first.
    """

    order: jax.Array  # [units]
    count: jax.Array  # [b', n', lines], b' and n' 1 where all rows or heads agree
    partial: jax.Array  # [b', n', lines]
    index: jax.Array  # [b', n', lines, blocks]


class Visibility(NamedTuple):
    """Which pairs a partial tile shows: those that satisfy everything here.

    Attributes:
        lower: the first key that each query may see.
        upper: the last one.
        pairs: numbers of queries and of keys that must be equal.
        dense: a mask of pairs, nonzero where allowed.
    """

    lower: jax.Array | None = None  # [b', t]
    upper: jax.Array | None = None  # [b', t]
    pairs: tuple[tuple[jax.Array, jax.Array], ...] = ()  # [b', t], [b', s]
    dense: jax.Array | None = None  # [b', n', t, s] int8


def why_not(rule: Rule) -> str | None:
    """Why the kernels cannot evaluate this mask, or None."""
    supported = (Band, Chunks, Dense, Everything, KeyLength, QueryLength, Segments, TokenTypes)
    kinds = [type(part).__name__ for part in rule.parts() if not isinstance(part, supported)]
    if kinds:
        return f"does not support masks made of {', '.join(sorted(set(kinds)))}"
    if sum(isinstance(part, Dense) for part in rule.parts()) > 1:
        return "does not support two dense masks at once"
    return None


def walk(
    rule: Rule, batch: int, heads: int, q_len: int, kv_len: int, block_q: int, block_k: int
) -> Walk:
    """The tiles of every query block."""
    if not jax.tree.leaves(rule):  # known before anything runs
        with jax.ensure_compile_time_eval():
            return _walk(rule, batch, heads, q_len, kv_len, block_q, block_k)
    return _walk(rule, batch, heads, q_len, kv_len, block_q, block_k)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _walk(rule, batch, heads, q_len, kv_len, block_q, block_k) -> Walk:
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    if kv_len % block_k:  # what lies past the last key must be masked
        last = jnp.arange(state.shape[-1]) == state.shape[-1] - 1
        state = jnp.where(last & (state == FULL), jnp.int8(PARTIAL), state)
    return _lines(state, batch, heads)


def walk_columns(
    rule: Rule,
    batch: int,
    heads: int,
    group: int,
    q_len: int,
    kv_len: int,
    block_q: int,
    block_k: int,
) -> Walk:
    """The tiles of every key block; a unit is one with all the `group` query heads it serves."""
    if not jax.tree.leaves(rule):
        with jax.ensure_compile_time_eval():
            return _walk_columns(rule, batch, heads, group, q_len, kv_len, block_q, block_k)
    return _walk_columns(rule, batch, heads, group, q_len, kv_len, block_q, block_k)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6, 7))
def _walk_columns(rule, batch, heads, group, q_len, kv_len, block_q, block_k) -> Walk:
    # Past the last query nothing is added, and past the last key nothing is written.
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    return _lines(jnp.swapaxes(state, 2, 3), batch, heads, group)


def _lines(state: jax.Array, batch: int, heads: int, group: int = 1) -> Walk:
    rank = jnp.where(state == PARTIAL, 0, jnp.where(state == FULL, 1, 2)).astype(jnp.int32)
    index = _sorting(rank)
    partial = (state == PARTIAL).sum(-1, dtype=jnp.int32)
    count = (state != EMPTY).sum(-1, dtype=jnp.int32)
    # A line without blocks still writes its result: it visits one, in which it sees nothing.
    partial = jnp.where(count == 0, 1, partial)
    count = jnp.maximum(count, 1)
    lengths = jnp.broadcast_to(count, (batch, heads * group, state.shape[2]))
    lengths = lengths.reshape(batch, heads, group, -1).sum(2).reshape(-1)
    # Stable: units as long as each other stay together by head, and share its keys in the cache.
    order = _sorting(-lengths)
    return Walk(order, count, partial, index)


def _sorting(numbers: jax.Array) -> jax.Array:
    """What sorts numbers along the last axis, equal ones in the order in which they stand.

    Few are counted and not sorted: two small kernels on a GPU, where a sort takes a dozen. How many
    others come first says where a number goes; then each place looks for the one that goes there.
    """
    size = numbers.shape[-1]
    if numbers.size * size > 2**25:
        return jnp.argsort(numbers, axis=-1, stable=True).astype(jnp.int32)
    place = jnp.arange(size, dtype=jnp.int32)
    other, one = numbers[..., None, :], numbers[..., :, None]
    first = (other < one) | ((other == one) & (place < place[:, None]))
    goes = first.sum(-1, dtype=jnp.int32)
    here = goes[..., None, :] == place[:, None]
    return jnp.where(here, place, 0).sum(-1, dtype=jnp.int32)


def visibility(rule: Rule, q_len: int, kv_len: int, q_size: int, kv_size: int) -> Visibility | None:
    """What partial tiles must look at, padded to whole blocks; None when every pair is visible."""
    if isinstance(rule, Everything) and kv_len == kv_size:
        return None
    if not jax.tree.leaves(rule):
        with jax.ensure_compile_time_eval():
            return _visibility(rule, q_len, kv_len, q_size, kv_size)
    return _visibility(rule, q_len, kv_len, q_size, kv_size)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _visibility(rule, q_len, kv_len, q_size, kv_size) -> Visibility:
    query = jnp.arange(q_size, dtype=jnp.int32)[None]  # [1, t]
    lowers, uppers, pairs, dense = [], [], [], None
    per_row = lambda number: jnp.asarray(number, jnp.int32).reshape(-1, 1)  # [b', 1]
    near = lambda number: jnp.clip(per_row(number), -_FAR, _FAR)
    for part in rule.parts():
        if isinstance(part, Band):
            place = query
            if part.q_positions is not None:
                place = jnp.clip(_padded(part.q_positions, q_size, 0), -_FAR, _FAR)
            if part.low is not None:
                lowers.append(place + near(part.low))
            if part.high is not None:
                uppers.append(place + near(part.high))
        elif isinstance(part, Chunks):
            size = per_row(part.size)
            first = (query + per_row(part.q_start)) // size * size - per_row(part.k_start)
            lowers.append(first)
            uppers.append(first + size - 1)
        elif isinstance(part, KeyLength):
            uppers.append(near(part.length) - 1)
        elif isinstance(part, QueryLength):
            uppers.append(jnp.where(query < near(part.length), _FAR, -1))
        elif isinstance(part, Segments | TokenTypes):
            q_numbers, kv_numbers = part._values()
            kv_numbers = _padded(kv_numbers, kv_size, _NO_KEY)
            pairs.append((_padded(q_numbers, q_size, _NO_QUERY), kv_numbers))
        elif isinstance(part, Dense):
            dense = part.mask.reshape((-1, *part.mask.shape[-3:]))
    if dense is not None:
        if dense.shape[2] == 1 and dense.shape[1] == 1:  # hides whole keys
            keys = jnp.where(dense[:, 0, 0], jnp.int32(0), jnp.int32(_NO_KEY))
            keys = jnp.broadcast_to(keys, (keys.shape[0], kv_len))
            pairs.append((jnp.zeros((1, q_size), jnp.int32), _padded(keys, kv_size, _NO_KEY)))
            dense = None
        else:
            whole = jnp.broadcast_to(dense, (*dense.shape[:2], q_len, kv_len)).astype(jnp.int8)
            padding = ((0, 0), (0, 0), (0, q_size - q_len), (0, kv_size - kv_len))
            dense = jnp.pad(whole, padding)
    if kv_len < kv_size or not (lowers or uppers or pairs or dense is not None):
        uppers.append(jnp.full((1, 1), kv_len - 1, jnp.int32))
    spread = lambda x: jnp.broadcast_to(x, (x.shape[0], q_size))
    bound = lambda these, choose: spread(functools.reduce(choose, these)) if these else None
    return Visibility(bound(lowers, jnp.maximum), bound(uppers, jnp.minimum), tuple(pairs), dense)


def _padded(numbers: jax.Array, size: int, fill: int) -> jax.Array:
    """[b', size] from [..., length]."""
    numbers = numbers.reshape(-1, numbers.shape[-1]).astype(jnp.int32)
    return jnp.pad(numbers, ((0, 0), (0, size - numbers.shape[1])), constant_values=fill)


def flat(x: Any) -> jax.Array:
    """An array as one row of numbers, which a kernel indexes by hand."""
    return jnp.asarray(x).reshape(-1)
