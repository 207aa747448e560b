"""Forward in Triton: online softmax over blocks of keys (https://arxiv.org/abs/2307.08691).

One program computes one block of queries of one head. It first visits the key blocks that are
fully visible, without a mask, then those that are partially visible.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.typing import DTypeLike

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.triton.configs import TritonTileConfig
from ejkernel.kernels.flash_attention.triton.operands import (
    FlashStaticArguments,
    kernel_arguments,
)
from ejkernel.kernels.flash_attention.triton.tile import (
    dropout_keep,
    load_block_bounds,
    load_block_list,
    load_rows,
    mask_tile,
    store_rows,
    tile_logits,
    visited_block,
)
from ejkernel.ops.platform import Device

tl: Any = None


def forward(
    inputs: Inputs, spec: Spec, config: TritonTileConfig, device: Device, dtype: DTypeLike
) -> Outputs:
    """Output, in `dtype`, and log-sum-exp of a call."""
    static, operands = kernel_arguments(inputs, spec, config.block_q, config.block_k)
    sinks = jnp.zeros((16,), jnp.float32)
    if inputs.sinks is not None:
        sinks = logsumexp(inputs.sinks.astype(jnp.float32), axis=-1)
        sinks = jnp.broadcast_to(sinks, (static.heads,))
    b, t, n, _ = inputs.query.shape
    out, lse = launch(
        forward_kernel,
        [*inputs[:3], sinks, *operands],
        [
            jax.ShapeDtypeStruct((b, t, n, inputs.value.shape[3]), dtype),
            jax.ShapeDtypeStruct((b, n, t), jnp.float32),
        ],
        static,
        LaunchConfig(b * n * static.q_blocks, config.num_warps, config.num_stages),
        device,
    )
    return Outputs(out, lse)


@triton_jit
def forward_kernel(
    query: Pointer, key: Pointer, value: Pointer, sinks: Pointer,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, block_bounds: Pointer, block_index: Pointer,
    out: Pointer, lse: Pointer, static: FlashStaticArguments,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries."""
    program = tl.program_id(0)
    # Under a causal mask the last query blocks take longest: they start first.
    i = static.q_blocks - 1 - program % static.q_blocks
    head = program // static.q_blocks % static.heads
    batch = program // (static.q_blocks * static.heads)
    row = tl.cast(batch, tl.int64)
    query += row * (static.q_len * static.q_stride) + head * static.head_dim
    key += row * (static.kv_len * static.k_stride) + head // static.group * static.head_dim
    value += row * (static.kv_len * static.v_stride) + head // static.group * static.value_dim
    out += row * (static.q_len * static.o_stride) + head * static.value_dim
    lse += (row * static.heads + head) * static.q_len

    q_start = i * static.block_q
    q = load_rows(
        query, q_start, static.q_len, static.q_stride, static.head_dim, static.head_width,
        static.block_q, static.ragged_queries,
    )  # fmt: skip
    acc = tl.full([static.block_q, static.value_width], 0.0, tl.float32)
    # The running max starts at a finite number: -inf minus it is -inf, not NaN.
    row_max = tl.full([static.block_q], static.float32_min, tl.float32)
    row_sum = tl.full([static.block_q], 0.0, tl.float32)

    first, full_first, full_end, end = load_block_bounds(i, batch, head, block_bounds, static)
    block_list = load_block_list(i, batch, head, block_index, static)
    for step in range(full_end - full_first):
        j = visited_block(step, True, first, full_first, full_end, block_list, static)
        acc, row_max, row_sum = _forward_step(
            acc, row_max, row_sum, q, q_start, j * static.block_k, batch, head, key, value,
            q_mask, k_mask, dense_mask, bias, dropout_counters, False, static,
        )  # fmt: skip
    if static.has_partial_blocks:
        for step in range(full_first - first + end - full_end):
            j = visited_block(step, False, first, full_first, full_end, block_list, static)
            acc, row_max, row_sum = _forward_step(
                acc, row_max, row_sum, q, q_start, j * static.block_k, batch, head, key, value,
                q_mask, k_mask, dense_mask, bias, dropout_counters, True, static,
            )  # fmt: skip

    visible = row_sum > 0.0
    denominator = row_sum
    if static.sinks:
        denominator += tl.exp2(tl.load(sinks + head) * static.log2_e - row_max)
    denominator = tl.where(visible, denominator, 1.0)
    if static.dropout:
        acc = acc * static.dropout_scale
    acc = acc / denominator[:, None]
    store_rows(
        out, acc, q_start, static.q_len, static.o_stride, static.value_dim, static.value_width,
        static.block_q,
    )  # fmt: skip
    natural = (row_max + tl.log2(tl.where(visible, row_sum, 1.0))) * static.ln_2
    at = q_start + tl.arange(0, static.block_q)
    tl.store(lse + at, tl.where(visible, natural, float("-inf")), mask=at < static.q_len)


@triton_jit
def _forward_step(
    acc: Tensor, row_max: Tensor, row_sum: Tensor, q: Tensor, q_start: Scalar, k_start: Scalar,
    batch: Scalar, head: Scalar, key: Pointer, value: Pointer, q_mask: Pointer, k_mask: Pointer,
    dense_mask: Pointer, bias: Pointer, dropout_counters: Pointer, masked: tl.constexpr,
    static: FlashStaticArguments,
):  # fmt: skip
    """The running softmax after one more block of keys."""
    edge: tl.constexpr = masked and static.ragged_keys
    k = load_rows(
        key, k_start, static.kv_len, static.k_stride, static.head_dim, static.head_width,
        static.block_k, edge,
    )  # fmt: skip
    x = tl.dot(q, tl.trans(k), input_precision=static.precision)
    x = tile_logits(x, q_start, k_start, batch, head, bias, edge, static, False)
    if masked:
        visible = mask_tile(
            q_start, k_start, batch, head, q_mask, k_mask, dense_mask, static, False
        )  # fmt: skip
        x = tl.where(visible, x, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(x, 1) * static.exp2_scale)
    weights = tl.exp2(x * static.exp2_scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    row_sum = row_sum * alpha + tl.sum(weights, 1)
    if static.dropout:
        keep = dropout_keep(q_start, k_start, batch, head, dropout_counters, static, False)
        weights = tl.where(keep, weights, 0.0)
    v = load_rows(
        value, k_start, static.kv_len, static.v_stride, static.value_dim, static.value_width,
        static.block_k, edge,
    )  # fmt: skip
    acc = acc * alpha[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=static.precision)
    return acc, new_max, row_sum
