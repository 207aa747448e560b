"""What the GPU kernels walk: the order of the work, the blocks to visit, what is visible in them.

All of it is computed by XLA before the kernel starts; of a mask without arrays, when it is traced.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.flash_attention.pallas_sm90.deal import (
    FEW,
    Units,
    dealt,
    dealt_alike,
    sorting,
)
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL, block_map
from ejkernel.types.rules import (
    Band,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    Or,
    QueryLength,
    Rule,
    Segments,
    TokenTypes,
)

# No index of a token is as far from zero as this, and sums of two do not overflow.
_FAR = 2**29
# Bits of a number of blocks, of which there are so few.
_BITS = 16
MOST_KEYS = 2 ** (_BITS + 6) - 64
# What a query and a key carry that match nothing.
_NO_QUERY, _NO_KEY = -(2**31), -(2**31) + 1


class Walk(NamedTuple):
    """The tiles of one pass: a line is a block of queries (or of keys), a step a tile of it.

    Attributes:
        order: the unit of work of each worker in each lap, or -1;
            unit = (batch * heads + head) * lines + line.
        tiles: of that unit, how many blocks it visits and how many of them are partial, as one
            number; where a unit serves several query heads, of the first.
        count: how many blocks each line visits, at least one.
        partial: how many of them, the first ones, need the mask.
        index: the blocks of each line, the partial ones first.
    """

    order: jax.Array  # [laps, workers]
    tiles: jax.Array  # [laps, workers]
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
        unions: of each of these, one must be satisfied.
    """

    lower: jax.Array | None = None  # [b', t]
    upper: jax.Array | None = None  # [b', t]
    pairs: tuple[tuple[jax.Array, jax.Array], ...] = ()  # [b', t], [b', s]
    dense: jax.Array | None = None  # [b', n', t, s] int8
    unions: tuple[tuple["Visibility", ...], ...] = ()

    def repeated(self, size: int) -> "Visibility":
        """The same for queries that come again and again, up to so many."""
        rows = lambda x, axis: jnp.take(x, np.arange(size) % x.shape[axis], axis)
        return Visibility(
            lower=None if self.lower is None else rows(self.lower, 1),
            upper=None if self.upper is None else rows(self.upper, 1),
            pairs=tuple((rows(query, 1), key) for query, key in self.pairs),
            dense=None if self.dense is None else rows(self.dense, 2),
            unions=tuple(tuple(one.repeated(size) for one in either) for either in self.unions),
        )


def why_not(rule: Rule) -> str | None:
    """Why the kernels cannot evaluate this mask, or None."""
    supported = (Band, Chunks, Dense, Everything, KeyLength, Or, QueryLength, Segments, TokenTypes)
    kinds = [type(part).__name__ for part in rule.parts() if not isinstance(part, supported)]
    if kinds:
        return f"does not support masks made of {', '.join(sorted(set(kinds)))}"
    inner = [one for part in rule.parts() if isinstance(part, Or) for one in part.rules]
    return next(filter(None, map(why_not, inner)), None)


