"""The tiles and blocks of a call over pages: queries of one sequence, and pages of it.

Both loops run as far as the real lengths reach. A sequence that decodes, with one query, is one
tile; longer ones are cut into tiles of a fixed size. The query heads of a key head are rows of one
matrix, so that keys are never repeated (GQA).

    tile of queries  [k, size * group, h]
    block of keys    [k, block, h]
    logits           [k, size, group, block]
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ejkernel.kernels.common import carry as carries
from ejkernel.kernels.common.paged import cache_axes, operand_dtype, read_pages
from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec

# Rows of a tile and positions of a block for which both matmuls run well on a CPU; a longer block
# would make the last one of a short sequence cost more than the others save.
_ROWS, _POSITIONS = 512, 256

Carry = TypeVar("Carry")


class QueryTile(NamedTuple):
    """Queries of one sequence: `size` rows from `row` on, of which some may not be its own."""

    sequence: jax.Array
    row: jax.Array  # where the tile begins among all queries
    own: jax.Array  # which rows belong to the sequence, [size]
    positions: jax.Array  # of the rows within the sequence, [size]
    first: jax.Array  # the position of the first of its own rows
    last: jax.Array


class PageBlock(NamedTuple):
    """Pages of one sequence."""

    pages: jax.Array  # page ids, [pages]; out of range where there is no page
    positions: jax.Array  # [block]
    present: jax.Array  # which positions have a page, [block]
    used: jax.Array  # which of them any query of the tile sees: the rest may hold anything


class PagedTiles:
    """The tiles and blocks of one call."""

    inputs: Inputs
    spec: Spec
    caches: tuple[jax.Array, jax.Array]
    cache_pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    rows: int
    heads: int
    kv_lengths: jax.Array

    def __init__(self, inputs: Inputs, spec: Spec, queries: int | None, pages: int | None):
        self.inputs, self.spec = inputs, spec
        values = inputs.value_pages
        self.axes: str = cache_axes(spec.kv_layout, combined=values is None)
        self.caches = (inputs.key_pages, inputs.key_pages if values is None else values)
        size = {letter: inputs.key_pages.shape[i] for i, letter in enumerate(self.axes)}
        self.cache_pages, self.page_size, self.kv_heads = size["p"], size["c"], size["k"]
        b, t, heads, self.head_dim = inputs.query.shape
        self.rows, self.heads = b * t, heads
        self.group: int = heads // self.kv_heads
        self.dtype: np.dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
        self.operands: np.dtype = operand_dtype(inputs.query.dtype, inputs.key_pages.dtype)

        table = inputs.page_indices
        wanted = max(1, _POSITIONS // self.page_size) if pages is None else pages
        self.pages: int = min(wanted, table.shape[-1])
        self.block: int = self.pages * self.page_size
        if queries is None:
            # No longer than sequences are on average: the rest of a tile is wasted work.
            queries = max(8, min(_ROWS // self.group, t // table.shape[1]))
        self.sizes: tuple[int, ...] = (1,) if t == 1 else (1, min(max(queries, 2), t))

        starts = jnp.asarray(inputs.query_starts) + t * jnp.arange(b, dtype=jnp.int32)[:, None]
        self.starts: jax.Array = starts.reshape(-1)
        self.lengths: jax.Array = jnp.clip(inputs.query_lens, 0, t).reshape(-1)
        self.kv_lengths = jnp.minimum(inputs.kv_lens, table.shape[-1] * self.page_size).reshape(-1)
        missing = -table.shape[-1] % self.pages
        table = jnp.asarray(table).reshape(-1, table.shape[-1])
        self.table: jax.Array = jnp.pad(table, ((0, 0), (0, missing)), constant_values=-1)
        self.windows: jax.Array | None = None  # of each sequence, where it is not static
        if inputs.traced_window is not None:
            windows = jnp.broadcast_to(inputs.traced_window[:, None], (b, inputs.kv_lens.shape[1]))
            self.windows = windows.reshape(-1)
        self._anchor = carries.anchor(inputs)

    def full(
        self, shape: tuple[int, ...], value: ArrayLike, dtype: DTypeLike | None = None
    ) -> jax.Array:
        """A constant that may be carried by the loops."""
        return carries.full(self._anchor, shape, value, dtype or self.dtype)

    def over_tiles(self, body: Callable[[QueryTile, int, Carry], Carry], carry: Carry) -> Carry:
        """`carry = body(tile, size, carry)` for every tile that may see something."""
        for size in self.sizes:
            fits = self.lengths == 1 if size == 1 else self.lengths > 1
            counts = jnp.where(fits & (self.kv_lengths > 0), -(-self.lengths // size), 0)
            ends = jnp.cumsum(counts, dtype=jnp.int32)

            def step(
                i: Index,
                carry: Carry,
                size: int = size,
                counts: jax.Array = counts,
                ends: jax.Array = ends,
            ) -> Carry:
                sequence = jnp.sum(ends <= i, dtype=jnp.int32)
                number = i - ends[sequence] + counts[sequence]
                return body(self._tile(sequence, number * size, size), size, carry)

            carry = lax.fori_loop(jnp.int32(0), ends[-1], step, carry)
        return carry

    def _tile(self, sequence: jax.Array, skipped: jax.Array, size: int) -> QueryTile:
        length, kv_length = self.lengths[sequence], self.kv_lengths[sequence]
        begin = self.starts[sequence] + skipped
        # The last tile of all may reach past the last row: it begins earlier instead.
        row = jnp.clip(begin, 0, self.rows - size)
        number = skipped + row - begin + jnp.arange(size, dtype=jnp.int32)
        own = (number >= skipped) & (number < length)
        last = jnp.minimum(skipped + size, length) - 1
        offset = kv_length - length
        return QueryTile(sequence, row, own, offset + number, offset + skipped, offset + last)

    def over_blocks(
        self, tile: QueryTile, body: Callable[[PageBlock, Carry], Carry], carry: Carry
    ) -> Carry:
        """`carry = body(block, carry)` for every block that a query of the tile may see."""
        end = (tile.last + self.block) // self.block
        begin = jnp.int32(0)
        if (window := self.window(tile)) is not None:
            begin = jnp.maximum(tile.first - window + 1, 0) // self.block
        step = lambda i, carry: body(self._block(tile, i), carry)
        return lax.fori_loop(begin, end, step, carry)

    def window(self, tile: QueryTile) -> Index | None:
        """How many positions a query of the tile sees, if not all up to its own."""
        if self.windows is None:
            return self.spec.sliding_window
        return self.windows[tile.sequence]

    def _block(self, tile: QueryTile, index: jax.Array) -> PageBlock:
        start = (tile.sequence, index * self.pages)
        pages = lax.dynamic_slice(self.table, start, (1, self.pages))[0]
        there = (pages >= 0) & (pages < self.cache_pages)
        positions = index * self.block + jnp.arange(self.block, dtype=jnp.int32)
        present = jnp.repeat(there, self.page_size)
        used = present & (positions <= tile.last)
        if (window := self.window(tile)) is not None:
            used &= positions > tile.first - window
        return PageBlock(jnp.where(there, pages, self.cache_pages), positions, present, used)

    def rows_of(self, x: jax.Array, tile: QueryTile, size: int) -> jax.Array:
        """The tile's rows of `x` [rows, n, d], as [k, size * group, d]."""
        start = (tile.row, jnp.int32(0), jnp.int32(0))
        x = lax.dynamic_slice(x, start, (size, *x.shape[1:]))
        x = x.reshape(size, self.kv_heads, self.group, -1).transpose(1, 0, 2, 3)
        return x.reshape(self.kv_heads, size * self.group, -1)

    def own_rows_of(
        self, x: jax.Array, tile: QueryTile, size: int, other: float = 0.0
    ) -> jax.Array:
        """`rows_of`, with `other` in the rows of other sequences, which may hold anything."""
        x = self.rows_of(x, tile, size)
        if size == 1:
            return x
        own = jnp.repeat(tile.own, self.group, total_repeat_length=size * self.group)
        return jnp.where(own[:, None], x, jnp.asarray(other, x.dtype))

    def put_rows(self, x: jax.Array, tile: QueryTile, size: int, rows: jax.Array) -> jax.Array:
        """`x` [rows, n, d] with the tile's own rows from `rows` [k, size * group, d]."""
        rows = rows.reshape(self.kv_heads, size, self.group, -1).transpose(1, 0, 2, 3)
        rows = rows.reshape(size, self.heads, -1).astype(x.dtype)
        start = (tile.row, jnp.int32(0), jnp.int32(0))
        if size > 1:
            kept = lax.dynamic_slice(x, start, rows.shape)
            rows = jnp.where(tile.own[:, None, None], rows, kept)
        return lax.dynamic_update_slice(x, rows, start)

    def by_head(self, rows: jax.Array, size: int) -> jax.Array:
        """The sum of the rows of a tile [k, size * group] for each query head, [n]."""
        return rows.reshape(self.kv_heads, size, self.group).sum(1).reshape(-1)

    def keys(self, block: PageBlock) -> jax.Array:
        """The keys of a block, [k, block, h]; where no query sees them they may be anything."""
        return self._read(0, block).astype(self.operands)

    def used_keys(self, block: PageBlock) -> jax.Array:
        """The keys of a block, 0 where no query sees them."""
        return self._read(0, block, zero=True).astype(self.operands)

    def used_values(self, block: PageBlock) -> jax.Array:
        """The values of a block, 0 where no query sees them: a weight of 0 does not undo a NaN."""
        return self._read(1, block, zero=True).astype(self.operands)

    def _read(self, part: int, block: PageBlock, zero: bool = False) -> jax.Array:
        ids = jnp.minimum(block.pages, self.cache_pages - 1)
        x = read_pages(self.caches[part], ids, self.axes, part)
        if zero:
            x = jnp.where(block.used[:, None], x, jnp.zeros((), x.dtype))
        # Transposed here, once: a matmul that reads large pages in stored order is slower on a CPU.
        return lax.optimization_barrier(x)

    def logits(self, products: jax.Array, size: int) -> jax.Array:
        """Scaled and capped logits [k, size, group, block] from products of queries and keys."""
        products = products.reshape(self.kv_heads, size, self.group, -1)
        logits = products * self.factor()[:, None, None, None]
        if self.spec.logits_soft_cap is not None:
            logits = self.spec.logits_soft_cap * jnp.tanh(logits / self.spec.logits_soft_cap)
        return logits

    def factor(self) -> jax.Array:
        """The factor of the products of each key head, [k] or [1]."""
        if self.inputs.k_scale is None:
            return jnp.full((1,), self.spec.softmax_scale, self.dtype)
        return self.inputs.k_scale.astype(self.dtype) * self.spec.softmax_scale

    def visible(self, tile: QueryTile, block: PageBlock) -> jax.Array:
        """Which logits are visible, [size, 1, block]."""
        own, position = tile.positions[:, None], block.positions
        visible = (position <= own) & block.present & tile.own[:, None]
        if (window := self.window(tile)) is not None:
            visible &= position > own - window
        return visible[:, None]
