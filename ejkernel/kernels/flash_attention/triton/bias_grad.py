"""The gradient of the bias in Triton, a kernel of its own: whoever does not ask pays nothing.

One program has one tile of the bias as it was given, and sums over the axes along which that is
broadcast: batch rows, heads, queries or keys, always in the same order.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.common.triton.bridge import Launch, kernel, launch
from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.kernels.flash_attention.triton.backward import tile_d_logits, tile_used, tile_weights
from ejkernel.kernels.flash_attention.triton.operands import Plan
from ejkernel.kernels.flash_attention.triton.tile import load_numbers, load_rows, walk

tl: Any = None


def bias_gradient(
    inputs: Inputs, d_out: jax.Array, terms: list[jax.Array], planned: Plan, warps: int, stages: int
) -> jax.Array:
    """Gradient of the bias, at its own shape; the plan has its map by rows."""
    mode, bias = planned.mode, inputs.bias
    tiles = (mode.q_blocks if mode.bias_rows > 1 else 1) * (
        mode.k_blocks if mode.bias_width > 1 else 1
    )
    return launch(
        d_bias,
        [*inputs[:3], d_out, *terms, *planned.operands],
        [jax.ShapeDtypeStruct(bias.shape, bias.dtype)],  # type: ignore[union-attr]
        mode,
        Launch(mode.bias_batch * mode.bias_heads * tiles, warps, stages),
    )[0]


@kernel
def d_bias(
    query, key, value, d_out, lse, delta, share,
    rows, columns, table, bias, counters, bounds, index, gradient,
    mode: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of the bias."""
    program = tl.program_id(0)
    # An axis of size 1 has one tile, which sums over all blocks, heads or rows of the call.
    tiles_k: tl.constexpr = mode.k_blocks if mode.bias_width > 1 else 1
    tiles_q: tl.constexpr = mode.q_blocks if mode.bias_rows > 1 else 1
    steps_q: tl.constexpr = 1 if mode.bias_rows > 1 else mode.q_blocks
    steps_n: tl.constexpr = 1 if mode.bias_heads > 1 else mode.heads
    steps_b: tl.constexpr = 1 if mode.bias_batch > 1 else mode.batch
    tile_k = program % tiles_k
    tile_q = program // tiles_k % tiles_q
    tile_n = program // (tiles_k * tiles_q) % mode.bias_heads
    tile_b = program // (tiles_k * tiles_q * mode.bias_heads)
    total = tl.full([mode.block_q, mode.block_k], 0.0, tl.float32)
    for step in range(steps_b * steps_n * steps_q):
        i = tile_q + step % steps_q
        head = tile_n + step // steps_q % steps_n
        batch = tile_b + step // (steps_q * steps_n)
        first, _, _, end = walk(i, batch, head, bounds, mode)
        if mode.map_lists:
            first = 0
            end = mode.k_blocks
        if mode.bias_width > 1:
            # A tile that the mask hides has an empty range.
            first = tl.maximum(first, tile_k)
            end = tl.minimum(end, tile_k + 1)
        for j in range(first, end):
            total += _tile(
                query, key, value, d_out, lse, delta, share, i * mode.block_q, j * mode.block_k,
                batch, head, rows, columns, table, bias, counters, mode,
            )  # fmt: skip

    base = gradient + tl.cast(tile_b * mode.bias_heads + tile_n, tl.int64) * (
        mode.bias_rows * mode.bias_width
    )
    q = tile_q * mode.block_q + tl.arange(0, mode.block_q)
    k = tile_k * mode.block_k + tl.arange(0, mode.block_k)
    if mode.bias_rows > 1 and mode.bias_width > 1:
        at = base + tl.cast(q[:, None], tl.int64) * mode.bias_width + k[None, :]
        inside = (q[:, None] < mode.q_len) & (k[None, :] < mode.kv_len)
        tl.store(at, total.to(gradient.dtype.element_ty), mask=inside)
    elif mode.bias_rows > 1:
        summed = tl.sum(total, 1).to(gradient.dtype.element_ty)
        tl.store(base + q, summed, mask=q < mode.q_len)
    elif mode.bias_width > 1:
        summed = tl.sum(total, 0).to(gradient.dtype.element_ty)
        tl.store(base + k, summed, mask=k < mode.kv_len)
    else:
        tl.store(base, tl.sum(tl.sum(total, 1), 0).to(gradient.dtype.element_ty))


@kernel
def _tile(
    query, key, value, d_out, lse, delta, share, q_start, k_start, batch, head,
    rows, columns, table, bias, counters, mode: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits of one tile."""
    group: tl.constexpr = mode.heads // mode.kv_heads
    q_stride: tl.constexpr = mode.heads * mode.head_dim
    o_stride: tl.constexpr = mode.heads * mode.value_dim
    k_stride: tl.constexpr = mode.kv_heads * mode.head_dim
    v_stride: tl.constexpr = mode.kv_heads * mode.value_dim
    row = tl.cast(batch, tl.int64)
    at = (row * mode.heads + head) * mode.q_len
    q = load_rows(
        query + row * (mode.q_len * q_stride) + head * mode.head_dim, q_start, mode.q_len,
        q_stride, mode.head_dim, mode.head_width, mode.block_q, mode.ragged_queries,
    )  # fmt: skip
    d_o = load_rows(
        d_out + row * (mode.q_len * o_stride) + head * mode.value_dim, q_start, mode.q_len,
        o_stride, mode.value_dim, mode.value_width, mode.block_q, mode.ragged_queries,
    )  # fmt: skip
    k = load_rows(
        key + row * (mode.kv_len * k_stride) + head // group * mode.head_dim, k_start, mode.kv_len,
        k_stride, mode.head_dim, mode.head_width, mode.block_k, mode.ragged_keys,
    )  # fmt: skip
    v = load_rows(
        value + row * (mode.kv_len * v_stride) + head // group * mode.value_dim, k_start,
        mode.kv_len, v_stride, mode.value_dim, mode.value_width, mode.block_k, mode.ragged_keys,
    )  # fmt: skip
    row_lse = load_numbers(lse + at, q_start, mode.q_len, mode.block_q, float("inf"))[:, None]
    row_delta = load_numbers(delta + at, q_start, mode.q_len, mode.block_q, 0.0)[:, None]
    row_share = row_delta
    if mode.sinks:
        row_share = load_numbers(share + at, q_start, mode.q_len, mode.block_q, 0.0)[:, None]
    products = tl.dot(q, tl.trans(k), input_precision=mode.precision)
    d_weights = tl.dot(d_o, tl.trans(v), input_precision=mode.precision)
    x, weights = tile_weights(
        products, row_lse, q_start, k_start, batch, head, rows, columns, table, bias,
        mode.masked, mode.ragged_keys, mode, False,
    )  # fmt: skip
    d_weights = tile_used(
        d_weights, row_share, q_start, k_start, batch, head, counters, mode, False
    )
    return tile_d_logits(x, weights, d_weights, row_delta, mode)