def walk(rule: Rule, units: Units, q_len: int, kv_len: int, block_q: int, block_k: int) -> Walk:
    """The tiles of every query block."""
    if not jax.tree.leaves(rule):  # known before anything runs
        with jax.ensure_compile_time_eval():
            return _walk(rule, units, q_len, kv_len, block_q, block_k)
    return _walk(rule, units, q_len, kv_len, block_q, block_k)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _walk(rule, units, q_len, kv_len, block_q, block_k) -> Walk:
    if all(map(_is_interval, rule.parts())):
        sizes = (-(-size // block) * block for size, block in ((q_len, block_q), (kv_len, block_k)))
        seen = _visibility(rule, q_len, kv_len, *sizes)
        return _ranges(seen, units, q_len, kv_len, block_q, block_k)
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    if kv_len % block_k:  # what lies past the last key must be masked
        last = jnp.arange(state.shape[-1]) == state.shape[-1] - 1
        state = jnp.where(last & (state == FULL), jnp.int8(PARTIAL), state)
    return _lines(state, units)


def walk_columns(
    rule: Rule, units: Units, q_len: int, kv_len: int, block_q: int, block_k: int
) -> Walk:
    """The tiles of every key block; a unit is one with all the query heads that it serves."""
    if not jax.tree.leaves(rule):
        with jax.ensure_compile_time_eval():
            return _walk_columns(rule, units, q_len, kv_len, block_q, block_k)
    return _walk_columns(rule, units, q_len, kv_len, block_q, block_k)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _walk_columns(rule, units, q_len, kv_len, block_q, block_k) -> Walk:
    # Past the last query nothing is added, and past the last key nothing is written.
    state = block_map(rule, q_len, kv_len, block_q, block_k).state
    return _lines(jnp.swapaxes(state, 2, 3), units)


def _is_interval(part: Rule) -> bool:
    """Whether each query sees a range of keys, and neighbours see ranges that overlap."""
    if isinstance(part, Band):
        return part.q_positions is None
    if isinstance(part, Segments):
        return part.documents is not None
    return isinstance(part, Chunks | KeyLength | QueryLength)


def _ranges(seen: Visibility, units: Units, q_len, kv_len, block_q, block_k) -> Walk:
    """The lists of `_lines` where each line visits one range of blocks: nothing to sort in them."""
    blocks = -(-kv_len // block_k)
    lower, upper = np.int32(0), np.int32(kv_len - 1)
    lower = lower if seen.lower is None else jnp.maximum(seen.lower, lower)
    upper = upper if seen.upper is None else jnp.minimum(seen.upper, upper)
    lower, upper = jnp.broadcast_arrays(lower, upper)
    real = jnp.arange(lower.shape[1]) < q_len
    sees = real & (lower <= upper)
    rows = (
        jnp.where(sees, lower // block_k, blocks),
        jnp.where(sees, upper // block_k + 1, 0),
        jnp.where(real, -(-lower // block_k), 0),
        jnp.where(real, (upper + 1) // block_k, blocks),
    )
    # Of a line: the first block of which some query sees something, and the one after the last;
    # the first of which every query sees all, and the one after the last.
    first, after, all_first, all_after = lax.reduce(
        tuple(x.reshape(x.shape[0], 1, -1, block_q) for x in rows),
        (np.int32(blocks), np.int32(0), np.int32(0), np.int32(blocks)),
        lambda a, b: (
            jnp.minimum(a[0], b[0]),
            jnp.maximum(a[1], b[1]),
            jnp.maximum(a[2], b[2]),
            jnp.minimum(a[3], b[3]),
        ),
        (3,),
    )
    # A line without blocks still writes its result: it visits one, in which it sees nothing.
    count = jnp.maximum(after - first, 1)
    full = jnp.maximum(all_after - all_first, 0)
    partial = count - full
    early = jnp.where(full > 0, all_first - first, count)  # partial ones before the full ones
    step = jnp.arange(blocks, dtype=jnp.int32)
    visited = count[..., None]
    first, full, early, all_partial = (x[..., None] for x in (first, full, early, partial))
    moved = jnp.where(step < all_partial, full, early - all_partial)
    first = jnp.minimum(first, blocks - 1)
    index = first + step + jnp.where(step < early, 0, moved)
    # Behind them the blocks that hide everything, whose gradients of a bias are written, too.
    hidden = step - visited
    hidden = jnp.where(hidden < first, hidden, hidden + visited)
    index = jnp.where(step < visited, index, hidden)
    return _dealt_walk(count, partial, index, units)


def _lines(state: jax.Array, units: Units) -> Walk:
    rank = jnp.where(state == PARTIAL, 0, jnp.where(state == FULL, 1, 2)).astype(jnp.int32)
    index = sorting(rank)
    partial = (state == PARTIAL).sum(-1, dtype=jnp.int32)
    count = (state != EMPTY).sum(-1, dtype=jnp.int32)
    # A line without blocks still writes its result: it visits one, in which it sees nothing.
    partial = jnp.where(count == 0, 1, partial)
    count = jnp.maximum(count, 1)
    return _dealt_walk(count, partial, index, units)


def _dealt_walk(count: jax.Array, partial: jax.Array, index: jax.Array, units: Units) -> Walk:
    lines = count.shape[2]
    both = partial << _BITS | count
    if (
        count.shape[:2] == (1, 1)
        and units.group == 1
        and units.batch * units.heads * lines**2 <= FEW
    ):
        return Walk(*dealt_alike(count[0, 0], both[0, 0], units), count, partial, index)
    lengths = jnp.broadcast_to(count, (units.batch, units.heads * units.group, lines))
    lengths = lengths.reshape(units.batch, units.heads, units.group, lines).sum(2)
    order = dealt(lengths.reshape(-1), units)
    both = jnp.broadcast_to(both, (units.batch, units.heads * units.group, lines))
    tiles = both[:, :: units.group].reshape(-1)[jnp.maximum(order, 0)]
    return Walk(order, tiles, count, partial, index)


def tile_counts(tiles: Any) -> tuple[Any, Any]:
    """How many blocks a unit visits, and how many of them are partial."""
    return tiles & (2**_BITS - 1), lax.shift_right_logical(tiles, _BITS)


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
    seen = _seen(rule, q_len, kv_len, q_size, kv_size)
    if kv_len < kv_size or not jax.tree.leaves(seen):
        last = jnp.full((1, q_size), kv_len - 1, jnp.int32)
        return seen._replace(upper=last if seen.upper is None else jnp.minimum(seen.upper, last))
    return seen


def _seen(rule, q_len, kv_len, q_size, kv_size) -> Visibility:
    """What a rule asks of pairs, whatever lies past the last key."""
    query = jnp.arange(q_size, dtype=jnp.int32)[None]  # [1, t]
    lowers, uppers, pairs, unions, dense = [], [], [], [], []
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
        elif isinstance(part, Segments) and part.documents is not None:
            first, last = _documents(part, q_size)
            lowers.append(first)
            uppers.append(last)
        elif isinstance(part, Segments | TokenTypes):
            q_numbers, kv_numbers = part.id_pair()
            kv_numbers = _padded(kv_numbers, kv_size, _NO_KEY)
            pairs.append((_padded(q_numbers, q_size, _NO_QUERY), kv_numbers))
        elif isinstance(part, Or):
            either = tuple(_seen(one, q_len, kv_len, q_size, kv_size) for one in part.rules)
            if not either:
                uppers.append(jnp.full((1, 1), -1, jnp.int32))
            elif all(map(jax.tree.leaves, either)):  # else one of them asks for nothing
                unions.append(either)
        elif isinstance(part, Dense):
            mask = part.mask.reshape((-1, *part.mask.shape[-3:]))
            if mask.shape[1] == mask.shape[2] == 1:  # hides whole keys
                keys = jnp.where(mask[:, 0, 0], jnp.int32(0), jnp.int32(_NO_KEY))
                keys = jnp.broadcast_to(keys, (keys.shape[0], kv_len))
                pairs.append((jnp.zeros((1, q_size), jnp.int32), _padded(keys, kv_size, _NO_KEY)))
                continue
            whole = jnp.broadcast_to(mask, (*mask.shape[:2], q_len, kv_len)).astype(jnp.int8)
            padding = ((0, 0), (0, 0), (0, q_size - q_len), (0, kv_size - kv_len))
            dense.append(jnp.pad(whole, padding))
    unions += [(Visibility(dense=mask),) for mask in dense[1:]]
    spread = lambda x: jnp.broadcast_to(x, (x.shape[0], q_size))
    bound = lambda these, choose: spread(functools.reduce(choose, these)) if these else None
    lower, upper = bound(lowers, jnp.maximum), bound(uppers, jnp.minimum)
    return Visibility(lower, upper, tuple(pairs), dense[0] if dense else None, tuple(unions))


def _documents(part: Segments, size: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last token of the document of each token; of padding none.

    Two bounds of a row are read once, where the ids of keys would be read with every tile.
    """
    if part.starts is not None:
        starts = part.starts.reshape(-1, 1, part.starts.shape[-1]).astype(jnp.int32)
        token = jnp.arange(size, dtype=jnp.int32)[:, None]
        first = jnp.where(starts <= token, starts, -1).max(-1)
        end = jnp.where(starts > token, starts, _FAR).min(-1)
        return jnp.where(first < 0, _FAR, first), jnp.where(end == _FAR, -1, end - 1)
    ids = _padded(part.q_ids, size, -1)
    number = jnp.arange(part.documents, dtype=jnp.int32)  # pyright: ignore[reportArgumentType]
    lengths = (ids[:, None] == number[:, None]).sum(-1, dtype=jnp.int32)[:, None]  # [b', 1, m]
    before = jnp.where(number < ids[..., None], lengths, 0).sum(-1, dtype=jnp.int32)
    own = jnp.where(number == ids[..., None], lengths, 0).sum(-1, dtype=jnp.int32)
    return before, before + own - 1


def _padded(numbers: jax.Array, size: int, fill: int) -> jax.Array:
    """[b', size] from [..., length]."""
    numbers = numbers.reshape(-1, numbers.shape[-1]).astype(jnp.int32)
    return jnp.pad(numbers, ((0, 0), (0, size - numbers.shape[1])), constant_values=fill)
