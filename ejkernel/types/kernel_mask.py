"""The normal form of a mask for kernels: bounds of each query, pairs of ids, a dense remainder.

A kernel that evaluates a mask in a tile needs no rules, only these arrays. A pair (q, k) is allowed
when all of the following hold:

| part | condition | from |
|---|---|---|
| `lower`, `upper` | `lower[q] <= k <= upper[q]` | bands, chunks, lengths, packed documents |
| `id_pairs` | `q_ids[q] == kv_ids[k]` for each pair | segments, token types, key padding |
| `dense` | `dense[q, k] != 0` | a mask that was given whole |
| `unions` | for each union, some member of it allows the pair | `Or` |

Where a lowering cannot use the arrays as they are, it starts from the same division of the rules:
`Interval` rules become bounds (`row_bounds`), `Match` rules become pairs of ids (`id_pair`),
`Table` rules are looked up. `conjunctions` writes a mask without tables as a disjunction of
conjunctions of the first two.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.rule_arrays import Index
from ejkernel.types.rules import (
    NO_KEY,
    NO_QUERY,
    And,
    Band,
    Blocks,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    Match,
    Or,
    QueryLength,
    Rule,
    Segments,
)

# Rules of the form `lower[q] <= k <= upper[q]`.
Interval = Band | Chunks | KeyLength | QueryLength
# Rules that are looked up in an array of pairs, or of blocks of pairs.
Table = Dense | Blocks

# No index of a token is as far from zero as this, and sums of two do not overflow.
_FAR = 2**29


class KernelMask(NamedTuple):
    """The pairs that satisfy everything here.

    Arrays are padded to the requested lengths `t` and `s`; a batch axis is 1 where all
    batch rows agree, a head axis 1 where all heads do.

    Attributes:
        lower: the first key that each query may see.
        upper: the last key that each query may see.
        id_pairs: ids of queries and ids of keys that must be equal.
        dense: a mask of pairs, nonzero where allowed.
        unions: of each of these, one member must be satisfied.
    """

    lower: jax.Array | None = None  # [#b, t]
    upper: jax.Array | None = None  # [#b, t]
    id_pairs: tuple[tuple[jax.Array, jax.Array], ...] = ()  # [#b, t], [#b, s]
    dense: jax.Array | None = None  # [#b, #n, t, s] int8
    unions: tuple[tuple["KernelMask", ...], ...] = ()

    def up_to(self, last_key: int, q_size: int) -> "KernelMask":
        """The mask without the keys after `last_key`."""
        last = jnp.full((1, q_size), last_key, jnp.int32)
        return self._replace(upper=last if self.upper is None else jnp.minimum(self.upper, last))

    def repeated(self, q_size: int) -> "KernelMask":
        """The mask of `q_size` queries that are the given ones again and again."""
        rows = lambda x, axis: jnp.take(x, np.arange(q_size) % x.shape[axis], axis)
        return KernelMask(
            lower=None if self.lower is None else rows(self.lower, 1),
            upper=None if self.upper is None else rows(self.upper, 1),
            id_pairs=tuple((rows(query, 1), key) for query, key in self.id_pairs),
            dense=None if self.dense is None else rows(self.dense, 2),
            unions=tuple(tuple(one.repeated(q_size) for one in union) for union in self.unions),
        )

    def allowed(self, kv_size: int) -> jax.Array:
        """The pairs themselves, bool, broadcastable to `[b, n, t, kv_size]`: the definition."""
        key = jnp.arange(kv_size, dtype=jnp.int32)
        allowed = jnp.ones((1, 1, 1, kv_size), bool)
        if self.lower is not None:
            allowed &= key >= self.lower[:, None, :, None]
        if self.upper is not None:
            allowed &= key <= self.upper[:, None, :, None]
        for q_ids, kv_ids in self.id_pairs:
            allowed &= q_ids[:, None, :, None] == kv_ids[:, None, None, :]
        if self.dense is not None:
            allowed &= self.dense != 0
        for union in self.unions:
            allowed &= functools.reduce(operator.or_, (one.allowed(kv_size) for one in union))
        return allowed


def without_kernel_mask(rule: Rule) -> list[str]:
    """The kinds of rules in `rule`, sorted, that `kernel_mask` has no form for."""
    found: set[str] = set()
    for part in rule.parts():
        if isinstance(part, Or):
            found.update(*map(without_kernel_mask, part.rules))
        elif not isinstance(part, Interval | Match | Dense | Everything):
            found.add(type(part).__name__)
    return sorted(found)


def is_overlapping_interval(part: Rule) -> bool:
    """Whether each query sees a range of keys, and neighbours see ranges that overlap."""
    if isinstance(part, Band):
        return part.q_positions is None
    if isinstance(part, Segments):
        return part.documents is not None
    return isinstance(part, Chunks | KeyLength | QueryLength)


def kernel_mask(rule: Rule, q_len: int, kv_len: int, q_size: int, kv_size: int) -> KernelMask:
    """The normal form of a mask.

    Args:
        rule: the mask; `without_kernel_mask` lists what it must not contain.
        q_len: number of queries.
        kv_len: number of keys.
        q_size: number of queries with padding.
        kv_size: number of keys with padding.

    Returns:
        The form, without what allows every pair. It says nothing about keys from `kv_len` on:
        use `up_to(kv_len - 1, q_size)` to hide them.

    >>> mask = kernel_mask(Band(-1, 0) & KeyLength(3), 4, 4, 4, 4)
    >>> mask.lower.tolist(), mask.upper.tolist()
    ([[-1, 0, 1, 2]], [[0, 1, 2, 2]])
    """
    query = jnp.arange(q_size, dtype=jnp.int32)[None]  # [1, t]
    lowers, uppers, id_pairs, unions, dense = [], [], [], [], []
    for part in rule.parts():
        if _has_bounds(part):
            lower, upper = _bounds(part, query)
            lowers.append(lower)
            uppers.append(upper)
        elif isinstance(part, Match):
            q_ids, kv_ids = part.id_pair()
            kv_ids = _padded(kv_ids, kv_size, int(NO_KEY))
            id_pairs.append((_padded(q_ids, q_size, int(NO_QUERY)), kv_ids))
        elif isinstance(part, Or):
            union = tuple(kernel_mask(one, q_len, kv_len, q_size, kv_size) for one in part.rules)
            if all(map(jax.tree.leaves, union)):  # else one of them allows every pair
                unions.append(union)
        elif isinstance(part, Dense):
            mask = part.mask.reshape((-1, *part.mask.shape[-3:]))
            if mask.shape[1] == mask.shape[2] == 1:  # hides whole keys
                id_pairs.append(_key_padding(mask, q_size, kv_len, kv_size))
                continue
            whole = jnp.broadcast_to(mask, (*mask.shape[:2], q_len, kv_len)).astype(jnp.int8)
            padding = ((0, 0), (0, 0), (0, q_size - q_len), (0, kv_size - kv_len))
            dense.append(jnp.pad(whole, padding))
    unions += [(KernelMask(dense=mask),) for mask in dense[1:]]
    return KernelMask(
        _tightest(lowers, jnp.maximum, q_size),
        _tightest(uppers, jnp.minimum, q_size),
        tuple(id_pairs),
        dense[0] if dense else None,
        tuple(unions),
    )


def row_bounds(parts: Iterable[Rule], q_size: int) -> tuple[jax.Array | None, jax.Array | None]:
    """The first and the last key that each query may see by those rules that bound it.

    Args:
        parts: rules that must all hold; those that do not bound the keys of a query are left out.
        q_size: number of queries.

    Returns:
        `[#b, q_size]` each; None where no rule gives such a bound.

    >>> lower, upper = row_bounds([Band(-1, 0), KeyLength(2)], 3)
    >>> lower.tolist(), upper.tolist()
    ([[-1, 0, 1]], [[0, 1, 1]])
    """
    query = jnp.arange(q_size, dtype=jnp.int32)[None]  # [1, t]
    bounds = [_bounds(part, query) for part in parts if _has_bounds(part)]
    return (
        _tightest([lower for lower, _ in bounds], jnp.maximum, q_size),
        _tightest([upper for _, upper in bounds], jnp.minimum, q_size),
    )


def conjunctions(rule: Rule, most: int) -> list[tuple[Rule, ...]] | None:
    """A mask as a disjunction of conjunctions of `Interval` and `Match` rules.

    Args:
        rule: the mask.
        most: the largest number of conjunctions to return.

    Returns:
        The conjunctions; None if a rule is of another kind or there are none or too many of them.
        An empty conjunction allows every pair.

    >>> mask = Band(None, 0) & (KeyLength(3) | QueryLength(2))
    >>> [len(rules) for rules in conjunctions(mask, 4)]
    [2, 2]
    """
    if isinstance(rule, Everything):
        return [()]
    if isinstance(rule, Interval | Match):
        return [(rule,)]
    if not isinstance(rule, And | Or):
        return None
    parts = [conjunctions(part, most) for part in rule.rules]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    if isinstance(rule, Or):
        found = [rules for part in known for rules in part]
    else:
        found = [tuple(itertools.chain(*one)) for one in itertools.product(*known)]
    return found if 0 < len(found) <= most else None


def _has_bounds(part: Rule) -> bool:
    """Whether each query sees one range of keys, or none of a union without members."""
    if isinstance(part, Or):
        return not part.rules
    return isinstance(part, Interval) or (isinstance(part, Segments) and part.documents is not None)


def _bounds(part: Rule, query: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """First and last key of each query, `[#b, t]` or `[#b, 1]`; None where there is no bound."""
    match part:
        case Band():
            place = query
            if part.q_positions is not None:
                place = jnp.clip(_padded(part.q_positions, query.shape[1], 0), -_FAR, _FAR)
            lower = None if part.low is None else place + _near(part.low)
            return lower, None if part.high is None else place + _near(part.high)
        case Chunks():
            size = _per_row(part.size)
            first = (query + _per_row(part.q_start)) // size * size - _per_row(part.k_start)
            return first, first + size - 1
        case KeyLength():
            return None, _near(part.length) - 1
        case QueryLength():
            return None, jnp.where(query < _near(part.length), _FAR, -1)
        case Segments():
            return _document_bounds(part, query.shape[1])
        case _:
            return None, jnp.full((1, 1), -1, jnp.int32)


def _document_bounds(part: Segments, size: int) -> tuple[jax.Array, jax.Array]:
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
    lengths = (ids[:, None] == number[:, None]).sum(-1, dtype=jnp.int32)[:, None]  # [#b, 1, m]
    before = jnp.where(number < ids[..., None], lengths, 0).sum(-1, dtype=jnp.int32)
    own = jnp.where(number == ids[..., None], lengths, 0).sum(-1, dtype=jnp.int32)
    return before, before + own - 1


def _key_padding(
    mask: jax.Array, q_size: int, kv_len: int, kv_size: int
) -> tuple[jax.Array, jax.Array]:
    """The pair of ids of a mask `[#b, 1, 1, #s]` that hides whole keys."""
    keys = jnp.where(mask[:, 0, 0], jnp.int32(0), jnp.int32(NO_KEY))
    keys = jnp.broadcast_to(keys, (keys.shape[0], kv_len))
    return jnp.zeros((1, q_size), jnp.int32), _padded(keys, kv_size, int(NO_KEY))


def _tightest(
    bounds: Sequence[jax.Array | None],
    choose: Callable[[jax.Array, jax.Array], jax.Array],
    q_size: int,
) -> jax.Array | None:
    given = [bound for bound in bounds if bound is not None]
    if not given:
        return None
    bound = functools.reduce(choose, given)
    return jnp.broadcast_to(bound, (bound.shape[0], q_size))


def _per_row(number: Index) -> jax.Array:
    """A number against `[b, t]`."""
    return jnp.asarray(number, jnp.int32).reshape(-1, 1)


def _near(number: Index) -> jax.Array:
    return jnp.clip(_per_row(number), -_FAR, _FAR)


def _padded(numbers: jax.Array, size: int, fill: int) -> jax.Array:
    """`[#b, size]` from `[..., length]`."""
    numbers = numbers.reshape(-1, numbers.shape[-1]).astype(jnp.int32)
    return jnp.pad(numbers, ((0, 0), (0, size - numbers.shape[1])), constant_values=fill)
