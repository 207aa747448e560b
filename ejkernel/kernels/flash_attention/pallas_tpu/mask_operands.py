"""Mask rules inside TPU kernels: which arrays a tile needs, and which of its pairs are allowed.

A kernel gets the arrays of a rule as operands, cut to the tile by block specs, and evaluates the
rule from them and from the indices of its queries and keys. Nothing of size Q x K is made, except
for a dense mask that the caller has given.

| kind | array | in the tile |
|---|---|---|
| scalar | [1 or b] | a number in scalar memory |
| query | [1 or b, t] | a column, or a row in a transposed tile, keys by queries |
| key | [1 or b, s] | a row, or a column |
| tile | [1 or b, 1 or n, 1 or t, 1 or s] | a tile, or what is broadcast to one |
| blocks | [1 or b, 1 or n, i, j] | all of it |
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.rule_arrays import bounded
from ejkernel.types.rules import (
    And,
    Band,
    Blocks,
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

Kind = Literal["scalar", "query", "key", "tile", "blocks"]


class MaskOperand(NamedTuple):
    """An array of a rule, batch first, and how a kernel is given it."""

    kind: Kind
    array: jax.Array


class _BlockGrid(NamedTuple):
    """`Blocks` with the block of every query and key looked up beforehand."""

    mask: jax.Array
    q_blocks: jax.Array
    k_blocks: jax.Array


# A rule without divisions; And and Or with their parts.
_Leaf = Rule | _BlockGrid
_Prepared = _Leaf | tuple[type[And] | type[Or], tuple]
# A field of a rule inside a kernel: an operand, or a static number; None: the rule has none.
_Value = jax.Array | int | None

_FIELDS: dict[type, tuple[tuple[str, Kind], ...]] = {
    Band: (("low", "scalar"), ("high", "scalar"), ("q_positions", "query")),
    KeyLength: (("length", "scalar"),),
    QueryLength: (("length", "scalar"),),
    Segments: (("q_ids", "query"), ("kv_ids", "key")),
    TokenTypes: (("q_types", "query"), ("kv_types", "key")),
    Dense: (("mask", "tile"),),
    _BlockGrid: (("mask", "blocks"), ("q_blocks", "query"), ("k_blocks", "key")),
}


class TileMask:
    """A rule as a kernel evaluates it.

    Attributes:
        operands: the arrays that the kernel must be given, in this order.
    """

    def __init__(self, rule: Rule, q_len: int, kv_len: int):
        self._rule = _prepared(rule, q_len, kv_len)
        self.operands: list[MaskOperand] = [
            MaskOperand(kind, _array(getattr(part, name), kind))
            for part in _leaves(self._rule)
            for name, kind in _FIELDS[type(part)]
            if isinstance(getattr(part, name), jax.Array)
        ]

    @property
    def always(self) -> bool:
        """Whether every pair is allowed."""
        return isinstance(self._rule, Everything)

    def allowed(self, values: list[jax.Array], q: jax.Array, k: jax.Array) -> jax.Array:
        """The allowed pairs of a tile; `values` are the operands, `q` and `k` the indices."""
        return _allowed(self._rule, iter(values), q, k)


def _prepared(rule: Rule, q_len: int, kv_len: int) -> _Prepared:
    """The rule without divisions, which kernels do not have: indices become ids beforehand."""
    if isinstance(rule, And | Or):
        parts = tuple(_prepared(part, q_len, kv_len) for part in rule.rules)
        return type(rule), parts
    ids = lambda length, start, size: (jnp.arange(length) + _column(start)) // _column(size)
    if isinstance(rule, Chunks):
        # Counted from the chunk of the first query: ids of segments are not negative.
        q, k = ids(q_len, rule.q_start, rule.size), ids(kv_len, rule.k_start, rule.size)
        least = jnp.minimum(q.min(), k.min())
        return Segments(q - least, k - least)
    if isinstance(rule, Blocks):
        mask = rule.mask if rule.mask.ndim == 4 else rule.mask[None]
        return _BlockGrid(
            mask,
            ids(q_len, rule.q_start, rule.block_q),
            ids(kv_len, rule.k_start, rule.block_k),
        )
    return rule


def _column(x: int | jax.Array) -> jax.Array:
    return jnp.reshape(jnp.asarray(x, jnp.int32), (-1, 1))


def _leaves(rule: _Prepared) -> list[_Leaf]:
    if isinstance(rule, tuple) and not isinstance(rule, _BlockGrid):
        return [leaf for part in rule[1] for leaf in _leaves(part)]
    return [] if isinstance(rule, Everything) else [rule]


def _array(x: jax.Array, kind: Kind) -> jax.Array:
    if kind == "scalar":
        return x.reshape(-1).astype(jnp.int32)
    if kind in ("query", "key"):
        return (x if x.ndim == 2 else x[None]).astype(jnp.int32)
    x = x if x.ndim == 4 else x[None]
    return x.astype(jnp.int8 if kind == "tile" else jnp.bfloat16)


def _allowed(rule: _Prepared, values: Iterator[jax.Array], q: jax.Array, k: jax.Array) -> jax.Array:
    if isinstance(rule, tuple) and not isinstance(rule, _BlockGrid):
        how, parts = rule
        found = [_allowed(part, values, q, k) for part in parts]
        return functools.reduce(operator.and_ if how is And else operator.or_, found)
    if isinstance(rule, Everything):
        return (q >= 0) & (k >= 0)
    fields = {
        name: next(values) if isinstance(getattr(rule, name), jax.Array) else getattr(rule, name)
        for name, _ in _FIELDS[type(rule)]
    }
    return _RULES[type(rule)](rule, q, k, **fields)


def _band(
    rule: Band, q: jax.Array, k: jax.Array, low: _Value, high: _Value, q_positions: jax.Array | None
) -> jax.Array:
    # Adding to a row or column costs next to nothing, adding to a tile does not.
    position = q if q_positions is None else q_positions
    bounds = [] if low is None else [k >= position + bounded(low)]
    bounds += [] if high is None else [k <= position + bounded(high)]
    return functools.reduce(operator.and_, bounds)


def _segments(
    rule: Segments, q: jax.Array, k: jax.Array, q_ids: jax.Array, kv_ids: jax.Array
) -> jax.Array:
    # Negative ids match nothing. Replacing them in rows and columns is cheap, in a tile it is not.
    return jnp.where(q_ids < 0, -1, q_ids) == jnp.where(kv_ids < 0, -2, kv_ids)


def _types(
    rule: TokenTypes, q: jax.Array, k: jax.Array, q_types: jax.Array, kv_types: jax.Array
) -> jax.Array:
    if rule.zero_policy != "none":
        nothing = jnp.iinfo(jnp.int32).min
        q_types = jnp.where(q_types == 0, nothing, q_types)
        kv_types = jnp.where(kv_types == 0, nothing + 1, kv_types)
    return q_types == kv_types


def _block_grid(
    rule: _BlockGrid,
    q: jax.Array,
    k: jax.Array,
    mask: jax.Array,
    q_blocks: jax.Array,
    k_blocks: jax.Array,
) -> jax.Array:
    """The block mask spread over a tile by two matmuls with rows of a unit matrix."""
    transposed = q_blocks.shape[0] == 1
    mask = mask.T if transposed else mask
    of_rows, of_columns = (k_blocks, q_blocks) if transposed else (q_blocks, k_blocks)
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    rows, columns = mask.shape
    place = functools.partial(jax.lax.broadcasted_iota, jnp.int32)
    picked = of_rows == place((of_rows.shape[0], rows), 1)
    spread = place((columns, of_columns.shape[1]), 0) == of_columns
    mask_rows = dot(picked.astype(mask.dtype), mask).astype(mask.dtype)
    return dot(mask_rows, spread.astype(mask.dtype)) > 0.5


_RULES: dict[type, Callable[..., jax.Array]] = {
    Band: _band,
    KeyLength: lambda rule, q, k, length: k < length,
    QueryLength: lambda rule, q, k, length: q < length,
    Segments: _segments,
    TokenTypes: _types,
    Dense: lambda rule, q, k, mask: mask.astype(jnp.int32) != 0,
    _BlockGrid: _block_grid,
}
