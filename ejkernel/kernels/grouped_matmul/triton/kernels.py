"""The two Triton kernels of grouped matmul: rows times weights, and sums over rows."""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit

tl: Any = None


@triton_jit
def multiply(rows, weights, order, tiles, existing, out, static: tl.constexpr):
    """A tile of rows that have one weight, times a block of columns of that weight."""
    program = tl.program_id(0)
    per_band: tl.constexpr = static.band * static.n_blocks
    first = program // per_band * static.band
    wide = tl.minimum(static.tiles - first, static.band)
    tile = first + program % per_band % wide
    column = program % per_band // wide * static.block_n

    weight = tl.load(tiles + tile)
    start = tl.load(tiles + static.tiles + tile)
    end = tl.load(tiles + 2 * static.tiles + tile)
    if start < end:
        # Rows past the end are computed as the last one is, and not written.
        place = tl.minimum(start + tl.arange(0, static.block_m), end - 1)
        if static.gathers:
            row = tl.load(order + place).to(tl.int64)
        else:
            rows += start.to(tl.int64) * static.k
            out += start.to(tl.int64) * static.n
            existing += start.to(tl.int64) * static.n
            row = place - start
        total = _product(rows, weights, row, weight, column, static)

        at = column + tl.arange(0, static.block_n)
        inside = (start + tl.arange(0, static.block_m) < end)[:, None]
        if static.uneven_n:
            inside = inside & (at < static.n)[None, :]
        at = row[:, None] * static.n + at[None, :]
        written = inside
        if static.existing:
            written = inside & (weight >= 0)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=written)
        if static.existing:
            kept = inside & (weight < 0)
            tl.store(out + at, tl.load(existing + at, mask=kept), mask=kept)


@triton_jit
def _product(rows, weights, row, weight, column, static: tl.constexpr):
    """The sum over k for one tile; 0 where there is no weight."""
    step = tl.arange(0, static.block_k)
    own = tl.arange(0, static.block_n)
    left = rows + row[:, None] * static.k + step[None, :]
    weights += weight.to(tl.int64) * (static.k * static.n)
    if static.transposed:
        right = weights + column.to(tl.int64) * static.k + own[None, :] * static.k + step[:, None]
        stride: tl.constexpr = 1
    else:
        right = weights + column + step[:, None] * static.n + own[None, :]
        stride: tl.constexpr = static.n
    total = tl.full([static.block_m, static.block_n], 0.0, tl.float32)
    steps = tl.where(weight < 0, 0, (static.k + static.block_k - 1) // static.block_k)
    for i in range(steps):
        left_inside = None
        right_inside = None
        if static.uneven_k:
            left_inside = (step < static.k - i * static.block_k)[None, :]
            right_inside = (step < static.k - i * static.block_k)[:, None]
        if static.uneven_n:
            columns_inside = (column + own < static.n)[None, :]
            right_inside = right_inside & columns_inside if static.uneven_k else columns_inside
        a = tl.load(left, mask=left_inside, other=0.0 if static.uneven_k else None)
        b = tl.load(
            right, mask=right_inside, other=0.0 if static.uneven_k or static.uneven_n else None
        )
        total = tl.dot(a, b, total, input_precision=static.precision)
        left += static.block_k
        right += static.block_k * stride
    return total


@triton_jit
def sum_rows(left, right, order, edges, out, static: tl.constexpr):
    """A tile of the sum over the rows of a weight of `left[r] right[r]^T`; 0 without rows."""
    program = tl.program_id(0)
    per_weight: tl.constexpr = static.m_blocks * static.n_blocks
    weight = program // per_weight
    within = program % per_weight
    per_band: tl.constexpr = static.band * static.n_blocks
    first = within // per_band * static.band
    wide = tl.minimum(static.m_blocks - first, static.band)
    m_start = (first + within % per_band % wide) * static.block_m
    n_start = within % per_band // wide * static.block_n
    start = tl.load(edges + 1 + weight)
    end = tl.load(edges + 2 + weight)

    m = m_start + tl.arange(0, static.block_m)
    n = n_start + tl.arange(0, static.block_n)
    step = tl.arange(0, static.block_k)
    last = tl.maximum(end - 1, 0)
    if static.gathers:
        row = tl.load(order + tl.minimum(start + step, last))
    else:
        left += start.to(tl.int64) * static.m
        right += start.to(tl.int64) * static.n
        left_at = left + step[:, None] * static.m + m[None, :]
        right_at = right + step[:, None] * static.n + n[None, :]
    total = tl.full([static.block_m, static.block_n], 0.0, tl.float32)
    for i in range((end - start + static.block_k - 1) // static.block_k):
        inside = (step < end - start - i * static.block_k)[:, None]
        if static.gathers:
            left_at = left + row.to(tl.int64)[:, None] * static.m + m[None, :]
            right_at = right + row.to(tl.int64)[:, None] * static.n + n[None, :]
            # A step ahead, so that no load waits for the place that it loads from.
            row = tl.load(order + tl.minimum(start + (i + 1) * static.block_k + step, last))
        # Both: what stands outside may be NaN, and 0 times NaN is not 0.
        left_inside = inside & (m < static.m)[None, :] if static.uneven_m else inside
        right_inside = inside & (n < static.n)[None, :] if static.uneven_n else inside
        a = tl.load(left_at, mask=left_inside, other=0.0)
        b = tl.load(right_at, mask=right_inside, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=static.precision)
        if not static.gathers:
            left_at += static.block_k * static.m
            right_at += static.block_k * static.n

    out += weight.to(tl.int64) * (static.m * static.n) + m_start.to(tl.int64) * static.n
    at = tl.arange(0, static.block_m)[:, None] * static.n + n[None, :]
    value = total.to(out.dtype.element_ty)
    if static.uneven_m or static.uneven_n:
        tl.store(out + at, value, mask=(m < static.m)[:, None] & (n < static.n)[None, :])
    else:
        tl.store(out + at, value)
