"""Backward in Triton: gradients of keys and values, then of queries, each summed in one program.

Two kernels recompute the weights, seven matmuls a tile instead of five, and add up in an order that
never changes: no atomics, the same bits in every run. The query heads that share a key head are
summed in the program that has its keys (https://arxiv.org/abs/2307.08691).
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.kernels.flash_attention.triton.operands import Plan
from ejkernel.kernels.flash_attention.triton.tile import (
    block_at,
    kept,
    list_at,
    load_numbers,
    load_rows,
    logits,
    store_rows,
    visible,
    walk,
)
from ejkernel.ops.platform import Device

tl: Any = None


def keys_and_values(
    inputs: Inputs,
    d_out: jax.Array,
    terms: list[jax.Array],
    planned: Plan,
    warps: int,
    stages: int,
    device: Device,
) -> list[jax.Array]:
    """Gradients of keys and values; the plan has its map by columns."""
    mode = planned.mode
    return launch(
        d_keys,
        [*inputs[:3], d_out, *terms, *planned.operands],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.key, inputs.value)],
        mode,
        LaunchConfig(mode.batch * mode.kv_heads * mode.k_blocks, warps, stages),
        device,
    )


def queries(
    inputs: Inputs,
    d_out: jax.Array,
    terms: list[jax.Array],
    planned: Plan,
    warps: int,
    stages: int,
    device: Device,
) -> list[jax.Array]:
    """Gradient of queries and, for each row, the sum of weights times their gradients."""
    mode = planned.mode
    return launch(
        d_queries,
        [*inputs[:3], d_out, *terms, *planned.operands],
        [
            jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
            jax.ShapeDtypeStruct(terms[0].shape if mode.sinks else (16,), jnp.float32),
        ],
        mode,
        LaunchConfig(mode.batch * mode.heads * mode.q_blocks, warps, stages),
        device,
    )


@triton_jit
def d_keys(
    query, key, value, d_out, lse, delta, share,
    rows, columns, table, bias, counters, bounds, index, d_key, d_value,
    static: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values."""
    program = tl.program_id(0)
    j = program % static.k_blocks
    kv_head = program // static.k_blocks % static.kv_heads
    batch = program // (static.k_blocks * static.kv_heads)
    group: tl.constexpr = static.heads // static.kv_heads
    q_stride: tl.constexpr = static.heads * static.head_dim
    o_stride: tl.constexpr = static.heads * static.value_dim
    k_stride: tl.constexpr = static.kv_heads * static.head_dim
    v_stride: tl.constexpr = static.kv_heads * static.value_dim
    row = tl.cast(batch, tl.int64)
    query += row * (static.q_len * q_stride)
    d_out += row * (static.q_len * o_stride)
    k_base = row * (static.kv_len * k_stride) + kv_head * static.head_dim
    v_base = row * (static.kv_len * v_stride) + kv_head * static.value_dim

    k_start = j * static.block_k
    k = load_rows(
        key + k_base, k_start, static.kv_len, k_stride, static.head_dim, static.head_width,
        static.block_k, static.ragged_keys,
    )  # fmt: skip
    v = load_rows(
        value + v_base, k_start, static.kv_len, v_stride, static.value_dim, static.value_width,
        static.block_k, static.ragged_keys,
    )  # fmt: skip
    d_k = tl.full([static.block_k, static.head_width], 0.0, tl.float32)
    d_v = tl.full([static.block_k, static.value_width], 0.0, tl.float32)
    if static.map_heads:
        for member in range(group):
            d_k, d_v = _heads(
                d_k, d_v, k, v, j, batch, kv_head * group + member, query, d_out, lse, delta,
                share, rows, columns, table, bias, counters, bounds, index, 1, static,
            )  # fmt: skip
    else:
        d_k, d_v = _heads(
            d_k, d_v, k, v, j, batch, kv_head * group, query, d_out, lse, delta, share,
            rows, columns, table, bias, counters, bounds, index, group, static,
        )  # fmt: skip
    store_rows(
        d_key + k_base, d_k * static.scale, k_start, static.kv_len, k_stride, static.head_dim,
        static.head_width, static.block_k,
    )  # fmt: skip
    store_rows(
        d_value + v_base, d_v, k_start, static.kv_len, v_stride, static.value_dim,
        static.value_width, static.block_k,
    )  # fmt: skip


