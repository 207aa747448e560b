"""Gradient of the bias in Triton, a kernel of its own: calls that do not need it do not pay for it.

One program computes one tile of the bias in its own shape. It sums over the axes along which the
bias is broadcast (batch, heads, queries or keys) in a fixed order: the result is deterministic.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar
from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.kernels.flash_attention.triton.backward import BackwardRowTerms
from ejkernel.kernels.flash_attention.triton.configs import TritonTileConfig
from ejkernel.kernels.flash_attention.triton.operands import (
    FlashKernelArguments,
    FlashStaticArguments,
)
from ejkernel.kernels.flash_attention.triton.tile import (
    apply_dropout_and_sinks,
    load_block_bounds,
    load_rows,
    load_vector,
    tile_d_logits,
    tile_weights,
)
from ejkernel.ops.platform import Device

tl: Any = None


def bias_backward(
    inputs: Inputs,
    d_out: jax.Array,
    terms: BackwardRowTerms,
    arguments: FlashKernelArguments,
    config: TritonTileConfig,
    device: Device,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Gradient of the bias, in its own shape; the block map of the arguments is by query block."""
    static, bias = arguments.static, inputs.bias
    if bias is None:
        raise ValueError("flash_attention: there is no bias to differentiate.")
    tiles = (static.q_blocks if static.bias_rows > 1 else 1) * (
        static.k_blocks if static.bias_width > 1 else 1
    )
    programs = static.bias_batch * static.bias_heads * tiles
    return launch(
        dbias_kernel,
        [*inputs[:3], d_out, *terms, *arguments.operands],
        [jax.ShapeDtypeStruct(bias.shape, dtype or bias.dtype)],
        static,
        LaunchConfig(programs, config.num_warps, config.num_stages),
        device,
    )[0]


@triton_jit
def dbias_kernel(
    query: Pointer, key: Pointer, value: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer, key_share: Pointer,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, block_bounds: Pointer, block_index: Pointer,
    d_bias: Pointer, static: FlashStaticArguments,
):  # fmt: skip
    """Gradient of a tile of the bias."""
    program = tl.program_id(0)
    # An axis of size 1 has one tile, which sums over all blocks, heads or batch rows of the call.
    tiles_k: tl.constexpr = static.k_blocks if static.bias_width > 1 else 1
    tiles_q: tl.constexpr = static.q_blocks if static.bias_rows > 1 else 1
    steps_q: tl.constexpr = 1 if static.bias_rows > 1 else static.q_blocks
    steps_n: tl.constexpr = 1 if static.bias_heads > 1 else static.heads
    steps_b: tl.constexpr = 1 if static.bias_batch > 1 else static.batch
    tile_k = program % tiles_k
    tile_q = program // tiles_k % tiles_q
    tile_n = program // (tiles_k * tiles_q) % static.bias_heads
    tile_b = program // (tiles_k * tiles_q * static.bias_heads)
    acc = tl.full([static.block_q, static.block_k], 0.0, tl.float32)
    for step in range(steps_b * steps_n * steps_q):
        i = tile_q + step % steps_q
        head = tile_n + step // steps_q % steps_n
        batch = tile_b + step // (steps_q * steps_n)
        first, _, _, end = load_block_bounds(i, batch, head, block_bounds, static)
        if static.block_lists:
            first = 0
            end = static.k_blocks
        if static.bias_width > 1:
            # A tile that the mask hides has an empty range.
            first = tl.maximum(first, tile_k)
            end = tl.minimum(end, tile_k + 1)
        for j in range(first, end):
            acc += _d_logits_tile(
                query, key, value, d_out, lse, delta, key_share,
                i * static.block_q, j * static.block_k, batch, head,
                q_mask, k_mask, dense_mask, bias, dropout_counters, static,
            )  # fmt: skip

    base = d_bias + tl.cast(tile_b * static.bias_heads + tile_n, tl.int64) * (
        static.bias_rows * static.bias_width
    )
    q = tile_q * static.block_q + tl.arange(0, static.block_q)
    k = tile_k * static.block_k + tl.arange(0, static.block_k)
    if static.bias_rows > 1 and static.bias_width > 1:
        at = base + tl.cast(q[:, None], tl.int64) * static.bias_width + k[None, :]
        inside = (q[:, None] < static.q_len) & (k[None, :] < static.kv_len)
        tl.store(at, acc.to(d_bias.dtype.element_ty), mask=inside)
    elif static.bias_rows > 1:
        summed = tl.sum(acc, 1).to(d_bias.dtype.element_ty)
        tl.store(base + q, summed, mask=q < static.q_len)
    elif static.bias_width > 1:
        summed = tl.sum(acc, 0).to(d_bias.dtype.element_ty)
        tl.store(base + k, summed, mask=k < static.kv_len)
    else:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0).to(d_bias.dtype.element_ty))


@triton_jit
def _d_logits_tile(
    query: Pointer, key: Pointer, value: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer, key_share: Pointer,
    q_start: Scalar, k_start: Scalar, batch: Scalar, head: Scalar,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, static: FlashStaticArguments,
):  # fmt: skip
    """Gradients of the logits of one tile."""
    row = tl.cast(batch, tl.int64)
    at = (row * static.heads + head) * static.q_len
    q = load_rows(
        query + row * (static.q_len * static.q_stride) + head * static.head_dim, q_start,
        static.q_len, static.q_stride, static.head_dim, static.head_width, static.block_q,
        static.ragged_queries,
    )  # fmt: skip
    d_o = load_rows(
        d_out + row * (static.q_len * static.o_stride) + head * static.value_dim, q_start,
        static.q_len, static.o_stride, static.value_dim, static.value_width, static.block_q,
        static.ragged_queries,
    )  # fmt: skip
    k = load_rows(
        key + row * (static.kv_len * static.k_stride) + head // static.group * static.head_dim,
        k_start, static.kv_len, static.k_stride, static.head_dim, static.head_width, static.block_k,
        static.ragged_keys,
    )  # fmt: skip
    v = load_rows(
        value + row * (static.kv_len * static.v_stride) + head // static.group * static.value_dim,
        k_start, static.kv_len, static.v_stride, static.value_dim, static.value_width,
        static.block_k, static.ragged_keys,
    )  # fmt: skip
    row_lse = load_vector(lse + at, q_start, static.q_len, static.block_q, float("inf"))[:, None]
    row_delta = load_vector(delta + at, q_start, static.q_len, static.block_q, 0.0)[:, None]
    row_share = row_delta
    if static.sinks:
        row_share = load_vector(key_share + at, q_start, static.q_len, static.block_q, 0.0)
        row_share = row_share[:, None]
    products = tl.dot(q, tl.trans(k), input_precision=static.precision)
    d_weights = tl.dot(d_o, tl.trans(v), input_precision=static.precision)
    x, weights = tile_weights(
        products, row_lse, q_start, k_start, batch, head, q_mask, k_mask, dense_mask, bias,
        static.has_partial_blocks, static.ragged_keys, static, False,
    )  # fmt: skip
    d_weights = apply_dropout_and_sinks(
        d_weights, row_share, q_start, k_start, batch, head, dropout_counters, static, False
    )
    return tile_d_logits(x, weights, d_weights, row_delta, static)
