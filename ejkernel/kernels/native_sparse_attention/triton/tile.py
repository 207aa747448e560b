"""Device functions for a tile of queries and a tile of keys, shared by the kernels of both passes.

Every branch on `static` is decided when the kernel is compiled.
"""

# Annotations stay text: Triton reads them, and it may not be installed.
from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.native_sparse_attention.triton.operands import SelectedStaticArguments

tl: Any = None


@triton_jit
def tile_position(program: Scalar, static: SelectedStaticArguments):
    """Tile, block of heads, key head and batch row; the last tiles, which see most, come first."""
    tile = static.tiles - 1 - program % static.tiles
    head_block = program // static.tiles % static.head_blocks
    kv_head = program // (static.tiles * static.head_blocks) % static.kv_heads
    batch = program // (static.tiles * static.head_blocks * static.kv_heads)
    return tile, head_block, kv_head, batch


@triton_jit
def load_rows(
    base: Pointer, row: Tensor, inside: Tensor, dim: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """[rows, width] of a matrix with rows of `dim`; 0 where a row is not inside."""
    column = tl.arange(0, width)[None, :]
    mask = inside[:, None]
    if dim != width:
        mask = mask & (column < dim)
    return tl.load(base + row[:, None] * dim + column, mask=mask, other=0.0)


@triton_jit
def store_rows(
    base: Pointer, tile: Tensor, row: Tensor, inside: Tensor, dim: tl.constexpr, width: tl.constexpr
):
    """Write [rows, width] to a matrix with rows of `dim`, those that are inside."""
    column = tl.arange(0, width)[None, :]
    mask = inside[:, None]
    if dim != width:
        mask = mask & (column < dim)
    tl.store(base + row[:, None] * dim + column, tile.to(base.dtype.element_ty), mask=mask)


@triton_jit
def load_keys(
    base: Pointer, start: Scalar, end: Scalar, stride: tl.constexpr, dim: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """[block, width] from key `start`; 0 from key `end` on."""
    row = tl.arange(0, block)[:, None]
    column = tl.arange(0, width)[None, :]
    mask = row < end - start
    if dim != width:
        mask = mask & (column < dim)
    at = base + tl.cast(start, tl.int64) * stride + (row * stride + column)
    return tl.load(at, mask=mask, other=0.0)


@triton_jit
def load_span(
    step: Scalar, count: Scalar, spans: Pointer, tile_end: Scalar, static: SelectedStaticArguments
):
    """The first key that a step visits, and the end of the keys of its block; none past the list.

    No token of the tile sees a key from `tile_end` on.
    """
    entry = step // static.steps
    start = tl.load(spans + entry, mask=entry < count, other=0)
    end = tl.load(spans + static.slots + entry, mask=entry < count, other=0)
    return start + step % static.steps * static.block_k, tl.minimum(end, tile_end)


@triton_jit
def visible_keys(
    step: Scalar, start: Scalar, end: Scalar, token: Tensor, member: Tensor, members: Pointer,
    static: SelectedStaticArguments,
):  # fmt: skip
    """Which keys of a step the rows of a tile see: of blocks that they chose, not after them."""
    key = start + tl.arange(0, static.block_k)
    visible = key[None, :] <= token[:, None]
    if static.uneven:
        visible = visible & (key < end)[None, :]
    if static.tokens > 1:
        bits = tl.load(members + step // static.steps * static.words + member // 32)
        visible = visible & ((bits >> member % 32 & 1) != 0)[:, None]
    return visible
