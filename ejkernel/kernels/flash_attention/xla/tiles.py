"""The tiles of a call in XLA, and the mask, the bias and dropout of one tile.

A tile is a block of queries against a block of keys, for some batch rows and heads at once: a unit.
The query heads of a key head are rows of one matrix, so that keys are never repeated (GQA).

    query tile   [lanes, group * tile_q, dim]      lanes = rows * heads
    key tile     [lanes, tile_k, dim]
    logits       [rows, heads, group, tile_q, tile_k]; transposed, tile_k comes before group

Tiles are sliced from the given arrays inside the loops: transposing a whole array costs more than
all its tiles, most of it for fresh memory. Where blocks are small and listed one by one, several
blocks of the list are gathered into one tile, which is then about as fast as one large block, and
the arrays they are sliced from are stored head by head.
"""

import itertools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ejkernel.kernels.common import carry as carries
from ejkernel.kernels.common.integers import largest_divisor
from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.flash_attention import dropout
from ejkernel.kernels.flash_attention.dropout import Dropout
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.types.block_map import FULL, BlockList, BlockMap, block_map
from ejkernel.types.rules import Everything, Rule

# Logits in one tile: more leaves the cache of a CPU, and costs memory without gaining speed.
_LARGEST_TILE = 1 << 21
# Blocks of a list are gathered up to this many queries or keys, and up to this many blocks.
_GATHERED, _MOST_GATHERED = 256, 8

# A block of queries or keys, or several that are gathered into one tile.
Blocks = Index | tuple[Index, ...]
Place = tuple[Index, ...]
Carry = TypeVar("Carry")


class Unit(NamedTuple):
    """The first batch row, the first query head and the first key head of a unit."""

    row: Index
    head: Index
    key: Index


