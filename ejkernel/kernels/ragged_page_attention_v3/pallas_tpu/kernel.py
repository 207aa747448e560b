"""Attention over pages on TPU: softmax block by block over the pages of a sequence.

Two ways to let queries meet keys:

    packed   few queries, as in decoding: all heads of them meet all rows of the pages in one
             matmul, rows of other heads are masked. A matmul takes as long for one query as for
             many, and no key has to be moved. A weight of 0 for another head's value that is NaN
             or infinite would give NaN: where a result is strange, all is done once more, and each
             head's weights meet its own values alone.
    apart    many queries: keys and values are put in order by head first, once for all of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention.pallas_tpu.call import LOG2_E, product
from ejkernel.kernels.ragged_page_attention_v3.inputs import Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.cache import Cache
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.copies import Copies, Plan
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.items import NO_PAGE, Items
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.order import (
    by_head,
    halves,
    head_of_rows,
    order_words,
    own_values,
    place_of,
)
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.refs import Refs
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.vectors import (
    LANES,
    SHUFFLED,
    across,
    along_lanes,
    divided,
    lane_sums,
    shuffled,
)

# Below every logit, yet a number: what was masked, -inf, is 0 after exp2(x - _LEAST).
_LEAST = -1e30
_NOWHERE = 1 << 30  # behind every position
_ROWS = 256  # rows that go through softmax together
_COLUMNS = 2048  # and columns


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
        self.columns_of_page = self.columns // plan.pages
        # Whether two heads of a token, side by side in a word of 32 bits, are told apart there.
        # Which key then stands in which column does not matter: its value stands there too.
        words = cache.page_in_words and refs.rows.dtype == jnp.bfloat16
        if plan.packed:
            self.shuffled = words and cache.combined and self.columns % SHUFFLED == 0
        else:
            # Rows that lie apart are read one register wide at most.
            fits = cache.dtype == jnp.bfloat16 and max(cache.dims) <= LANES
            self.shuffled = words and fits and cache.slots % SHUFFLED == 0

    def run(self) -> None:
        self._maps()
        again = self.refs.again
        if again is None:
            self._pass(None)
            return
        again[0] = 0
        self.refs.strange[...] = jnp.zeros_like(self.refs.strange)

        @pl.loop(0, 2)
        def _(number):
            @pl.when((number == 0) | (again[0] != 0))
            def _():
                self._pass(number > 0)
                again[0] = (self.refs.strange[...].max() > 0.0).astype(jnp.int32)

    def _pass(self, heads_apart: Any) -> None:
        """All tiles of this core; with `heads_apart`, where there is that, the slow way."""
        copies = self.copies
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
                self._step(item, block, step, heads_apart)
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
        column = jax.lax.broadcasted_iota(jnp.int32, (1, self.columns), 1)
        if self.shuffled:
            column = shuffled(column)
        if not self.plan.packed:
            self.refs.offsets[...] = column
            return
        self.refs.offsets[...], head = place_of(self.cache, column)
        mine = head == head_of_rows(self.cache, self.rows, self.heads)
        self.refs.own[...] = jnp.where(mine, jnp.inf, -jnp.inf)

    # A tile

    def _begin(self, item: Any) -> None:
        refs = self.refs
        query = refs.queries[item & 1].astype(refs.rows.dtype)
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
        refs, slot = self.refs, item & 1

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
            if refs.again is not None:
                finite = jnp.abs(result) < jnp.inf
                refs.strange[...] = jnp.where(finite, refs.strange[...], 1.0)
            lse = highest * (1 / LOG2_E) + jnp.log(visible)
            refs.numbers_kept[slot, part] = along_lanes(lse)

        refs.results[slot] = self._by_query(refs.sums[...]).astype(refs.results.dtype)

    def _of_rows(self, x: jax.Array) -> jax.Array:
        """[heads of a part, d] -> [rows, d]"""
        wide = jnp.broadcast_to(x[None], (self.plan.size, *x.shape))
        return wide.reshape(self.rows, x.shape[1])

    # A block

    def _step(self, item: Any, block: Any, step: Any, heads_apart: Any) -> None:
        slot, complete = self.copies.wait_for_pages(step)
        first = self.items.first[item]
        start = block * self.block
        full = complete & (start + self.block <= first + 1)
        if self.plan.window is not None:
            full &= start > first + self.items.rows[item] - 1 - self.plan.window

        part = jnp.logical_not(full)
        if heads_apart is not None:
            full, part = (x & jnp.logical_not(heads_apart) for x in (full, part))

        @pl.when(full)
        def _():
            self._visit(slot, 0, self.plan.pages, None)

        @pl.when(part)
        def _():
            self._part_of_block(item, block, step, slot)

        if heads_apart is not None:

            @pl.when(heads_apart)
            def _():
                @pl.loop(0, self.cache.heads)
                def _(head):
                    self._part_of_block(item, block, step, slot, head)

    def _part_of_block(self, item: Any, block: Any, step: Any, slot: Any, head: Any = None) -> None:
        """A block of which not all is seen, where heads are packed some pages at a time."""
        first, last = self.copies.used(item, block)
        query = jax.lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        query = divided(query, self.rows // self.plan.size)[0]
        query += self.items.first[item] - block * self.block
        width = self.plan.pages
        if self.plan.packed:
            # A power of two, as the pages of a block are.
            most = max(1, _COLUMNS // 2 // (self.cache.slots * self.cache.heads))
            width = min(width, 1 << (most.bit_length() - 1))

        def some(begin: Any) -> None:
            @pl.when((begin < last) & (begin + width > first))
            def _():
                self._clean(item, block, step, slot, begin, width)
                offsets = self._present(block, step, slot, begin, width)
                visible = offsets <= query
                if self.plan.window is not None:
                    visible &= offsets > query - self.plan.window
                self._visit(slot, begin, width, visible, head)

        if width * self.columns_of_page % LANES or width == self.plan.pages:
            for begin in range(0, self.plan.pages, width):
                some(begin)
        else:  # columns that begin with a register can be counted while it runs
            pl.loop(0, self.plan.pages // width)(lambda number: some(number * width))

    def _columns(self, begin: Any, count: int) -> Any:
        """The columns of so many pages."""
        start = begin * self.columns_of_page
        if not isinstance(begin, int):
            start = pl.multiple_of(start, LANES)
        return pl.ds(start, count * self.columns_of_page)

    def _present(self, block: Any, step: Any, slot: Any, begin: Any, count: int) -> jax.Array:
        """The position of every column, counted from the block's; far behind where no page is."""
        entries, slots = self.copies.first_entry(block, step), self.cache.slots

        def mark(number: Any, offsets: jax.Array) -> jax.Array:
            start = number * slots
            here = (offsets >= start) & (offsets < start + slots)
            missing = self.refs.entries[entries + number] >= NO_PAGE
            return jnp.where(here & missing, _NOWHERE, offsets)

        last = jnp.where(self.refs.holes[slot] < NO_PAGE, begin, begin + count)
        offsets = self.refs.offsets[:, self._columns(begin, count)]
        return jax.lax.fori_loop(begin, last, mark, offsets)

    def _clean(self, item: Any, block: Any, step: Any, slot: Any, begin: Any, count: int) -> None:
        """Put 0 where values are that no query of the tile sees: 0 times NaN is NaN."""
        position = self.items.first[item]
        newest = position + self.items.rows[item] - 1 - block * self.block
        oldest = -1
        if self.plan.window is not None:
            oldest = position - self.plan.window - block * self.block
        values, page = self.refs.blocks[-1], self.cache.page
        entries, slots = self.copies.first_entry(block, step), self.cache.slots

        @pl.loop(begin, begin + count)
        def _(number):
            there = self.refs.entries[entries + number] < NO_PAGE
            start = number * slots
            whole = there & (start > oldest) & (start + slots - 1 <= newest)

            @pl.when(jnp.logical_not(whole))
            def _():
                if len(page) == 1:
                    row = jax.lax.broadcasted_iota(jnp.int32, (*page, 1), 0)
                    if self.cache.heads_first:
                        token = divided(row, slots)[1] + start
                    else:
                        token = divided(row, self.cache.rows // slots)[0] + start
                else:
                    axis = 1 if self.cache.heads_first else 0
                    token = jax.lax.broadcasted_iota(jnp.int32, (*page, 1), axis) + start
                seen = there & (token > oldest) & (token <= newest)
                x = values[slot, number].astype(jnp.float32)
                values[slot, number] = jnp.where(seen, x, 0.0).astype(values.dtype)

    def _visit(self, slot: Any, begin: Any, count: int, visible: Any, head: Any = None) -> None:
        """So many pages of a block from `begin` on; all of them where heads are apart."""
        refs, dtype = self.refs, self.refs.rows.dtype
        if self.plan.packed:
            pages = pl.ds(begin, count)
            rows = [x[slot, pages].astype(dtype).reshape(-1, x.shape[-1]) for x in refs.blocks]
            if self.cache.combined:
                rows = halves(self.cache, rows[0], self.shuffled)
            keys, values = rows
            self._attend(0, keys, values, self._columns(begin, count), visible, head)
            return
        for blocks, ordered in zip(refs.blocks, refs.ordered, strict=True):
            if self.shuffled:
                order_words(self.cache, blocks, ordered, slot)
            else:
                ordered[...] = by_head(self.cache, blocks[slot].astype(dtype))
        stride = self.cache.parts

        @pl.loop(0, self.parts)
        def _(part):
            keys = refs.ordered[0][part * stride]
            values = refs.ordered[-1][part * stride + stride - 1]
            self._attend(part, keys, values, self._columns(begin, count), visible)

    def _attend(
        self,
        part: Any,
        keys: jax.Array,
        values: jax.Array,
        columns: Any,
        visible: Any,
        head: Any = None,
    ) -> None:
        """Some rows and some columns after the others."""
        for row in range(0, self.rows, _ROWS):
            rows = slice(row, min(row + _ROWS, self.rows))
            for start in range(0, keys.shape[0], _COLUMNS):
                some = slice(start, min(start + _COLUMNS, keys.shape[0]))
                own = pl.ds(columns.start + start, some.stop - start)
                seen = None if visible is None else visible[rows, some]
                self._accumulate(part, rows, own, keys[some], values[some], seen, head)

    def _accumulate(
        self,
        part: Any,
        rows: slice,
        columns: Any,
        keys: jax.Array,
        values: jax.Array,
        visible: Any,
        head: Any,
    ) -> None:
        """What the keys and values give to the softmax; of one key head, where it is told."""
        refs, width = self.refs, keys.shape[0]
        logits = product(refs.rows[part, rows], keys, transpose_right=True)
        logits = self._logits(logits, part, rows)
        if visible is not None:
            if self.plan.packed:
                visible &= refs.own[rows, columns] > 0.0
                if head is not None:
                    visible &= head_of_rows(self.cache, self.rows, self.heads)[rows] == head
            logits = jnp.where(visible, logits, -jnp.inf)
        elif self.plan.packed:
            logits = jnp.minimum(logits, refs.own[rows, columns])
        before = refs.most[part, rows]
        after = jnp.maximum(before, logits.max(axis=1, keepdims=True))
        fade = jnp.exp2(before - after)
        weights = jnp.exp2(logits - across(after, width))
        refs.most[part, rows] = after
        refs.total[part, rows] = refs.total[part, rows] * fade + lane_sums(weights)
        if head is not None:
            values = own_values(self.cache, values, columns.start, head, self.shuffled)
        found = product(weights.astype(values.dtype), values)
        if head is not None:
            found = jnp.where(
                head_of_rows(self.cache, self.rows, self.heads)[rows] == head, found, 0.0
            )
        refs.sums[part, rows] = refs.sums[part, rows] * across(fade, refs.sums.shape[-1]) + found

    def _logits(self, products: jax.Array, part: Any, rows: slice) -> jax.Array:
        """Logits in base 2."""
        scale, cap = self.spec.softmax_scale, self.spec.logits_soft_cap
        factor: Any = scale
        if self.refs.numbers.factor is not None:
            if self.plan.packed:
                factor = across(
                    self._of_rows(self.refs.numbers.factor[part])[rows], products.shape[1]
                )
            else:
                factor = self.refs.numbers.factor[part][:1, :1]
        if cap is None:
            return products * (factor * LOG2_E)
        return jnp.tanh(products * (factor * (1.0 / cap))) * (cap * LOG2_E)
