"""Attention over pages in Triton: every program takes an equal share of the line of tiles.

A program walks its share item by item. An item that it has whole it finishes; of one that is cut it
leaves the softmax so far, for `combine` to put together.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit
from ejkernel.kernels.ragged_page_attention_v3.triton.line import item_units, locate
from ejkernel.kernels.ragged_page_attention_v3.triton.tile import (
    block_range,
    finish,
    load_queries,
    page_ids,
    step,
)

tl: Any = None


@triton_jit
def attend(
    query, keys, values, table, info, items, ends, k_scale, v_scale, sinks,
    out, lse, parts, peaks, masses, cut,
    static: tl.constexpr,
):  # fmt: skip
    """The share of one program; `cut` says which item, if any, it leaves to be continued."""
    if static.wide_rows > 0:
        _share_of_listed(
            query, keys, values, table, info, items, ends, k_scale, v_scale, sinks,
            out, lse, parts, peaks, masses, cut, static,
        )  # fmt: skip
    else:
        _share_of_few(
            query, keys, values, table, info, k_scale, v_scale, sinks,
            out, lse, parts, peaks, masses, cut, static,
        )  # fmt: skip


@triton_jit
def _share_of_few(
    query, keys, values, table, info, k_scale, v_scale, sinks,
    out, lse, parts, peaks, masses, cut,
    static: tl.constexpr,
):  # fmt: skip
    """Where no sequence has many queries: items as they follow from the lengths."""
    program = tl.program_id(0)
    at, end, share, sequence, base = locate(info, static)
    _note_share(cut, program, share)
    while at < end:
        start = tl.load(info + sequence)
        length = tl.load(info + static.sequences + sequence)
        kv_length = tl.load(info + 2 * static.sequences + sequence)
        kv_length = tl.minimum(kv_length, static.table_width * static.page_size)
        # A 0 that the compiler does not know: what rows of a tile need is then computed for each
        # item anew, and takes no registers all the time. Where they are short only one that is
        # waited for will do.
        if static.pairs:
            zero = tl.load(info + sequence, volatile=True) - start
        else:
            zero = tl.minimum(length, 0)
        blocks, units = item_units(length, kv_length, static)
        held = blocks * static.kv_heads * units
        if base + held <= at:
            base += held
            sequence += 1
        else:
            number = (at - base) // units
            head = number // blocks
            block = number - head * blocks
            skipped = at - base - number * units
            taken = tl.minimum(units - skipped, end - at)
            begin, stop = block_range(block, static.narrow_tokens, length, kv_length, static)
            # The first units of an item are not tiles.
            first = begin + tl.maximum(skipped - static.opening, 0)
            last = tl.minimum(begin + tl.maximum(skipped + taken - static.opening, 0), stop)

            batch = sequence // static.per_batch
            pages = table + sequence * static.table_width
            row = start + block * static.narrow_tokens
            real = tl.minimum(static.narrow_tokens, length - block * static.narrow_tokens)
            position = kv_length - length + block * static.narrow_tokens
            # One that began in an earlier program, one that goes on in the next, or a whole one.
            place = tl.where(skipped > 0, 2 * program, 2 * program + 1)
            if (skipped == 0) & (taken < units):
                _note(cut, program, units - taken, batch, row, real, head)
            _narrow(
                query, keys, values, pages, k_scale, v_scale, sinks, out, lse, parts, peaks,
                masses, batch, row, real, position, kv_length, head, first, last, place,
                taken == units, zero, static,
            )  # fmt: skip
            at += taken


@triton_jit
def _note_share(cut, program, share):
    """Nothing is cut so far; all at once, since what a single thread has to do takes a register."""
    index = tl.arange(0, 8)
    tl.store(cut + program * 8 + index, tl.where(index == 5, share, 0))


@triton_jit
def _note(cut, program, remaining, batch, row, real, head):
    """What `combine` has to know of an item that others go on with, beside the share."""
    tl.store(cut + program * 8, remaining)
    tl.store(cut + program * 8 + 1, batch)
    tl.store(cut + program * 8 + 2, row)
    tl.store(cut + program * 8 + 3, real)
    tl.store(cut + program * 8 + 4, head)


@triton_jit
def _share_of_listed(
    query, keys, values, table, info, items, ends, k_scale, v_scale, sinks,
    out, lse, parts, peaks, masses, cut,
    static: tl.constexpr,
):  # fmt: skip
    """Where some sequences have many queries: items of a list."""
    program = tl.program_id(0)
    total = tl.load(ends + static.items - 1)
    share = (total + static.programs - 1) // static.programs
    _note_share(cut, program, share)
    at = program * share
    end = tl.minimum(at + share, total)

    item = 0
    if at < end:
        for chunk in range(0, static.items, static.search):
            index = chunk + tl.arange(0, static.search)
            some = tl.load(ends + index, mask=index < static.items, other=2147483647)
            item += tl.sum((some <= at).to(tl.int32), 0)
    before = tl.load(ends + item - 1, mask=item > 0, other=0)  # tiles of the items before
    while at < end:
        upto = tl.load(ends + item)
        while upto <= at:
            item += 1
            upto = tl.load(ends + item)
        sequence = tl.load(items + item)
        block = tl.load(items + item + static.items)
        head = tl.load(items + item + 2 * static.items)
        zero = tl.load(ends + item, volatile=True) - upto
        start = tl.load(info + sequence * 4)
        length = tl.load(info + sequence * 4 + 1)
        kv_length = tl.load(info + sequence * 4 + 2)
        missing = tl.load(info + sequence * 4 + 3)
        tokens = tl.where(length <= static.narrow_tokens, static.narrow_tokens, static.wide_tokens)
        begin, stop = block_range(block, tokens, length, kv_length, static)
        count = upto - before
        skipped = at - before
        taken = tl.minimum(upto, end) - at
        first = begin + skipped
        last = tl.minimum(first + taken, stop)

        batch = sequence // static.per_batch
        own = tl.minimum(sequence - batch * static.per_batch, static.per_batch - 2)
        pages = table + (batch * (static.per_batch - 1) + own) * static.table_width
        row = start + block * tokens
        real = tl.minimum(tokens, length - block * tokens)
        position = kv_length - length + block * tokens
        # An item that began in an earlier program, one that goes on in the next, or a whole one.
        place = tl.where(skipped > 0, 2 * program, 2 * program + 1)
        whole = taken == count
        if (skipped == 0) & (taken < count):
            _note(cut, program, count - taken, batch, row, real, head)
        if length > static.narrow_tokens:
            _wide(
                query, keys, values, pages, k_scale, v_scale, sinks, out, lse, parts, peaks,
                masses, batch, row, real, position, kv_length, head, first, last, place, whole,
                missing, static,
            )  # fmt: skip
        else:
            _narrow(
                query, keys, values, pages, k_scale, v_scale, sinks, out, lse, parts, peaks,
                masses, batch, row, real, position, kv_length, head, first, last, place, whole,
                zero, static,
            )  # fmt: skip
        # Read once more, so as not to be kept.
        before = tl.load(ends + item)
        at = tl.minimum(before, end)


@triton_jit
def _narrow(
    query, keys, values, pages, k_scale, v_scale, sinks, out, lse, parts, peaks, masses,
    batch, row, real, position, kv_length, head, first, last, place, whole, zero,
    static: tl.constexpr,
):  # fmt: skip
    """Some tiles of an item of few rows: bound by memory, so that every tile is masked."""
    rows: tl.constexpr = static.narrow_rows
    index = tl.arange(0, rows) + zero
    # Page ids are read a step ahead: where a tile lies is known when its turn comes.
    a, b, c, d = page_ids(pages, first, kv_length, static)
    q, factor = load_queries(query, k_scale, batch, row, real, head, index, static.pairs, static)
    if static.pairs:
        half = tl.full([rows, static.value_width // 2], 0.0, tl.float32)
        total = (half, half)
    else:
        total = tl.full([rows, static.value_width], 0.0, tl.float32)
    # The peak starts at a finite number: -inf less than that is still -inf, not NaN.
    peak = tl.full([rows], -3.4028234663852886e38, tl.float32)
    mass = tl.full([rows], 0.0, tl.float32)
    for j in range(first, last):
        later = page_ids(pages, j + 1, kv_length, static)
        total, peak, mass = step(
            total, peak, mass, q, factor, keys, values, a, b, c, d, j, real, position, head, index,
            True, static.pairs, static,
        )  # fmt: skip
        a, b, c, d = later
    if static.pairs:
        total = tl.interleave(total[0], total[1])
    _leave(
        total, peak, mass, v_scale, sinks, out, lse, parts, peaks, masses, batch, row, real, head,
        place, whole, index, static,
    )  # fmt: skip


@triton_jit
def _wide(
    query, keys, values, pages, k_scale, v_scale, sinks, out, lse, parts, peaks, masses,
    batch, row, real, position, kv_length, head, first, last, place, whole, missing,
    static: tl.constexpr,
):  # fmt: skip
    """Some tiles of an item of many rows: first those that all its rows see whole."""
    rows: tl.constexpr = static.wide_rows
    index = tl.arange(0, rows)
    q, factor = load_queries(query, k_scale, batch, row, real, head, index, False, static)
    total = tl.full([rows, static.value_width], 0.0, tl.float32)
    peak = tl.full([rows], -3.4028234663852886e38, tl.float32)
    mass = tl.full([rows], 0.0, tl.float32)
    full_first = first
    if static.window > 0:
        oldest = position + real - static.window  # of what the last row sees
        full_first = tl.maximum(first, (oldest + static.block_k - 1) // static.block_k)
        full_first = tl.minimum(full_first, last)
    full_end = tl.minimum((position + 1) // static.block_k, last)
    full_end = tl.where(missing > 0, full_first, tl.maximum(full_end, full_first))
    a, b, c, d = page_ids(pages, full_first, kv_length, static)
    for j in range(full_first, full_end):
        later = page_ids(pages, j + 1, kv_length, static)
        total, peak, mass = step(
            total, peak, mass, q, factor, keys, values, a, b, c, d, j, real, position, head, index,
            False, False, static,
        )  # fmt: skip
        a, b, c, d = later
    left = full_first - first
    j = tl.where(left > 0, first, full_end)
    a, b, c, d = page_ids(pages, j, kv_length, static)
    for number in tl.range(1, left + last - full_end + 1, num_stages=static.edge_stages):
        following = tl.where(number < left, first + number, full_end + number - left)
        later = page_ids(pages, following, kv_length, static)
        total, peak, mass = step(
            total, peak, mass, q, factor, keys, values, a, b, c, d, j, real, position, head, index,
            True, False, static,
        )  # fmt: skip
        a, b, c, d = later
        j = following
    _leave(
        total, peak, mass, v_scale, sinks, out, lse, parts, peaks, masses, batch, row, real, head,
        place, whole, index, static,
    )  # fmt: skip


@triton_jit
def _leave(
    total, peak, mass, v_scale, sinks, out, lse, parts, peaks, masses, batch, row, real, head,
    place, whole, index, static: tl.constexpr,
):  # fmt: skip
    """Results of an item that the program had whole, else its part of the softmax."""
    if whole:
        finish(total, peak, mass, v_scale, sinks, out, lse, batch, row, real, head, index, static)
    else:
        at = place * static.rows + index
        column = tl.arange(0, static.value_width)
        to = parts + at[:, None] * static.value_width + column[None, :]
        if static.wide_rows > 0 or static.pairs:
            tl.store(to, total)
            tl.store(peaks + at, peak)
            tl.store(masses + at, mass)
        else:
            # Most rows of an item of few rows are none; others lack the registers for a mask.
            there = index < real * static.group
            tl.store(to, total, mask=there[:, None])
            tl.store(peaks + at, peak, mask=there)
            tl.store(masses + at, mass, mask=there)
