"""The two Triton kernels of grouped matmul: rows times weights, and sums over rows."""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import kernel

tl: Any = None


@kernel
def multiply(rows, weights, order, tiles, existing, out, mode: tl.constexpr):
    """A tile of rows that have one weight, times a block of columns of that weight."""
    program = tl.program_id(0)
    per_band: tl.constexpr = mode.band * mode.n_blocks
    first = program // per_band * mode.band
    wide = tl.minimum(mode.tiles - first, mode.band)
    tile = first + program % per_band % wide
    column = program % per_band // wide * mode.block_n

    weight = tl.load(tiles + tile)
    start = tl.load(tiles + mode.tiles + tile)
    end = tl.load(tiles + 2 * mode.tiles + tile)
    if start < end:
        # Rows past the end are computed as the last one is, and not written.
        place = tl.minimum(start + tl.arange(0, mode.block_m), end - 1)
        if mode.gathers:
            row = tl.load(order + place).to(tl.int64)
        else:
            rows += start.to(tl.int64) * mode.k
            out += start.to(tl.int64) * mode.n
            existing += start.to(tl.int64) * mode.n
            row = place - start
        total = _product(rows, weights, row, weight, column, mode)

        at = column + tl.arange(0, mode.block_n)
        inside = (start + tl.arange(0, mode.block_m) < end)[:, None]
        if mode.uneven_n:
            inside = inside & (at < mode.n)[None, :]
        at = row[:, None] * mode.n + at[None, :]
        written = inside
        if mode.existing:
            written = inside & (weight >= 0)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=written)
        if mode.existing:
            kept = inside & (weight < 0)
            tl.store(out + at, tl.load(existing + at, mask=kept), mask=kept)


@kernel
def _product(rows, weights, row, weight, column, mode: tl.constexpr):
    """The sum over k for one tile; 0 where there is no weight."""
    step = tl.arange(0, mode.block_k)
    own = tl.arange(0, mode.block_n)
    left = rows + row[:, None] * mode.k + step[None, :]
    weights += weight.to(tl.int64) * (mode.k * mode.n)
    if mode.transposed:
        right = weights + column.to(tl.int64) * mode.k + own[None, :] * mode.k + step[:, None]
        stride: tl.constexpr = 1
    else:
        right = weights + column + step[:, None] * mode.n + own[None, :]
        stride: tl.constexpr = mode.n
    total = tl.full([mode.block_m, mode.block_n], 0.0, tl.float32)
    steps = tl.where(weight < 0, 0, (mode.k + mode.block_k - 1) // mode.block_k)
    for i in range(steps):
        left_inside = None
        right_inside = None
        if mode.uneven_k:
            left_inside = (step < mode.k - i * mode.block_k)[None, :]
            right_inside = (step < mode.k - i * mode.block_k)[:, None]
        if mode.uneven_n:
            columns_inside = (column + own < mode.n)[None, :]
            right_inside = right_inside & columns_inside if mode.uneven_k else columns_inside
        a = tl.load(left, mask=left_inside, other=0.0 if mode.uneven_k else None)
        b = tl.load(right, mask=right_inside, other=0.0 if mode.uneven_k or mode.uneven_n else None)
        total = tl.dot(a, b, total, input_precision=mode.precision)
        left += mode.block_k
        right += mode.block_k * stride
    return total


@kernel
def sum_rows(left, right, order, edges, out, mode: tl.constexpr):
    """A tile of the sum over the rows of a weight of `left[r] right[r]^T`; 0 without rows."""
    program = tl.program_id(0)
    per_weight: tl.constexpr = mode.m_blocks * mode.n_blocks
    weight = program // per_weight
    within = program % per_weight
    per_band: tl.constexpr = mode.band * mode.n_blocks
    first = within // per_band * mode.band
    wide = tl.minimum(mode.m_blocks - first, mode.band)
    m_start = (first + within % per_band % wide) * mode.block_m
    n_start = within % per_band // wide * mode.block_n
    start = tl.load(edges + 1 + weight)
    end = tl.load(edges + 2 + weight)

    m = m_start + tl.arange(0, mode.block_m)
    n = n_start + tl.arange(0, mode.block_n)
    step = tl.arange(0, mode.block_k)
    last = tl.maximum(end - 1, 0)
    if mode.gathers:
        row = tl.load(order + tl.minimum(start + step, last))
    else:
        left += start.to(tl.int64) * mode.m
        right += start.to(tl.int64) * mode.n
        left_at = left + step[:, None] * mode.m + m[None, :]
        right_at = right + step[:, None] * mode.n + n[None, :]
    total = tl.full([mode.block_m, mode.block_n], 0.0, tl.float32)
    for i in range((end - start + mode.block_k - 1) // mode.block_k):
        inside = (step < end - start - i * mode.block_k)[:, None]
        if mode.gathers:
            left_at = left + row.to(tl.int64)[:, None] * mode.m + m[None, :]
            right_at = right + row.to(tl.int64)[:, None] * mode.n + n[None, :]
            # A step ahead, so that no load waits for the place that it loads from.
            row = tl.load(order + tl.minimum(start + (i + 1) * mode.block_k + step, last))
        # Both: what stands outside may be NaN, and 0 times NaN is not 0.
        left_inside = inside & (m < mode.m)[None, :] if mode.uneven_m else inside
        right_inside = inside & (n < mode.n)[None, :] if mode.uneven_n else inside
        a = tl.load(left_at, mask=left_inside, other=0.0)
        b = tl.load(right_at, mask=right_inside, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=mode.precision)
        if not mode.gathers:
            left_at += mode.block_k * mode.m
            right_at += mode.block_k * mode.n

    out += weight.to(tl.int64) * (mode.m * mode.n) + m_start.to(tl.int64) * mode.n
    at = tl.arange(0, mode.block_m)[:, None] * mode.n + n[None, :]
    value = total.to(out.dtype.element_ty)
    if mode.uneven_m or mode.uneven_n:
        tl.store(out + at, value, mask=(m < mode.m)[:, None] & (n < mode.n)[None, :])
    else:
        tl.store(out + at, value)
