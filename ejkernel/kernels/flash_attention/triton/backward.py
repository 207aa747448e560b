"""Backward in Triton: one kernel for dK and dV, one for dQ.

Both kernels recompute the weights, seven matmuls a tile instead of five. They use no atomics and
sum in a fixed order: the result is deterministic. The query heads of a key head (GQA) are summed
in the program that holds its keys (https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.sinks import share_of_keys
from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, Tensor
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs
from ejkernel.kernels.flash_attention.triton.configs import TritonTileConfig
from ejkernel.kernels.flash_attention.triton.operands import (
    FlashKernelArguments,
    FlashStaticArguments,
)
from ejkernel.kernels.flash_attention.triton.tile import (
    apply_dropout_and_sinks,
    load_block_bounds,
    load_block_list,
    load_rows,
    load_vector,
    store_rows,
    tile_d_logits,
    tile_weights,
    visited_block,
)
from ejkernel.ops.platform import Device

tl: Any = None


class BackwardRowTerms(NamedTuple):
    """Per-row terms of the gradient, each [b, n, t].

    With w the share of a row's weights that the sinks leave to the keys (1 without sinks),
    d_logits = exp(logits - lse) * (w * d_weights - delta).
    """

    lse: jax.Array  # base 2; inf where a row sees no key
    delta: jax.Array
    key_share: jax.Array  # w; a placeholder without sinks


def backward_row_terms(inputs: Inputs, residuals: Outputs, d_outputs: Outputs) -> BackwardRowTerms:
    """The row terms of a call, computed by XLA."""
    lse, d_lse = residuals.lse, d_outputs.lse
    products = residuals.out.astype(jnp.float32) * d_outputs.out.astype(jnp.float32)
    delta = jnp.swapaxes(products.sum(-1), 1, 2)
    visible = lse > -jnp.inf
    # For a row that sees no key exp2(logits - inf) is 0, whatever the logits.
    safe_lse = jnp.where(visible, lse * LOG2_E, jnp.inf)
    if inputs.sinks is None:
        return BackwardRowTerms(safe_lse, delta - d_lse, jnp.zeros((16,), jnp.float32))
    share = share_of_keys(lse, inputs.sinks)
    return BackwardRowTerms(safe_lse, share * delta - d_lse, share)


def keys_and_values_backward(
    inputs: Inputs,
    d_out: jax.Array,
    terms: BackwardRowTerms,
    arguments: FlashKernelArguments,
    config: TritonTileConfig,
    device: Device,
    dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of keys and values; the block map of the arguments is by key block."""
    static = arguments.static
    programs = static.batch * static.kv_heads * static.k_blocks
    d_key, d_value = launch(
        dkdv_kernel,
        [*inputs[:3], d_out, *terms, *arguments.operands],
        [jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for x in (inputs.key, inputs.value)],
        static,
        LaunchConfig(programs, config.num_warps, config.num_stages),
        device,
    )
    return d_key, d_value