@triton_jit
def _heads(
    d_k, d_v, k, v, j, batch, head, query, d_out, lse, delta, share,
    rows, columns, table, bias, counters, bounds, index, count: tl.constexpr, static: tl.constexpr,
):  # fmt: skip
    """What some heads from `head` on, of one map, add to the gradients of a block of keys.

    One loop goes through the blocks of all of them: a loop in a loop would cost registers, and
    time at the end of each.
    """
    first, full_first, full_end, end = walk(j, batch, head, bounds, static)
    listed = list_at(j, batch, head, index, static)
    full = full_end - full_first
    for step in range(full * count):
        member = 0 if count == 1 else step // full
        i = block_at(step - member * full, True, first, full_first, full_end, listed, static)
        d_k, d_v = _keys_step(
            d_k, d_v, k, v, i * static.block_q, j * static.block_k, batch, head + member,
            query, d_out, lse, delta, share, rows, columns, table, bias, counters, False, static,
        )  # fmt: skip
    if static.masked:
        partial = full_first - first + end - full_end
        for step in range(partial * count):
            member = 0 if count == 1 else step // partial
            i = block_at(
                step - member * partial, False, first, full_first, full_end, listed, static
            )
            d_k, d_v = _keys_step(
                d_k, d_v, k, v, i * static.block_q, j * static.block_k, batch, head + member,
                query, d_out, lse, delta, share, rows, columns, table, bias, counters, True, static,
            )  # fmt: skip
    return d_k, d_v


@triton_jit
def _keys_step(
    d_k, d_v, k, v, q_start, k_start, batch, head, query, d_out, lse, delta, share,
    rows, columns, table, bias, counters, masked: tl.constexpr, static: tl.constexpr,
):  # fmt: skip
    """What one block of queries adds to the gradients of a block of keys; tiles are transposed."""
    edge: tl.constexpr = masked and static.ragged_queries
    query += head * static.head_dim
    d_out += head * static.value_dim
    at = (tl.cast(batch, tl.int64) * static.heads + head) * static.q_len
    q = load_rows(
        query, q_start, static.q_len, static.heads * static.head_dim, static.head_dim,
        static.head_width, static.block_q, edge,
    )  # fmt: skip
    d_o = load_rows(
        d_out, q_start, static.q_len, static.heads * static.value_dim, static.value_dim,
        static.value_width, static.block_q, edge,
    )  # fmt: skip
    # Of a row that is not there exp2(logits - inf) is 0, whatever the logits.
    lse = load_numbers(lse + at, q_start, static.q_len, static.block_q, float("inf"))
    delta = load_numbers(delta + at, q_start, static.q_len, static.block_q, 0.0)
    if static.sinks:
        share = load_numbers(share + at, q_start, static.q_len, static.block_q, 0.0)[None, :]
    products = tl.dot(k, tl.trans(q), input_precision=static.precision)
    x, weights = tile_weights(
        products, lse[None, :], q_start, k_start, batch, head, rows, columns, table, bias,
        masked, static.ragged_keys, static, True,
    )  # fmt: skip
    # The values first: what they need is then free for the second half.
    used = tile_used(weights, share, q_start, k_start, batch, head, counters, static, True)
    d_v = tl.dot(used.to(d_o.dtype), d_o, d_v, input_precision=static.precision)
    if static.sinks or static.dropout:
        d_weights = tl.dot(v, tl.trans(d_o), input_precision=static.precision)
        d_weights = tile_used(
            d_weights, share, q_start, k_start, batch, head, counters, static, True
        )
        d_logits = tile_d_logits(x, weights, d_weights, delta[None, :], static)
    else:
        # Summed from -delta on, which so needs no registers beside the sum.
        less = tl.broadcast_to(-delta[None, :], [static.block_k, static.block_q])
        d_weights = tl.dot(v, tl.trans(d_o), less, input_precision=static.precision)
        d_logits = tile_d_logits(x, weights, d_weights, 0.0, static)
    d_k = tl.dot(d_logits.to(q.dtype), q, d_k, input_precision=static.precision)
    return d_k, d_v


