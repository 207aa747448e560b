"""Device functions for one tile of logits, shared by the kernels of both passes.

A tile is block_q queries against block_k keys; `transposed`: keys first. Every branch on `static`
is decided when the kernel is compiled.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.common.triton.bridge import triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.flash_attention.triton.operands import FlashStaticArguments

tl: Any = None


@triton_jit
def load_rows(
    base: Pointer, start: Scalar, length: tl.constexpr, stride: tl.constexpr, dim: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, edge: tl.constexpr,
):  # fmt: skip
    """[block, width] from row `start` of a matrix [length, dim], padded with 0.

    `edge`: the rows may pass the end of the matrix.
    """
    row = tl.arange(0, block)[:, None]
    column = tl.arange(0, width)[None, :]
    at = base + tl.cast(start, tl.int64) * stride + (row * stride + column)
    if edge:
        tile = tl.load(at, mask=(start + row < length) & (column < dim), other=0.0)
    elif dim != width:
        tile = tl.load(at, mask=column < dim, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton_jit
def store_rows(
    base: Pointer, tile: Tensor, start: Scalar, length: tl.constexpr, stride: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write [block, width] to row `start` of a matrix [length, dim], without the padding."""
    row = tl.arange(0, block)[:, None]
    column = tl.arange(0, width)[None, :]
    at = base + tl.cast(start, tl.int64) * stride + (row * stride + column)
    tl.store(at, tile.to(base.dtype.element_ty), mask=(start + row < length) & (column < dim))


@triton_jit
def load_vector(
    base: Pointer, start: Scalar, length: tl.constexpr, block: tl.constexpr, other: tl.constexpr
):
    """[block] from entry `start` of a vector [length], padded with `other`."""
    index = start + tl.arange(0, block)
    return tl.load(base + index, mask=index < length, other=other)


@triton_jit
def tile_offsets(static: FlashStaticArguments, transposed: tl.constexpr):
    """Offsets of the queries and of the keys in a tile, shaped to broadcast to the tile."""
    q = tl.arange(0, static.block_q)
    k = tl.arange(0, static.block_k)
    if transposed:
        q, k = q[None, :], k[:, None]
    else:
        q, k = q[:, None], k[None, :]
    return q, k


@triton_jit
def load_block_bounds(
    block: Scalar, batch: Scalar, head: Scalar, block_bounds: Pointer, static: FlashStaticArguments
):
    """The blocks that a program visits: first, first full one, end of the full ones, end.

    In a range the full blocks are contiguous, with partial ones on both sides. A list starts with
    the full blocks.
    """
    blocks: tl.constexpr = static.k_blocks if static.by_key_block else static.q_blocks
    # Loaded even where they are known: the compiler spills when the trip count is a constant.
    at = block_bounds + _block_map_row(block, blocks, batch, head, static) * 4
    first = tl.load(at)
    full_first = tl.load(at + 1)
    full_end = tl.load(at + 2)
    end = tl.load(at + 3)
    return first, full_first, full_end, end


@triton_jit
def _block_map_row(
    block: Scalar, blocks: tl.constexpr, batch: Scalar, head: Scalar, static: FlashStaticArguments
):
    """The row of the block map for a block; batch and head axes of size 1 are broadcast."""
    row = block
    if static.block_map_heads:
        row += head * blocks
    if static.block_map_batched:
        row += batch * (blocks * (static.heads if static.block_map_heads else 1))
    return tl.cast(row, tl.int64)


@triton_jit
def load_block_list(
    block: Scalar, batch: Scalar, head: Scalar, block_index: Pointer, static: FlashStaticArguments
):
    """The address of the list of blocks that a program visits."""
    blocks: tl.constexpr = static.k_blocks if static.by_key_block else static.q_blocks
    others: tl.constexpr = static.q_blocks if static.by_key_block else static.k_blocks
    return block_index + _block_map_row(block, blocks, batch, head, static) * others


@triton_jit
def visited_block(
    step: Scalar, full: tl.constexpr, first: Scalar, full_first: Scalar, full_end: Scalar,
    block_list: Pointer, static: FlashStaticArguments,
):  # fmt: skip
    """The block of a step of the loop over full blocks, or of the loop over partial ones."""
    if static.block_lists:
        block = tl.load(block_list + (step if full else full_end + step))
    elif full:
        block = full_first + step
    else:
        left = full_first - first
        block = tl.where(step < left, first + step, full_end + step - left)
    return block