def queries_backward(
    inputs: Inputs,
    d_out: jax.Array,
    terms: BackwardRowTerms,
    arguments: FlashKernelArguments,
    config: TritonTileConfig,
    device: Device,
    dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradient of the queries and, with sinks, the sum over keys of weight times its gradient."""
    static = arguments.static
    programs = static.batch * static.heads * static.q_blocks
    d_query, row_dot = launch(
        dq_kernel,
        [*inputs[:3], d_out, *terms, *arguments.operands],
        [
            jax.ShapeDtypeStruct(inputs.query.shape, dtype or inputs.query.dtype),
            jax.ShapeDtypeStruct(terms.lse.shape if static.sinks else (16,), jnp.float32),
        ],
        static,
        LaunchConfig(programs, config.num_warps, config.num_stages),
        device,
    )
    return d_query, row_dot


@triton_jit
def dkdv_kernel(
    query: Pointer, key: Pointer, value: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer, key_share: Pointer,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, block_bounds: Pointer, block_index: Pointer,
    d_key: Pointer, d_value: Pointer, static: FlashStaticArguments,
):  # fmt: skip
    """Gradients of a block of keys and values."""
    program = tl.program_id(0)
    j = program % static.k_blocks
    kv_head = program // static.k_blocks % static.kv_heads
    batch = program // (static.k_blocks * static.kv_heads)
    row = tl.cast(batch, tl.int64)
    query += row * (static.q_len * static.q_stride)
    d_out += row * (static.q_len * static.o_stride)
    k_base = row * (static.kv_len * static.k_stride) + kv_head * static.head_dim
    v_base = row * (static.kv_len * static.v_stride) + kv_head * static.value_dim

    k_start = j * static.block_k
    k = load_rows(
        key + k_base, k_start, static.kv_len, static.k_stride, static.head_dim, static.head_width,
        static.block_k, static.ragged_keys,
    )  # fmt: skip
    v = load_rows(
        value + v_base, k_start, static.kv_len, static.v_stride, static.value_dim,
        static.value_width, static.block_k, static.ragged_keys,
    )  # fmt: skip
    d_k = tl.full([static.block_k, static.head_width], 0.0, tl.float32)
    d_v = tl.full([static.block_k, static.value_width], 0.0, tl.float32)
    if static.block_map_heads:
        for member in range(static.group):
            d_k, d_v = _accumulate_heads(
                d_k, d_v, k, v, j, batch, kv_head * static.group + member, query, d_out, lse, delta,
                key_share, q_mask, k_mask, dense_mask, bias, dropout_counters, block_bounds,
                block_index, 1, static,
            )  # fmt: skip
    else:
        d_k, d_v = _accumulate_heads(
            d_k, d_v, k, v, j, batch, kv_head * static.group, query, d_out, lse, delta,
            key_share, q_mask, k_mask, dense_mask, bias, dropout_counters, block_bounds,
            block_index, static.group, static,
        )  # fmt: skip
    store_rows(
        d_key + k_base, d_k * static.scale, k_start, static.kv_len, static.k_stride,
        static.head_dim, static.head_width, static.block_k,
    )  # fmt: skip
    store_rows(
        d_value + v_base, d_v, k_start, static.kv_len, static.v_stride, static.value_dim,
        static.value_width, static.block_k,
    )  # fmt: skip


@triton_jit
def _accumulate_heads(
    d_k: Tensor, d_v: Tensor, k: Tensor, v: Tensor, j: Scalar, batch: Scalar, head: Scalar,
    query: Pointer, d_out: Pointer, lse: Pointer, delta: Pointer, key_share: Pointer,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, block_bounds: Pointer, block_index: Pointer,
    count: tl.constexpr, static: FlashStaticArguments,
):  # fmt: skip
    """Add the contributions of `count` query heads from `head` on, which share one block map.

    One loop runs over the blocks of all heads: a nested loop would cost registers, and a prologue
    and epilogue for each head.
    """
    first, full_first, full_end, end = load_block_bounds(j, batch, head, block_bounds, static)
    block_list = load_block_list(j, batch, head, block_index, static)
    full = full_end - full_first
    for step in range(full * count):
        member = 0 if count == 1 else step // full
        i = visited_block(
            step - member * full, True, first, full_first, full_end, block_list, static
        )  # fmt: skip
        d_k, d_v = _dkdv_step(
            d_k, d_v, k, v, i * static.block_q, j * static.block_k, batch, head + member,
            query, d_out, lse, delta, key_share, q_mask, k_mask, dense_mask, bias,
            dropout_counters, False, static,
        )  # fmt: skip
    if static.has_partial_blocks:
        partial = full_first - first + end - full_end
        for step in range(partial * count):
            member = 0 if count == 1 else step // partial
            i = visited_block(
                step - member * partial, False, first, full_first, full_end, block_list, static
            )  # fmt: skip
            d_k, d_v = _dkdv_step(
                d_k, d_v, k, v, i * static.block_q, j * static.block_k, batch, head + member,
                query, d_out, lse, delta, key_share, q_mask, k_mask, dense_mask, bias,
                dropout_counters, True, static,
            )  # fmt: skip
    return d_k, d_v


@triton_jit
def _dkdv_step(
    d_k: Tensor, d_v: Tensor, k: Tensor, v: Tensor, q_start: Scalar, k_start: Scalar,
    batch: Scalar, head: Scalar, query: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer, key_share: Pointer,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, masked: tl.constexpr, static: FlashStaticArguments,
):  # fmt: skip
    """Add the contribution of one block of queries; tiles are transposed."""
    edge: tl.constexpr = masked and static.ragged_queries
    query += head * static.head_dim
    d_out += head * static.value_dim
    at = (tl.cast(batch, tl.int64) * static.heads + head) * static.q_len
    q = load_rows(
        query, q_start, static.q_len, static.q_stride, static.head_dim,
        static.head_width, static.block_q, edge,
    )  # fmt: skip
    d_o = load_rows(
        d_out, q_start, static.q_len, static.o_stride, static.value_dim,
        static.value_width, static.block_q, edge,
    )  # fmt: skip
    # Past the last query lse is inf: exp2(logits - inf) is 0, whatever the logits.
    row_lse = load_vector(lse + at, q_start, static.q_len, static.block_q, float("inf"))
    row_delta = load_vector(delta + at, q_start, static.q_len, static.block_q, 0.0)
    if static.sinks:
        key_share = load_vector(key_share + at, q_start, static.q_len, static.block_q, 0.0)[None, :]
    products = tl.dot(k, tl.trans(q), input_precision=static.precision)
    x, weights = tile_weights(
        products, row_lse[None, :], q_start, k_start, batch, head, q_mask, k_mask, dense_mask, bias,
        masked, static.ragged_keys, static, True,
    )  # fmt: skip
    # dV first: the registers of its operands are then free for dK.
    used = apply_dropout_and_sinks(
        weights, key_share, q_start, k_start, batch, head, dropout_counters, static, True
    )
    d_v = tl.dot(used.to(d_o.dtype), d_o, d_v, input_precision=static.precision)
    if static.sinks or static.dropout:
        d_weights = tl.dot(v, tl.trans(d_o), input_precision=static.precision)
        d_weights = apply_dropout_and_sinks(
            d_weights, key_share, q_start, k_start, batch, head, dropout_counters, static, True
        )
        d_logits = tile_d_logits(x, weights, d_weights, row_delta[None, :], static)
    else:
        # The accumulator starts at -delta, which then needs no registers of its own.
        minus_delta = tl.broadcast_to(-row_delta[None, :], [static.block_k, static.block_q])
        d_weights = tl.dot(v, tl.trans(d_o), minus_delta, input_precision=static.precision)
        d_logits = tile_d_logits(x, weights, d_weights, 0.0, static)
    d_k = tl.dot(d_logits.to(q.dtype), q, d_k, input_precision=static.precision)
    return d_k, d_v


@triton_jit
def dq_kernel(
    query: Pointer, key: Pointer, value: Pointer, d_out: Pointer,
    lse: Pointer, delta: Pointer, key_share: Pointer,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, block_bounds: Pointer, block_index: Pointer,
    d_query: Pointer, row_dots: Pointer, static: FlashStaticArguments,
):  # fmt: skip
    """Gradient of a block of queries; with sinks, also the row sums of weights times gradients."""
    program = tl.program_id(0)
    i = static.q_blocks - 1 - program % static.q_blocks
    head = program // static.q_blocks % static.heads
    batch = program // (static.q_blocks * static.heads)
    row = tl.cast(batch, tl.int64)
    q_base = row * (static.q_len * static.q_stride) + head * static.head_dim
    d_out += row * (static.q_len * static.o_stride) + head * static.value_dim
    key += row * (static.kv_len * static.k_stride) + head // static.group * static.head_dim
    value += row * (static.kv_len * static.v_stride) + head // static.group * static.value_dim
    at = (row * static.heads + head) * static.q_len

    q_start = i * static.block_q
    q = load_rows(
        query + q_base, q_start, static.q_len, static.q_stride, static.head_dim, static.head_width,
        static.block_q, static.ragged_queries,
    )  # fmt: skip
    d_o = load_rows(
        d_out, q_start, static.q_len, static.o_stride, static.value_dim, static.value_width,
        static.block_q, static.ragged_queries,
    )  # fmt: skip
    row_lse = load_vector(lse + at, q_start, static.q_len, static.block_q, float("inf"))[:, None]
    row_delta = load_vector(delta + at, q_start, static.q_len, static.block_q, 0.0)[:, None]
    row_share = row_delta
    if static.sinks:
        row_share = load_vector(key_share + at, q_start, static.q_len, static.block_q, 0.0)
        row_share = row_share[:, None]
    d_q = tl.full([static.block_q, static.head_width], 0.0, tl.float32)
    row_dot = tl.full([static.block_q], 0.0, tl.float32)

    first, full_first, full_end, end = load_block_bounds(i, batch, head, block_bounds, static)
    block_list = load_block_list(i, batch, head, block_index, static)
    for step in range(full_end - full_first):
        j = visited_block(step, True, first, full_first, full_end, block_list, static)
        d_q, row_dot = _dq_step(
            d_q, row_dot, q, d_o, row_lse, row_delta, row_share, q_start, j * static.block_k,
            batch, head, key, value, q_mask, k_mask, dense_mask, bias, dropout_counters, False,
            static,
        )  # fmt: skip
    if static.has_partial_blocks:
        for step in range(full_first - first + end - full_end):
            j = visited_block(step, False, first, full_first, full_end, block_list, static)
            d_q, row_dot = _dq_step(
                d_q, row_dot, q, d_o, row_lse, row_delta, row_share, q_start, j * static.block_k,
                batch, head, key, value, q_mask, k_mask, dense_mask, bias, dropout_counters, True,
                static,
            )  # fmt: skip
    store_rows(
        d_query + q_base, d_q * static.scale, q_start, static.q_len, static.q_stride,
        static.head_dim, static.head_width, static.block_q,
    )  # fmt: skip
    if static.sinks:
        index = q_start + tl.arange(0, static.block_q)
        tl.store(row_dots + at + index, row_dot, mask=index < static.q_len)


@triton_jit
def _dq_step(
    d_q: Tensor, row_dot: Tensor, q: Tensor, d_o: Tensor,
    row_lse: Tensor, row_delta: Tensor, row_share: Tensor, q_start: Scalar, k_start: Scalar,
    batch: Scalar, head: Scalar, key: Pointer, value: Pointer,
    q_mask: Pointer, k_mask: Pointer, dense_mask: Pointer, bias: Pointer,
    dropout_counters: Pointer, masked: tl.constexpr, static: FlashStaticArguments,
):  # fmt: skip
    """Add the contribution of one block of keys."""
    edge: tl.constexpr = masked and static.ragged_keys
    k = load_rows(
        key, k_start, static.kv_len, static.k_stride, static.head_dim,
        static.head_width, static.block_k, edge,
    )  # fmt: skip
    v = load_rows(
        value, k_start, static.kv_len, static.v_stride, static.value_dim,
        static.value_width, static.block_k, edge,
    )  # fmt: skip
    products = tl.dot(q, tl.trans(k), input_precision=static.precision)
    d_weights = tl.dot(d_o, tl.trans(v), input_precision=static.precision)
    x, weights = tile_weights(
        products, row_lse, q_start, k_start, batch, head, q_mask, k_mask, dense_mask, bias,
        masked, edge, static, False,
    )  # fmt: skip
    d_weights = apply_dropout_and_sinks(
        d_weights, row_share, q_start, k_start, batch, head, dropout_counters, static, False
    )
    d_logits = tile_d_logits(x, weights, d_weights, row_delta, static)
    if static.sinks:
        row_dot += tl.sum(weights * d_weights, 1)
    d_q = tl.dot(d_logits.to(k.dtype), k, d_q, input_precision=static.precision)
    return d_q, row_dot
