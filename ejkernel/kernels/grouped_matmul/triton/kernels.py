"""The Triton kernels of grouped matmul and their launches: `gmm` and `tgmm`.

Rows are gathered where they are: none is moved, and no group is padded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.triton.bridge import (
    LaunchConfig,
    launch,
    matmul_precision,
    triton_jit,
)
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.grouped_matmul.triton.configs import (
    TritonTileConfig,
    gmm_tiles,
    tgmm_tiles,
)
from ejkernel.kernels.grouped_matmul.triton.operands import (
    GroupedMatmulStatic,
    GroupOffsets,
    max_tiles,
    tile_list,
)
from ejkernel.ops.platform import Device

tl: Any = None

_RASTER_BAND = 16  # row tiles


def gmm(
    rows: jax.Array,
    weights: jax.Array,
    transposed: bool,
    groups: GroupOffsets,
    tiles: TritonTileConfig,
    dtype: np.dtype,
    existing: jax.Array | None,
    device: Device,
) -> jax.Array:
    """Each row times its weight, or its transpose, [m, n]; else its row of `existing`, or 0."""
    (m, k), n = rows.shape, weights.shape[1 if transposed else 2]
    tiles = gmm_tiles(tiles, n, k, rows.dtype == jnp.float32)
    count = max_tiles(m, weights.shape[0], tiles.block_m)
    static = GroupedMatmulStatic(
        m=m,
        n=n,
        k=k,
        weights=weights.shape[0],
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        max_tiles=count,
        # Where a weight has a single row tile there is nothing to share.
        raster_band=_RASTER_BAND if tiles.block_m >= 64 else 1,
        gathers=groups.order is not None,
        transposed=transposed,
        has_existing=existing is not None,
        precision=matmul_precision(rows.dtype),
    )
    unused = jnp.zeros((16,), dtype)
    (out,) = launch(
        gmm_kernel,
        [
            rows,
            weights,
            _order(groups),
            tile_list(groups.offsets, tiles.block_m, count),
            unused if existing is None else existing,
        ],
        [jax.ShapeDtypeStruct((m, n), dtype)],
        static,
        LaunchConfig(count * static.n_blocks, tiles.warps, tiles.stages),
        device,
    )
    return out


def tgmm(
    left: jax.Array,
    right: jax.Array,
    groups: GroupOffsets,
    tiles: TritonTileConfig,
    dtype: np.dtype,
    device: Device,
) -> jax.Array:
    """For each weight the sum over its rows of `left[r] right[r]^T`, [e, m, n]."""
    (rows, m), n = left.shape, right.shape[1]
    weights = groups.offsets.shape[0] - 3
    tiles = tgmm_tiles(tiles, m, n, left.dtype == jnp.float32, groups.order is not None)
    static = GroupedMatmulStatic(
        m=m,
        n=n,
        k=rows,
        weights=weights,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        max_tiles=0,
        raster_band=_RASTER_BAND,
        gathers=groups.order is not None,
        transposed=False,
        has_existing=False,
        precision=matmul_precision(left.dtype),
    )
    (out,) = launch(
        tgmm_kernel,
        [left, right, _order(groups), groups.offsets],
        [jax.ShapeDtypeStruct((weights, m, n), dtype)],
        static,
        LaunchConfig(weights * static.m_blocks * static.n_blocks, tiles.warps, tiles.stages),
        device,
    )
    return out


def _order(groups: GroupOffsets) -> jax.Array:
    return jnp.zeros((16,), jnp.int32) if groups.order is None else groups.order


@triton_jit
def gmm_kernel(
    rows: Pointer,
    weights: Pointer,
    order: Pointer,
    tiles: Pointer,
    existing: Pointer,
    out: Pointer,
    static: GroupedMatmulStatic,
):
    """A tile of rows that have one weight, times a block of columns of that weight."""
    program = tl.program_id(0)
    per_band: tl.constexpr = static.raster_band * static.n_blocks
    first = program // per_band * static.raster_band
    width = tl.minimum(static.max_tiles - first, static.raster_band)
    tile = first + program % per_band % width
    column = program % per_band // width * static.block_n

    weight = tl.load(tiles + tile)
    start = tl.load(tiles + static.max_tiles + tile)
    end = tl.load(tiles + 2 * static.max_tiles + tile)
    if start < end:
        # Rows past the end repeat the last row, and are not stored.
        position = tl.minimum(start + tl.arange(0, static.block_m), end - 1)
        if static.gathers:
            row = tl.load(order + position).to(tl.int64)
        else:
            rows += start.to(tl.int64) * static.k
            out += start.to(tl.int64) * static.n
            existing += start.to(tl.int64) * static.n
            row = position - start
        acc = _sum_over_k(rows, weights, row, weight, column, static)

        offsets = column + tl.arange(0, static.block_n)
        inside = (start + tl.arange(0, static.block_m) < end)[:, None]
        if static.uneven_n:
            inside = inside & (offsets < static.n)[None, :]
        offsets = row[:, None] * static.n + offsets[None, :]
        computed = inside
        if static.has_existing:
            computed = inside & (weight >= 0)
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=computed)
        if static.has_existing:
            copied = inside & (weight < 0)
            tl.store(out + offsets, tl.load(existing + offsets, mask=copied), mask=copied)


@triton_jit
def _sum_over_k(
    rows: Pointer,
    weights: Pointer,
    row: Tensor,
    weight: Scalar,
    column: Scalar,
    static: GroupedMatmulStatic,
):
    """The accumulator of one tile; 0 where there is no weight."""
    k_offsets = tl.arange(0, static.block_k)
    n_offsets = tl.arange(0, static.block_n)
    left = rows + row[:, None] * static.k + k_offsets[None, :]
    weights += weight.to(tl.int64) * (static.k * static.n)
    if static.transposed:
        right = weights + column.to(tl.int64) * static.k
        right = right + n_offsets[None, :] * static.k + k_offsets[:, None]
        stride: tl.constexpr = 1
    else:
        right = weights + column + k_offsets[:, None] * static.n + n_offsets[None, :]
        stride: tl.constexpr = static.n
    acc = tl.full([static.block_m, static.block_n], 0.0, tl.float32)
    steps = tl.where(weight < 0, 0, (static.k + static.block_k - 1) // static.block_k)
    for i in range(steps):
        left_inside = None
        right_inside = None
        if static.uneven_k:
            left_inside = (k_offsets < static.k - i * static.block_k)[None, :]
            right_inside = (k_offsets < static.k - i * static.block_k)[:, None]
        if static.uneven_n:
            columns_inside = (column + n_offsets < static.n)[None, :]
            right_inside = right_inside & columns_inside if static.uneven_k else columns_inside
        a = tl.load(left, mask=left_inside, other=0.0 if static.uneven_k else None)
        b = tl.load(
            right, mask=right_inside, other=0.0 if static.uneven_k or static.uneven_n else None
        )
        acc = tl.dot(a, b, acc, input_precision=static.precision)
        left += static.block_k
        right += static.block_k * stride
    return acc


@triton_jit
def tgmm_kernel(
    left: Pointer,
    right: Pointer,
    order: Pointer,
    offsets: Pointer,
    out: Pointer,
    static: GroupedMatmulStatic,
):
    """A tile of the sum over the rows of a weight of `left[r] right[r]^T`; 0 without rows."""
    program = tl.program_id(0)
    per_weight: tl.constexpr = static.m_blocks * static.n_blocks
    weight = program // per_weight
    within = program % per_weight
    per_band: tl.constexpr = static.raster_band * static.n_blocks
    first = within // per_band * static.raster_band
    width = tl.minimum(static.m_blocks - first, static.raster_band)
    m_start = (first + within % per_band % width) * static.block_m
    n_start = within % per_band // width * static.block_n
    start = tl.load(offsets + 1 + weight)
    end = tl.load(offsets + 2 + weight)

    m = m_start + tl.arange(0, static.block_m)
    n = n_start + tl.arange(0, static.block_n)
    k_offsets = tl.arange(0, static.block_k)
    last = tl.maximum(end - 1, 0)
    if static.gathers:
        row = tl.load(order + tl.minimum(start + k_offsets, last))
    else:
        left += start.to(tl.int64) * static.m
        right += start.to(tl.int64) * static.n
        left_at = left + k_offsets[:, None] * static.m + m[None, :]
        right_at = right + k_offsets[:, None] * static.n + n[None, :]
    acc = tl.full([static.block_m, static.block_n], 0.0, tl.float32)
    for i in range((end - start + static.block_k - 1) // static.block_k):
        inside = (k_offsets < end - start - i * static.block_k)[:, None]
        if static.gathers:
            left_at = left + row.to(tl.int64)[:, None] * static.m + m[None, :]
            right_at = right + row.to(tl.int64)[:, None] * static.n + n[None, :]
            # Prefetched a step ahead, so that no load waits for its own address.
            row = tl.load(order + tl.minimum(start + (i + 1) * static.block_k + k_offsets, last))
        # Both operands: rows of other groups may hold NaN, and 0 times NaN is not 0.
        left_inside = inside & (m < static.m)[None, :] if static.uneven_m else inside
        right_inside = inside & (n < static.n)[None, :] if static.uneven_n else inside
        a = tl.load(left_at, mask=left_inside, other=0.0)
        b = tl.load(right_at, mask=right_inside, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=static.precision)
        if not static.gathers:
            left_at += static.block_k * static.m
            right_at += static.block_k * static.n

    out += weight.to(tl.int64) * (static.m * static.n) + m_start.to(tl.int64) * static.n
    out_offsets = tl.arange(0, static.block_m)[:, None] * static.n + n[None, :]
    value = acc.to(out.dtype.element_ty)
    if static.uneven_m or static.uneven_n:
        tl.store(out + out_offsets, value, mask=(m < static.m)[:, None] & (n < static.n)[None, :])
    else:
        tl.store(out + out_offsets, value)