@triton_jit
def d_queries(
    query, key, value, d_out, lse, delta, share,
    rows, columns, table, bias, counters, bounds, index, d_query, taken,
    static: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of queries; with sinks, also what its weights give to them."""
    program = tl.program_id(0)
    i = static.q_blocks - 1 - program % static.q_blocks
    head = program // static.q_blocks % static.heads
    batch = program // (static.q_blocks * static.heads)
    group: tl.constexpr = static.heads // static.kv_heads
    q_stride: tl.constexpr = static.heads * static.head_dim
    o_stride: tl.constexpr = static.heads * static.value_dim
    k_stride: tl.constexpr = static.kv_heads * static.head_dim
    v_stride: tl.constexpr = static.kv_heads * static.value_dim
    row = tl.cast(batch, tl.int64)
    q_base = row * (static.q_len * q_stride) + head * static.head_dim
    d_out += row * (static.q_len * o_stride) + head * static.value_dim
    key += row * (static.kv_len * k_stride) + head // group * static.head_dim
    value += row * (static.kv_len * v_stride) + head // group * static.value_dim
    at = (row * static.heads + head) * static.q_len

    q_start = i * static.block_q
    q = load_rows(
        query + q_base, q_start, static.q_len, q_stride, static.head_dim, static.head_width,
        static.block_q, static.ragged_queries,
    )  # fmt: skip
    d_o = load_rows(
        d_out, q_start, static.q_len, o_stride, static.value_dim, static.value_width,
        static.block_q, static.ragged_queries,
    )  # fmt: skip
    row_lse = load_numbers(lse + at, q_start, static.q_len, static.block_q, float("inf"))[:, None]
    row_delta = load_numbers(delta + at, q_start, static.q_len, static.block_q, 0.0)[:, None]
    row_share = row_delta
    if static.sinks:
        row_share = load_numbers(share + at, q_start, static.q_len, static.block_q, 0.0)[:, None]
    d_q = tl.full([static.block_q, static.head_width], 0.0, tl.float32)
    given = tl.full([static.block_q], 0.0, tl.float32)

    first, full_first, full_end, end = walk(i, batch, head, bounds, static)
    listed = list_at(i, batch, head, index, static)
    for step in range(full_end - full_first):
        j = block_at(step, True, first, full_first, full_end, listed, static)
        d_q, given = _queries_step(
            d_q, given, q, d_o, row_lse, row_delta, row_share, q_start, j * static.block_k,
            batch, head, key, value, rows, columns, table, bias, counters, False, static,
        )  # fmt: skip
    if static.masked:
        for step in range(full_first - first + end - full_end):
            j = block_at(step, False, first, full_first, full_end, listed, static)
            d_q, given = _queries_step(
                d_q, given, q, d_o, row_lse, row_delta, row_share, q_start, j * static.block_k,
                batch, head, key, value, rows, columns, table, bias, counters, True, static,
            )  # fmt: skip
    store_rows(
        d_query + q_base, d_q * static.scale, q_start, static.q_len, q_stride, static.head_dim,
        static.head_width, static.block_q,
    )  # fmt: skip
    if static.sinks:
        here = q_start + tl.arange(0, static.block_q)
        tl.store(taken + at + here, given, mask=here < static.q_len)


@triton_jit
def _queries_step(
    d_q, given, q, d_o, lse, delta, share, q_start, k_start, batch, head, key, value,
    rows, columns, table, bias, counters, masked: tl.constexpr, static: tl.constexpr,
):  # fmt: skip
    """What one block of keys adds to the gradient of a block of queries."""
    edge: tl.constexpr = masked and static.ragged_keys
    k = load_rows(
        key, k_start, static.kv_len, static.kv_heads * static.head_dim, static.head_dim,
        static.head_width, static.block_k, edge,
    )  # fmt: skip
    v = load_rows(
        value, k_start, static.kv_len, static.kv_heads * static.value_dim, static.value_dim,
        static.value_width, static.block_k, edge,
    )  # fmt: skip
    products = tl.dot(q, tl.trans(k), input_precision=static.precision)
    d_weights = tl.dot(d_o, tl.trans(v), input_precision=static.precision)
    x, weights = tile_weights(
        products, lse, q_start, k_start, batch, head, rows, columns, table, bias,
        masked, edge, static, False,
    )  # fmt: skip
    d_weights = tile_used(d_weights, share, q_start, k_start, batch, head, counters, static, False)
    d_logits = tile_d_logits(x, weights, d_weights, delta, static)
    if static.sinks:
        given += tl.sum(weights * d_weights, 1)
    d_q = tl.dot(d_logits.to(k.dtype), k, d_q, input_precision=static.precision)
    return d_q, given


@triton_jit
def tile_weights(
    products, lse, q_start, k_start, batch, head, rows, columns, table, bias,
    masked: tl.constexpr, edge: tl.constexpr, static: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, as `logits` gives them, and its weights before sinks and dropout."""
    x = logits(products, q_start, k_start, batch, head, bias, edge, static, t)
    weights = tl.exp2(x * static.factor - lse)
    if masked:
        seen = visible(q_start, k_start, batch, head, rows, columns, table, static, t)
        weights = tl.where(seen, weights, 0.0)
    return x, weights


@triton_jit
def tile_used(
    weights, share, q_start, k_start, batch, head, counters, static: tl.constexpr, t: tl.constexpr
):
    """Weights after sinks and dropout; or, what is the same, gradients before them."""
    if static.dropout:
        keep = kept(q_start, k_start, batch, head, counters, static, t)
        weights = tl.where(keep, weights * static.grow, 0.0)
    if static.sinks:
        weights = weights * share
    return weights


@triton_jit
def tile_d_logits(x, weights, d_weights, delta, static: tl.constexpr):
    """Gradients of the products, but for the scale."""
    d_logits = weights * (d_weights - delta)
    if static.soft_cap > 0.0:
        d_logits = d_logits * (1.0 - x * x)  # x is the tanh
    return d_logits