class FlashTiles:
    """The tiles of one call: their sizes, which to visit, and their operands.

    `i` is a block of queries and `j` a block of keys, or a tuple of blocks that a step of a loop
    gathers into one tile.
    """

    spec: Spec
    dropout: Dropout | None
    rule: Rule
    q_len: int
    q_heads: int
    kv_len: int
    block_q: int
    block_k: int
    q_blocks: int
    k_blocks: int
    tile_q: int
    tile_k: int
    group: int

    def __init__(
        self, inputs: Inputs, spec: Spec, block_q: int, block_k: int, over: Literal["q", "k"]
    ):
        self.spec, self.dropout = spec, inputs.dropout
        self.rule = rule = inputs.mask or Everything()
        batch, self.q_len, self.q_heads, _ = inputs.query.shape
        self.kv_len, kv_heads = inputs.key.shape[1:3]
        self.block_q, self.block_k = min(block_q, self.q_len), min(block_k, self.kv_len)
        self.q_blocks, self.k_blocks = -(-self.q_len // block_q), -(-self.kv_len // block_k)
        # A single block is visited whatever the mask, and without a mask all of them are.
        self.single: bool = self.q_blocks == self.k_blocks == 1
        self.map: BlockMap | None = None
        if not (self.single or isinstance(rule, Everything)):
            self.map = block_map(rule, self.q_len, self.kv_len, self.block_q, self.block_k)
        self.tile_q, self.tile_k = self.block_q, self.block_k
        if over == "q":
            self.tile_q *= _gathered(self.map and self.map.columns, self.block_q)
        else:
            self.tile_k *= _gathered(self.map and self.map.rows, self.block_k)
        # Batch rows and heads share a tile if they share the mask, as many as fit.
        apart = rule.heads > 1
        self.group, heads = (1, 1) if apart else (self.q_heads // kv_heads, kv_heads)
        area = self.group * self.tile_q * self.tile_k
        self.heads: int = largest_divisor(heads, _LARGEST_TILE // area)
        together = not (apart or rule.batched) and self.heads == kv_heads
        self.rows: int = largest_divisor(batch, _LARGEST_TILE // (area * heads)) if together else 1
        self.units: int = batch * self.q_heads // (self.rows * self.heads * self.group)
        self.units_per_key: int = self.q_heads // kv_heads // self.group
        self.ragged: bool = self.kv_len % self.block_k != 0
        self._anchor = carries.anchor(inputs)
        self.bias = inputs.bias
        if self.bias is not None:
            for axis, pad in ((2, self.pad_queries), (3, self.pad_keys)):
                self.bias = self.bias if self.bias.shape[axis] == 1 else pad(self.bias, axis)

    def unit(self, index: Index) -> Unit:
        """The unit of this index."""
        row, head = divmod(index, self.q_heads // (self.heads * self.group))
        key = head * self.heads // self.units_per_key
        return Unit(row * self.rows, head * self.heads * self.group, key)

    def full(self, shape: tuple[int, ...], value: ArrayLike, dtype: DTypeLike) -> jax.Array:
        """A constant that loops over tiles can carry."""
        return carries.full(self._anchor, shape, value, dtype)

    def pad_queries(self, x: jax.Array, axis: int = 1, fill: float = 0.0) -> jax.Array:
        """`x` with a whole number of query blocks along `axis`."""
        return pad(x, axis, self.q_blocks * self.block_q, fill)

    def pad_keys(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """`x` with a whole number of key blocks along `axis`."""
        return pad(x, axis, self.k_blocks * self.block_k, 0.0)

    def source_of_queries(self, x: jax.Array) -> jax.Array:
        """[b, t, n, d], padded, as `queries` cuts it."""
        x = self.pad_queries(x)
        return jnp.swapaxes(x, 1, 2) if self.tile_q > self.block_q else x

    def source_of_keys(self, x: jax.Array) -> jax.Array:
        """[b, s, k, d], padded, as `keys` cuts it."""
        x = self.pad_keys(x)
        return jnp.swapaxes(x, 1, 2) if self.tile_k > self.block_k else x

    def queries(self, x: jax.Array, unit: Unit, i: Blocks) -> jax.Array:
        """The query tile [lanes, group * tile_q, d] of [b, t, n, d]."""
        return self._cut(x, unit.row, i, self.block_q, unit.head, self.group)

    def keys(self, x: jax.Array, unit: Unit, j: Blocks) -> jax.Array:
        """The key tile [lanes, tile_k, d] of [b, s, k, d]."""
        return self._cut(x, unit.row, j, self.block_k, unit.key, 1)

    def per_row(self, x: jax.Array, unit: Unit, i: Blocks) -> jax.Array:
        """The part of [b, n, t], a number for each row of logits, in a tile: [lanes, 1, rows]."""
        size = (self.rows, self.heads * self.group, self.block_q)
        parts = [cut(x, (unit.row, unit.head, at * self.block_q), size) for at in blocks_of(i)]
        return joined(parts, 2).reshape(self.rows * self.heads, 1, -1)

    def put_queries(self, x: jax.Array, tile: jax.Array, unit: Unit, i: Index) -> jax.Array:
        """`x`, [b, t, n, d], with a query tile of a single block written to its place."""
        tile = tile.reshape(self.rows, self.heads, self.group, self.block_q, -1)
        tile = tile.transpose(0, 3, 1, 2, 4).reshape(self.rows, self.block_q, -1, x.shape[-1])
        return update(x, tile, (unit.row, i * self.block_q, unit.head, 0))

    def add_queries_t(self, x: jax.Array, tile: jax.Array, unit: Unit, i: Blocks) -> jax.Array:
        """`x`, [b, n, d, t], with a transposed query tile [lanes, d, group * tile_q] added."""
        tile = tile.reshape(self.rows, self.heads, -1, self.group, self.tile_q)
        tile = tile.transpose(0, 1, 3, 2, 4).reshape(self.rows, -1, x.shape[2], self.tile_q)
        return add_blocks(x, tile, 3, i, lambda at: (unit.row, unit.head, 0, at * self.block_q))

    def add_keys(self, x: jax.Array, tile: jax.Array, unit: Unit, j: Index) -> jax.Array:
        """`x`, [b, s, k, d], with a key tile added; written, where only one unit has it."""
        tile = tile.reshape(self.rows, self.heads, self.block_k, -1).transpose(0, 2, 1, 3)
        start = (unit.row, j * self.block_k, unit.key, 0)
        return update(x, tile, start) if self.units_per_key == 1 else add(x, tile, start)

    def over_keys(
        self, unit: Unit, i: Index, step: Callable[[Blocks, Carry], Carry], carry: Carry
    ) -> Carry:
        """`carry = step(j, carry)` until every key block that query block i may see was in a j."""
        blocks = None if self.map is None else self.map.rows
        gathered = self.tile_k // self.block_k
        return _over_listed_blocks(blocks, self.k_blocks, gathered, unit, i, step, carry)

    def over_queries(
        self, unit: Unit, j: Index, step: Callable[[Blocks, Carry], Carry], carry: Carry
    ) -> Carry:
        """`carry = step(i, carry)` until every query block that may see key block j was in an i."""
        blocks = None if self.map is None else self.map.columns
        gathered = self.tile_q // self.block_q
        return _over_listed_blocks(blocks, self.q_blocks, gathered, unit, j, step, carry)

    def logits(
        self, products: jax.Array, unit: Unit, i: Blocks, j: Blocks, transposed: bool = False
    ) -> jax.Array:
        """Scaled, biased and capped logits of a tile, from the products of queries and keys."""
        rows = (self.group, self.tile_q)
        shape = (self.tile_k, *rows) if transposed else (*rows, self.tile_k)
        logits = products.reshape(self.rows, self.heads, *shape) * self.spec.softmax_scale
        if self.bias is not None:
            tile = self._bias_tile(unit, i, j)
            heads = (1, 1) if tile.shape[1] == 1 else (self.heads, self.group)
            tile = tile.reshape(tile.shape[0], *heads, *tile.shape[2:])
            logits += _orient(tile, transposed).astype(logits.dtype)
        if (cap := self.spec.logits_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def add_to_bias(
        self, total: jax.Array, tile: jax.Array, unit: Unit, i: Blocks, j: Index
    ) -> jax.Array:
        """`total` with a transposed tile of gradients added, summed over the broadcast axes."""
        # By the bias and not by the tile: several blocks of one query each are not broadcast.
        one = [size == 1 for size in total.shape]
        over = tuple(axis for axis, of in enumerate((0, 1, 3, 1, 2)) if one[of])
        tile = jnp.moveaxis(tile.sum(over, keepdims=True), 2, -1)
        tile = tile.reshape(*self._bias_sizes[:2], *tile.shape[-2:])
        start = lambda at: self._bias_start(unit, at, j)
        return add_blocks(total, tile, 2, 0 if one[2] else i, start)

    def add_to_heads(self, total: jax.Array, rows: jax.Array, unit: Unit) -> jax.Array:
        """`total` [n] with what each row of a tile gives, [lanes, rows], added to its head."""
        tile = rows.reshape(self.rows, self.heads, self.group, self.tile_q)
        return add(total, tile.sum((0, 3)).reshape(-1), (unit.head,))

    def visible(
        self, unit: Unit, i: Blocks, j: Blocks, transposed: bool = False
    ) -> jax.Array | None:
        """Which logits of a tile are visible, for its last axes; None when all of them are."""
        if isinstance(self.rule, Everything) and not self.ragged:
            return None
        size = (self.block_q, self.block_k)

        def evaluate() -> jax.Array:
            rule = self.rule.row(unit.row).head(unit.head)
            part = lambda a, b: rule.slice(a * size[0], size[0], b * size[1], size[1]).dense(*size)
            strips = [joined([part(a, b)[0] for b in blocks_of(j)], 1) for a in blocks_of(i)]
            mask = joined(strips, 0)
            if self.ragged:
                mask &= positions(j, size[1]) < self.kv_len
            if isinstance(i, tuple):
                mask &= first_time(i, size[0])[:, None]
            if isinstance(j, tuple):
                mask &= first_time(j, size[1])
            # Flat, so that a transposed mask is also stored so, and later read in order.
            return (mask.T if transposed else mask).reshape(-1) | (self._anchor > 0)

        if self.single:
            mask = evaluate()
        else:
            full = blocks_of(j)[-1] < self.k_blocks - self.ragged
            if self.map is not None:
                state = _pick(self.map.state, unit)
                for a, b in itertools.product(blocks_of(i), blocks_of(j)):
                    full &= state[a, b] == FULL
            for blocks in (i, j):
                if isinstance(blocks, tuple):
                    full &= blocks[-1] != blocks[-2]
            area = self.tile_q * self.tile_k
            mask = lax.cond(full, lambda: self.full((area,), True, bool), evaluate)
        tile = (self.tile_q, self.tile_k)
        return mask.reshape((tile[1], 1, tile[0]) if transposed else tile)

    def kept(self, unit: Unit, i: Blocks, j: Blocks, transposed: bool = False) -> jax.Array:
        """Which logits of a tile survive dropout."""
        seed, batch, head, rows, columns = self.dropout  # type: ignore[misc]
        indices = (
            cut(batch, (unit.row,), (self.rows,)).reshape(-1, 1, 1, 1, 1),
            cut(head, (unit.head,), (self.heads * self.group,)).reshape(1, self.heads, -1, 1, 1),
            dropout.position(rows, positions(i, self.block_q)).reshape(1, 1, 1, -1, 1),
            dropout.position(columns, positions(j, self.block_k)).reshape(1, 1, 1, 1, -1),
        )
        indices = (_orient(index, transposed) for index in indices)
        return dropout.keep(self.spec.dropout_prob, seed, *indices)

    def per_head(self, x: jax.Array, unit: Unit) -> jax.Array:
        """[1 or n], a number for each head -> one for each row of a tile."""
        x = jnp.broadcast_to(x, (self.q_heads,))
        x = cut(x, (unit.head,), (self.heads * self.group,)).reshape(1, self.heads, -1, 1)
        x = jnp.broadcast_to(x, (self.rows, self.heads, self.group, self.block_q))
        return x.reshape(self.rows * self.heads, -1)

    def _cut(
        self, x: jax.Array, row: Index, blocks: Blocks, size: int, head: Index, group: int
    ) -> jax.Array:
        d = x.shape[-1]
        if isinstance(blocks, tuple):
            sizes = (self.rows, self.heads * group, size, d)
            parts = [cut(x, (row, head, at * size, 0), sizes) for at in blocks]
            return joined(parts, 2).reshape(self.rows * self.heads, -1, d)
        flat = x.reshape(*x.shape[:2], -1)
        sizes = (self.rows, size, self.heads * group * d)
        part = cut(flat, (row, blocks * size, head * d), sizes)
        # First the slice, then the transpose: in one loop they run half as fast.
        part = lax.optimization_barrier(part).reshape(self.rows, -1, self.heads, group, d)
        return part.transpose(0, 2, 3, 1, 4).reshape(self.rows * self.heads, -1, d)

    def _bias_tile(self, unit: Unit, i: Blocks, j: Blocks) -> jax.Array:
        part = lambda a, b: cut(self.bias, self._bias_start(unit, a, b), self._bias_sizes)
        rows, columns = self._bias_blocks(2, i), self._bias_blocks(3, j)
        return joined([joined([part(a, b) for b in columns], 3) for a in rows], 2)

    def _bias_blocks(self, axis: int, blocks: Blocks) -> Place:
        """The blocks of the bias that a tile takes along an axis: a broadcast axis has one."""
        shape = self.bias.shape  # type: ignore[union-attr]
        return (0,) if shape[axis] == 1 else blocks_of(blocks)

    @property
    def _bias_sizes(self) -> tuple[int, ...]:
        tile = (self.rows, self.heads * self.group, self.block_q, self.block_k)
        shape = self.bias.shape  # type: ignore[union-attr]
        return tuple(1 if size == 1 else part for size, part in zip(shape, tile, strict=True))

    def _bias_start(self, unit: Unit, i: Index, j: Index) -> Place:
        start = (unit.row, unit.head, i * self.block_q, j * self.block_k)
        shape = self.bias.shape  # type: ignore[union-attr]
        return tuple(0 if size == 1 else at for size, at in zip(shape, start, strict=True))


def blocks_of(blocks: Blocks) -> Place:
    """The blocks of a tile along one axis."""
    return blocks if isinstance(blocks, tuple) else (blocks,)


def first_time(blocks: Place, size: int) -> jax.Array:
    """The queries or keys that do not repeat: after its end a list repeats its last block."""
    places = jnp.stack([jnp.int32(-1), *blocks])
    return jnp.repeat(places[1:] != places[:-1], size)


def positions(blocks: Blocks, size: int) -> jax.Array:
    """The positions of the queries or keys of a tile in their sequence."""
    return joined([at * size + jnp.arange(size, dtype=jnp.int32) for at in blocks_of(blocks)], 0)


def joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def add_blocks(
    x: jax.Array, tile: jax.Array, axis: int, blocks: Blocks, start: Callable[[Index], Place]
) -> jax.Array:
    """`x` with the blocks of a tile along `axis` added, each at `start(block)`."""
    if not isinstance(blocks, tuple):
        return add(x, tile, start(blocks))
    size, places = tile.shape[axis] // len(blocks), jnp.stack(blocks)

    # A loop, because a chain of updates is not always done in place.
    def one(n: Index, x: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(tile, n * size, size, axis)
        return add(x, part, start(places[n]))

    return lax.fori_loop(jnp.int32(0), jnp.int32(len(blocks)), one, x)


def pad(x: jax.Array, axis: int, length: int, fill: float) -> jax.Array:
    if x.shape[axis] == length:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, padding, constant_values=fill)


def cut(x: ArrayLike | None, start: Place, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(jnp.asarray(x), [jnp.int32(at) for at in start], sizes)


def update(x: jax.Array, part: jax.Array, start: Place) -> jax.Array:
    return lax.dynamic_update_slice(x, part, [jnp.int32(at) for at in start])


def add(x: jax.Array, part: jax.Array, start: Place) -> jax.Array:
    return update(x, part + cut(x, start, part.shape), start)


def over_blocks(step: Callable[[Index, Carry], Carry], carry: Carry, count: int) -> Carry:
    """`carry = step(block, carry)` for 0 to `count`: no loop where there is only one."""
    if count == 1:
        return step(0, carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, carry)


def _gathered(blocks: BlockList | None, size: int) -> int:
    """How many blocks of a list make a tile."""
    if blocks is None or blocks.index is None:
        return 1
    return min(blocks.index.shape[-1], max(1, _GATHERED // size), _MOST_GATHERED)


def _over_listed_blocks(
    blocks: BlockList | None,
    all_blocks: int,
    gathered: int,
    unit: Unit,
    block: Index,
    step: Callable[[Blocks, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`step` over the blocks listed for a block, or over all; `gathered` of them at a time."""
    if blocks is None:
        return over_blocks(step, carry, all_blocks)
    at = lambda place: blocks.at(unit.row, unit.head, block, place)
    if gathered == 1:
        body = lambda s, carry: step(at(s), carry)
    else:
        last = all_blocks - 1
        body = lambda s, carry: step(
            tuple(at(jnp.minimum(s * gathered + n, last)) for n in range(gathered)), carry
        )
    count = -(-_pick(blocks.count, unit)[block] // gathered)
    return lax.fori_loop(jnp.int32(0), count, body, carry)


def _pick(blocks: jax.Array, unit: Unit) -> jax.Array:
    """The entry of a batch row and head; an axis of size 1 is that of all."""
    row, head, *_ = (at if size > 1 else 0 for at, size in zip(unit, blocks.shape, strict=False))
    return blocks[row, head]


def _orient(tile: jax.Array, transposed: bool) -> jax.Array:
    """[rows, heads, group, block_q, block_k], or [rows, heads, block_k, group, block_q]."""
    return jnp.moveaxis(tile, -1, 2) if transposed else tile
