"""Attention over pages on TPU: online softmax over blocks of a sequence's pages.

There are two ways to multiply queries with keys:

    packed   Few queries, as in decoding. The queries of all heads are multiplied with all rows of
             the pages in one matmul, and the logits of other heads are masked. A matmul takes as
             long for one query as for many, and no key has to be moved. A weight of 0 times a NaN
             or infinite value of another head would give NaN: where a result is not finite, the
             kernel runs once more and multiplies the weights of each head with its own values.
    by head  Many queries. Keys and values are sorted by head first, once for all queries.

A step is one block of one tile. The steps of all tiles follow each other without a gap: while a
step computes, the pages of the next steps are copied, and before them their table entries. Only
pages that a query of the tile sees are copied.

    page table   HBM -> SMEM   a ring buffer of chunks
    pages        HBM -> VMEM   a ring buffer of blocks
    rows         HBM <-> VMEM  the queries of the next tile, the results of the previous ones
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import settings
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.mosaic_tpu.copies import AsyncCopy, RowCopies
from ejkernel.kernels.common.mosaic_tpu.vectors import LANES, LEAST, matmul_nn, matmul_nt
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu import block_layout
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.configs import (
    TABLE_LEAD,
    CacheLayout,
    HeadFactors,
    KernelRefs,
    PagedKernelConfig,
    cache_arrays,
    head_factors,
    scratch_shapes,
)
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.schedule import (
    NO_PAGE,
    TABLE_CHUNK,
    WorkList,
    flat_page_table,
)

_NO_POSITION = 1 << 30  # after every position
_SOFTMAX_ROWS = 256  # rows that go through softmax together
_SOFTMAX_COLUMNS = 2048  # and columns
_UNROLLED_COPIES = 8  # copies of pages that are written out without a loop


def run_kernel(
    inputs: Inputs,
    spec: Spec,
    config: PagedKernelConfig,
    layout: CacheLayout,
    work: WorkList,
    vmem_limit: int,
    query: jax.Array,
    out: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`out` [tokens, n, v] with the results of the tiles, and their lse [tiles, size, n]."""
    heads = query.shape[1]
    table, table_stride = flat_page_table(inputs, config.block_pages, layout.num_pages)
    config = config._replace(table_stride=table_stride)
    parts = 1 if config.packed else layout.kv_heads
    rows = config.tile_queries * heads // parts
    factors = head_factors(inputs, spec, parts)
    given = [x for x in factors if x is not None]
    count, lane_rows = work.row.shape[0], -(-rows // LANES)
    scratch = scratch_shapes(inputs, config, layout)

    def body(*refs: Ref) -> None:
        rest = iter(refs)
        work_refs = WorkList(*itertools.islice(rest, len(WorkList._fields)))
        table, query = next(rest), next(rest)
        caches = tuple(itertools.islice(rest, layout.num_arrays))
        factor_refs = HeadFactors(*(None if x is None else next(rest) for x in factors))
        next(rest)  # the zeros, aliased to the output
        out, lse = next(rest), next(rest)
        named: dict[str, Any] = dict(zip(scratch, rest, strict=True))
        blocks = tuple(named.pop(f"kv_blocks{i}") for i in range(len(caches)))
        arrays = () if config.packed else range(len(caches))
        by_head = tuple(named.pop(f"kv_by_head{i}") for i in arrays)
        PagedAttentionKernel(
            config,
            layout,
            work_refs,
            spec,
            KernelRefs(
                page_table=table,
                query=query,
                cache=caches,
                head_factors=factor_refs,
                out=out,
                lse=lse,
                kv_blocks=blocks,
                kv_by_head=by_head,
                **named,
            ),
        ).run()

    in_hbm, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    operands = [table, query, *cache_arrays(inputs, spec), *given, out]
    out, lse = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(config.cores,),
            in_specs=[in_hbm] * (2 + layout.num_arrays) + [in_vmem] * len(given) + [in_hbm],
            out_specs=[in_hbm, in_hbm],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct((count, parts, lane_rows, LANES), jnp.float32),
        ],
        input_output_aliases={len(work) + len(operands) - 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_limit,
            disable_bounds_checks=True,  # pages are within the cache, rows within their tile
        ),
        interpret=settings.interpret(),
        name="page_attention_one_query" if config.tile_queries == 1 else "page_attention",
    )(*work, *operands)
    lse = lse.reshape(count, parts, lane_rows * LANES)[:, :, :rows]
    lse = lse.reshape(count, parts, config.tile_queries, heads // parts).swapaxes(1, 2)
    return out, lse.reshape(count, config.tile_queries, heads)


class CopyPipeline:
    """The copies of one kernel."""

    config: PagedKernelConfig
    layout: CacheLayout
    work: WorkList
    refs: KernelRefs
    begin: jax.Array
    end: jax.Array

    def __init__(
        self, config: PagedKernelConfig, layout: CacheLayout, work: WorkList, refs: KernelRefs
    ):
        self.config, self.layout, self.work, self.refs = config, layout, work, refs
        core = pl.program_id(0)
        self.begin, self.end = work.core_bounds[core], work.core_bounds[core + 1]

    def prologue(self) -> None:
        """Start the copies of the first steps."""

        @pl.when(self.begin < self.end)
        def _():
            for cursor in (0, 3):
                self.refs.cursors[cursor] = self.begin
                self.refs.cursors[cursor + 1] = self.work.begin[self.begin]
                self.refs.cursors[cursor + 2] = 0
            self.queries(self.begin).start()

            @pl.loop(0, TABLE_LEAD + self.config.stages - 1)
            def _(step: jax.Array):
                self.start_next_table()
                pl.when(step >= TABLE_LEAD)(self.start_next_pages)

    def start_next_table(self) -> None:
        """Start to copy the table entries of the step at the first cursor."""

        def begin(item: jax.Array, block: jax.Array, step: jax.Array) -> None:
            self._table_copy(item, block, step).start()

        self._advance(0, begin)

    def _table_copy(self, item: jax.Array, block: jax.Array, step: jax.Array) -> AsyncCopy:
        count = self.config.table_chunk
        first = self.work.sequence[item] * self.config.table_stride
        first += block_layout.shift_divide(block, count // self.config.block_pages) * count
        stage = step & (self.config.table_stages - 1)
        return pltpu.make_async_copy(
            self.refs.page_table.at[pl.ds(pl.multiple_of(first, TABLE_CHUNK), count)],
            self.refs.table_entries.at[pl.ds(pl.multiple_of(stage * count, TABLE_CHUNK), count)],
            self.refs.table_semaphores.at[stage],
        )

    def first_entry(self, block: jax.Array, step: jax.Array) -> jax.Array:
        """The place of the first table entry of a block in SMEM."""
        count = self.config.table_chunk
        inside = (block & (count // self.config.block_pages - 1)) * self.config.block_pages
        return (step & (self.config.table_stages - 1)) * count + inside

    def start_next_pages(self) -> None:
        """Start to copy the pages of the step at the second cursor."""
        block_pages = self.config.block_pages

        def begin(item: jax.Array, block: jax.Array, step: jax.Array) -> None:
            self._table_copy(item, block, step).wait()
            stage = self._stage(step)
            first, last = self.visible_pages(item, block)
            entries = self.first_entry(block, step)

            def one(number: Index, missing: jax.Array) -> jax.Array:
                entry = self.refs.table_entries[entries + number]
                # In place of a missing page another one is copied, which no query sees.
                page = entry & (NO_PAGE - 1)
                for which in range(self.layout.num_arrays):
                    self._page_copy(which, page, stage, number).start()
                return missing | entry

            copied = last - first
            self.refs.pages_copied[stage] = copied

            @pl.when(copied == block_pages)
            def _():
                missing = jnp.int32(0)
                # Without a loop a copy costs a few instructions.
                unrolled = min(_UNROLLED_COPIES, block_pages)
                if unrolled == block_pages:
                    for number in range(unrolled):
                        missing = one(number, missing)
                else:

                    def several(group: Index, missing: jax.Array) -> jax.Array:
                        for number in range(unrolled):
                            missing = one(group * unrolled + number, missing)
                        return missing

                    missing = jax.lax.fori_loop(0, block_pages // unrolled, several, missing)
                self.refs.pages_missing[stage] = missing

            @pl.when(copied < block_pages)
            def _():
                self.refs.pages_missing[stage] = jax.lax.fori_loop(first, last, one, jnp.int32(0))

        self._advance(3, begin)

    def _stage(self, step: jax.Array) -> jax.Array:
        """The place of a step's block in VMEM."""
        stages = self.config.stages
        return step & (stages - 1) if stages & (stages - 1) == 0 else jax.lax.rem(step, stages)

    def visible_pages(self, item: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first page of a block that a query of the tile sees, and one past the last."""
        before, slots = block * self.config.block_pages, self.layout.page_size
        position = self.work.position[item]
        last = block_layout.divide(position + self.work.rows[item] - 1, slots) + 1 - before
        last = jnp.minimum(last, self.config.block_pages)
        if self.config.window is None:
            return jnp.int32(0), last
        oldest = jnp.maximum(position - self.config.window + 1, 0)
        return jnp.maximum(block_layout.divide(oldest, slots) - before, 0), last

    def _page_copy(self, which: int, page: Index, stage: jax.Array, number: Index) -> AsyncCopy:
        source = self.refs.cache[which]
        return pltpu.make_async_copy(
            source.at[:, page] if self.layout.pages_second else source.at[page],
            self.refs.kv_blocks[which].at[stage, number],
            self.refs.page_semaphores.at[stage],
        )

    def wait_for_pages(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Wait for the block of a step: its place in VMEM, and whether it has all pages."""
        stage = self._stage(step)
        copied = self.refs.pages_copied[stage]
        semaphore = self.refs.page_semaphores

        @pl.when(copied == self.config.block_pages)
        def _():
            for blocks in self.refs.kv_blocks:
                whole = blocks.at[stage]
                pltpu.make_async_copy(whole, whole, semaphore.at[stage]).wait()

        @pl.when(copied < self.config.block_pages)
        def _():
            @pl.loop(0, copied)
            def _(number: Index):
                for blocks in self.refs.kv_blocks:
                    page = blocks.at[stage, 0]
                    pltpu.make_async_copy(page, page, semaphore.at[stage]).wait()

        complete = copied == self.config.block_pages
        return stage, complete & (self.refs.pages_missing[stage] < NO_PAGE)

    def _advance(
        self, cursor: int, begin: Callable[[jax.Array, jax.Array, jax.Array], None]
    ) -> None:
        """`begin(tile, block, step)` at a cursor, which then moves on to the next step."""
        at = self.refs.cursors
        item = at[cursor]

        @pl.when(item < self.end)
        def _():
            block, step = at[cursor + 1], at[cursor + 2]
            begin(item, block, step)
            is_last = block + 1 >= self.work.end[item]
            following = jnp.minimum(item + 1, self.work.begin.shape[0] - 1)
            at[cursor] = jnp.where(is_last, item + 1, item)
            at[cursor + 1] = jnp.where(is_last, self.work.begin[following], block + 1)
            at[cursor + 2] = step + 1

    def queries(self, item: jax.Array) -> RowCopies:
        """The copies of a tile's queries into VMEM."""
        return self._rows(item, self.refs.query, self.refs.query_tiles, self.refs.query_semaphores)

    def results(self, item: jax.Array) -> RowCopies:
        """The copies of a tile's results into HBM."""
        refs = self.refs
        return self._rows(item, refs.out, refs.out_tiles, refs.out_semaphores, to_hbm=True)

    def _rows(
        self, item: jax.Array, array: Ref, tiles: Ref, semaphores: Ref, to_hbm: bool = False
    ) -> RowCopies:
        row, rows, stage = self.work.row[item], self.work.rows[item], item & 1
        return RowCopies(row, rows, stage, array, tiles, semaphores.at[stage], to_hbm)

    def lse(self, item: jax.Array) -> AsyncCopy:
        """The copy of a tile's log-sum-exps into HBM."""
        stage = item & 1
        return pltpu.make_async_copy(
            self.refs.lse_tiles.at[stage],
            self.refs.lse.at[item],
            self.refs.lse_semaphores.at[stage],
        )


class PagedAttentionKernel:
    """The body of the kernel.

    `parts` are the key heads, or one for all of them where they are packed. A row is a query head
    of a query of the tile.
    """

    config: PagedKernelConfig
    layout: CacheLayout
    spec: Spec
    refs: KernelRefs
    work: WorkList
    parts: int
    rows: int

    def __init__(
        self,
        config: PagedKernelConfig,
        layout: CacheLayout,
        work: WorkList,
        spec: Spec,
        refs: KernelRefs,
    ):
        self.config, self.layout, self.spec, self.refs, self.work = config, layout, spec, refs, work
        self.copies: CopyPipeline = CopyPipeline(config, layout, work, refs)
        self.block_positions: int = config.block_pages * layout.page_size
        self.heads: int = refs.query.shape[1]
        self.parts, self.rows = refs.query_rows.shape[:2]
        self.columns: int = refs.column_offsets.shape[1]
        self.columns_per_page: int = self.columns // config.block_pages
        # Two heads of a token that share a word of 32 bits are told apart within the register. The
        # order of the keys then changes, and that of the values in the same way.
        words = layout.heads_share_words and refs.query_rows.dtype == jnp.bfloat16
        if config.packed:
            self.interleaved = (
                words and layout.combined and self.columns % block_layout.INTERLEAVED == 0
            )
        else:
            # Strided rows are read one register wide at most.
            fits = layout.dtype == jnp.bfloat16 and max(layout.head_dims) <= LANES
            self.interleaved = words and fits and layout.page_size % block_layout.INTERLEAVED == 0

    def run(self) -> None:
        self._fill_maps()
        rerun, nonfinite = self.refs.rerun, self.refs.nonfinite
        if rerun is None or nonfinite is None:
            self._run_tiles(None)
            return
        rerun[0] = 0
        nonfinite[...] = jnp.zeros_like(nonfinite)

        @pl.loop(0, 2)
        def _(number: jax.Array):
            @pl.when((number == 0) | (rerun[0] != 0))
            def _():
                self._run_tiles(number > 0)
                rerun[0] = (nonfinite[...].max() > 0.0).astype(jnp.int32)

    def _run_tiles(self, head_by_head: jax.Array | None) -> None:
        """All tiles of this core; `head_by_head`: packed, but one key head after the other."""
        copies = self.copies
        copies.prologue()

        @pl.loop(copies.begin, copies.end, init_carry=jnp.int32(0))
        def _(item: jax.Array, step: jax.Array):
            @pl.when(item + 1 < copies.end)
            def _():
                copies.queries(item + 1).start()

            copies.queries(item).wait()
            self._begin_tile(item)

            def visit(block: jax.Array, step: jax.Array) -> jax.Array:
                copies.start_next_table()
                copies.start_next_pages()
                self._step(item, block, step, head_by_head)
                return step + 1

            step = jax.lax.fori_loop(self.work.begin[item], self.work.end[item], visit, step)

            @pl.when(item - 2 >= copies.begin)
            def _():
                copies.results(item - 2).wait()
                copies.lse(item - 2).wait()

            self._end_tile(item)
            copies.results(item).start()
            copies.lse(item).start()
            return step

        for distance in (2, 1):

            @pl.when(copies.end - distance >= copies.begin)
            def _(distance: int = distance):
                copies.results(copies.end - distance).wait()
                copies.lse(copies.end - distance).wait()

    def _fill_maps(self) -> None:
        """The position of every column of a block, and the columns of each row's key head."""
        column = jax.lax.broadcasted_iota(jnp.int32, (1, self.columns), 1)
        if self.interleaved:
            column = block_layout.interleaved(column)
        if self.refs.head_mask is None:
            self.refs.column_offsets[...] = column
            return
        self.refs.column_offsets[...], head = block_layout.position_and_head(self.layout, column)
        mine = head == block_layout.key_head_of_rows(self.layout, self.rows, self.heads)
        self.refs.head_mask[...] = jnp.where(mine, jnp.inf, -jnp.inf)

    def _begin_tile(self, item: jax.Array) -> None:
        refs = self.refs
        query = refs.query_tiles[item & 1].astype(refs.query_rows.dtype)
        refs.query_rows[...] = block_layout.rows_by_part(query, self.parts)
        refs.row_max[...] = jnp.full_like(refs.row_max, LEAST)
        refs.row_sum[...] = jnp.zeros_like(refs.row_sum)
        refs.acc[...] = jnp.zeros_like(refs.acc)

    def _end_tile(self, item: jax.Array) -> None:
        refs, stage = self.refs, item & 1
        factors, nonfinite = refs.head_factors, refs.nonfinite

        @pl.loop(0, self.parts)
        def _(part: Index):
            row_sum = refs.row_sum[part].sum(axis=1, keepdims=True)
            row_max = refs.row_max[part][:, :1]
            divisor = row_sum
            if factors.sinks is not None:
                sinks = self._per_row(factors.sinks[part])[:, :1]
                divisor += jnp.exp2(sinks * LOG2_E - row_max)
            result = refs.acc[part] / jnp.where(row_sum > 0.0, divisor, 1.0)
            if factors.values is not None:
                result *= self._per_row(factors.values[part])[:, :1]
            refs.acc[part] = result
            if nonfinite is not None:
                finite = jnp.abs(result) < jnp.inf
                nonfinite[...] = jnp.where(finite, nonfinite[...], 1.0)
            lse = row_max * (1 / LOG2_E) + jnp.log(row_sum)
            refs.lse_tiles[stage, part] = block_layout.column_to_lanes(lse)

        refs.out_tiles[stage] = block_layout.rows_by_query(
            refs.acc[...], self.config.tile_queries
        ).astype(refs.out_tiles.dtype)

    def _per_row(self, x: jax.Array) -> jax.Array:
        """[heads of a part, d] -> [rows, d]"""
        wide = jnp.broadcast_to(x[None], (self.config.tile_queries, *x.shape))
        return wide.reshape(self.rows, x.shape[1])

    def _step(
        self, item: jax.Array, block: jax.Array, step: jax.Array, head_by_head: jax.Array | None
    ) -> None:
        stage, complete = self.copies.wait_for_pages(step)
        position = self.work.position[item]
        start = block * self.block_positions
        full = complete & (start + self.block_positions <= position + 1)
        if self.config.window is not None:
            full &= start > position + self.work.rows[item] - 1 - self.config.window

        partial = jnp.logical_not(full)
        if head_by_head is not None:
            full, partial = (x & jnp.logical_not(head_by_head) for x in (full, partial))

        @pl.when(full)
        def _():
            self._attend_pages(stage, 0, self.config.block_pages, None)

        @pl.when(partial)
        def _():
            self._partial_block(item, block, step, stage)

        if head_by_head is not None:

            @pl.when(head_by_head)
            def _():
                @pl.loop(0, self.layout.kv_heads)
                def _(head: Index):
                    self._partial_block(item, block, step, stage, head)

    def _partial_block(
        self,
        item: jax.Array,
        block: jax.Array,
        step: jax.Array,
        stage: jax.Array,
        head: Index | None = None,
    ) -> None:
        """A block with masked positions; packed, some pages at a time."""
        first, last = self.copies.visible_pages(item, block)
        query = jax.lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        query = block_layout.divmod_small(query, self.rows // self.config.tile_queries)[0]
        query += self.work.position[item] - block * self.block_positions
        width = self.config.block_pages
        if self.config.packed:
            # A power of two, as the pages of a block are.
            most = max(1, _SOFTMAX_COLUMNS // 2 // (self.layout.page_size * self.layout.kv_heads))
            width = min(width, 1 << (most.bit_length() - 1))

        def attend(begin: int | jax.Array) -> None:
            @pl.when((begin < last) & (begin + width > first))
            def _():
                self._zero_hidden_values(item, block, step, stage, begin, width)
                offsets = self._offsets(block, step, stage, begin, width)
                visible = offsets <= query
                if self.config.window is not None:
                    visible &= offsets > query - self.config.window
                self._attend_pages(stage, begin, width, visible, head)

        if width * self.columns_per_page % LANES or width == self.config.block_pages:
            for begin in range(0, self.config.block_pages, width):
                attend(begin)
        else:  # the columns begin at a register boundary: a loop may index them
            pl.loop(0, self.config.block_pages // width)(lambda number: attend(number * width))

    def _columns(self, begin: int | jax.Array, count: int) -> slice | pl.Slice:
        """The columns of `count` pages."""
        start = begin * self.columns_per_page
        if isinstance(start, jax.Array):
            start = pl.multiple_of(start, LANES)
        return pl.ds(start, count * self.columns_per_page)

    def _offsets(
        self,
        block: jax.Array,
        step: jax.Array,
        stage: jax.Array,
        begin: int | jax.Array,
        count: int,
    ) -> jax.Array:
        """The position of every column, relative to the block; after all where no page is."""
        entries, slots = self.copies.first_entry(block, step), self.layout.page_size

        def mark(number: Index, offsets: jax.Array) -> jax.Array:
            start = number * slots
            in_page = (offsets >= start) & (offsets < start + slots)
            missing = self.refs.table_entries[entries + number] >= NO_PAGE
            return jnp.where(in_page & missing, _NO_POSITION, offsets)

        last = jnp.where(self.refs.pages_missing[stage] < NO_PAGE, begin, begin + count)
        offsets = self.refs.column_offsets[:, self._columns(begin, count)]
        return jax.lax.fori_loop(begin, last, mark, offsets)

    def _zero_hidden_values(
        self,
        item: jax.Array,
        block: jax.Array,
        step: jax.Array,
        stage: jax.Array,
        begin: int | jax.Array,
        count: int,
    ) -> None:
        """Set the values to 0 that no query of the tile sees: 0 times NaN is NaN."""
        position = self.work.position[item]
        newest = position + self.work.rows[item] - 1 - block * self.block_positions
        oldest = -1
        if self.config.window is not None:
            oldest = position - self.config.window - block * self.block_positions
        values = self.refs.kv_blocks[-1]
        entries, slots = self.copies.first_entry(block, step), self.layout.page_size

        @pl.loop(begin, begin + count)
        def _(number: Index):
            present = self.refs.table_entries[entries + number] < NO_PAGE
            start = number * slots
            whole = present & (start > oldest) & (start + slots - 1 <= newest)

            @pl.when(jnp.logical_not(whole))
            def _():
                token = block_layout.slot_of_rows(self.layout) + start
                seen = present & (token > oldest) & (token <= newest)
                x = values[stage, number].astype(jnp.float32)
                values[stage, number] = jnp.where(seen, x, 0.0).astype(values.dtype)

    def _attend_pages(
        self,
        stage: jax.Array,
        begin: int | jax.Array,
        count: int,
        visible: jax.Array | None,
        head: Index | None = None,
    ) -> None:
        """`count` pages of a block from `begin` on; all of them where heads are not packed."""
        refs, dtype = self.refs, self.refs.query_rows.dtype
        columns = lambda: self._columns(begin, count)
        if self.config.packed:
            pages = pl.ds(begin, count)
            rows = [x[stage, pages].astype(dtype).reshape(-1, x.shape[-1]) for x in refs.kv_blocks]
            if self.layout.combined:
                rows = block_layout.split_combined(self.layout, rows[0], self.interleaved)
            keys, values = rows
            self._attend(0, keys, values, columns(), visible, head)
            return
        for blocks, by_head in zip(refs.kv_blocks, refs.kv_by_head, strict=True):
            if self.interleaved:
                block_layout.sort_by_head_in_words(self.layout, blocks, by_head, stage)
            else:
                by_head[...] = block_layout.sort_by_head(self.layout, blocks[stage].astype(dtype))
        stride = self.layout.rows_per_head

        @pl.loop(0, self.parts)
        def _(part: Index):
            keys = refs.kv_by_head[0][part * stride]
            values = refs.kv_by_head[-1][part * stride + stride - 1]
            self._attend(part, keys, values, columns(), visible)

    def _attend(
        self,
        part: Index,
        keys: jax.Array,
        values: jax.Array,
        columns: slice | pl.Slice,
        visible: jax.Array | None,
        head: Index | None = None,
    ) -> None:
        """Keys and values, some rows and columns at a time."""
        for row in range(0, self.rows, _SOFTMAX_ROWS):
            rows = slice(row, min(row + _SOFTMAX_ROWS, self.rows))
            for start in range(0, keys.shape[0], _SOFTMAX_COLUMNS):
                some = slice(start, min(start + _SOFTMAX_COLUMNS, keys.shape[0]))
                place = pl.ds(columns.start + start, some.stop - start)
                seen = None if visible is None else visible[rows, some]
                self._accumulate(part, rows, place, keys[some], values[some], seen, head)

    def _accumulate(
        self,
        part: Index,
        rows: slice,
        columns: slice | pl.Slice,
        keys: jax.Array,
        values: jax.Array,
        visible: jax.Array | None,
        head: Index | None,
    ) -> None:
        """Add keys and values to the online softmax; `head`: those of one key head only."""
        refs, width = self.refs, keys.shape[0]
        logits = matmul_nt(refs.query_rows[part, rows], keys)
        logits = self._logits(logits, part, rows)
        if visible is not None:
            seen = visible
            if refs.head_mask is not None:
                seen = seen & (refs.head_mask[rows, columns] > 0.0)
                if head is not None:
                    seen = seen & (self._key_heads(rows) == head)
            logits = jnp.where(seen, logits, -jnp.inf)
        elif refs.head_mask is not None:
            logits = jnp.minimum(logits, refs.head_mask[rows, columns])
        old_max = refs.row_max[part, rows]
        row_max = jnp.maximum(old_max, logits.max(axis=1, keepdims=True))
        alpha = jnp.exp2(old_max - row_max)
        weights = jnp.exp2(logits - block_layout.broadcast_lanes(row_max, width))
        refs.row_max[part, rows] = row_max
        refs.row_sum[part, rows] = refs.row_sum[part, rows] * alpha + block_layout.lane_sums(
            weights
        )
        if head is not None:
            values = block_layout.values_of_head(
                self.layout, values, columns.start, head, self.interleaved
            )
        products = matmul_nn(weights.astype(values.dtype), values)
        if head is not None:
            products = jnp.where(self._key_heads(rows) == head, products, 0.0)
        refs.acc[part, rows] = (
            refs.acc[part, rows] * block_layout.broadcast_lanes(alpha, refs.acc.shape[-1])
            + products
        )

    def _key_heads(self, rows: slice) -> jax.Array:
        """The key head of each row, [rows, 1]"""
        return block_layout.key_head_of_rows(self.layout, self.rows, self.heads)[rows]

    def _logits(self, products: jax.Array, part: Index, rows: slice) -> jax.Array:
        """Logits in base 2."""
        scale, cap = self.spec.softmax_scale, self.spec.logits_soft_cap
        factor: float | jax.Array = scale
        factors = self.refs.head_factors.logits
        if factors is not None:
            if self.config.packed:
                factor = block_layout.broadcast_lanes(
                    self._per_row(factors[part])[rows], products.shape[1]
                )
            else:
                factor = factors[part][:1, :1]
        if cap is None:
            return products * (factor * LOG2_E)
        return jnp.tanh(products * (factor * (1.0 / cap))) * (cap * LOG2_E)