@triton_jit
def mask_tile(
    q_start: Scalar, k_start: Scalar, batch: Scalar, head: Scalar,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer,
    static: FlashStaticArguments, transposed: tl.constexpr,
):  # fmt: skip
    """Which pairs of a tile are visible; False past the last query and the last key."""
    q, k = tile_offsets(static, transposed)
    q_inside = q + q_start < static.q_len
    k_inside = k + k_start < static.kv_len
    if static.mask_batched:
        q_mask += tl.cast(batch, tl.int64) * (static.q_mask_rows * static.q_len)
        k_mask += tl.cast(batch, tl.int64) * (static.k_mask_rows * static.kv_len)
    visible = q_inside & k_inside
    conjunctions: tl.constexpr = static.conjunctions
    for i in tl.static_range(conjunctions):
        allowed = _conjunction(i, q_start, k_start, k, k_inside, q_mask, k_mask, static, transposed)
        if i == 0:
            any_allowed = allowed
        else:
            any_allowed = any_allowed | allowed
    if static.conjunctions > 0:
        visible = visible & any_allowed
    if static.dense_mask:
        # One pointer for the tile and 32-bit offsets for its elements: fewer registers.
        heads_size: tl.constexpr = static.dense_mask_rows * static.dense_mask_width
        if static.dense_mask_batched:
            dense_mask += tl.cast(batch, tl.int64) * (static.dense_mask_heads * heads_size)
        if static.dense_mask_heads > 1:
            dense_mask += tl.cast(head, tl.int64) * heads_size
        if static.dense_mask_blocks:
            row = _q_mask_row(q_mask, static.q_mask_rows - 1, q_start, static, transposed)
            column = _k_mask_row(k_mask, static.k_mask_rows - 1, k_start, static, transposed)
            at = row * static.dense_mask_width + column
        else:
            q_stride: tl.constexpr = static.dense_mask_width if static.dense_mask_rows > 1 else 0
            k_stride: tl.constexpr = 1 if static.dense_mask_width > 1 else 0
            dense_mask += tl.cast(q_start, tl.int64) * q_stride + k_start * k_stride
            at = q * q_stride + k * k_stride
        visible = visible & (tl.load(dense_mask + at, mask=q_inside & k_inside, other=0) != 0)
    return visible


@triton_jit
def _conjunction(
    conjunction: tl.constexpr, q_start: Scalar, k_start: Scalar, k: Tensor, k_inside: Tensor,
    q_mask: Pointer, k_mask: Pointer, static: FlashStaticArguments, transposed: tl.constexpr,
):  # fmt: skip
    """The pairs that one conjunction of the mask allows: bounds on the keys, and equal ids."""
    # A function: a constexpr that is declared in a loop body cannot change between iterations.
    first: tl.constexpr = conjunction * (static.has_low + static.has_high + static.id_pairs)
    first_id: tl.constexpr = first + static.has_low + static.has_high
    id_pairs: tl.constexpr = static.id_pairs
    allowed = k_inside
    if static.has_low:
        low = _q_mask_row(q_mask, first, q_start, static, transposed)
        allowed = allowed & (k + k_start >= low)
    if static.has_high:
        high = _q_mask_row(q_mask, first + static.has_low, q_start, static, transposed)
        allowed = allowed & (k + k_start <= high)
    for pair in tl.static_range(id_pairs):
        q_id = _q_mask_row(q_mask, first_id + pair, q_start, static, transposed)
        k_id = _k_mask_row(k_mask, conjunction * id_pairs + pair, k_start, static, transposed)
        allowed = allowed & (q_id == k_id)
    return allowed


@triton_jit
def _q_mask_row(
    q_mask: Pointer, row: tl.constexpr, q_start: Scalar, static: FlashStaticArguments,
    transposed: tl.constexpr,
):  # fmt: skip
    """A row of `q_mask` for the queries of a tile, shaped to broadcast to the tile."""
    # Loaded as a vector: a load of two axes may be repeated by a thread for all its elements.
    values = load_vector(q_mask + row * static.q_len, q_start, static.q_len, static.block_q, 0)
    return values[None, :] if transposed else values[:, None]


@triton_jit
def _k_mask_row(
    k_mask: Pointer, row: tl.constexpr, k_start: Scalar, static: FlashStaticArguments,
    transposed: tl.constexpr,
):  # fmt: skip
    """A row of `k_mask` for the keys of a tile, shaped to broadcast to the tile."""
    values = load_vector(k_mask + row * static.kv_len, k_start, static.kv_len, static.block_k, 0)
    return values[:, None] if transposed else values[None, :]


@triton_jit
def tile_logits(
    products: Tensor, q_start: Scalar, k_start: Scalar, batch: Scalar, head: Scalar, bias: Pointer,
    edge: tl.constexpr, static: FlashStaticArguments, transposed: tl.constexpr,
):  # fmt: skip
    """Logits of a tile in base 2, divided by `static.exp2_scale`; `edge`: it may pass the last key.

    Without bias and soft cap these are the products themselves: the scale is applied in the
    argument of exp2, where it costs nothing.
    """
    if not static.plain:
        products = products * static.scale
    if static.bias:
        tile = _bias_tile(q_start, k_start, batch, head, bias, edge, static, transposed)
        products += tile.to(tl.float32)
    if static.soft_cap > 0.0:
        products = products * (2.0 * static.log2_e / static.soft_cap)
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right for infinite exp(2x).
        products = 1.0 - 2.0 / (tl.exp2(products) + 1.0)
    return products


