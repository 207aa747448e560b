"""Which tokens each device holds of a sequence that is split, and masks as it sees them.

| placement | shard i of n holds |
|---|---|
| `contiguous` | the i-th of n equal parts |
| `zigzag` | parts i and 2n - 1 - i of 2n equal parts |
| `striped` | the tokens t with t mod n = i |

In all of them the positions of a shard's tokens increase. Therefore the keys of a shard that lie in
an interval of positions are one range of its indices, and every mask rule of the whole sequence is,
for the queries of one shard and the keys of another, a rule of the same kind or a range of keys for
each query: kernels need to know nothing of placements.
"""

from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.types.rule_arrays import Index, bounded
from ejkernel.types.rules import (
    And,
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

Placement: TypeAlias = Literal["contiguous", "zigzag", "striped"]
PLACEMENTS: Final[tuple[Placement, ...]] = get_args(Placement)
_Array = TypeVar("_Array", jax.Array, np.ndarray)


def length_multiple(shards: int, placement: Placement) -> int:
    """What the length of a sequence must be a multiple of."""
    return 2 * shards if placement == "zigzag" else shards


def place(x: _Array, shards: int, placement: Placement, axis: int) -> _Array:
    """`x` with the tokens of each shard next to each other, shard after shard."""
    if placement == "contiguous" or shards == 1:
        return x
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if placement == "striped":
        apart = x.reshape(*before, length // shards, shards, *after)
        return apart.swapaxes(axis, axis + 1).reshape(x.shape)
    stack = np.stack if isinstance(x, np.ndarray) else jnp.stack
    halves = x.reshape(*before, 2, shards, length // (2 * shards), *after)
    index = (slice(None),) * axis
    low, high = halves[(*index, 0)], halves[(*index, 1, slice(None, None, -1))]
    placed: Any = stack((low, high), axis + 1)
    return placed.reshape(x.shape)


def restore(x: _Array, shards: int, placement: Placement, axis: int) -> _Array:
    """The inverse of `place`."""
    if placement == "contiguous" or shards == 1:
        return x
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if placement == "striped":
        apart = x.reshape(*before, shards, length // shards, *after)
        return apart.swapaxes(axis, axis + 1).reshape(x.shape)
    join = np.concatenate if isinstance(x, np.ndarray) else jnp.concatenate
    pairs = x.reshape(*before, shards, 2, length // (2 * shards), *after)
    index = (slice(None),) * axis
    low = pairs[(*index, slice(None), 0)]
    high = pairs[(*index, slice(None, None, -1), 1)]
    restored: Any = join((low, high), axis)
    return restored.reshape(x.shape)


class ShardPositions(NamedTuple):
    """The positions of the tokens that one shard holds, in ascending order.

    Attributes:
        starts: the first position of each piece.
        length: tokens in a piece.
        stride: the distance of neighbours in a piece.
    """

    starts: tuple[Index, ...]
    length: int
    stride: int = 1

    @classmethod
    def of(cls, shard: Index, shards: int, placement: Placement, size: int) -> "ShardPositions":
        """The share of `size` tokens that a shard holds."""
        if placement == "striped":
            return cls((shard,), size, shards)
        if placement == "zigzag":
            half = size // 2
            return cls((shard * half, (2 * shards - 1 - shard) * half), half)
        return cls((shard * size,), size)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.starts) * self.length

    def positions(self) -> jax.Array:
        """The position of each token, `[size]`."""
        steps = jnp.arange(self.length, dtype=jnp.int32) * self.stride
        return jnp.concatenate([steps + start for start in self.starts])

    def affine(self) -> jax.Array:
        """Four numbers (a, b, c, d): token i has the position `a + b i`, plus d for `i >= c`."""
        jump = 0 if len(self.starts) == 1 else self.starts[1] - self.starts[0] - self.length
        numbers = (self.starts[0], self.stride, self.length, jump)
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers])

    def count_below(self, position: Index) -> Any:
        """How many of the tokens lie before a position."""
        clip = jnp.clip if isinstance(position, jax.Array) else np.clip
        if any(isinstance(start, jax.Array) for start in self.starts):
            clip = jnp.clip
        count = lambda start: clip(-((start - position) // self.stride), 0, self.length)
        return sum(count(start) for start in self.starts)

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        """The entries of these tokens, from an array of all."""
        axis %= x.ndim
        if self.stride == 1:
            parts = [lax.dynamic_slice_in_dim(x, at, self.length, axis) for at in self.starts]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
        apart = x.reshape(*x.shape[:axis], self.length, self.stride, *x.shape[axis + 1 :])
        return lax.dynamic_index_in_dim(apart, self.starts[0], axis + 1, keepdims=False)

    def add(self, x: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        """An array of all tokens with `part`, one of these tokens, added in their places."""
        axis %= x.ndim
        if self.stride != 1:
            apart = x.reshape(*x.shape[:axis], self.length, self.stride, *x.shape[axis + 1 :])
            part = jnp.expand_dims(part, axis + 1)
            return _added(apart, part, self.starts[0], axis + 1).reshape(x.shape)
        for number, start in enumerate(self.starts):
            piece = lax.slice_in_dim(
                part, number * self.length, (number + 1) * self.length, 1, axis
            )
            x = _added(x, piece, start, axis)
        return x


def _added(x: jax.Array, part: jax.Array, start: Index, axis: int) -> jax.Array:
    part = part + lax.dynamic_slice_in_dim(x, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, part, start, axis)


def placed_rule(rule: Rule, queries: ShardPositions, keys: ShardPositions) -> Rule:
    """A rule of the whole sequence for the queries and keys of two shares.

    Args:
        rule: the mask, by positions.
        queries: which queries there are.
        keys: which keys there are.

    Returns:
        The rule by indices into the shares.

    >>> query, key = (ShardPositions.of(shard, 2, "striped", 2) for shard in (0, 1))
    >>> placed_rule(Band(None, 0), query, key).dense(2, 2)[0].astype(int).tolist()
    [[0, 0], [1, 0]]
    """
    if queries.stride == keys.stride == len(queries.starts) == len(keys.starts) == 1:
        return rule.slice(queries.starts[0], queries.length, keys.starts[0], keys.length)
    match rule:
        case And() | Or():
            parts = [placed_rule(part, queries, keys) for part in rule.rules]
            return type(rule)(tuple(parts))
        case Band():
            return _placed_band(rule, queries, keys)
        case Chunks():
            size = _along(rule.size)
            first = (queries.positions() + _along(rule.q_start)) // size * size
            first = first - _along(rule.k_start)
            return _key_range(keys, first, first + size - 1)
        case KeyLength():
            return KeyLength(_count_below(keys, rule.length))
        case QueryLength():
            return QueryLength(_count_below(queries, rule.length))
        case Segments():
            return Segments(queries.take(rule.q_ids, -1), keys.take(rule.kv_ids, -1))
        case TokenTypes():
            types = queries.take(rule.q_types, -1), keys.take(rule.kv_types, -1)
            return TokenTypes(*types, rule.zero_policy)
        case Dense():
            mask = rule.mask
            mask = mask if mask.shape[-2] == 1 else queries.take(mask, -2)
            return Dense(mask if mask.shape[-1] == 1 else keys.take(mask, -1))
        case Everything():
            return rule
        case _:
            raise NotImplementedError(f"placed_rule: {type(rule).__name__} has no placed form.")


def _along(number: Index) -> Any:
    """A number against positions `[..., t]`; an array has one entry per batch row."""
    return number[..., None] if isinstance(number, jax.Array) else number


def _count_below(share: ShardPositions, length: Index) -> Any:
    count = share.count_below(bounded(length))
    return count if isinstance(count, jax.Array) else int(count)


def _key_range(keys: ShardPositions, first: jax.Array | None, last: jax.Array | None) -> Rule:
    """The keys from a first to a last position for each query."""
    rule: Rule = Everything()
    if first is not None:
        rule = rule & Band(0, None, keys.count_below(bounded(first)))
    if last is not None:
        rule = rule & Band(None, 0, keys.count_below(bounded(last) + 1) - 1)
    return rule


def _placed_band(rule: Band, queries: ShardPositions, keys: ShardPositions) -> Rule:
    at = queries.positions()
    if rule.q_positions is not None:
        at = bounded(queries.take(rule.q_positions, -1).astype(jnp.int32))
    low, high = (
        None if bound is None else at + _along(bounded(bound)) for bound in (rule.low, rule.high)
    )
    return _key_range(keys, low, high)
