"""What every mask rule is and can do, and the two ways of putting rules together.

A rule says which (query, key) pairs are allowed, from indices and O(length) arrays. It knows no
lengths of its own: they are passed to `dense` and `blocks`. Its arrays may have one leading batch
axis (of size 1 where all rows agree) or none, as after `row` or inside `vmap`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.types.rule_arrays import Grid, Index, Start, as_start, index_or_first
from ejkernel.types.rule_tree import (
    STATIC_TYPES,
    arrays_of,
    changed,
    field_names,
    full_rank,
    register,
    summary,
)


class Rule:
    """Which (query, key) pairs may attend; an immutable pytree.

    Arrays (and rules inside rules) are children of the pytree; numbers and strings are static.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(cls)

    def __and__(self, other: "Rule") -> "Rule":
        return _unwrap(And((self, other)))

    def __or__(self, other: "Rule") -> "Rule":
        return _unwrap(Or((self, other)))

    def row(self, b: Index) -> "Rule":
        """The rule of batch row `b`, its arrays without the batch axis."""
        changes = {}
        for name, value in arrays_of(self):
            if value.ndim == full_rank(type(self), name):
                changes[name] = index_or_first(value, b)
        return self._changed(**changes)

    def head(self, n: Index) -> "Rule":
        """The rule of head `n`, which differs only for a dense mask that has heads."""
        return self

    def slice(self, q_start: Index, q_len: int, k_start: Index, k_len: int) -> "Rule":
        """The rule of the rectangle at (q_start, k_start), indices counted from there.

        The rectangle lies inside the mask, or its starts are multiples of its lengths (a tile at
        the edge). What lies beyond the edge is allowed or not as the rule happens to say there:
        whoever reads it must mask it by the lengths.

        Args:
            q_start: first query; an int, a traced scalar, or one per batch row `[b]`.
            q_len: number of queries.
            k_start: first key, like `q_start`.
            k_len: number of keys.

        Returns:
            The rule; of the mask's arrays only O(q_len + k_len) are read (a dense mask: the
            rectangle).
        """
        return self.sliced(as_start(q_start), q_len, as_start(k_start), k_len)

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> "Rule":
        """`slice` for starts that are ints or int32 arrays."""
        raise NotImplementedError

    def dense(self, q_len: int, kv_len: int) -> jax.Array:
        """The mask itself, bool `[..., 1 or n, q_len, kv_len]`: the one place of size Q x K."""
        with jax.numpy_rank_promotion("allow"):
            allowed = self.allowed(q_len, kv_len)
        return jnp.broadcast_to(allowed, (*allowed.shape[:-2], q_len, kv_len))

    def blocks(
        self, q_len: int, kv_len: int, block_q: int, block_k: int
    ) -> tuple[jax.Array, jax.Array]:
        """What is known of each block without looking at its pairs.

        Args:
            q_len: number of queries.
            kv_len: number of keys.
            block_q: queries in a block.
            block_k: keys in a block.

        Returns:
            `(some, every)`, bool `[..., 1 or n, ceil(q_len / block_q), ceil(kv_len / block_k)]`:
            `some` is False only where no pair of the block is allowed, `every` is True only where
            all pairs of the block inside `q_len x kv_len` are.
        """
        with jax.numpy_rank_promotion("allow"):
            some, every = self.block_bounds(Grid(q_len, kv_len, block_q, block_k))
        shape = jnp.broadcast_shapes(
            some.shape, every.shape, (1, -(-q_len // block_q), -(-kv_len // block_k))
        )
        return jnp.broadcast_to(some, shape), jnp.broadcast_to(every, shape)

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        """`dense` before it is broadcast to its full shape: at least `[1, 1, 1]`."""
        raise NotImplementedError

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        """`blocks` before it is broadcast to its full shape."""
        raise NotImplementedError

    @property
    def contiguous(self) -> bool:
        """Whether the key blocks that each query block sees are one range, whatever the arrays."""
        return False

    @property
    def contiguous_columns(self) -> bool:
        """Whether the query blocks that see each key block are one range, whatever the arrays."""
        return False

    @property
    def heads(self) -> int:
        """1, or the number of heads of a dense mask that differs between heads."""
        return 1

    @property
    def batch_size(self) -> int | None:
        """Length of the batch axis of the arrays; None if no array has one."""
        sizes = [
            value.shape[0]
            for name, value in arrays_of(self)
            if getattr(value, "ndim", None) == full_rank(type(self), name)
        ]
        return max(sizes, default=None)

    @property
    def batched(self) -> bool:
        """Whether some array has a batch axis longer than 1."""
        return (self.batch_size or 1) > 1

    def with_batch(self, size: int) -> "Rule":
        """The rule with every batch axis of length 1 repeated to `size`."""
        changes = {}
        for name, value in arrays_of(self):
            if value.ndim == full_rank(type(self), name) and value.shape[0] != size:
                changes[name] = jnp.broadcast_to(value, (size, *value.shape[1:]))
        return self._changed(**changes)

    def repeat_rows(self, times: int) -> "Rule":
        """The rule with every batch row so many times, one after the other."""
        changes = {}
        for name, value in arrays_of(self):
            if value.ndim == full_rank(type(self), name) and value.shape[0] > 1:
                changes[name] = jnp.repeat(value, times, axis=0)
        return self._changed(**changes)

    def parts(self) -> tuple["Rule", ...]:
        """The rules that must all hold: those of an `And`, else this one."""
        return (self,)

    def features(self) -> frozenset[str]:
        """The kinds of rules in this one, such as `{"causal", "segments"}`."""
        return frozenset()

    def describe(self) -> tuple[object, ...]:
        """Kinds and static numbers, hashable and fit for JSON; arrays appear as `"array"`."""
        values = (getattr(self, name) for name in field_names(type(self)))
        return (
            type(self).__name__.lower(),
            *(value if isinstance(value, STATIC_TYPES) else "array" for value in values),
        )

    def __repr__(self) -> str:
        # Shapes only: the values of an array may be far away, or not known yet.
        values = ((name, getattr(self, name)) for name in field_names(type(self)))
        shown = ", ".join(f"{name}={summary(value)}" for name, value in values if value is not None)
        return f"{type(self).__name__}({shown})"

    def _changed(self, **changes: object) -> "Rule":
        """A copy with other field values and no validation."""
        return changed(self, changes) if changes else self


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Everything(Rule):
    """Every pair is allowed."""

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        return self

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        return jnp.ones((1, 1, 1), bool)

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        return jnp.ones((1, 1, 1), bool), jnp.ones((1, 1, 1), bool)

    @property
    def contiguous(self) -> bool:
        return True

    @property
    def contiguous_columns(self) -> bool:
        return True


class Offset(Rule):
    """Shared by the rules that count queries and keys from starts of their own."""

    q_start: int | jax.Array
    k_start: int | jax.Array

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        return self._changed(q_start=self.q_start + q_start, k_start=self.k_start + k_start)


class _Combination(Rule):
    """Shared by `And` and `Or`: everything but the connective."""

    rules: tuple[Rule, ...]

    def row(self, b: Index) -> Rule:
        return self._each(lambda rule: rule.row(b))

    def head(self, n: Index) -> Rule:
        return self._each(lambda rule: rule.head(n))

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        return self._each(lambda rule: rule.sliced(q_start, q_len, k_start, k_len))

    def with_batch(self, size: int) -> Rule:
        return self._each(lambda rule: rule.with_batch(size))

    def repeat_rows(self, times: int) -> Rule:
        return self._each(lambda rule: rule.repeat_rows(times))

    @property
    def heads(self) -> int:
        return max((rule.heads for rule in self.rules), default=1)

    @property
    def batch_size(self) -> int | None:
        sizes = [rule.batch_size for rule in self.rules]
        return max((size for size in sizes if size is not None), default=None)

    def features(self) -> frozenset[str]:
        return frozenset().union(*(rule.features() for rule in self.rules))

    def describe(self) -> tuple[object, ...]:
        return (type(self).__name__.lower(), *(rule.describe() for rule in self.rules))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.rules))})"

    def _each(self, change: Callable[[Rule], Rule]) -> Rule:
        return self._changed(rules=tuple(change(rule) for rule in self.rules))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(_Combination):
    """A pair is allowed when every rule allows it; nested `And` and `Everything` dissolve."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _flat(self.rules, And, Everything))

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        parts = [rule.allowed(q_len, kv_len) for rule in self.rules]
        return functools.reduce(operator.and_, parts, jnp.ones((1, 1, 1), bool))

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        some, every = Everything().block_bounds(grid)
        for rule in self.rules:
            rule_some, rule_every = rule.block_bounds(grid)
            some, every = some & rule_some, every & rule_every
        return some, every

    def parts(self) -> tuple[Rule, ...]:
        return self.rules

    @property
    def contiguous(self) -> bool:
        return all(rule.contiguous for rule in self.rules)

    @property
    def contiguous_columns(self) -> bool:
        return all(rule.contiguous_columns for rule in self.rules)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(_Combination):
    """A pair is allowed when some rule allows it; of no rules, nothing is."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        flat = _flat(self.rules, Or, None)
        # What allows every pair leaves nothing for the others to add.
        everything = tuple(rule for rule in flat if isinstance(rule, Everything))
        object.__setattr__(self, "rules", everything[:1] or flat)

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        parts = [rule.allowed(q_len, kv_len) for rule in self.rules]
        return functools.reduce(operator.or_, parts, jnp.zeros((1, 1, 1), bool))

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        some = every = jnp.zeros((1, 1, 1), bool)
        for rule in self.rules:
            rule_some, rule_every = rule.block_bounds(grid)
            some, every = some | rule_some, every | rule_every
        return some, every

    def features(self) -> frozenset[str]:
        return super().features() | {"union"}


def _flat(rules: tuple[Rule, ...], same: type, neutral: type | None) -> tuple[Rule, ...]:
    flat: list[Rule] = []
    for rule in rules:
        if isinstance(rule, same):
            flat.extend(rule.rules)  # type: ignore
        elif neutral is None or not isinstance(rule, neutral):
            flat.append(rule)
    return tuple(flat)


def _unwrap(rule: And | Or) -> Rule:
    """A combination of one rule is that rule; an `And` of none allows everything."""
    if len(rule.rules) == 1:
        return rule.rules[0]
    return Everything() if isinstance(rule, And) and not rule.rules else rule