@triton_jit
def _bias_tile(
    q_start: Scalar, k_start: Scalar, batch: Scalar, head: Scalar, bias: Pointer,
    edge: tl.constexpr, static: FlashStaticArguments, transposed: tl.constexpr,
):  # fmt: skip
    q, k = tile_offsets(static, transposed)
    if static.bias_batch > 1:
        bias += tl.cast(batch, tl.int64) * (
            static.bias_heads * static.bias_rows * static.bias_width
        )
    if static.bias_heads > 1:
        bias += tl.cast(head, tl.int64) * (static.bias_rows * static.bias_width)
    # An axis of size 1 is loaded once and broadcast by the addition.
    if static.bias_rows > 1 and static.bias_width > 1:
        bias += tl.cast(q_start, tl.int64) * static.bias_width + k_start
        at = q * static.bias_width + k
        if edge or static.ragged_queries:
            inside = (q + q_start < static.q_len) & (k + k_start < static.kv_len)
            tile = tl.load(bias + at, mask=inside, other=0.0)
        else:
            tile = tl.load(bias + at)
    elif static.bias_rows > 1:
        tile = load_vector(bias, q_start, static.q_len, static.block_q, 0.0)
        tile = tile[None, :] if transposed else tile[:, None]
    elif static.bias_width > 1:
        tile = load_vector(bias, k_start, static.kv_len, static.block_k, 0.0)
        tile = tile[:, None] if transposed else tile[None, :]
    else:
        tile = tl.load(bias)
    return tile


@triton_jit
def tile_weights(
    products: Tensor, lse: Tensor, q_start: Scalar, k_start: Scalar, batch: Scalar, head: Scalar,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    masked: tl.constexpr, edge: tl.constexpr, static: FlashStaticArguments,
    transposed: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, as `tile_logits` gives them, and its weights before sinks and dropout."""
    x = tile_logits(products, q_start, k_start, batch, head, bias, edge, static, transposed)
    weights = tl.exp2(x * static.exp2_scale - lse)
    if masked:
        visible = mask_tile(
            q_start, k_start, batch, head, q_mask, k_mask, dense_mask, static, transposed
        )
        weights = tl.where(visible, weights, 0.0)
    return x, weights


@triton_jit
def apply_dropout_and_sinks(
    weights: Tensor, key_share: Tensor, q_start: Scalar, k_start: Scalar, batch: Scalar,
    head: Scalar, dropout_counters: Pointer, static: FlashStaticArguments, transposed: tl.constexpr,
):  # fmt: skip
    """Weights after dropout and sinks. Their gradients are transformed in the same way."""
    if static.dropout:
        keep = dropout_keep(
            q_start, k_start, batch, head, dropout_counters, static, transposed
        )  # fmt: skip
        weights = tl.where(keep, weights * static.dropout_scale, 0.0)
    if static.sinks:
        weights = weights * key_share
    return weights


@triton_jit
def tile_d_logits(
    x: Tensor, weights: Tensor, d_weights: Tensor, delta: Tensor, static: FlashStaticArguments
):
    """Gradients of the logits of a tile, before the softmax scale."""
    d_logits = weights * (d_weights - delta)
    if static.soft_cap > 0.0:
        d_logits = d_logits * (1.0 - x * x)  # x is the tanh
    return d_logits


@triton_jit
def dropout_keep(
    q_start: Scalar, k_start: Scalar, batch: Scalar, head: Scalar, dropout_counters: Pointer,
    static: FlashStaticArguments, transposed: tl.constexpr,
):  # fmt: skip
    """Which weights of a tile dropout keeps, by the hash of kernels/flash_attention/dropout.py."""
    q, k = tile_offsets(static, transposed)
    q += q_start
    k += k_start
    if static.dropout_shares:
        shares = dropout_counters + 1 + static.heads + static.batch
        q, k = _share_position(q, shares), _share_position(k, shares + 4)
    seed = tl.load(dropout_counters).to(tl.uint32, bitcast=True)
    head_index = tl.load(dropout_counters + 1 + head).to(tl.uint32, bitcast=True)
    batch_index = tl.load(dropout_counters + 1 + static.heads + batch).to(tl.uint32, bitcast=True)
    q, k = q.to(tl.uint32, bitcast=True), k.to(tl.uint32, bitcast=True)
    first = _hash_chain(_hash_mix(seed), batch_index, head_index, q)
    second = _hash_chain(_hash_mix(seed ^ 0x5BD1E995), batch_index, head_index, q)
    x = first + k * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ second) * 0x846CA68B
    return (x ^ (x >> 16)) >= static.dropout_threshold


@triton_jit
def _share_position(index: Tensor, share: Pointer):
    """The position of each token of a share of a sequence: a + b i, and d more for i >= c."""
    jump = tl.where(index >= tl.load(share + 2), tl.load(share + 3), 0)
    return tl.load(share) + tl.load(share + 1) * index + jump


@triton_jit
def _hash_chain(x: Tensor, batch: Scalar, head: Scalar, row: Tensor):
    x = _hash_mix(x + batch * 0x9E3779B9)
    return _hash_mix(_hash_mix(x + head * 0x9E3779B9) + row * 0x9E3779B9)


@triton_jit
def _hash_mix(x: Tensor):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
