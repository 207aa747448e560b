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

from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.cache import Cache
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.items import NO_PAGE, PIECE, Items
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.refs import Refs

AHEAD = 2  # steps that the table is ahead of the pages
_WRITTEN_OUT = 8  # copies of pages that follow each other without a loop


class Plan(NamedTuple):
    """What is static about a kernel.

    Attributes:
        size: queries of a tile.
        pages: pages of a block.
        depth: blocks that VMEM holds.
        packed: whether all heads meet all rows of a page in one matmul.
        cores: how many cores share the tiles.
        per_sequence: entries of the table that a sequence has.
        window: how many positions a query sees; None: all.
    """

    size: int
    pages: int
    depth: int
    packed: bool
    cores: int
    per_sequence: int
    window: int | None

    @property
    def ring(self) -> int:
        """Pieces of the table that are held: a power of two."""
        return 1 << (self.depth + AHEAD - 1).bit_length()


class Copies:
    """The copies of one kernel; `refs` names its arrays."""

    def __init__(self, plan: Plan, cache: Cache, items: Items, refs: Refs):
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
        count = max(self.plan.pages, PIECE)
        first = self.items.sequence[item] * self.plan.per_sequence
        first += _shifted(block, count // self.plan.pages) * count
        slot = step & (self.plan.ring - 1)
        return pltpu.make_async_copy(
            self.refs.table.at[pl.ds(pl.multiple_of(first, PIECE), count)],
            self.refs.entries.at[pl.ds(pl.multiple_of(slot * count, PIECE), count)],
            self.refs.table_arrived.at[slot],
        )

    def first_entry(self, block: Any, step: Any) -> Any:
        """Where the entries of a block begin, as far as they are in scalar memory."""
        count = max(self.plan.pages, PIECE)
        inside = (block & (count // self.plan.pages - 1)) * self.plan.pages
        return (step & (self.plan.ring - 1)) * count + inside

    # The pages

    def next_pages(self) -> None:
        """Begin to copy the pages of the step that the second cursor stands at."""

        def begin(item: Any, block: Any, step: Any) -> None:
            self._table(item, block, step).wait()
            slot = self.slot(step)
            first, last = self.used(item, block)

            entries = self.first_entry(block, step)

            def one(number: Any, holes: Any) -> Any:
                entry = self.refs.entries[entries + number]
                # In the place of a page that is not there comes another, for nobody to see.
                page = entry & (NO_PAGE - 1)
                for which in range(self.cache.arrays):
                    self._page(which, page, slot, number).start()
                return holes | entry

            copied = last - first
            self.refs.copied[slot] = copied

            @pl.when(copied == self.plan.pages)
            def _():
                holes = jnp.int32(0)
                # Written out, as far as that goes, a copy costs a few instructions.
                several = min(_WRITTEN_OUT, self.plan.pages)
                if several == self.plan.pages:
                    for number in range(several):
                        holes = one(number, holes)
                else:

                    def some(group: Any, holes: Any) -> Any:
                        for number in range(several):
                            holes = one(group * several + number, holes)
                        return holes

                    holes = jax.lax.fori_loop(0, self.plan.pages // several, some, holes)
                self.refs.holes[slot] = holes

            @pl.when(copied < self.plan.pages)
            def _():
                self.refs.holes[slot] = jax.lax.fori_loop(first, last, one, jnp.int32(0))

        self._advance(3, begin)

    def slot(self, step: Any) -> Any:
        """Where the block of a step is in VMEM."""
        depth = self.plan.depth
        return step & (depth - 1) if depth & (depth - 1) == 0 else jax.lax.rem(step, depth)

    def used(self, item: Any, block: Any) -> tuple[Any, Any]:
        """The pages of a block that queries of the tile see: from the first to behind the last."""
        before, slots = block * self.plan.pages, self.cache.slots
        position = self.items.first[item]
        last = _divided(position + self.items.rows[item] - 1, slots) + 1 - before
        last = jnp.minimum(last, self.plan.pages)
        if self.plan.window is None:
            return jnp.int32(0), last
        oldest = jnp.maximum(position - self.plan.window + 1, 0)
        return jnp.maximum(_divided(oldest, slots) - before, 0), last

    def _page(self, which: int, page: Any, slot: Any, number: Any) -> Any:
        source = self.refs.cache[which]
        return pltpu.make_async_copy(
            source.at[:, page] if self.cache.strided else source.at[page],
            self.refs.blocks[which].at[slot, number],
            self.refs.pages_arrived.at[slot],
        )

    def wait_for_pages(self, step: Any) -> tuple[Any, Any]:
        """The block of a step, once it is there: its place in VMEM, and whether all pages came."""
        slot = self.slot(step)
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

        return slot, (copied == self.plan.pages) & (self.refs.holes[slot] < NO_PAGE)

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
        slot = item & 1
        return pltpu.make_async_copy(
            self.refs.numbers_kept.at[slot], self.refs.lse.at[item], self.refs.numbers_left.at[slot]
        )


class RowCopies:
    """As many rows as a tile has, in pieces."""

    def __init__(
        self, copies: Copies, item: Any, array: Any, kept: Any, semaphores: Any, out: bool = False
    ):
        self.row, self.rows = copies.items.row[item], copies.items.rows[item]
        self.array, self.kept, self.out = array, kept, out
        self.slot = item & 1
        self.semaphore = semaphores.at[self.slot]

    def start(self) -> None:
        self._each(lambda copy: copy.start())

    def wait(self) -> None:
        self._each(lambda copy: copy.wait())

    def _each(self, act: Callable[[Any], None]) -> None:
        def one(skipped: Any, piece: int) -> None:
            there = self.array.at[pl.ds(self.row + skipped, piece)]
            here = self.kept.at[self.slot, pl.ds(skipped, piece)]
            ends = (here, there) if self.out else (there, here)
            act(pltpu.make_async_copy(*ends, self.semaphore))

        in_pieces(self.rows, min(self.kept.shape[1], self.array.shape[0]), one)


def in_pieces(count: Any, most: int, act: Callable[[Any, int], None]) -> None:
    """`act(skipped, piece)` for pieces of `count`, `most` at most, whose sizes are static."""
    for bit in reversed(range(most.bit_length())):
        piece = 1 << bit

        @pl.when((count & piece) != 0)
        def _(piece=piece):
            act(count & ~(2 * piece - 1), piece)


def _shifted(x: Any, by: int) -> Any:
    """`x // by` of what is not negative, by a power of two."""
    return jax.lax.shift_right_logical(x, by.bit_length() - 1)


def _divided(x: Any, by: int) -> Any:
    """`x // by` of what is not negative."""
    return _shifted(x, by) if by & (by - 1) == 0 else jax.lax.div(x, by)
