"""The Triton kernels of mean pooling and their launches.

| launch | computes |
|---|---|
| `sum_padded` | the mean of a row where one program has all of its tokens, else sums of its parts |
| `sum_packed` | the sums of the tokens that a sequence and a block of tokens have in common |
| `combine` | means from such sums |
| `broadcast_gradient`, `broadcast_packed_gradient` | the gradient |

Sums of parts are in float32 and are added in a fixed order. Unused operands reuse an existing
array; a placeholder would need another kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, padded_size, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, StaticArguments, Tensor
from ejkernel.kernels.mean_pooling.triton.configs import TritonTileConfig
from ejkernel.ops.platform import Device

tl: Any = None

# Parts and columns of a tile of `combine`: for sequences of many parts, and for those of few.
_MANY_PARTS, _FEW_PARTS = (32, 128), (8, 512)
_SEARCHED = 128  # boundaries that are compared at once


@dataclasses.dataclass(frozen=True)
class PoolingStatic(StaticArguments):
    """The constants of a launch."""

    tokens: int  # of a row of `x`
    columns: int
    sequences: int  # of a row
    block_tokens: int  # of a program
    block_columns: int
    block_rows: int  # tokens or parts that are added at once
    has_mask: bool = False
    has_boundaries: bool = False
    one_x: bool = False  # all rows of boundaries are of the same tokens
    one_boundaries: bool = False  # all rows have the same boundaries

    counted: int = 4096  # elements of a mask that are counted at once
    searched: int = _SEARCHED

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // self.block_columns)

    @property
    def token_blocks(self) -> int:
        return -(-self.tokens // self.block_tokens)

    @property
    def parts(self) -> int:
        """The sums of a row: at most one more for each further sequence or block of tokens."""
        return self.token_blocks + self.sequences - 1

    @property
    def uneven_columns(self) -> bool:
        return self.columns % self.block_columns > 0

    @property
    def search_levels(self) -> int:
        """How often a search compares boundaries, each time closer ones."""
        levels = 1
        while self.searched**levels < self.sequences + 1:
            levels += 1
        return levels


def sum_padded(
    x: jax.Array, mask: jax.Array | None, tiles: TritonTileConfig, device: Device
) -> jax.Array:
    """The means [b, 1, d] where a program has all tokens of a row, else sums [b, parts, d]."""
    static = _static(x, 1, tiles, has_mask=mask is not None)
    dtype = x.dtype if static.parts == 1 else jnp.float32
    (sums,) = launch(
        sum_padded_kernel,
        [x, x if mask is None else mask],
        [jax.ShapeDtypeStruct((x.shape[0], static.parts, x.shape[2]), dtype)],
        static,
        _launch_config(x.shape[0], static, tiles),
        device,
    )
    return sums


def sum_packed(
    x: jax.Array, boundaries: jax.Array, tiles: TritonTileConfig, device: Device
) -> jax.Array:
    """The sum of the tokens that sequence i and block j have in common, at [b, i + j, d].

    Neither decreases from a token to the next, so that each pair has a place of its own.
    """
    rows = max(x.shape[0], boundaries.shape[0])
    static = _static(
        x,
        boundaries.shape[1] - 1,
        tiles,
        has_boundaries=True,
        one_x=x.shape[0] < rows,
        one_boundaries=boundaries.shape[0] < rows,
    )
    (partials,) = launch(
        sum_packed_kernel,
        [x, boundaries],
        [jax.ShapeDtypeStruct((rows, static.parts, x.shape[2]), jnp.float32)],
        static,
        _launch_config(rows, static, tiles),
        device,
    )
    return partials


def combine(
    partials: jax.Array,
    mask: jax.Array | None,
    boundaries: jax.Array | None,
    x: jax.Array,
    tiles: TritonTileConfig,
    device: Device,
) -> jax.Array:
    """The means of all sequences, [b, q, d], from the sums of their parts."""
    rows, sequences = partials.shape[0], 1
    if boundaries is not None:
        sequences = boundaries.shape[1] - 1
    parts, columns = _MANY_PARTS if partials.shape[1] > 8 * sequences else _FEW_PARTS
    static = dataclasses.replace(
        _static(x, sequences, tiles, has_mask=mask is not None),
        block_columns=min(columns, padded_size(x.shape[2])),
        block_rows=parts,
        has_boundaries=boundaries is not None,
        one_boundaries=boundaries is not None and boundaries.shape[0] < rows,
    )
    (out,) = launch(
        combine_kernel,
        [
            partials,
            partials if mask is None else mask,
            partials if boundaries is None else boundaries,
        ],
        [jax.ShapeDtypeStruct((rows, sequences, x.shape[2]), x.dtype)],
        static,
        LaunchConfig(rows * sequences * static.column_blocks, 4, 1),
        device,
    )
    return out


def broadcast_gradient(
    d_out: jax.Array, mask: jax.Array | None, tokens: int, tiles: TritonTileConfig, device: Device
) -> jax.Array:
    """The gradient of `x`, [b, s, d], from that of the means, [b, d]."""
    shape = jax.ShapeDtypeStruct((d_out.shape[0], tokens, d_out.shape[1]), d_out.dtype)
    static = _static(shape, 1, tiles, has_mask=mask is not None)
    unused = [d_out, d_out]
    (d_x,) = launch(
        broadcast_gradient_kernel,
        [d_out, *(unused if mask is None else [mask, mask.sum(1, dtype=jnp.int32)])],
        [shape],
        static,
        _launch_config(d_out.shape[0], static, tiles),
        device,
    )
    return d_x


def broadcast_packed_gradient(
    d_out: jax.Array, boundaries: jax.Array, tokens: int, tiles: TritonTileConfig, device: Device
) -> jax.Array:
    """The gradient of packed tokens, [b, s, d]; 0 for those outside of all sequences."""
    rows, sequences, columns = d_out.shape
    shape = jax.ShapeDtypeStruct((rows, tokens, columns), d_out.dtype)
    one = boundaries.shape[0] < rows
    static = _static(shape, sequences, tiles, has_boundaries=True, one_boundaries=one)
    (d_x,) = launch(
        broadcast_packed_gradient_kernel,
        [d_out, boundaries],
        [shape],
        static,
        _launch_config(rows, static, tiles),
        device,
    )
    return d_x


def _static(
    x: jax.Array | jax.ShapeDtypeStruct, sequences: int, tiles: TritonTileConfig, **flags: bool
) -> PoolingStatic:
    return PoolingStatic(
        tokens=x.shape[-2],
        columns=x.shape[-1],
        sequences=sequences,
        block_tokens=tiles.tokens,
        block_columns=tiles.columns,
        block_rows=tiles.rows,
        **flags,
    )


def _launch_config(rows: int, static: PoolingStatic, tiles: TritonTileConfig) -> LaunchConfig:
    return LaunchConfig(rows * static.token_blocks * static.column_blocks, tiles.warps, 1)


@triton_jit
def sum_padded_kernel(x: Pointer, mask: Pointer, out: Pointer, static: PoolingStatic):
    """The sum, or the mean, of the valid ones of a block of tokens, for a block of columns."""
    row, block, column = _position(tl.program_id(0), static)
    first = block * static.block_tokens
    count = tl.minimum(static.tokens - first, static.block_tokens)
    token = row * static.tokens + first
    tokens = x + token * static.columns
    sums, valid = _sum_rows(tokens, mask + token, column, count, static.has_mask, static)
    if static.parts == 1:
        if static.has_mask:
            count = tl.maximum(valid, 1)
        sums = sums / count.to(tl.float32)
    part = (tl.program_id(0) // static.column_blocks).to(tl.int64)  # of those of all rows
    _store_row(out + part * static.columns, sums, column, static)


@triton_jit
def sum_packed_kernel(x: Pointer, boundaries: Pointer, partials: Pointer, static: PoolingStatic):
    """The sums of a block of tokens with each sequence that it meets, for a block of columns."""
    row, block, column = _position(tl.program_id(0), static)
    if not static.one_boundaries:
        boundaries += row * (static.sequences + 1)
    partials += row * (static.parts * static.columns)
    if not static.one_x:
        x += row * (static.tokens * static.columns)
    start = block * static.block_tokens
    end = tl.minimum(start + static.block_tokens, static.tokens)
    sequence = tl.maximum(_boundaries_until(boundaries, start, static) - 1, 0)
    if sequence < static.sequences:
        start = tl.maximum(tl.load(boundaries + sequence), start)
    while (sequence < static.sequences) & (start < end):
        stop = tl.minimum(tl.load(boundaries + sequence + 1), end)
        if stop > start:
            tokens = x + start.to(tl.int64) * static.columns
            sums, _ = _sum_rows(tokens, boundaries, column, stop - start, False, static)
            place = partials + (sequence + block).to(tl.int64) * static.columns
            _store_row(place, sums, column, static)
        start = tl.maximum(stop, start)
        sequence += 1


@triton_jit
def combine_kernel(
    partials: Pointer, mask: Pointer, boundaries: Pointer, out: Pointer, static: PoolingStatic
):
    """The mean of a sequence, for a block of columns."""
    program = tl.program_id(0)
    column = program % static.column_blocks * static.block_columns
    index = program // static.column_blocks
    sequence = index % static.sequences
    row = (index // static.sequences).to(tl.int64)
    partials += row * (static.parts * static.columns)
    if static.has_boundaries:
        if not static.one_boundaries:
            boundaries += row * (static.sequences + 1)
        start = tl.maximum(tl.load(boundaries + sequence), 0)
        count = tl.minimum(tl.load(boundaries + sequence + 1), static.tokens) - start
        block = start // static.block_tokens
        parts = tl.where(count > 0, (start + count - 1) // static.block_tokens - block + 1, 0)
        partials += (sequence + block).to(tl.int64) * static.columns
        count = tl.maximum(count, 1)
    else:
        parts = static.parts
        count = _count_valid(mask + row * static.tokens, static)
    sums, _ = _sum_rows(partials, mask, column, parts, False, static)
    mean = sums / count.to(tl.float32)
    _store_row(out + index.to(tl.int64) * static.columns, mean, column, static)


@triton_jit
def broadcast_gradient_kernel(
    d_out: Pointer, mask: Pointer, counts: Pointer, d_x: Pointer, static: PoolingStatic
):
    """The gradient of a block of tokens, for a block of columns."""
    row, block, column = _position(tl.program_id(0), static)
    first = block * static.block_tokens
    count = static.tokens
    if static.has_mask:
        count = tl.maximum(tl.load(counts + row), 1)
    value = _load_row(d_out + row * static.columns, column, True, static) / count
    token = row * static.tokens + first
    tokens = tl.minimum(static.tokens - first, static.block_tokens)
    _store_rows(d_x + token * static.columns, mask + token, value, column, tokens, static)


@triton_jit
def broadcast_packed_gradient_kernel(
    d_out: Pointer, boundaries: Pointer, d_x: Pointer, static: PoolingStatic
):
    """The gradient of a block of tokens, sequence after sequence, for a block of columns."""
    row, block, column = _position(tl.program_id(0), static)
    if not static.one_boundaries:
        boundaries += row * (static.sequences + 1)
    d_out += row * (static.sequences * static.columns)
    d_x += row * (static.tokens * static.columns)
    start = block * static.block_tokens
    end = tl.minimum(start + static.block_tokens, static.tokens)
    # From -1, before the first sequence, to the number of sequences, after the last.
    sequence = _boundaries_until(boundaries, start, static) - 1
    while start < end:
        follows = tl.load(
            boundaries + sequence + 1, mask=sequence < static.sequences, other=static.tokens
        )
        follows = tl.minimum(follows, static.tokens)
        exists = (sequence >= 0) & (sequence < static.sequences)
        begins = tl.maximum(tl.load(boundaries + sequence, mask=exists, other=0), 0)
        stop = tl.minimum(follows, end)
        if stop > start:
            source = d_out + sequence.to(tl.int64) * static.columns
            count = tl.maximum(follows - begins, 1).to(tl.float32)
            value = _load_row(source, column, exists, static) / count
            tokens = d_x + start.to(tl.int64) * static.columns
            _store_rows(tokens, boundaries, value, column, stop - start, static)
        start = tl.maximum(stop, start)
        sequence += 1


@triton_jit
def _position(program: Scalar, static: PoolingStatic):
    """Row, block of tokens in it, and first column of a program."""
    column = program % static.column_blocks * static.block_columns
    block = program // static.column_blocks
    row = (block // static.token_blocks).to(tl.int64)
    return row, block % static.token_blocks, column


@triton_jit
def _boundaries_until(boundaries: Pointer, token: Scalar, static: PoolingStatic):
    """How many boundaries are at or before a token: a search of many branches."""
    found = tl.full([], 0, tl.int32)
    levels: tl.constexpr = static.search_levels
    for level in tl.static_range(levels):
        step: tl.constexpr = static.searched ** (levels - 1 - level)
        index = found + (tl.arange(0, static.searched) + 1) * step - 1
        known = tl.load(boundaries + index, mask=index <= static.sequences, other=static.tokens)
        found += tl.sum((known <= token).to(tl.int32), 0) * step
    return found


@triton_jit
def _sum_rows(
    rows: Pointer,
    mask: Pointer,
    column: Scalar,
    count: Scalar,
    masked: tl.constexpr,
    static: PoolingStatic,
):
    """The sum of `count` rows, in float32; if `masked`, of the valid ones, and their number."""
    index = tl.arange(0, static.block_rows)
    columns = column + tl.arange(0, static.block_columns)
    at = rows + index[:, None] * static.columns + columns[None, :]
    valid = index < count
    if masked:
        valid = tl.load(mask + index, mask=valid, other=0)
    acc = tl.full([static.block_rows, static.block_columns], 0.0, tl.float32)
    seen = tl.full([static.block_rows], 0, tl.int32)
    for i in range((count + static.block_rows - 1) // static.block_rows):
        inside = valid[:, None]
        if static.uneven_columns:
            inside = inside & (columns < static.columns)[None, :]
        if masked:
            seen += valid.to(tl.int32)
        later = (i + 1) * static.block_rows + index
        # Prefetched a step ahead, so that no load waits for its own mask.
        valid = later < count
        if masked:
            valid = tl.load(mask + later, mask=valid, other=0)
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        at += static.block_rows * static.columns
    return tl.sum(acc, 0), tl.sum(seen, 0)


@triton_jit
def _count_valid(mask: Pointer, static: PoolingStatic):
    """The number of valid tokens of a row, at least 1."""
    count = tl.full([], static.tokens, tl.int32)
    if static.has_mask:
        token = tl.arange(0, static.counted)
        acc = tl.full([static.counted], 0, tl.int32)
        for i in range((static.tokens + static.counted - 1) // static.counted):
            inside = token < static.tokens - i * static.counted
            acc += tl.load(mask + i * static.counted + token, mask=inside, other=0).to(tl.int32)
        count = tl.maximum(tl.sum(acc, 0), 1)
    return count


@triton_jit
def _load_row(source: Pointer, column: Scalar, exists: Scalar, static: PoolingStatic):
    """A block of columns of a row, float32; 0 where it does not exist."""
    columns = column + tl.arange(0, static.block_columns)
    inside = exists & (columns < static.columns)
    return tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)


@triton_jit
def _store_row(place: Pointer, value: Tensor, column: Scalar, static: PoolingStatic):
    """A block of columns of a row."""
    columns = column + tl.arange(0, static.block_columns)
    tl.store(place + columns, value.to(place.dtype.element_ty), mask=columns < static.columns)


@triton_jit
def _store_rows(
    place: Pointer,
    mask: Pointer,
    value: Tensor,
    column: Scalar,
    count: Scalar,
    static: PoolingStatic,
):
    """The same value for each valid one of `count` tokens, 0 for the others."""
    rows = tl.arange(0, static.block_rows)
    columns = column + tl.arange(0, static.block_columns)
    at = place + rows[:, None] * static.columns + columns[None, :]
    value = value.to(place.dtype.element_ty)[None, :]
    tile = tl.broadcast_to(value, [static.block_rows, static.block_columns])
    for i in range((count + static.block_rows - 1) // static.block_rows):
        exists = rows < count - i * static.block_rows
        inside = exists[:, None]
        if static.uneven_columns:
            inside = inside & (columns < static.columns)[None, :]
        stored = tile
        if static.has_mask:
            valid = tl.load(mask + i * static.block_rows + rows, mask=exists, other=0)
            stored = tl.where(valid[:, None], tile, 0.0).to(place.dtype.element_ty)
        tl.store(at, stored, mask=inside)
        at += static.block_rows * static.columns
