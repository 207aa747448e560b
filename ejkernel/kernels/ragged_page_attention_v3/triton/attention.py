"""The attention kernel over pages: a persistent grid with an equal share of tiles per program.

The schedule is that of stream-K. The tiles of all work items form one list, and each program
processes a contiguous share of it, item by item. It writes the results of an item that it processes
alone. Of an item that is split between programs (split-KV) each writes its partial softmax, for the
combine kernel.

Where no sequence has many queries (decode), the list is not stored: each program finds its share
from the lengths of the sequences. It counts in units: an item has a unit for each tile, and
`item_overhead` more for the time that it takes to start one. All items of a sequence count as many
units as its longest one, so that an item is found by a division.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import PagedTileConfig
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import (
    PagedOperands,
    PagedStaticArguments,
)
from ejkernel.kernels.ragged_page_attention_v3.triton.tile import (
    attention_step,
    load_queries,
    page_ids,
    store_results,
    tile_range,
)
from ejkernel.ops.platform import Device

tl: Any = None


class PartialSoftmax(NamedTuple):
    """Partial softmax of split items. Program p writes 2p for an item that an earlier program
    started, and 2p + 1 for an item that it started itself.
    """

    acc: jax.Array  # [programs, 2, max_rows, value_width]
    row_max: jax.Array  # [programs, 2, max_rows]
    row_sum: jax.Array  # [programs, 2, max_rows]
    # [programs, 8]: remaining units of the item that the program started and did not finish, its
    # batch row, first row of queries, number of tokens, key head; then the share of a program.
    split_info: jax.Array


def result_shapes(query: jax.Array, static: PagedStaticArguments) -> list[jax.ShapeDtypeStruct]:
    """Shapes of output and log-sum-exp."""
    b, t, heads, _ = query.shape
    dtype = jnp.float32 if static.float32_out else query.dtype
    return [
        jax.ShapeDtypeStruct((b, t, heads, static.value_dim), dtype),
        jax.ShapeDtypeStruct((b, heads, t), jnp.float32),
    ]


def attention(
    static: PagedStaticArguments, operands: PagedOperands, config: PagedTileConfig, device: Device
) -> tuple[jax.Array, jax.Array, PartialSoftmax]:
    """Output and log-sum-exp of the items that are not split; partial softmax of the others."""
    partial = (static.programs, 2, static.max_rows)
    temporary = [
        jax.ShapeDtypeStruct((*partial, static.value_width), jnp.float32),
        jax.ShapeDtypeStruct(partial, jnp.float32),
        jax.ShapeDtypeStruct(partial, jnp.float32),
        jax.ShapeDtypeStruct((static.programs, 8), jnp.int32),
    ]
    out, lse, *partials = launch(
        attention_kernel,
        operands,
        [*result_shapes(operands.query, static), *temporary],
        static,
        LaunchConfig(static.programs, config.num_warps, config.num_stages),
        device,
    )
    return out, lse, PartialSoftmax(*partials)


@triton_jit
def attention_kernel(
    query: Pointer, keys: Pointer, values: Pointer, page_table: Pointer, sequence_info: Pointer,
    work_items: Pointer, work_ends: Pointer, k_scale: Pointer, v_scale: Pointer, sinks: Pointer,
    out: Pointer, lse: Pointer, partial_acc: Pointer, partial_max: Pointer, partial_sum: Pointer,
    split_info: Pointer, static: PagedStaticArguments,
):  # fmt: skip
    """The share of one program; `split_info` describes the item that it leaves unfinished."""
    if static.prefill_rows > 0:
        _listed_share(
            query, keys, values, page_table, sequence_info, work_items, work_ends, k_scale, v_scale,
            sinks, out, lse, partial_acc, partial_max, partial_sum, split_info, static,
        )  # fmt: skip
    else:
        _decode_share(
            query, keys, values, page_table, sequence_info, k_scale, v_scale, sinks,
            out, lse, partial_acc, partial_max, partial_sum, split_info, static,
        )  # fmt: skip


@triton_jit
def _decode_share(
    query: Pointer, keys: Pointer, values: Pointer, page_table: Pointer, sequence_info: Pointer,
    k_scale: Pointer, v_scale: Pointer, sinks: Pointer, out: Pointer, lse: Pointer,
    partial_acc: Pointer, partial_max: Pointer, partial_sum: Pointer, split_info: Pointer,
    static: PagedStaticArguments,
):  # fmt: skip
    """The share of a program where no sequence has many queries; items follow from the lengths."""
    program = tl.program_id(0)
    at, end, share, sequence, base = _locate_share(sequence_info, static)
    _store_share(split_info, program, share)
    while at < end:
        start = tl.load(sequence_info + sequence)
        length = tl.load(sequence_info + static.sequences + sequence)
        kv_length = tl.load(sequence_info + 2 * static.sequences + sequence)
        kv_length = tl.minimum(kv_length, static.table_width * static.page_size)
        # A 0 that the compiler cannot prove: the row offsets are then computed for each item and
        # not kept in registers over the loop. Under register pressure only a volatile load works.
        if static.column_pairs:
            zero = tl.load(sequence_info + sequence, volatile=True) - start
        else:
            zero = tl.minimum(length, 0)
        blocks, units = _item_units(length, kv_length, static)
        sequence_total = blocks * static.kv_heads * units
        if base + sequence_total <= at:
            base += sequence_total
            sequence += 1
        else:
            number = (at - base) // units
            head = number // blocks
            block = number - head * blocks
            skipped = at - base - number * units
            taken = tl.minimum(units - skipped, end - at)
            begin, stop = tile_range(block, static.decode_tokens, length, kv_length, static)
            # The first units of an item are its overhead, not tiles.
            first = begin + tl.maximum(skipped - static.item_overhead, 0)
            last = tl.minimum(begin + tl.maximum(skipped + taken - static.item_overhead, 0), stop)

            batch = sequence // static.sequences_per_batch
            pages = page_table + sequence * static.table_width
            row = start + block * static.decode_tokens
            valid_tokens = tl.minimum(static.decode_tokens, length - block * static.decode_tokens)
            position = kv_length - length + block * static.decode_tokens
            # An item that an earlier program started, or one that this program started.
            partial_index = tl.where(skipped > 0, 2 * program, 2 * program + 1)
            if (skipped == 0) & (taken < units):
                _store_split(split_info, program, units - taken, batch, row, valid_tokens, head)
            _decode_item(
                query, keys, values, pages, k_scale, v_scale, sinks, out, lse, partial_acc,
                partial_max, partial_sum, batch, row, valid_tokens, position, kv_length, head,
                first, last, partial_index, taken == units, zero, static,
            )  # fmt: skip
            at += taken


@triton_jit
def _listed_share(
    query: Pointer, keys: Pointer, values: Pointer, page_table: Pointer, sequence_info: Pointer,
    work_items: Pointer, work_ends: Pointer, k_scale: Pointer, v_scale: Pointer, sinks: Pointer,
    out: Pointer, lse: Pointer, partial_acc: Pointer, partial_max: Pointer, partial_sum: Pointer,
    split_info: Pointer, static: PagedStaticArguments,
):  # fmt: skip
    """The share of a program where some sequences have many queries; items are in a work list."""
    program = tl.program_id(0)
    total = tl.load(work_ends + static.items - 1)
    share = (total + static.programs - 1) // static.programs
    _store_share(split_info, program, share)
    at = program * share
    end = tl.minimum(at + share, total)

    item = 0
    if at < end:
        for chunk in range(0, static.items, static.search_block):
            index = chunk + tl.arange(0, static.search_block)
            ends = tl.load(work_ends + index, mask=index < static.items, other=2147483647)
            item += tl.sum((ends <= at).to(tl.int32), 0)
    item_start = tl.load(work_ends + item - 1, mask=item > 0, other=0)
    while at < end:
        item_end = tl.load(work_ends + item)
        while item_end <= at:
            item += 1
            item_end = tl.load(work_ends + item)
        sequence = tl.load(work_items + item)
        block = tl.load(work_items + item + static.items)
        head = tl.load(work_items + item + 2 * static.items)
        zero = tl.load(work_ends + item, volatile=True) - item_end
        start = tl.load(sequence_info + sequence * 4)
        length = tl.load(sequence_info + sequence * 4 + 1)
        kv_length = tl.load(sequence_info + sequence * 4 + 2)
        missing_page = tl.load(sequence_info + sequence * 4 + 3)
        tokens = tl.where(
            length <= static.decode_tokens, static.decode_tokens, static.prefill_tokens
        )
        begin, stop = tile_range(block, tokens, length, kv_length, static)
        count = item_end - item_start
        skipped = at - item_start
        taken = tl.minimum(item_end, end) - at
        first = begin + skipped
        last = tl.minimum(first + taken, stop)

        batch = sequence // static.sequences_per_batch
        # The last sequence of a batch row stands for its padding tokens: it has no pages.
        last_paged: tl.constexpr = static.sequences_per_batch - 2
        paged = tl.minimum(sequence - batch * static.sequences_per_batch, last_paged)
        pages = page_table + (batch * (static.sequences_per_batch - 1) + paged) * static.table_width
        row = start + block * tokens
        valid_tokens = tl.minimum(tokens, length - block * tokens)
        position = kv_length - length + block * tokens
        # An item that an earlier program started, or one that this program started.
        partial_index = tl.where(skipped > 0, 2 * program, 2 * program + 1)
        is_complete = taken == count
        if (skipped == 0) & (taken < count):
            _store_split(split_info, program, count - taken, batch, row, valid_tokens, head)
        if length > static.decode_tokens:
            _prefill_item(
                query, keys, values, pages, k_scale, v_scale, sinks, out, lse, partial_acc,
                partial_max, partial_sum, batch, row, valid_tokens, position, kv_length, head,
                first, last, partial_index, is_complete, missing_page, static,
            )  # fmt: skip
        else:
            _decode_item(
                query, keys, values, pages, k_scale, v_scale, sinks, out, lse, partial_acc,
                partial_max, partial_sum, batch, row, valid_tokens, position, kv_length, head,
                first, last, partial_index, is_complete, zero, static,
            )  # fmt: skip
        # Loaded again: keeping it would take a register.
        item_start = tl.load(work_ends + item)
        at = tl.minimum(item_start, end)


@triton_jit
def _store_share(split_info: Pointer, program: Scalar, share: Scalar):
    """Initialise `split_info` with one vector store; a scalar store would take a register."""
    index = tl.arange(0, 8)
    tl.store(split_info + program * 8 + index, tl.where(index == 5, share, 0))


@triton_jit
def _store_split(
    split_info: Pointer, program: Scalar, remaining: Scalar, batch: Scalar, row: Scalar,
    valid_tokens: Scalar, head: Scalar,
):  # fmt: skip
    """Describe for the combine kernel an item that later programs continue."""
    tl.store(split_info + program * 8, remaining)
    tl.store(split_info + program * 8 + 1, batch)
    tl.store(split_info + program * 8 + 2, row)
    tl.store(split_info + program * 8 + 3, valid_tokens)
    tl.store(split_info + program * 8 + 4, head)


@triton_jit
def _locate_share(sequence_info: Pointer, static: PagedStaticArguments):
    """This program's share of the units: start, end, length, first sequence, and its first unit."""
    program = tl.program_id(0)
    if static.sequences <= static.search_block:
        units = _sequence_units(sequence_info, 0, static)
        total = tl.sum(units, 0)
        share = (total + static.programs - 1) // static.programs
        at = program * share
        ends = tl.cumsum(units, 0)
        sequence = tl.sum((ends <= at).to(tl.int32), 0)
        base = tl.max(tl.where(ends <= at, ends, 0), 0)
    else:
        total = 0
        for chunk in range(0, static.sequences, static.search_block):
            total += tl.sum(_sequence_units(sequence_info, chunk, static), 0)
        share = (total + static.programs - 1) // static.programs
        at = program * share
        sequence, base, before = 0, 0, 0
        for chunk in range(0, static.sequences, static.search_block):
            units = _sequence_units(sequence_info, chunk, static)
            ends = before + tl.cumsum(units, 0)
            sequence += tl.sum((ends <= at).to(tl.int32), 0)
            base = tl.maximum(base, tl.max(tl.where(ends <= at, ends, 0), 0))
            before += tl.sum(units, 0)
    return at, tl.minimum(at + share, total), share, sequence, base


