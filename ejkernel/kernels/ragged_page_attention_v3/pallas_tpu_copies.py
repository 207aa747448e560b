"""The copies of a TPU kernel over pages: tables, pages, queries and results, all under way at once.

Steps are the blocks of all tiles in one row, over the ends of tiles. While a step computes, the
pages of the steps that follow are on their way, and further ahead their entries of the table:

    table   HBM -> SMEM   a ring of pieces
    pages   HBM -> VMEM   a ring of blocks
    rows    HBM <-> VMEM  the queries of the next tile, the results of the last

Only pages that a query of the tile sees are copied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu_cache import Cache
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu_items import PIECE, Items

AHEAD = 2  # steps that the table is ahead of the pages


class Plan(NamedTuple):
    """What is static about a kernel.

    Attributes:
        size: queries of a tile.
        pages: pages of a block.
        depth: blocks that VMEM holds.
        packed: whether all heads meet all rows of a page in one matmul.
        cores: how many cores share the tiles.
        per_sequence: pieces of the table that a sequence has.
        per_block: pieces of the table that a block needs.
        window: how many positions a query sees; None: all.
    """

    size: int
    pages: int
    depth: int
    packed: bool
    cores: int
    per_sequence: int
    per_block: int
    window: int | None

    @property
    def ring(self) -> int:
        """Pieces of the table that are held."""
        return self.depth + AHEAD


class Copies:
    """The copies of one kernel; `refs` names its arrays."""

    def __init__(self, plan: Plan, cache: Cache, items: Items, refs: Any):
        self.plan, self.cache, self.items, self.refs = plan, cache, items, refs
        self.block = plan.pages * cache.slots  # positions
        core = pl.program_id(0)
        self.begin, self.end = items.bounds[core], items.bounds[core + 1]

    def start(self) -> None:
        """Set out on the first steps."""

        @pl.when(self.begin < self.end)
        def _():
            for cursor in (0, 3):
                self.refs.cursor[cursor] = self.begin
                self.refs.cursor[cursor + 1] = self.items.begin[self.begin]
                self.refs.cursor[cursor + 2] = 0
            self.queries(self.begin).start()

            @pl.loop(0, AHEAD + self.plan.depth - 1)
            def _(step):
                self.next_table()
                pl.when(step >= AHEAD)(self.next_pages)

    # The table

    def next_table(self) -> None:
        """Begin to copy the entries of the step that the first cursor stands at."""

        def begin(item: Any, block: Any, step: Any) -> None:
            self._table(item, block, step).start()

        self._advance(0, begin)

    def _table(self, item: Any, block: Any, step: Any) -> Any:
        first = self.items.sequence[item] * self.plan.per_sequence
        if self.plan.pages >= PIECE:
            first += block * self.plan.per_block
        else:
            first += jax.lax.div(block, PIECE // self.plan.pages)
        slot = jax.lax.rem(step, self.plan.ring)
        return pltpu.make_async_copy(
            self.refs.table.at[pl.ds(first, self.plan.per_block)],
            self.refs.entries.at[slot],
            self.refs.table_arrived.at[slot],
        )

    def entry(self, block: Any, step: Any, number: Any) -> tuple[Any, Any]:
        """The page in this place of a block, and whether there is one."""
        slot = jax.lax.rem(step, self.plan.ring)
        if self.plan.pages >= PIECE:
            piece = jax.lax.div(number, PIECE)
            place = number - piece * PIECE
        else:
            piece = 0
            place = number + jax.lax.rem(block, PIECE // self.plan.pages) * self.plan.pages
        page = self.refs.entries[slot, piece, 0, place]
        return page, (page >= 0) & (page < self.cache.pages)

    # The pages

    def next_pages(self) -> None:
        """Begin to copy the pages of the step that the second cursor stands at."""

        def begin(item: Any, block: Any, step: Any) -> None:
            self._table(item, block, step).wait()
            slot = jax.lax.rem(step, self.plan.depth)
            first, last = self.used(item, block)

            def one(number: Any, copied: Any) -> Any:
                page, there = self.entry(block, step, number)

                @pl.when(there)
                def _():
                    for i in range(self.cache.arrays):
                        self._page(i, page, slot, number).start()

                return copied + there.astype(jnp.int32)

            self.refs.copied[slot] = jax.lax.fori_loop(first, last, one, jnp.int32(0))

        self._advance(3, begin)

    def used(self, item: Any, block: Any) -> tuple[Any, Any]:
        """The pages of a block that queries of the tile see: from the first to behind the last."""
        before, slots = block * self.plan.pages, self.cache.slots
        position = self.items.first[item]
        last = jax.lax.div(position + self.items.rows[item] - 1, slots) + 1 - before
        last = jnp.minimum(last, self.plan.pages)
        if self.plan.window is None:
            return jnp.int32(0), last
        oldest = jnp.maximum(position - self.plan.window + 1, 0)
        return jnp.maximum(jax.lax.div(oldest, slots) - before, 0), last

    def _page(self, which: int, page: Any, slot: Any, number: Any) -> Any:
        source = self.refs.cache[which]
        return pltpu.make_async_copy(
            source.at[:, page] if self.cache.strided else source.at[page],
            self.refs.blocks[which].at[slot, number],
            self.refs.pages_arrived.at[slot],
        )

    def wait_for_pages(self, step: Any) -> tuple[Any, Any]:
        """The block of a step, once it is there: its place in VMEM, and how many pages came."""
        slot = jax.lax.rem(step, self.plan.depth)
        copied = self.refs.copied[slot]

        @pl.when(copied == self.plan.pages)
        def _():
            for blocks in self.refs.blocks:
                whole = blocks.at[slot]
                pltpu.make_async_copy(whole, whole, self.refs.pages_arrived.at[slot]).wait()

        @pl.when(copied < self.plan.pages)
        def _():
            @pl.loop(0, copied)
            def _(number):
                for blocks in self.refs.blocks:
                    one = blocks.at[slot, 0]
                    pltpu.make_async_copy(one, one, self.refs.pages_arrived.at[slot]).wait()

        return slot, copied

    def _advance(self, cursor: int, begin: Callable[[Any, Any, Any], None]) -> None:
        """`begin(tile, block, step)` at a cursor, which goes on to the next step."""
        at = self.refs.cursor
        item = at[cursor]

        @pl.when(item < self.end)
        def _():
            block, step = at[cursor + 1], at[cursor + 2]
            begin(item, block, step)
            behind = block + 1 >= self.items.end[item]
            following = jnp.minimum(item + 1, self.items.begin.shape[0] - 1)
            at[cursor] = jnp.where(behind, item + 1, item)
            at[cursor + 1] = jnp.where(behind, self.items.begin[following], block + 1)
            at[cursor + 2] = step + 1

    # Rows of queries and results

    def queries(self, item: Any) -> "RowCopies":
        """The queries of a tile, on their way in."""
        return RowCopies(self, item, self.refs.query, self.refs.queries, self.refs.queries_arrived)

    def results(self, item: Any) -> "RowCopies":
        """The results of a tile, on their way out."""
        refs = self.refs
        return RowCopies(self, item, refs.out, refs.results, refs.results_left, out=True)

    def numbers(self, item: Any) -> Any:
        """The log-sum-exps of a tile, on their way out."""
        slot = jax.lax.rem(item, 2)
        return pltpu.make_async_copy(
            self.refs.numbers_kept.at[slot], self.refs.lse.at[item], self.refs.numbers_left.at[slot]
        )


class RowCopies:
    """As many rows as a tile has, in pieces whose sizes are powers of two: those must be static."""

    def __init__(
        self, copies: Copies, item: Any, array: Any, kept: Any, semaphores: Any, out: bool = False
    ):
        self.row, self.rows = copies.items.row[item], copies.items.rows[item]
        self.array, self.kept, self.out = array, kept, out
        self.slot = jax.lax.rem(item, 2)
        self.semaphore = semaphores.at[self.slot]

    def start(self) -> None:
        self._each(lambda copy: copy.start())

    def wait(self) -> None:
        self._each(lambda copy: copy.wait())

    def _each(self, act: Callable[[Any], None]) -> None:
        most = min(self.kept.shape[1], self.array.shape[0])
        for bit in reversed(range(most.bit_length())):
            piece = 1 << bit

            @pl.when((self.rows & piece) != 0)
            def _(piece=piece):
                skipped = self.rows & ~(2 * piece - 1)
                there = self.array.at[pl.ds(self.row + skipped, piece)]
                here = self.kept.at[self.slot, pl.ds(skipped, piece)]
                ends = (here, there) if self.out else (there, here)
                act(pltpu.make_async_copy(*ends, self.semaphore))
