"""How a call is cut into tiles, and what the mask, the bias and dropout are in one tile.

A tile is a block of queries against a block of keys, for some batch rows and heads at once: a unit.
The query heads that share a key head stand below each other as rows of one matrix, so that keys are
never repeated.

    query tile   [lanes, group * block_q, dim]      lanes = rows * heads
    key tile     [lanes, block_k, dim]
    logits       [rows, heads, group, block_q, block_k]; transposed, block_k comes before group

Tiles are cut from the arrays as they come, inside the loops: rearranging a whole array costs more
than all its tiles, most of it for fresh memory.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import dropout
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.types.block_map import FULL, BlockList, block_map
from ejkernel.types.rules import Everything

# Logits in one tile: more leaves the cache of a CPU, and costs memory without gaining speed.
_LARGEST_TILE = 1 << 21


class Unit(NamedTuple):
    """Where a unit begins: its first batch row, its first query head, its first key head."""

    row: Any
    head: Any
    key: Any


class Tiles:
    """The tiles of one call: their geometry (static), which to visit, and what stands in them."""

    def __init__(self, inputs: Inputs, spec: Spec, block_q: int, block_k: int):
        self.spec, self.dropout = spec, inputs.dropout
        self.rule = rule = inputs.mask or Everything()
        batch, self.q_len, self.q_heads, _ = inputs.query.shape
        self.kv_len, kv_heads = inputs.key.shape[1:3]
        self.block_q, self.block_k = min(block_q, self.q_len), min(block_k, self.kv_len)
        self.q_blocks, self.k_blocks = -(-self.q_len // block_q), -(-self.kv_len // block_k)
        # Batch rows and heads share a tile if they share the mask, as many as fit.
        apart = rule.heads > 1
        self.group, heads = (1, 1) if apart else (self.q_heads // kv_heads, kv_heads)
        area = self.group * self.block_q * self.block_k
        self.heads = _largest_divisor(heads, _LARGEST_TILE // area)
        together = not (apart or rule.batched) and self.heads == kv_heads
        self.rows = _largest_divisor(batch, _LARGEST_TILE // (area * heads)) if together else 1
        self.units = batch * self.q_heads // (self.rows * self.heads * self.group)
        self.units_per_key = self.q_heads // kv_heads // self.group
        self.ragged = self.kv_len % self.block_k != 0
        # A single block is visited whatever the mask, and without a mask all of them are.
        self.single = self.q_blocks == self.k_blocks == 1
        self.map = None
        if not (self.single or isinstance(rule, Everything)):
            self.map = block_map(rule, self.q_len, self.kv_len, self.block_q, self.block_k)
        # Varies over every mesh axis that some input varies over, inside shard_map; holds no data.
        leaves = jax.tree.leaves(inputs)
        self._anchor = sum(lax.full_like(x, 0, shape=(), dtype=jnp.int32) for x in leaves)
        self.bias = inputs.bias
        if self.bias is not None:
            for axis, pad in ((2, self.pad_queries), (3, self.pad_keys)):
                self.bias = self.bias if self.bias.shape[axis] == 1 else pad(self.bias, axis)

    def unit(self, index: Any) -> Unit:
        """Where the unit of this index begins."""
        row, head = divmod(index, self.q_heads // (self.heads * self.group))
        key = head * self.heads // self.units_per_key
        return Unit(row * self.rows, head * self.heads * self.group, key)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
        """A constant that loops over tiles can carry."""
        return lax.full_like(self._anchor, value, shape=shape, dtype=dtype)

    def pad_queries(self, x: jax.Array, axis: int = 1, fill: float = 0.0) -> jax.Array:
        """`x` with a whole number of query blocks along `axis`."""
        return _pad(x, axis, self.q_blocks * self.block_q, fill)

    def pad_keys(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """`x` with a whole number of key blocks along `axis`."""
        return _pad(x, axis, self.k_blocks * self.block_k, 0.0)

    def queries(self, x: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """The query tile [lanes, group * block_q, d] of [b, t, n, d]."""
        return self._cut(x, (unit.row, i * self.block_q, unit.head), self.block_q, self.group)

    def keys(self, x: jax.Array, unit: Unit, j: Any) -> jax.Array:
        """The key tile [lanes, block_k, d] of [b, s, k, d]."""
        return self._cut(x, (unit.row, j * self.block_k, unit.key), self.block_k, 1)

    def per_row(self, x: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """The part of [b, n, t], a number for each row of logits, in a tile: [lanes, 1, rows]."""
        size = (self.rows, self.heads * self.group, self.block_q)
        part = _slice(x, (unit.row, unit.head, i * self.block_q), size)
        return part.reshape(self.rows * self.heads, 1, -1)

    def put_queries(self, x: jax.Array, tile: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """`x`, [b, t, n, d], with a query tile written to its place."""
        tile = tile.reshape(self.rows, self.heads, self.group, self.block_q, -1)
        tile = tile.transpose(0, 3, 1, 2, 4).reshape(self.rows, self.block_q, -1, x.shape[-1])
        return _update(x, tile, (unit.row, i * self.block_q, unit.head, 0))

    def add_queries_t(self, x: jax.Array, tile: jax.Array, unit: Unit, i: Any) -> jax.Array:
        """`x`, [b, n, d, t], with a transposed query tile [lanes, d, group * block_q] added."""
        tile = tile.reshape(self.rows, self.heads, -1, self.group, self.block_q)
        tile = tile.transpose(0, 1, 3, 2, 4).reshape(self.rows, -1, x.shape[2], self.block_q)
        return _add(x, tile, (unit.row, unit.head, 0, i * self.block_q))

    def add_keys(self, x: jax.Array, tile: jax.Array, unit: Unit, j: Any) -> jax.Array:
        """`x`, [b, s, k, d], with a key tile added; written, where only one unit has it."""
        tile = tile.reshape(self.rows, self.heads, self.block_k, -1).transpose(0, 2, 1, 3)
        start = (unit.row, j * self.block_k, unit.key, 0)
        return _update(x, tile, start) if self.units_per_key == 1 else _add(x, tile, start)

    def over_keys(self, unit: Unit, i: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`carry = step(j, carry)` for every key block j that query block i may see."""
        blocks = None if self.map is None else self.map.rows
        return _walk(blocks, self.k_blocks, unit, i, step, carry)

    def over_queries(self, unit: Unit, j: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`carry = step(i, carry)` for every query block i that may see key block j."""
        blocks = None if self.map is None else self.map.columns
        return _walk(blocks, self.q_blocks, unit, j, step, carry)

    def logits(self, products: jax.Array, unit: Unit, i: Any, j: Any, transposed: bool = False):
        """Scaled, biased and capped logits of a tile, from the products of queries and keys."""
        rows = (self.group, self.block_q)
        shape = (self.block_k, *rows) if transposed else (*rows, self.block_k)
        logits = products.reshape(self.rows, self.heads, *shape) * self.spec.softmax_scale
        if self.bias is not None:
            tile = _slice(self.bias, self._bias_start(unit, i, j), self._bias_sizes)
            heads = (1, 1) if tile.shape[1] == 1 else (self.heads, self.group)
            tile = tile.reshape(tile.shape[0], *heads, *tile.shape[2:])
            logits += _orient(tile, transposed).astype(logits.dtype)
        if (cap := self.spec.logits_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def add_to_bias(self, total: jax.Array, tile: jax.Array, unit: Unit, i: Any, j: Any):
        """`total` with a transposed tile of gradients added, summed over the broadcast axes."""
        b, n, t, s = self._bias_sizes
        over = tuple(axis for axis, size in enumerate((b, n, s, n, t)) if size == 1)
        tile = jnp.moveaxis(tile.sum(over, keepdims=True), 2, -1)
        return _add(total, tile.reshape(self._bias_sizes), self._bias_start(unit, i, j))

    def add_to_heads(self, total: jax.Array, rows: jax.Array, unit: Unit) -> jax.Array:
        """`total` [n] with what each row of a tile gives, [lanes, rows], added to its head."""
        tile = rows.reshape(self.rows, self.heads, self.group, self.block_q)
        return _add(total, tile.sum((0, 3)).reshape(-1), (unit.head,))

    def visible(self, unit: Unit, i: Any, j: Any, transposed: bool = False) -> jax.Array | None:
        """Which logits of a tile are visible, for its last axes; None when all of them are."""
        if isinstance(self.rule, Everything) and not self.ragged:
            return None
        size = (self.block_q, self.block_k)

        def evaluate() -> jax.Array:
            rule = self.rule.row(unit.row).head(unit.head)
            mask = rule.slice(i * size[0], size[0], j * size[1], size[1]).dense(*size)[0]
            if self.ragged:
                mask &= jnp.arange(size[1], dtype=jnp.int32) < self.kv_len - j * size[1]
            # Flat, so that a transposed mask is also stored so, and later read in order.
            return (mask.T if transposed else mask).reshape(-1) | (self._anchor > 0)

        if self.single:
            mask = evaluate()
        else:
            full = j < self.k_blocks - self.ragged
            if self.map is not None:
                full &= _pick(self.map.state, unit)[i, j] == FULL
            mask = lax.cond(full, lambda: self.full((math.prod(size),), True, bool), evaluate)
        return mask.reshape((size[1], 1, size[0]) if transposed else size)

    def kept(self, unit: Unit, i: Any, j: Any, transposed: bool = False) -> jax.Array:
        """Which logits of a tile survive dropout."""
        seed, batch, head = self.dropout  # type: ignore[misc]
        indices = (
            _slice(batch, (unit.row,), (self.rows,)).reshape(-1, 1, 1, 1, 1),
            _slice(head, (unit.head,), (self.heads * self.group,)).reshape(1, self.heads, -1, 1, 1),
            (i * self.block_q + jnp.arange(self.block_q)).reshape(1, 1, 1, -1, 1),
            (j * self.block_k + jnp.arange(self.block_k)).reshape(1, 1, 1, 1, -1),
        )
        indices = (_orient(index, transposed) for index in indices)
        return dropout.keep(self.spec.dropout_prob, seed, *indices)

    def per_head(self, x: jax.Array, unit: Unit) -> jax.Array:
        """[1 or n], a number for each head -> one for each row of a tile."""
        x = jnp.broadcast_to(x, (self.q_heads,))
        x = _slice(x, (unit.head,), (self.heads * self.group,)).reshape(1, self.heads, -1, 1)
        x = jnp.broadcast_to(x, (self.rows, self.heads, self.group, self.block_q))
        return x.reshape(self.rows * self.heads, -1)

    def _cut(self, x: jax.Array, start: tuple, block: int, group: int) -> jax.Array:
        d = x.shape[-1]
        flat, start = x.reshape(*x.shape[:2], -1), (*start[:2], start[2] * d)
        part = _slice(flat, start, (self.rows, block, self.heads * group * d))
        # First the slice, then the transpose: in one loop they run half as fast.
        part = lax.optimization_barrier(part).reshape(self.rows, block, self.heads, group, d)
        return part.transpose(0, 2, 3, 1, 4).reshape(self.rows * self.heads, group * block, d)

    @property
    def _bias_sizes(self) -> tuple[int, ...]:
        tile = (self.rows, self.heads * self.group, self.block_q, self.block_k)
        shape = self.bias.shape  # type: ignore[union-attr]
        return tuple(1 if size == 1 else part for size, part in zip(shape, tile, strict=True))

    def _bias_start(self, unit: Unit, i: Any, j: Any) -> tuple:
        start = (unit.row, unit.head, i * self.block_q, j * self.block_k)
        shape = self.bias.shape  # type: ignore[union-attr]
        return tuple(0 if size == 1 else at for size, at in zip(shape, start, strict=True))


def over_blocks(step: Callable[[Any, Any], Any], carry: Any, count: int) -> Any:
    """`carry = step(block, carry)` for 0 to `count`: no loop where there is only one."""
    if count == 1:
        return step(0, carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, carry)


def matmul(equation: str, left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """`einsum` accumulated in `dtype`, exact unless the user has asked for less."""
    asked = getattr(jax.config, "jax_default_matmul_precision", None)
    precision = lax.Precision.HIGHEST if asked is None else None
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=dtype)


def _walk(blocks: BlockList | None, all_blocks: int, unit: Unit, line: Any, step, carry) -> Any:
    """`step` over the blocks listed for `line`, or over all."""
    if blocks is None:
        return over_blocks(step, carry, all_blocks)
    body = lambda s, carry: step(blocks.at(unit.row, unit.head, line, s), carry)
    return lax.fori_loop(jnp.int32(0), _pick(blocks.count, unit)[line], body, carry)


def _pick(blocks: jax.Array, unit: Unit) -> jax.Array:
    """The entry of a batch row and head; an axis of size 1 serves all."""
    row, head, *_ = (at if size > 1 else 0 for at, size in zip(unit, blocks.shape, strict=False))
    return blocks[row, head]


def _orient(tile: jax.Array, transposed: bool) -> jax.Array:
    """[rows, heads, group, block_q, block_k], or [rows, heads, block_k, group, block_q]."""
    return jnp.moveaxis(tile, -1, 2) if transposed else tile


def _largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(max(1, min(number, most)), 0, -1) if number % d == 0)


def _pad(x: jax.Array, axis: int, length: int, fill: float) -> jax.Array:
    if x.shape[axis] == length:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, padding, constant_values=fill)


def _slice(x: Any, start: tuple, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(jnp.asarray(x), [jnp.int32(at) for at in start], sizes)


def _update(x: jax.Array, part: jax.Array, start: tuple) -> jax.Array:
    return lax.dynamic_update_slice(x, part, [jnp.int32(at) for at in start])


def _add(x: jax.Array, part: jax.Array, start: tuple) -> jax.Array:
    return _update(x, part + _slice(x, start, part.shape), start)
