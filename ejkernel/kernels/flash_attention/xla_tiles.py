"""How a call is cut into tiles, and what the mask, the bias and dropout are in one tile.

A tile is a block of queries against a block of keys for some batch rows and heads at once: one
`Unit`. The query heads that share a key head stand below each other as rows of one matrix, so keys
are never repeated.

    query tile   [lanes, group * block_q, dim]      lanes = rows * heads
    key tile     [lanes, block_k, dim]
    logits       [rows, heads, group, block_q, block_k], or transposed: block_k before group

Tiles are cut from the arrays as they come, in the loop: a copy of a whole array in another order costs
more than all the small ones.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import dropout
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.types.block_map import FULL, BlockList, BlockMap, block_map
from ejkernel.types.rules import Everything, Rule

# Logits in one tile: more would leave the cache of a CPU, and cost memory without gaining speed.
_LARGEST_TILE = 1 << 21


class Unit(NamedTuple):
    """Where a unit begins: its first batch row, its first query head, its first key head."""

    row: Any
    head: Any
    key: Any


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The geometry of a call: all of it static."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_k: int
    rows: int  # batch rows in a unit
    heads: int  # key heads in a unit; query heads where the mask differs between them
    group: int  # query heads on each of them

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def k_blocks(self) -> int:
        return -(-self.kv_len // self.block_k)

    @property
    def units(self) -> int:
        return self.batch * self.q_heads // (self.rows * self.heads * self.group)

    @property
    def lanes(self) -> int:
        return self.rows * self.heads

    @property
    def units_per_key(self) -> int:
        """How many units read the same keys: more than 1 where the mask differs between heads."""
        return self.q_heads // self.kv_heads // self.group

    def unit(self, index: Any) -> Unit:
        """Where the unit of this index begins."""
        row, head = divmod(index, self.q_heads // (self.heads * self.group))
        key = head * self.heads // self.units_per_key
        return Unit(row * self.rows, head * self.heads * self.group, key)

    def pad_queries(self, x: jax.Array, axis: int = 1, fill: float = 0.0) -> jax.Array:
        """`x` with a whole number of query blocks along `axis`."""
        return _pad(x, axis, self.q_blocks * self.block_q, fill)

    def pad_keys(self, x: jax.Array) -> jax.Array:
        """`x`, [b, s, k, d], with a whole number of key blocks."""
        return _pad(x, 1, self.k_blocks * self.block_k, 0.0)

    def queries(self, x: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """The query tile [lanes, group * block_q, d] of [b, t, n, d]."""
        sizes = (self.rows, self.block_q, self.heads * self.group, x.shape[-1])
        tile = _slice(x, (unit.row, i * self.block_q, unit.head, 0), sizes)
        tile = tile.reshape(self.rows, self.block_q, self.heads, self.group, -1)
        return tile.transpose(0, 2, 3, 1, 4).reshape(self.lanes, self.group * self.block_q, -1)

    def keys(self, x: jax.Array, unit: Unit, j: Any) -> jax.Array:
        """The key tile [lanes, block_k, d] of [b, s, k, d]."""
        sizes = (self.rows, self.block_k, self.heads, x.shape[-1])
        tile = _slice(x, (unit.row, j * self.block_k, unit.key, 0), sizes)
        return tile.transpose(0, 2, 1, 3).reshape(self.lanes, self.block_k, -1)

    def per_row(self, x: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """The part of [b, n, t], a number for each row of logits, in a tile: [lanes, rows]."""
        sizes = (self.rows, self.heads * self.group, self.block_q)
        return _slice(x, (unit.row, unit.head, i * self.block_q), sizes).reshape(self.lanes, -1)

    def put_queries(self, x: jax.Array, tile: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """`x`, [b, t, n, d], with a query tile written to its place."""
        tile = tile.reshape(self.rows, self.heads, self.group, self.block_q, -1)
        tile = tile.transpose(0, 3, 1, 2, 4).reshape(self.rows, self.block_q, -1, x.shape[-1])
        return _update(x, tile, (unit.row, i * self.block_q, unit.head, 0))

    def put_per_row(self, x: jax.Array, tile: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """`x`, [b, n, t], with the numbers of a tile's rows written to their place."""
        tile = tile.reshape(self.rows, -1, self.block_q)
        return _update(x, tile, (unit.row, unit.head, i * self.block_q))

    def add_queries_t(self, x: jax.Array, tile: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """`x`, [b, n, d, t], with a transposed query tile [lanes, d, rows] added to it."""
        start = (unit.row, unit.head, 0, i * self.block_q)
        tile = tile.reshape(self.rows, self.heads, -1, self.group, self.block_q)
        tile = tile.transpose(0, 1, 3, 2, 4).reshape(self.rows, -1, x.shape[2], self.block_q)
        return _update(x, tile + _slice(x, start, tile.shape), start)

    def add_keys(self, x: jax.Array, tile: jax.Array, unit: Unit, j: Any) -> jax.Array:
        """`x`, [b, s, k, d], with a key tile added to it."""
        start = (unit.row, j * self.block_k, unit.key, 0)
        tile = tile.reshape(self.rows, self.heads, self.block_k, -1).transpose(0, 2, 1, 3)
        if self.units_per_key > 1:
            tile += _slice(x, start, tile.shape)
        return _update(x, tile.astype(x.dtype), start)


def tiling(inputs: Inputs, block_q: int, block_k: int) -> Tiling:
    """The tiles of a call: as many batch rows and heads at once as fit, if they share a mask."""
    rule = inputs.mask or Everything()
    batch, q_len, q_heads, _ = inputs.query.shape
    kv_len, kv_heads = inputs.key.shape[1:3]
    block_q, block_k = min(block_q, q_len), min(block_k, kv_len)
    apart = rule.heads > 1
    group, heads = (1, 1) if apart else (q_heads // kv_heads, kv_heads)
    area = group * block_q * block_k
    heads = _largest_divisor(heads, _LARGEST_TILE // area)
    together = not apart and not rule.batched and heads == kv_heads
    rows = _largest_divisor(batch, _LARGEST_TILE // (area * heads)) if together else 1
    return Tiling(
        batch, q_heads, kv_heads, q_len, kv_len, block_q, block_k, rows, heads, group
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(max(1, min(number, most)), 0, -1) if number % d == 0)


class Tiles:
    """The tiles of one call: which to visit, and mask, bias and dropout in each."""

    def __init__(self, inputs: Inputs, spec: Spec, block_q: int, block_k: int):
        self.inputs, self.spec = inputs, spec
        self.cut = cut = tiling(inputs, block_q, block_k)
        self.rule: Rule = inputs.mask or Everything()
        # Alone in its row and column, a block is visited whatever the mask.
        self.single = cut.q_blocks == cut.k_blocks == 1
        self.map: BlockMap | None = None
        if not (self.single or isinstance(self.rule, Everything)):
            self.map = block_map(self.rule, cut.q_len, cut.kv_len, cut.block_q, cut.block_k)
        self.ragged = cut.kv_len % cut.block_k != 0
        # Carries an axis over which any input varies inside shard_map; holds no data.
        self._anchor = sum(
            lax.full_like(x, 0, shape=(), dtype=jnp.int32) for x in jax.tree.leaves(inputs)
        )
        self.bias = None if inputs.bias is None else self._padded(inputs.bias)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
        """A constant that may be carried by a loop over tiles."""
        return lax.full_like(self._anchor, value, shape=shape, dtype=dtype)

    def over_keys(self, unit: Unit, i: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`carry = step(j, carry)` for every key block j that query block i may see."""
        rows = None if self.map is None else self.map.rows
        return self._walk(rows, self.cut.k_blocks, unit, i, step, carry)

    def over_queries(self, unit: Unit, j: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`carry = step(i, carry)` for every query block i that may see key block j."""
        columns = None if self.map is None else self.map.columns
        return self._walk(columns, self.cut.q_blocks, unit, j, step, carry)

    def _walk(self, blocks: BlockList | None, all_blocks: int, unit: Unit, line, step, carry):
        if blocks is not None:
            row, head = (unit.row, unit.head)
            count = _pick(blocks.count, row, head)[line]
            at = lambda s: blocks.at(row, head, line, s)
        elif all_blocks == 1:
            return step(jnp.int32(0), carry)
        else:
            count, at = jnp.int32(all_blocks), lambda s: s
        return lax.fori_loop(jnp.int32(0), count, lambda s, carry: step(at(s), carry), carry)

    def visible(self, unit: Unit, i: Any, j: Any, transposed: bool = False) -> jax.Array | None:
        """Which logits of a tile are visible, against the last axes of 5-D; None when all are."""
        cut = self.cut
        whole = isinstance(self.rule, Everything)
        if whole and not self.ragged:
            return None

        def evaluate() -> jax.Array:
            rule = self.rule.row(unit.row).head(unit.head)
            part = rule.slice(i * cut.block_q, cut.block_q, j * cut.block_k, cut.block_k)
            mask = part.dense(cut.block_q, cut.block_k)[0]
            if self.ragged:
                mask &= jnp.arange(cut.block_k, dtype=jnp.int32) < cut.kv_len - j * cut.block_k
            # Flat, so that the transposed tile is also stored that way and later read in order.
            return (mask.T if transposed else mask).reshape(-1)

        if self.single:
            mask = evaluate()
        else:
            full = jnp.bool_(True) if self.map is None else _pick(self.map.state, *unit[:2])[i, j] == FULL
            if self.ragged:
                full &= j < cut.k_blocks - 1
            everything = lambda: self.full((cut.block_q * cut.block_k,), True, bool)
            mask = lax.cond(full, everything, lambda: evaluate() | (self._anchor > 0))
        shape = (cut.block_k, 1, cut.block_q) if transposed else (cut.block_q, cut.block_k)
        return mask.reshape(shape)

    def logits(self, products: jax.Array, unit: Unit, i: Any, j: Any, transposed: bool = False):
        """Scaled, biased and capped logits of a tile, 5-D, from the products of queries and keys."""
        cut, spec = self.cut, self.spec
        group = (cut.group, cut.block_q)
        shape = (cut.block_k, *group) if transposed else (*group, cut.block_k)
        logits = products.reshape(cut.rows, cut.heads, *shape) * spec.softmax_scale
        if self.bias is not None:
            logits = logits + orient(self.bias_tile(unit, i, j), transposed).astype(logits.dtype)
        if spec.logits_soft_cap is not None:
            logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
        return logits

    def kept(self, unit: Unit, i: Any, j: Any, transposed: bool = False) -> jax.Array:
        """Which logits of a tile survive dropout, 5-D."""
        cut = self.cut
        seed, batch, head = self.inputs.dropout  # type: ignore[misc]
        rows = lax.dynamic_slice_in_dim(jnp.asarray(batch), unit.row, cut.rows)
        heads = lax.dynamic_slice_in_dim(jnp.asarray(head), unit.head, cut.heads * cut.group)
        query = i * cut.block_q + jnp.arange(cut.block_q, dtype=jnp.int32)
        key = j * cut.block_k + jnp.arange(cut.block_k, dtype=jnp.int32)
        indices = (
            rows.reshape(-1, 1, 1, 1, 1),
            heads.reshape(1, cut.heads, cut.group, 1, 1),
            query.reshape(1, 1, 1, -1, 1),
            key.reshape(1, 1, 1, 1, -1),
        )
        return dropout.keep(
            self.spec.dropout_prob, seed, *(orient(index, transposed) for index in indices)
        )

    def per_head(self, x: jax.Array, unit: Unit) -> jax.Array:
        """[1 or n], a number for each head -> one for each row of a tile, [lanes, rows]."""
        cut = self.cut
        x = jnp.broadcast_to(x, (cut.q_heads,))
        x = lax.dynamic_slice_in_dim(x, unit.head, cut.heads * cut.group)
        x = x.reshape(1, cut.heads, cut.group, 1)
        x = jnp.broadcast_to(x, (cut.rows, cut.heads, cut.group, cut.block_q))
        return x.reshape(cut.rows * cut.heads, cut.group * cut.block_q)

    def bias_tile(self, unit: Unit, i: Any, j: Any) -> jax.Array:
        """The bias of a tile, axes of size 1 left as they are."""
        bias = self.bias
        tile = lax.dynamic_slice(bias, self._bias_start(bias, unit, i, j), self._bias_sizes())
        b, n, t, s = tile.shape
        heads = (1, 1) if n == 1 else (self.cut.heads, self.cut.group)
        return tile.reshape(b, *heads, t, s)

    def add_bias_tile(self, total: jax.Array, unit: Unit, i: Any, j: Any, tile: jax.Array):
        """`total` with the gradient of a tile of logits added, summed over broadcast axes."""
        start, sizes = self._bias_start(total, unit, i, j), self._bias_sizes()
        b, n, t, s = sizes
        # The tile stands transposed: rows, heads, keys, group, queries.
        over = tuple(axis for axis, size in enumerate((b, n, s, n, t)) if size == 1)
        tile = tile.sum(over, keepdims=True, dtype=total.dtype)
        tile = jnp.moveaxis(tile, 2, -1).reshape(sizes)
        tile += lax.dynamic_slice(total, start, sizes)
        return lax.dynamic_update_slice(total, tile, start)

    def _bias_sizes(self) -> tuple[int, ...]:
        cut = self.cut
        tile = (cut.rows, cut.heads * cut.group, cut.block_q, cut.block_k)
        return tuple(
            1 if size == 1 else part for size, part in zip(self.bias.shape, tile, strict=True)
        )

    def _bias_start(self, bias: jax.Array, unit: Unit, i: Any, j: Any) -> tuple:
        starts = (unit.row, unit.head, i * self.cut.block_q, j * self.cut.block_k)
        return tuple(
            jnp.int32(0 if size == 1 else start)
            for size, start in zip(bias.shape, starts, strict=True)
        )

    def _padded(self, bias: jax.Array) -> jax.Array:
        cut = self.cut
        lengths = (cut.q_blocks * cut.block_q, cut.k_blocks * cut.block_k)
        missing = [
            0 if size == 1 else length - size
            for size, length in zip(bias.shape[2:], lengths, strict=True)
        ]
        if not any(missing):
            return bias
        return jnp.pad(bias, ((0, 0), (0, 0), *((0, m) for m in missing)))


def orient(tile: jax.Array, transposed: bool) -> jax.Array:
    """[rows, heads, group, block_q, block_k], or [rows, heads, block_k, group, block_q]."""
    return jnp.moveaxis(tile, -1, 2) if transposed else tile


def over_blocks(step: Callable[[Any, Any], Any], carry: Any, count: int) -> Any:
    """`carry = step(block, carry)` for 0 to `count`: no loop where there is only one."""
    if count == 1:
        return step(0, carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, carry)


def matmul(equation: str, left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """`einsum` accumulated in `dtype`, exact where the user has not asked for less."""
    precision = lax.Precision.HIGHEST if jax.config.jax_default_matmul_precision is None else None
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=dtype)


def _pad(x: jax.Array, axis: int, length: int, fill: float) -> jax.Array:
    if x.shape[axis] == length:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, padding, constant_values=fill)


def _slice(x: jax.Array, start: tuple, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(x, [jnp.int32(at) for at in start], sizes)


def _update(x: jax.Array, part: jax.Array, start: tuple) -> jax.Array:
    return lax.dynamic_update_slice(x, part, [jnp.int32(at) for at in start])


def _pick(blocks: jax.Array, row: Any, head: Any) -> jax.Array:
    """The entry of a batch row and head; an axis of size 1 serves all."""
    return blocks[row if blocks.shape[0] > 1 else 0, head if blocks.shape[1] > 1 else 0]
