"""Where the share of a program lies in the line of a call whose sequences have few queries.

Nothing is prepared for it: each program adds up what the sequences before it hold. A unit of that
line is a tile; an item has some more, for the time that it takes to begin one. All items of a
sequence count as many units as the longest of them, so that an item is found by division.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import kernel
from ejkernel.kernels.ragged_page_attention_v3.triton.tile import block_range

tl: Any = None


@kernel
def item_units(length, kv_length, mode: tl.constexpr):
    """Blocks of queries of a sequence, and the units of each of its items."""
    blocks = (length + mode.narrow_tokens - 1) // mode.narrow_tokens
    begin, stop = block_range(0, mode.narrow_tokens, length, kv_length, mode)
    _, stop = block_range(blocks - 1, mode.narrow_tokens, length, kv_length, mode)
    tiles = stop - begin
    if mode.window > 0:
        tiles = tl.minimum(tiles, (mode.window + mode.narrow_tokens - 2) // mode.block_k + 2)
    return blocks, mode.opening + tl.maximum(tiles, 0)


@kernel
def sequence_units(info, chunk, mode: tl.constexpr):
    """The units of some sequences, from `chunk` on."""
    index = chunk + tl.arange(0, mode.search)
    there = index < mode.sequences
    length = tl.load(info + mode.sequences + index, mask=there, other=0)
    kv_length = tl.load(info + 2 * mode.sequences + index, mask=there, other=0)
    kv_length = tl.minimum(kv_length, mode.table_width * mode.page_size)
    blocks, units = item_units(length, kv_length, mode)
    return blocks * mode.kv_heads * units


@kernel
def locate(info, mode: tl.constexpr):
    """Begin, end and length of this program's share; the sequence where it begins, and its begin"""
    program = tl.program_id(0)
    if mode.sequences <= mode.search:
        units = sequence_units(info, 0, mode)
        total = tl.sum(units, 0)
        share = (total + mode.programs - 1) // mode.programs
        at = program * share
        ends = tl.cumsum(units, 0)
        sequence = tl.sum((ends <= at).to(tl.int32), 0)
        base = tl.max(tl.where(ends <= at, ends, 0), 0)
    else:
        total = 0
        for chunk in range(0, mode.sequences, mode.search):
            total += tl.sum(sequence_units(info, chunk, mode), 0)
        share = (total + mode.programs - 1) // mode.programs
        at = program * share
        sequence, base, before = 0, 0, 0
        for chunk in range(0, mode.sequences, mode.search):
            units = sequence_units(info, chunk, mode)
            ends = before + tl.cumsum(units, 0)
            sequence += tl.sum((ends <= at).to(tl.int32), 0)
            base = tl.maximum(base, tl.max(tl.where(ends <= at, ends, 0), 0))
            before += tl.sum(units, 0)
    return at, tl.minimum(at + share, total), share, sequence, base