@triton_jit
def _sequence_units(sequence_info: Pointer, chunk: Scalar, static: PagedStaticArguments):
    """The units of `search_block` sequences from `chunk` on."""
    index = chunk + tl.arange(0, static.search_block)
    valid = index < static.sequences
    length = tl.load(sequence_info + static.sequences + index, mask=valid, other=0)
    kv_length = tl.load(sequence_info + 2 * static.sequences + index, mask=valid, other=0)
    kv_length = tl.minimum(kv_length, static.table_width * static.page_size)
    blocks, units = _item_units(length, kv_length, static)
    return blocks * static.kv_heads * units


@triton_jit
def _item_units(length: Scalar, kv_length: Scalar, static: PagedStaticArguments):
    """Query blocks of a sequence, and the units of each of its items."""
    blocks = (length + static.decode_tokens - 1) // static.decode_tokens
    begin, stop = tile_range(0, static.decode_tokens, length, kv_length, static)
    _, stop = tile_range(blocks - 1, static.decode_tokens, length, kv_length, static)
    tiles = stop - begin
    if static.window > 0:
        tiles = tl.minimum(tiles, (static.window + static.decode_tokens - 2) // static.block_k + 2)
    return blocks, static.item_overhead + tl.maximum(tiles, 0)


@triton_jit
def _decode_item(
    query: Pointer, keys: Pointer, values: Pointer, pages: Pointer, k_scale: Pointer,
    v_scale: Pointer, sinks: Pointer, out: Pointer, lse: Pointer, partial_acc: Pointer,
    partial_max: Pointer, partial_sum: Pointer, batch: Scalar, row: Scalar, valid_tokens: Scalar,
    position: Scalar, kv_length: Scalar, head: Scalar, first: Scalar, last: Scalar,
    partial_index: Scalar, is_complete: Scalar, zero: Scalar, static: PagedStaticArguments,
):  # fmt: skip
    """Tiles `first` to `last` of an item of few rows: bandwidth bound, every tile is masked."""
    rows: tl.constexpr = static.decode_rows
    row_index = tl.arange(0, rows) + zero
    # Page ids are loaded one step ahead, so that the loads of a tile do not wait for them.
    a, b, c, d = page_ids(pages, first, kv_length, static)
    q, row_scale = load_queries(
        query, k_scale, batch, row, valid_tokens, head, row_index, static.column_pairs, static
    )
    if static.column_pairs:
        half = tl.full([rows, static.value_width // 2], 0.0, tl.float32)
        acc = (half, half)
    else:
        acc = tl.full([rows, static.value_width], 0.0, tl.float32)
    # The running max starts at a finite number: -inf minus it is -inf, not NaN.
    row_max = tl.full([rows], static.float32_min, tl.float32)
    row_sum = tl.full([rows], 0.0, tl.float32)
    for j in range(first, last):
        next_pages = page_ids(pages, j + 1, kv_length, static)
        acc, row_max, row_sum = attention_step(
            acc, row_max, row_sum, q, row_scale, keys, values, a, b, c, d, j, valid_tokens,
            position, head, row_index, True, static.column_pairs, static,
        )  # fmt: skip
        a, b, c, d = next_pages
    if static.column_pairs:
        acc = tl.interleave(acc[0], acc[1])
    _store_item(
        acc, row_max, row_sum, v_scale, sinks, out, lse, partial_acc, partial_max, partial_sum,
        batch, row, valid_tokens, head, partial_index, is_complete, row_index, static,
    )  # fmt: skip


@triton_jit
def _prefill_item(
    query: Pointer, keys: Pointer, values: Pointer, pages: Pointer, k_scale: Pointer,
    v_scale: Pointer, sinks: Pointer, out: Pointer, lse: Pointer, partial_acc: Pointer,
    partial_max: Pointer, partial_sum: Pointer, batch: Scalar, row: Scalar, valid_tokens: Scalar,
    position: Scalar, kv_length: Scalar, head: Scalar, first: Scalar, last: Scalar,
    partial_index: Scalar, is_complete: Scalar, missing_page: Scalar, static: PagedStaticArguments,
):  # fmt: skip
    """Tiles `first` to `last` of an item of many rows: first the fully visible ones, unmasked."""
    rows: tl.constexpr = static.prefill_rows
    row_index = tl.arange(0, rows)
    q, row_scale = load_queries(
        query, k_scale, batch, row, valid_tokens, head, row_index, False, static
    )
    acc = tl.full([rows, static.value_width], 0.0, tl.float32)
    row_max = tl.full([rows], static.float32_min, tl.float32)
    row_sum = tl.full([rows], 0.0, tl.float32)
    full_first = first
    if static.window > 0:
        oldest = position + valid_tokens - static.window  # key that the last row sees
        full_first = tl.maximum(first, (oldest + static.block_k - 1) // static.block_k)
        full_first = tl.minimum(full_first, last)
    full_end = tl.minimum((position + 1) // static.block_k, last)
    full_end = tl.where(missing_page > 0, full_first, tl.maximum(full_end, full_first))
    a, b, c, d = page_ids(pages, full_first, kv_length, static)
    for j in range(full_first, full_end):
        next_pages = page_ids(pages, j + 1, kv_length, static)
        acc, row_max, row_sum = attention_step(
            acc, row_max, row_sum, q, row_scale, keys, values, a, b, c, d, j, valid_tokens,
            position, head, row_index, False, False, static,
        )  # fmt: skip
        a, b, c, d = next_pages
    left = full_first - first
    j = tl.where(left > 0, first, full_end)
    a, b, c, d = page_ids(pages, j, kv_length, static)
    for tile in tl.range(1, left + last - full_end + 1, num_stages=static.partial_stages):
        following = tl.where(tile < left, first + tile, full_end + tile - left)
        next_pages = page_ids(pages, following, kv_length, static)
        acc, row_max, row_sum = attention_step(
            acc, row_max, row_sum, q, row_scale, keys, values, a, b, c, d, j, valid_tokens,
            position, head, row_index, True, False, static,
        )  # fmt: skip
        a, b, c, d = next_pages
        j = following
    _store_item(
        acc, row_max, row_sum, v_scale, sinks, out, lse, partial_acc, partial_max, partial_sum,
        batch, row, valid_tokens, head, partial_index, is_complete, row_index, static,
    )  # fmt: skip


@triton_jit
def _store_item(
    acc: Tensor, row_max: Tensor, row_sum: Tensor, v_scale: Pointer, sinks: Pointer, out: Pointer,
    lse: Pointer, partial_acc: Pointer, partial_max: Pointer, partial_sum: Pointer, batch: Scalar,
    row: Scalar, valid_tokens: Scalar, head: Scalar, partial_index: Scalar, is_complete: Scalar,
    row_index: Tensor, static: PagedStaticArguments,
):  # fmt: skip
    """Write the results of an item, or its partial softmax if the item is split."""
    if is_complete:
        store_results(
            acc,
            row_max,
            row_sum,
            v_scale,
            sinks,
            out,
            lse,
            batch,
            row,
            valid_tokens,
            head,
            row_index,
            static,
        )
    else:
        at = partial_index * static.max_rows + row_index
        column = tl.arange(0, static.value_width)
        acc_at = partial_acc + at[:, None] * static.value_width + column[None, :]
        if static.prefill_rows > 0 or static.column_pairs:
            tl.store(acc_at, acc)
            tl.store(partial_max + at, row_max)
            tl.store(partial_sum + at, row_sum)
        else:
            # Most rows are padding here. The other cases lack the registers for a mask.
            valid = row_index < valid_tokens * static.group
            tl.store(acc_at, acc, mask=valid[:, None])
            tl.store(partial_max + at, row_max, mask=valid)
            tl.store(partial_sum + at, row_sum, mask=valid)
