"""Where the share of a program lies in the line of a call whose sequences have few queries.

Nothing is prepared for it: each program adds up what the sequences before it hold. A unit of that
line is a tile; an item has some more, for the time that it takes to begin one. All items of a
sequence count as many units as the longest of them, so that an item is found by division.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit
from ejkernel.kernels.ragged_page_attention_v3.triton.tile import block_range

tl: Any = None


@triton_jit
def item_units(length, kv_length, static: tl.constexpr):
    """Blocks of queries of a sequence, and the units of each of its items."""
    blocks = (length + static.narrow_tokens - 1) // static.narrow_tokens
    begin, stop = block_range(0, static.narrow_tokens, length, kv_length, static)
    _, stop = block_range(blocks - 1, static.narrow_tokens, length, kv_length, static)
    tiles = stop - begin
    if static.window > 0:
        tiles = tl.minimum(tiles, (static.window + static.narrow_tokens - 2) // static.block_k + 2)
    return blocks, static.opening + tl.maximum(tiles, 0)


@triton_jit
def sequence_units(info, chunk, static: tl.constexpr):
    """The units of some sequences, from `chunk` on."""
    index = chunk + tl.arange(0, static.search)
    there = index < static.sequences
    length = tl.load(info + static.sequences + index, mask=there, other=0)
    kv_length = tl.load(info + 2 * static.sequences + index, mask=there, other=0)
    kv_length = tl.minimum(kv_length, static.table_width * static.page_size)
    blocks, units = item_units(length, kv_length, static)
    return blocks * static.kv_heads * units


@triton_jit
def locate(info, static: tl.constexpr):
    """Begin, end and length of this program's share; the sequence where it begins, and its begin"""
    program = tl.program_id(0)
    if static.sequences <= static.search:
        units = sequence_units(info, 0, static)
        total = tl.sum(units, 0)
        share = (total + static.programs - 1) // static.programs
        at = program * share
        ends = tl.cumsum(units, 0)
        sequence = tl.sum((ends <= at).to(tl.int32), 0)
        base = tl.max(tl.where(ends <= at, ends, 0), 0)
    else:
        total = 0
        for chunk in range(0, static.sequences, static.search):
            total += tl.sum(sequence_units(info, chunk, static), 0)
        share = (total + static.programs - 1) // static.programs
        at = program * share
        sequence, base, before = 0, 0, 0
        for chunk in range(0, static.sequences, static.search):
            units = sequence_units(info, chunk, static)
            ends = before + tl.cumsum(units, 0)
            sequence += tl.sum((ends <= at).to(tl.int32), 0)
            base = tl.maximum(base, tl.max(tl.where(ends <= at, ends, 0), 0))
            before += tl.sum(units, 0)
    return at, tl.minimum(at + share, total), share, sequence, base
