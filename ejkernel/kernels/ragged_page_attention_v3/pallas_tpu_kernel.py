"""Attention over pages on TPU: softmax block by block over the pages of a sequence.

Two ways to let queries meet keys:

    packed   few queries, as in decoding: all heads of them meet all rows of the pages in one
             matmul, rows of other heads are masked. A matmul takes as long for one query as for
             many, and no key has to be moved.
    apart    many queries: keys and values are put in order by head first, once for all of them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention.pallas_tpu_call import LANES, LOG2_E, product
from ejkernel.kernels.ragged_page_attention_v3.inputs import Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu_cache import Cache
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu_copies import Copies, Plan
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu_items import Items

# Below every logit, yet a number: what was masked, -inf, is 0 after exp2(x - _LEAST).
_LEAST = -1e30
_NOWHERE = 1 << 30  # behind every position
_ROWS = 256  # rows that go through softmax together


class Numbers(NamedTuple):
    """A number for each query head, over all lanes, [parts, heads of a part, LANES] each."""

    factor: Any  # of the logits
    value: Any  # of the results
    sinks: Any


class Refs(NamedTuple):
    """The arrays of a kernel."""

    table: Any
    query: Any
    cache: tuple
    numbers: Numbers
    out: Any
    lse: Any
    cursor: Any
    copied: Any
    entries: Any
    blocks: tuple
    queries: Any
    results: Any
    numbers_kept: Any
    rows: Any  # of the queries, by part
    most: Any
    total: Any
    sums: Any
    offsets: Any  # from the beginning of a block to the position of each column
    own: Any  # packed: inf for a row's own columns, -inf for the others
    ordered: tuple  # apart: keys and values by head
    table_arrived: Any
    pages_arrived: Any
    queries_arrived: Any
    results_left: Any
    numbers_left: Any


class Kernel:
    """What a step does."""

    def __init__(self, plan: Plan, cache: Cache, items: Items, spec: Spec, refs: Refs):
        self.plan, self.cache, self.spec, self.refs = plan, cache, spec, refs
        self.items = items
        self.copies = Copies(plan, cache, items, refs)
        self.block = self.copies.block
        self.heads = refs.query.shape[1]
        self.parts, self.rows = refs.rows.shape[:2]
        self.columns = refs.offsets.shape[1]

    def run(self) -> None:
        copies = self.copies
        self._maps()
        copies.start()

        @pl.loop(copies.begin, copies.end, init_carry=jnp.int32(0))
        def _(item, step):
            @pl.when(item + 1 < copies.end)
            def _():
                copies.queries(item + 1).start()

            copies.queries(item).wait()
            self._begin(item)

            def visit(block: Any, step: Any) -> Any:
                copies.next_table()
                copies.next_pages()
                self._step(item, block, step)
                return step + 1

            step = jax.lax.fori_loop(self.items.begin[item], self.items.end[item], visit, step)

            @pl.when(item - 2 >= copies.begin)
            def _():
                copies.results(item - 2).wait()
                copies.numbers(item - 2).wait()

            self._finish(item)
            copies.results(item).start()
            copies.numbers(item).start()
            return step

        for behind in (2, 1):

            @pl.when(copies.end - behind >= copies.begin)
            def _(behind=behind):
                copies.results(copies.end - behind).wait()
                copies.numbers(copies.end - behind).wait()

    # Maps of a block, the same for all

    def _maps(self) -> None:
        """The position of every column of a block, and the columns that are each row's own."""
        if not self.plan.packed:
            self.refs.offsets[...] = jax.lax.broadcasted_iota(jnp.int32, (1, self.columns), 1)
            return
        column = jax.lax.broadcasted_iota(jnp.int32, (1, self.columns), 1)
        page, row = _divided(column, self.cache.rows)
        slot, head = self._place(row)
        self.refs.offsets[...] = page * self.cache.slots + slot
        mine = jax.lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        mine = _divided(_divided(mine, self.heads)[1], self.heads // self.cache.heads)[0]
        own = head == mine * self.cache.parts
        self.refs.own[...] = jnp.where(own, jnp.inf, -jnp.inf)

    def _place(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slot and the head of a row of a page."""
        if self.cache.heads_first:
            return _divided(row, self.cache.slots)[::-1]
        return _divided(row, self.cache.heads * self.cache.parts)

    # A tile

    def _begin(self, item: Any) -> None:
        refs = self.refs
        query = refs.queries[jax.lax.rem(item, 2)].astype(refs.rows.dtype)
        refs.rows[...] = self._by_part(query)
        refs.most[...] = jnp.full_like(refs.most, _LEAST)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.sums[...] = jnp.zeros_like(refs.sums)

    def _by_part(self, x: jax.Array) -> jax.Array:
        """[size, n, d] -> [parts, rows, d]"""
        size, heads, width = x.shape
        if self.parts > 1:
            x = x.reshape(size, self.parts, heads // self.parts, width).swapaxes(0, 1)
        return x.reshape(self.parts, self.rows, width)

    def _by_query(self, x: jax.Array) -> jax.Array:
        """[parts, rows, d] -> [size, n, d]"""
        size, width = self.plan.size, x.shape[-1]
        if self.parts > 1:
            x = x.reshape(self.parts, size, self.heads // self.parts, width).swapaxes(0, 1)
        return x.reshape(size, self.heads, width)

    def _finish(self, item: Any) -> None:
        refs, slot = self.refs, jax.lax.rem(item, 2)

        @pl.loop(0, self.parts)
        def _(part):
            visible = refs.total[part].sum(axis=1, keepdims=True)
            highest = refs.most[part][:, :1]
            divisor = visible
            if refs.numbers.sinks is not None:
                sinks = self._of_rows(refs.numbers.sinks[part])[:, :1]
                divisor += jnp.exp2(sinks * LOG2_E - highest)
            result = refs.sums[part] / jnp.where(visible > 0.0, divisor, 1.0)
            if refs.numbers.value is not None:
                result *= self._of_rows(refs.numbers.value[part])[:, :1]
            refs.sums[part] = result
            lse = highest * (1 / LOG2_E) + jnp.log(visible)
            refs.numbers_kept[slot, part] = _along_lanes(lse)

        refs.results[slot] = self._by_query(refs.sums[...]).astype(refs.results.dtype)

    def _of_rows(self, x: jax.Array) -> jax.Array:
        """[heads of a part, d] -> [rows, d]"""
        wide = jnp.broadcast_to(x[None], (self.plan.size, *x.shape))
        return wide.reshape(self.rows, x.shape[1])

    # A block

    def _step(self, item: Any, block: Any, step: Any) -> None:
        slot, copied = self.copies.wait_for_pages(step)
        first = self.items.first[item]
        start = block * self.block
        full = (copied == self.plan.pages) & (start + self.block <= first + 1)
        if self.plan.window is not None:
            full &= start > first + self.items.rows[item] - 1 - self.plan.window

        @pl.when(full)
        def _():
            self._visit(slot, None)

        @pl.when(jnp.logical_not(full))
        def _():
            self._clean(item, block, step, slot)
            offsets = self._present(item, block, step, copied)
            shape = (self.rows, 1)
            query = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            query = _divided(query, self.rows // self.plan.size)[0] + (first - start)
            visible = offsets <= query
            if self.plan.window is not None:
                visible &= offsets > query - self.plan.window
            self._visit(slot, visible)

    def _present(self, item: Any, block: Any, step: Any, copied: Any) -> jax.Array:
        """The position of every column, counted from the block's; far behind where no page is."""
        first, last = self.copies.used(item, block)
        slots = self.cache.slots

        def mark(number: Any, offsets: jax.Array) -> jax.Array:
            _, there = self.copies.entry(block, step, number)
            begin = number * slots
            here = (offsets >= begin) & (offsets < begin + slots)
            return jnp.where(here & jnp.logical_not(there), _NOWHERE, offsets)

        complete = copied == last - first
        last = jnp.where(complete, first, last)
        return jax.lax.fori_loop(first, last, mark, self.refs.offsets[...])

    def _clean(self, item: Any, block: Any, step: Any, slot: Any) -> None:
        """Put 0 where values are that no query of the tile sees: 0 times NaN is NaN."""
        position = self.items.first[item]
        newest = position + self.items.rows[item] - 1 - block * self.block
        oldest = -1
        if self.plan.window is not None:
            oldest = position - self.plan.window - block * self.block
        values, page = self.refs.blocks[-1], self.cache.page
        slots = self.cache.slots

        @pl.loop(0, self.plan.pages)
        def _(number):
            _, there = self.copies.entry(block, step, number)
            begin = number * slots
            whole = there & (begin > oldest) & (begin + slots - 1 <= newest)

            @pl.when(jnp.logical_not(whole))
            def _():
                if len(page) == 1:
                    row = jax.lax.broadcasted_iota(jnp.int32, (*page, 1), 0)
                    token = self._place(row)[0] + begin
                else:
                    axis = 1 if self.cache.heads_first else 0
                    token = jax.lax.broadcasted_iota(jnp.int32, (*page, 1), axis) + begin
                seen = there & (token > oldest) & (token <= newest)
                x = values[slot, number].astype(jnp.float32)
                values[slot, number] = jnp.where(seen, x, 0.0).astype(values.dtype)

    def _visit(self, slot: Any, visible: jax.Array | None) -> None:
        refs, dtype = self.refs, self.refs.rows.dtype
        if self.plan.packed:
            keys, values = (
                x[slot].astype(dtype).reshape(self.columns, x.shape[-1])
                for x in (refs.blocks[0], refs.blocks[-1])
            )
            self._attend(0, keys, values, visible)
            return
        for blocks, ordered in zip(refs.blocks, refs.ordered, strict=True):
            ordered[...] = self._by_head(blocks[slot].astype(dtype))
        stride = self.cache.parts

        @pl.loop(0, self.parts)
        def _(part):
            keys = refs.ordered[0][part * stride]
            values = refs.ordered[-1][part * stride + stride - 1]
            self._attend(part, keys, values, visible)

    def _by_head(self, x: jax.Array) -> jax.Array:
        """A block [pages, *page, d] -> [heads, positions, d]"""
        heads, slots = self.cache.heads * self.cache.parts, self.cache.slots
        width = x.shape[-1]
        if self.cache.heads_first:
            x = x.reshape(self.plan.pages, heads, slots, width).swapaxes(0, 1)
            return x.reshape(heads, self.block, width)
        return x.reshape(self.block, heads, width).swapaxes(0, 1)

    def _attend(self, part: Any, keys: jax.Array, values: jax.Array, visible: Any) -> None:
        refs = self.refs
        for start in range(0, self.rows, _ROWS):
            rows = slice(start, min(start + _ROWS, self.rows))
            logits = product(refs.rows[part, rows], keys, transpose_right=True)
            logits = self._logits(logits, part, rows)
            if visible is not None:
                seen = visible[rows]
                if self.plan.packed:
                    seen &= refs.own[rows] > 0.0
                logits = jnp.where(seen, logits, -jnp.inf)
            elif self.plan.packed:
                logits = jnp.minimum(logits, refs.own[rows])
            before = refs.most[part, rows]
            after = jnp.maximum(before, logits.max(axis=1, keepdims=True))
            fade = jnp.exp2(before - after)
            weights = jnp.exp2(logits - _across(after, self.columns))
            refs.most[part, rows] = after
            refs.total[part, rows] = refs.total[part, rows] * fade + _lane_sums(weights)
            if self.plan.packed and self.cache.combined:
                weights = _rolled(weights, self.cache.slots if self.cache.heads_first else 1)
            width = refs.sums.shape[-1]
            refs.sums[part, rows] = refs.sums[part, rows] * _across(fade, width) + product(
                weights.astype(values.dtype), values
            )

    def _logits(self, products: jax.Array, part: Any, rows: slice) -> jax.Array:
        """Logits in base 2."""
        scale, cap = self.spec.softmax_scale, self.spec.logits_soft_cap
        factor: Any = scale
        if self.refs.numbers.factor is not None:
            if self.plan.packed:
                factor = _across(self._of_rows(self.refs.numbers.factor[part])[rows], self.columns)
            else:
                factor = self.refs.numbers.factor[part][:1, :1]
        if cap is None:
            return products * (factor * LOG2_E)
        return jnp.tanh(products * (factor * (1.0 / cap))) * (cap * LOG2_E)


def _divided(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of small numbers; kernels have no division of integers."""
    if by & (by - 1) == 0:
        quotient = jax.lax.shift_right_logical(x, by.bit_length() - 1)
    else:
        quotient = jnp.floor((x.astype(jnp.float32) + 0.5) * (1.0 / by)).astype(jnp.int32)
    return quotient, x - quotient * by


def _rolled(x: jax.Array, by: int) -> jax.Array:
    """Columns moved to the right; what falls out comes in at the left."""
    return pltpu.roll(x, by, 1) if x.shape[1] % LANES == 0 else jnp.roll(x, by, axis=1)


def _across(x: jax.Array, width: int) -> jax.Array:
    """A number for each row, the same in all lanes, over so many columns."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _lane_sums(x: jax.Array) -> jax.Array:
    """Sums along the rows, but for the last: one for each lane."""
    missing = -x.shape[1] % LANES
    if missing:
        x = jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], axis=1)
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    return functools.reduce(jnp.add, parts)


def _along_lanes(x: jax.Array) -> jax.Array:
    """A column [rows, 1] as rows of lanes, [rows / LANES rounded up, LANES]."""
    diagonal = (LANES, LANES)
    own = jax.lax.broadcasted_iota(jnp.int32, diagonal, 0) == jax.lax.broadcasted_iota(
        jnp.int32, diagonal, 1
    )
    lines = []
    for start in range(0, x.shape[0], LANES):
        some = x[start : start + LANES]
        count = some.shape[0]
        wide = jnp.where(own[:count], jnp.broadcast_to(some, (count, LANES)), 0.0)
        lines.append(wide.sum(axis=0, keepdims=True))
    return jnp.concatenate(lines, axis=0)
