"""Device functions for a tile of queries and a tile of keys, shared by the kernels of both passes.

Every branch on `static` is decided when the kernel is compiled.
"""

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
def tile_list(
    tile: Scalar, kv_head: Scalar, batch: Scalar, counts: Pointer, spans: Pointer,
    members: Pointer, static: SelectedStaticArguments,
):  # fmt: skip
    """The list of a tile: how many blocks, their spans, and which tokens have chosen them."""
    at = tl.cast((batch * static.kv_heads + kv_head) * static.tiles + tile, tl.int64)
    count = tl.load(counts + at)
    return count, spans + at * (2 * static.slots), members + at * (static.slots * static.words)


@triton_jit
def tile_tokens(tile: Scalar, tiles: Pointer, static: SelectedStaticArguments):
    """The first token of a tile, and the end of its tokens."""
    return tl.load(tiles + tile), tl.load(tiles + static.tiles + tile)


@triton_jit
def tile_rows(
    tile_start: Scalar, tile_end: Scalar, head_block: Scalar, static: SelectedStaticArguments
):
    """Of each row of a tile its token, counted from the first one, its query, and if it is inside.

    Queries are counted from the `first_query` of the tile.
    """
    member = tl.arange(0, static.rows) // static.head_block
    head = head_block * static.head_block + tl.arange(0, static.rows) % static.head_block
    inside = (tile_start + member < tile_end) & (head < static.group)
    return member, member * static.heads + head, inside


@triton_jit
def first_query(batch: Scalar, token: Scalar, kv_head: Scalar, static: SelectedStaticArguments):
    """The number, in the whole array, of a token's query for the first head of a key head."""
    row_start = tl.cast(batch, tl.int64) * static.length
    return (row_start + token) * static.heads + kv_head * static.group


@triton_jit
def head_pointers(
    key: Pointer, value: Pointer, batch: Scalar, kv_head: Scalar, static: SelectedStaticArguments
):
    """The first key and the first value of a key head."""
    row_start = tl.cast(batch, tl.int64) * static.length
    key += row_start * static.k_stride + kv_head * static.head_dim
    value += row_start * static.v_stride + kv_head * static.value_dim
    return key, value


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
def load_key_tile(key: Pointer, start: Scalar, end: Scalar, static: SelectedStaticArguments):
    """[block_k, head_width] from key `start`; 0 from key `end` on."""
    return load_keys(
        key, start, end, static.k_stride, static.head_dim, static.head_width, static.block_k
    )


@triton_jit
def load_value_tile(value: Pointer, start: Scalar, end: Scalar, static: SelectedStaticArguments):
    """[block_k, value_width] from value `start`; 0 from value `end` on."""
    return load_keys(
        value, start, end, static.v_stride, static.value_dim, static.value_width, static.block_k
    )


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
